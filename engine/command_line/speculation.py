"""vLLM's --speculative-config, as fields of EngineOptions."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from typing import Any

METHODS = {"mtp": "mtp", "qwen3_5_mtp": "mtp", "qwen3_next_mtp": "mtp", "ngram": "ngram"}
"""vLLM's names, and ours for what they stand for: the multi-token-prediction head, or prompt look-up."""
LOOKUP_BOUNDS = ("prompt_lookup_max", "prompt_lookup_min")


def speculative_config(text: str) -> dict[str, Any]:
    """The fields that the JSON sets. Raises ArgumentTypeError, as a type of a flag."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"not JSON ({error}): {text[:40]!r}") from None
    if not isinstance(config, dict) or type(config.get("num_speculative_tokens")) is not int:
        raise ArgumentTypeError(f'want an object with "num_speculative_tokens", got {text[:40]!r}')
    method = config.get("method", "mtp")
    if not isinstance(method, str) or method not in METHODS:
        raise ArgumentTypeError(f"want method {', '.join(METHODS)}, got {method!r}")
    fields: dict[str, Any] = {"num_speculative_tokens": _number(config, "num_speculative_tokens", 0)}
    known = {"method", "num_speculative_tokens"}
    if METHODS[method] == "mtp":
        known |= {"model"}
        fields |= {"draft_head": str(config["model"])} if config.get("model") is not None else {}
    else:
        known |= set(LOOKUP_BOUNDS)
        fields |= {name: _number(config, name, 1) for name in LOOKUP_BOUNDS if config.get(name) is not None}
    if unknown := config.keys() - known:
        raise ArgumentTypeError(f"not supported with method {method!r}: {', '.join(sorted(unknown))}")
    return fields | {"speculative_method": METHODS[method]}


def _number(config: dict[str, Any], name: str, least: int) -> int:
    value = config[name]
    if type(value) is not int or value < least:
        raise ArgumentTypeError(f"{name}: want a whole number of at least {least}, got {value!r:.40}")
    return value
