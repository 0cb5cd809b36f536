"""Operands of `GroupedExperts.rows` for a choice of experts that is given."""

from __future__ import annotations

import torch

from pilotfish.kernels.cuda.moe import ExpertScratch, GroupedExperts
from pilotfish.kernels.cuda.tiled_rows import AnyRows


def choosing(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits fp32 [R, E + 1] that choose the ids, all different within a row, in their order; and weights, ids and gate
    to be written, which hold NaN and -1."""
    rows, top_k = ids.shape
    logits = torch.full((rows, num_experts + 1), -1.0, device=ids.device)
    logits.scatter_(1, ids.long(), torch.arange(top_k, 0, -1.0, device=ids.device).expand(rows, top_k))
    return logits, *outputs(rows, top_k, ids.device)


def outputs(rows: int, top_k: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, ids and gate that hold NaN and -1."""
    nan = float("nan")
    ids = torch.full((rows, top_k), -1, dtype=torch.int32, device=device)
    return torch.full((rows, top_k), nan, device=device), ids, torch.full((rows,), nan, device=device)


def run_routed(
    packed: GroupedExperts, x: AnyRows, ids: torch.Tensor, scratch: ExpertScratch, pdl: bool = False
) -> torch.Tensor:
    """`GroupedExperts.rows` of the experts that `ids` name."""
    operands = choosing(ids, packed.num_experts)
    parts = packed.rows(x, *operands, scratch, pdl)
    assert ids.is_meta or torch.equal(operands[2], ids)
    return parts
