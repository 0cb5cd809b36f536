"""Routed experts and the shared one, over the distinct experts of all rows; combined in rank order.

Three launches: gate_up with SwiGLU, down, combine. A program takes (pair, tiles): pair p = row * k + rank, and leaves
at once unless p is the first pair of its expert; the rows that chose the expert are the columns of the product
(linear.py, the same instruction, order and split), the others are 0. The shared expert is one more, chosen by all rows. Results go
to their own (row, rank), so nothing is added across experts before `combine`. Past FAST_ROWS rows a plan kernel first
lists the rows of each expert.

R = rows, E = experts, k = experts a token, H = hidden, I = expert width.
Reads each distinct expert's weights once: at uniform routing 1 - (1 - k/E)^R of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

FAST_ROWS = 16


@dataclass(frozen=True)
class ExpertWeights:
    """gate, up [I, H] and down [H, I]: bf16 tensors, NvFp4Weight or Fp8Weight."""

    gate: Any
    up: Any
    down: Any


@dataclass(frozen=True)
class Scratch:
    """What a layer writes between its launches, for up to `rows` rows; layers of one model may share it.

    inner bf16 [rows, k + 1, I]; out bf16 [rows, k + 1, H], rank k the shared expert's; lists int32 [E + 1, rows + 1]:
    the number of an expert's rows, then its (row, rank) as row * (k + 1) + rank, for more than FAST_ROWS rows.
    """

    inner: torch.Tensor
    out: torch.Tensor
    lists: torch.Tensor

    @staticmethod
    def make(rows: int, top_k: int, num_experts: int, width: int, hidden: int, device: torch.device) -> Scratch:
        """width: the larger of the routed experts' and the shared one's."""
        inner = torch.zeros((rows, top_k + 1, width), dtype=torch.bfloat16, device=device)
        out = torch.zeros((rows, top_k + 1, hidden), dtype=torch.bfloat16, device=device)
        lists = torch.zeros((num_experts + 1, rows + 1), dtype=torch.int32, device=device)
        return Scratch(inner, out, lists)

    @property
    def num_bytes(self) -> int:
        return self.inner.nbytes + self.out.nbytes + self.lists.nbytes


class GroupedExperts:
    """E routed experts and a shared one, packed. E may differ from layer to layer.

    The routed experts are of one shape and format; the shared one may be of others. The weights are not referred to
    afterwards. Raises ValueError naming the expert that does not fit.
    """

    def __init__(self, experts: Sequence[ExpertWeights], shared: ExpertWeights, top_k: int):
        raise NotImplementedError

    def rows(self, x: torch.Tensor, ids: torch.Tensor, scratch: Scratch, pdl: bool = False) -> torch.Tensor:
        """bf16 [R, k + 1, H], a view of scratch.out: each row's experts in rank order, then the shared one.

        x: bf16 [>= R, H], contiguous; ids: int32 [R, k], all different within a row, R of 1 .. linear.MAX_ROWS.
        """
        raise NotImplementedError

    def bulk(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        shared_gate: torch.Tensor,
        scratch: torch.Tensor,
    ) -> torch.Tensor:
        """fp32 [T, H] for prefill, all weighted and summed. scratch: bf16, `scratch_size` numbers."""
        raise NotImplementedError


def combine(
    parts: torch.Tensor,
    weights: torch.Tensor,
    shared_gate: torch.Tensor,
    x: torch.Tensor,
    norm_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """x += the sum over ranks of weights * parts, then + shared_gate * the shared part; in rank order, by fma.

    parts: bf16 [R, k + 1, H]; weights fp32 [R, k]; shared_gate fp32 [R]; x fp32 [>= R, H], updated in place. With
    norm_scale fp32 [H] also out = rms_norm(x) * norm_scale, bf16 [>= R, H].
    """
    raise NotImplementedError


def combine_reference(
    parts: torch.Tensor,
    weights: torch.Tensor,
    shared_gate: torch.Tensor,
    x: torch.Tensor,
    norm_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
) -> None:
    """The same in plain torch."""
    rows, top_k = weights.shape
    total = parts[:, 0].float() * weights[:, :1]
    for rank in range(1, top_k):
        total = torch.addcmul(total, parts[:, rank].float(), weights[:, rank : rank + 1])
    total = torch.addcmul(total, parts[:, top_k].float(), shared_gate[:, None])
    x[:rows] += total
    if norm_scale is not None and out is not None:
        out[:rows] = F.rms_norm(x[:rows], (x.shape[1],), norm_scale, eps).to(out.dtype)
