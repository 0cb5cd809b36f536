"""The operators of a round on a CUDA device, bound to one choice: whether a kernel may start while the one before it
still runs (programmatic dependent launch). Tests put the plain torch references in their place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pilotfish.kernels.cuda import attention, commit, delta_net, moe, norm, router, sample
from pilotfish.kernels.cuda.slots import SlotState


@dataclass(frozen=True)
class Operators:
    """Each method is a launcher of kernels.cuda; see there."""

    pdl: bool = True

    def plan_rows(self, *args: Any) -> None:
        attention.plan_rows(*args, launch_pdl=self.pdl)

    def embed_rows(self, *args: Any) -> None:
        norm.embed_rows(*args, pdl=self.pdl)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, scale: torch.Tensor, eps: float, h: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        norm.add_norm(x, delta, scale, eps, h, rows, pdl=self.pdl)

    def pair_norm(self, *args: Any) -> None:
        norm.pair_norm(*args, pdl=self.pdl)

    def linear(self, weight: Any, x: torch.Tensor, out: torch.Tensor) -> None:
        weight.rows(x, out, pdl=self.pdl)

    def gdn_window(self, *args: Any) -> None:
        delta_net.gdn_window(*args, launch_pdl=self.pdl)

    def attention_window(self, *args: Any) -> None:
        attention.attention_window(*args, launch_pdl=self.pdl)

    def route(self, *args: Any) -> None:
        router.route(*args, pdl=self.pdl)

    def experts(self, weights: Any, x: torch.Tensor, ids: torch.Tensor, scratch: moe.Scratch) -> torch.Tensor:
        return weights.rows(x, ids, scratch, pdl=self.pdl)

    def combine(self, *args: Any) -> None:
        moe.combine(*args, pdl=self.pdl)

    def choose(
        self, logits: torch.Tensor, slots: torch.Tensor, state: SlotState, width: int, first: int, out: torch.Tensor,
        scratch: sample.Scratch, has_nan: torch.Tensor | None = None, allowed: torch.Tensor | None = None,
        draft: bool = False,
    ) -> None:  # fmt: skip
        sample.choose(
            logits, slots, state, width, first, out, scratch, has_nan, allowed, draft=draft, pdl=self.pdl
        )  # fmt: skip

    def accept_commit(self, *args: Any) -> None:
        commit.accept_commit(*args, pdl=self.pdl)
