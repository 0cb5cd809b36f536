"""The operators of a round on a CUDA device, bound to one choice: whether a kernel may start while the one before it
still runs (programmatic dependent launch). Tests put the plain torch references in their place."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pilotfish.kernels.cuda import attention, commit, delta_net, lookup, moe, norm, router, sample


class Operators:
    """Each attribute is a launcher of kernels.cuda; see there."""

    def __init__(self, pdl: bool = True):
        self.use_pdl(pdl)

    def use_pdl(self, pdl: bool) -> None:
        """Binds the launchers; what has been captured stays as it was."""
        self.pdl = pdl
        self.plan_rows = partial(attention.plan_rows, pdl=pdl)
        self.embed_rows = partial(norm.embed_rows, pdl=pdl)
        self.add_norm = partial(norm.add_norm, pdl=pdl)
        self.pair_norm = partial(norm.pair_norm, pdl=pdl)
        self.gdn_window = partial(delta_net.gdn_window, pdl=pdl)
        self.attention_window = partial(attention.attention_window, pdl=pdl)
        self.route = partial(router.route, pdl=pdl)
        self.combine = partial(moe.combine, pdl=pdl)
        self.choose = partial(sample.choose, pdl=pdl)
        self.accept_commit = partial(commit.accept_commit, pdl=pdl)
        self.look_up = partial(lookup.look_up, pdl=pdl)

    def linear(self, weight: Any, x: torch.Tensor, out: torch.Tensor) -> None:
        """x times a packed weight [N, K], into out [R, N]."""
        weight.packed.rows(x, out, pdl=self.pdl)

    def gate_up(self, mlp: Any, x: torch.Tensor, out: torch.Tensor) -> None:
        """silu(gate x) * up x, the inner rows of a dense MLP."""
        mlp.gate_up.packed.rows(x, out, pdl=self.pdl)

    def experts(self, mlp: Any, x: torch.Tensor, ids: torch.Tensor, scratch: moe.Scratch) -> torch.Tensor:
        """Each row's experts in rank order, then the shared one, [R, k + 1, H]."""
        return mlp.experts.packed.rows(x, ids, scratch, pdl=self.pdl)
