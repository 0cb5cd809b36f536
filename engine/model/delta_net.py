"""The GatedDeltaNet layer: projections, short convolution, gates, delta rule, gated norm.

H = hidden, C = convolution channels (q | k | v), J = convolution width, Hk / Hv = key / value heads. Value head j reads
key head j // (Hv / Hk).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pilotfish.kernels.linear import AnyLinear


@dataclass(frozen=True)
class GatedDeltaNet:
    """`in_proj` [C + value_dim + 2 Hv, H]: rows of qkv, z, b, a. `conv_weight` fp32 [J, C]; `decay_rate` fp32 [Hv] is
    -exp(A_log); `gate_norm` fp32 [dv] is the plain weight of the gated norm; `qk_factor` fp32 [2, 1, 1] scales q and k
    after their norm."""

    in_proj: AnyLinear
    output: AnyLinear
    conv_weight: torch.Tensor
    decay_rate: torch.Tensor
    dt_bias: torch.Tensor
    gate_norm: torch.Tensor
    qk_factor: torch.Tensor
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    eps: float
    dtype: torch.dtype
