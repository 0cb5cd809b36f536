"""Mixture of experts: router, gated experts, weighted sum in top-k rank order (ties to the lower expert id).

An expert's output is rounded to the model's dtype, bf16 on a GPU, before it is weighted and added: so it may come from
another device. R = rows (whole tiles on the decode path), E = experts, k = experts a token, H = hidden, I = an expert's
width.
No atomics, no sum whose order depends on which rows share an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pilotfish.kernels.activation import silu
from pilotfish.kernels.linear import TILE_ROWS, AnyLinear


@dataclass(frozen=True)
class GatedMlp:
    """down(silu(gate x) * up x), gate and up as one product [2I, H]."""

    gate_up: AnyLinear
    down: AnyLinear


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of rows gate | up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def mlp_rows(mlp: GatedMlp, x_RH: torch.Tensor) -> torch.Tensor:
    """[R, H], row-invariant; R a multiple of TILE_ROWS."""
    rows: torch.Tensor = mlp.down.rows(swiglu(mlp.gate_up.rows(x_RH)))
    return rows


def mlp_bulk(mlp: GatedMlp, x_TH: torch.Tensor) -> torch.Tensor:
    """[T, H] for prefill."""
    return mlp.down.bulk(swiglu(mlp.gate_up.bulk(x_TH)))


def route(logits_RE: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights fp32 [R, k] (softmax over all experts, then renormalised over the chosen) and expert ids int64 [R, k]."""
    probabilities = logits_RE.float().softmax(-1)
    # a stable sort, not topk: equal probabilities must go to the lower id
    ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    weights = ordered[:, :top_k]
    return weights / weights.sum(-1, keepdim=True), ids[:, :top_k]


def expert_parts(
    x_RH: torch.Tensor, num_rows: int, experts: list[GatedMlp], shared: GatedMlp, ids_Rk: torch.Tensor
) -> torch.Tensor:
    """fp32 [k + 1, num_rows, H]: each row's experts in rank order, then the shared one, on the decode path; rows past
    num_rows are padding and use no expert.

    Every distinct expert of a tile runs over the whole tile: a product of TILE_ROWS rows costs the same however many
    of them are wanted, and no row has to be moved.
    """
    parts = [
        _expert_tile(x, min(TILE_ROWS, num_rows - start), experts, shared, ids)
        for start, x, ids in zip(
            range(0, num_rows, TILE_ROWS), x_RH.split(TILE_ROWS), ids_Rk.split(TILE_ROWS), strict=False
        )
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _expert_tile(
    x: torch.Tensor, num_rows: int, experts: list[GatedMlp], shared: GatedMlp, ids: torch.Tensor
) -> torch.Tensor:
    chosen = ids[:num_rows].tolist()
    distinct = sorted({expert for row in chosen for expert in row})
    # one SwiGLU for all of them: it is elementwise, and every call costs more than its arithmetic
    inner = swiglu(torch.cat([experts[expert].gate_up.rows(x) for expert in distinct])).split(TILE_ROWS)
    outputs = [experts[expert].down.rows(part) for expert, part in zip(distinct, inner, strict=True)]
    outputs.append(mlp_rows(shared, x))
    start = {expert: index * TILE_ROWS for index, expert in enumerate(distinct)}
    top_k, last = ids.shape[1], len(distinct) * TILE_ROWS
    index = [start[row[rank]] + number for rank in range(top_k) for number, row in enumerate(chosen)]
    index += range(last, last + num_rows)
    picked = torch.cat(outputs).index_select(0, torch.tensor(index, device=x.device))
    return picked.float().view(top_k + 1, num_rows, -1)


def combine(parts_kRH: torch.Tensor, weights_Rk: torch.Tensor, gate_R: torch.Tensor) -> torch.Tensor:
    """fp32 [R, H]: parts [k + 1, R, H] weighted and added in rank order, then the shared one by its gate."""
    total = parts_kRH[0] * weights_Rk[:, :1]
    for rank in range(1, weights_Rk.shape[1]):
        total = torch.addcmul(total, parts_kRH[rank], weights_Rk[:, rank : rank + 1])
    return torch.addcmul(total, parts_kRH[-1], gate_R[:, None])


def expert_bulk(
    x_TH: torch.Tensor, experts: list[GatedMlp], weights_Tk: torch.Tensor, ids_Tk: torch.Tensor
) -> torch.Tensor:
    """fp32 [T, H] for prefill: each expert once over its own rows, summed in rank order."""
    tokens, top_k = ids_Tk.shape
    picked = x_TH.new_empty((tokens, top_k, x_TH.shape[1]), dtype=torch.float32)
    for expert in ids_Tk.unique().tolist():
        rows, ranks = torch.where(ids_Tk == expert)
        picked[rows, ranks] = mlp_bulk(experts[expert], x_TH[rows]).float()
    total = picked[:, 0] * weights_Tk[:, :1]
    for rank in range(1, top_k):
        total = torch.addcmul(total, picked[:, rank], weights_Tk[:, rank : rank + 1])
    return total
