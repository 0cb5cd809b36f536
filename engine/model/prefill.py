"""A whole text through a trunk at once, outside of any engine."""

from __future__ import annotations

import torch

from pilotfish.engine.model.build import Model
from pilotfish.engine.model.window import Span
from pilotfish.kernels.attention import PAGE

SLOT = 1


def pages_for(num_tokens: int) -> int:
    """Pages of the cache that a text takes."""
    return -(-num_tokens // PAGE)


@torch.inference_mode()
def read_text(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """Final-norm hidden [T, H] of int64 [T], in chunks of a page; writes to slot 1 and the first pages."""
    table = list(range(1, pages_for(len(tokens)) + 1))
    model.trunk.state.reset(SLOT)
    parts = []
    for start in range(0, len(tokens), PAGE):
        part = tokens[start : start + PAGE].to(model.device)
        parts.append(model.trunk.bulk(part, Span.build(SLOT, start, len(part), table, model.inv_freq)))
    return torch.cat(parts)
