"""The trunk's weights: embedding, layers of two kinds, final norm, lm_head. The residual stream is fp32.

H = hidden, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pilotfish.engine.cache.tensors import KvCache, RecurrentState
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.model.delta_net import GatedDeltaNet
from pilotfish.engine.model.mlp import MoeMlp, PackedMoeMlp
from pilotfish.kernels.cuda.packing import PackedRows
from pilotfish.kernels.linear import AnyLinear
from pilotfish.kernels.moe import GatedMlp

Embedding = torch.Tensor | PackedRows
"""[V, H]; `embedding[tokens]` are their rows."""


@dataclass(frozen=True)
class Norm:
    """An RMSNorm of the (1 + w) kind, to `dtype`; `scale` fp32 [H] holds 1 + w."""

    scale: torch.Tensor
    eps: float
    dtype: torch.dtype


@dataclass(frozen=True)
class Layer:
    """x + mixer(norm(x)), then x + mlp(norm(x)); fp32 in and out."""

    input_norm: Norm
    mixer: GatedAttention | GatedDeltaNet
    post_norm: Norm
    mlp: GatedMlp | MoeMlp | PackedMoeMlp


@dataclass(frozen=True)
class Trunk:
    """`kv` (one cache a full layer, in order) and `state` hold every sequence."""

    embedding: Embedding
    layers: list[Layer]
    norm: Norm
    lm_head: AnyLinear
    kv: list[KvCache]
    state: RecurrentState

    def norms_after(self) -> list[Norm]:
        """What each layer's output is normed by: the next layer's first norm, and at the end the trunk's own."""
        return [*(layer.input_norm for layer in self.layers[1:]), self.norm]
