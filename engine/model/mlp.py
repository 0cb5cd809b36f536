"""The feed-forward half of an MoE layer: routed experts beside a shared one. A dense layer's is a kernels.moe.GatedMlp.

H = hidden, E = experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pilotfish.kernels.linear import AnyLinear
from pilotfish.kernels.moe import GatedMlp

if TYPE_CHECKING:
    from pilotfish.kernels.cuda.moe import GroupedExperts


@dataclass(frozen=True)
class MoeMlp:
    """`router` [E + 1, H]: the experts' logits, then the shared expert's gate."""

    router: AnyLinear
    experts: list[GatedMlp]
    shared: GatedMlp
    top_k: int


@dataclass(frozen=True)
class PackedMoeMlp:
    """The same with packed weights; `experts` has the shared one too."""

    router: AnyLinear
    experts: GroupedExperts
    top_k: int
