"""What an engine says once it has loaded, for tests that care for some of it."""

from __future__ import annotations

from typing import Any

from pilotfish.engine.link.messages import Ready


def ready(**fields: Any) -> Ready:
    """On a CPU with 4 sequences at k = 3; `fields` go before."""
    defaults: dict[str, Any] = {
        "model_type": "scripted",
        "vocab_size": 512,
        "max_model_len": 4096,
        "max_num_seqs": 4,
        "binding_limit": "configured",
        "num_speculative_tokens": 3,
        "speculation_disabled_reason": None,
        "max_waiting": 64,
        "kv_pages_total": 100,
        "page_size": 256,
        "device": "none",
        "dtype": "none",
        "load_seconds": 0.0,
        "ledger": {},
    }
    return Ready(**{**defaults, **fields})
