"""Gated full attention: per-head norms of q and k, partial RoPE, paged attention, an output gate.

H = hidden, h = heads, kv = key/value heads, D = head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pilotfish.kernels.linear import AnyLinear


@dataclass(frozen=True)
class GatedAttention:
    """`qkvg` [(2h + 2kv) D, H]: rows of all q heads, all k heads, all v heads, all gates, so that q and k are one block
    for the norm and RoPE. `qk_norm` fp32 [h + kv, D] holds 1 + w of q_norm and k_norm."""

    qkvg: AnyLinear
    output: AnyLinear
    qk_norm: torch.Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    dtype: torch.dtype
