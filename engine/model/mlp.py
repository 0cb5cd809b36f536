"""The feed-forward half of a layer: a dense gated MLP, or routed experts beside a shared one.

R = rows, T = prompt rows, H = hidden, E = experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from pilotfish.kernels.activation import sigmoid
from pilotfish.kernels.linear import AnyLinear
from pilotfish.kernels.moe import GatedMlp, expert_bulk, expert_rows, route

if TYPE_CHECKING:
    from pilotfish.kernels.cuda.modules import FusedExperts, FusedMlp

SeeExperts = Callable[[torch.Tensor], None]
"""Is shown the experts of each row of a window, int [R, k] in order of rank."""


@dataclass(frozen=True)
class DenseMlp:
    mlp: GatedMlp | FusedMlp

    def rows(self, x_RH: torch.Tensor, num_rows: int, see: SeeExperts | None = None) -> torch.Tensor:
        """[R, H], row-invariant; rows past num_rows are padding. There are no experts to see."""
        return self.mlp.rows(x_RH)

    def bulk(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] for prefill."""
        return self.mlp.bulk(x_TH)


@dataclass(frozen=True)
class MoeMlp:
    """`router` [E + 1, H]: the experts' logits, then the shared expert's gate."""

    router: AnyLinear
    experts: list[GatedMlp]
    shared: GatedMlp
    top_k: int

    def rows(self, x_RH: torch.Tensor, num_rows: int, see: SeeExperts | None = None) -> torch.Tensor:
        """fp32 [R, H], row-invariant; rows past num_rows are padding and use no expert."""
        weights, ids, shared_gate = self._route(self.router.rows(x_RH))
        if see is not None:
            see(ids)
        routed = expert_rows(x_RH, num_rows, self.experts, weights, ids)
        return torch.addcmul(routed, self.shared.rows(x_RH).float(), shared_gate)

    def bulk(self, x_TH: torch.Tensor) -> torch.Tensor:
        """fp32 [T, H] for prefill."""
        weights, ids, shared_gate = self._route(self.router.bulk(x_TH))
        return torch.addcmul(expert_bulk(x_TH, self.experts, weights, ids), self.shared.bulk(x_TH).float(), shared_gate)

    def _route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, gate = logits.float().split([len(self.experts), 1], dim=-1)
        return *route(logits, self.top_k), sigmoid(gate)


@dataclass(frozen=True)
class FusedMoeMlp:
    """MoeMlp with packed weights; `experts` has the shared one too."""

    router: AnyLinear
    experts: FusedExperts
    top_k: int

    def rows(self, x_RH: torch.Tensor, num_rows: int, see: SeeExperts | None = None) -> torch.Tensor:
        """fp32 [R, H], row-invariant; rows past num_rows are padding, and zero."""
        routed = self._route(self.router.rows(x_RH[:num_rows]))
        if see is not None:
            see(routed[1])
        return F.pad(self.experts.rows(x_RH[:num_rows], *routed), (0, 0, 0, len(x_RH) - num_rows))

    def bulk(self, x_TH: torch.Tensor) -> torch.Tensor:
        """fp32 [T, H] for prefill."""
        return self.experts.bulk(x_TH, self.router.bulk(x_TH))

    def bulk_into(self, stream: torch.Tensor, x_TH: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        """Adds what `bulk` gives to the stream fp32 [T, H]; x's dtype [T, H], the stream's norm. Of packed experts."""
        return self.experts.bulk_into(stream, x_TH, self.router.bulk(x_TH), scale, eps)

    def _route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, gate = logits.float().split([logits.shape[1] - 1, 1], dim=-1)
        weights, ids = route(logits, self.top_k)
        return weights, ids.int(), sigmoid(gate)[:, 0]
