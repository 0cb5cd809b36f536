"""A router with the norm before it, by one launch and by three: what tests with and without a GPU compare."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from pilotfish.kernels.cuda import norm, router
from pilotfish.kernels.cuda.linear import PackedLinear

ARGUMENTS = ("x", "h", "weights", "ids", "gate")
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """x fp32, delta bf16 [R, H]; scale fp32 [H]; matrix bf16 [E + 1, H]."""

    x: torch.Tensor
    delta: torch.Tensor
    scale: torch.Tensor
    matrix: torch.Tensor

    @cached_property
    def packed(self) -> PackedLinear:
        return PackedLinear([self.matrix])

    def rows(self, count: int) -> Case:
        return replace(self, x=self.x[:count].clone(), delta=self.delta[:count].clone())

    def outputs(self, top_k: int) -> tuple[torch.Tensor, ...]:
        """x, and h, weights, ids and gate as nobody would leave them."""
        rows, device = len(self.x), self.x.device
        weights, gate = torch.full((rows, top_k), float("nan")), torch.full((rows,), float("nan"))
        ids = torch.full((rows, top_k), -7, dtype=torch.int32)
        return (self.x.clone(), torch.full_like(self.delta, -7.0), *(t.to(device) for t in (weights, ids, gate)))


def make_case(hidden: int, experts: int, rows: int, device: Any = "cpu", seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x, delta, scale = 10 * draw(rows, hidden), draw(rows, hidden).bfloat16(), 1 + 0.1 * draw(hidden)
    matrix = (draw(experts + 1, hidden) / hidden**0.5).bfloat16()
    return Case(*(value.to(device) for value in (x, delta, scale, matrix)))


def by_three(case: Case, top_k: int, pdl: bool = False) -> tuple[torch.Tensor, ...]:
    x, h, weights, ids, gate = case.outputs(top_k)
    logits = torch.full((len(x), len(case.matrix)), float("nan"), device=x.device)
    norm.add_norm(x, case.delta, case.scale, EPS, h, pdl=pdl)
    case.packed.rows(h, logits, pdl)
    router.route(logits, len(case.matrix) - 1, weights, ids, gate, pdl)
    return x, h, weights, ids, gate


def by_one_launch(
    case: Case, top_k: int, pdl: bool = False, scratch: router.RouterScratch | None = None
) -> tuple[torch.Tensor, ...]:
    out = case.outputs(top_k)
    if scratch is None:
        scratch = router.RouterScratch.make(len(case.matrix) - 1, case.x.device)
    x, *others = out
    router.add_norm_route(x, case.delta, case.scale, EPS, case.packed, *others, scratch, pdl)
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
