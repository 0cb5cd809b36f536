"""Gated full attention: per-head norms of q and k, partial RoPE, paged attention, an output gate.

H = hidden, h = heads, kv = key/value heads, D = head width, R = rows, T = prompt rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pilotfish.engine.cache.tensors import KvCache
from pilotfish.engine.model.window import Span, Window
from pilotfish.kernels.activation import sigmoid
from pilotfish.kernels.attention import prefill_attention, window_attention, write_kv
from pilotfish.kernels.linear import AnyLinear
from pilotfish.kernels.norm import rms_norm
from pilotfish.kernels.rope import apply_rope


@dataclass(frozen=True)
class GatedAttention:
    """`qkvg` [(2h + 2kv) D, H]: rows of all q heads, all k heads, all v heads, all gates, so that q and k are one block
    for the norm and RoPE. `qk_norm` fp32 [h + kv, D] holds 1 + w of q_norm and k_norm. `prompt_kernels`: prompts by
    launches of kernels.cuda beside the library's product, in place of plain torch."""

    qkvg: AnyLinear
    output: AnyLinear
    qk_norm: torch.Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    dtype: torch.dtype
    prompt_kernels: bool = False

    def rows(self, x_RH: torch.Tensor, window: Window, cache: KvCache) -> torch.Tensor:
        """[R, H], row-invariant; writes the window's keys and values. R is padded to whole tiles."""
        num_rows = window.num_rows
        q, k, v, gate = self._project(self.qkvg.rows(x_RH)[:num_rows], window)
        write_kv(cache.k, cache.v, window.pages, window.offsets, k, v, cache.k_scale, cache.v_scale)
        mixed = window_attention(q, cache.k, cache.v, window.tiles, cache.k_scale, cache.v_scale)
        gated = self._gate(mixed.flatten(1), gate)
        return self.output.rows(F.pad(gated, (0, 0, 0, x_RH.shape[0] - num_rows)))

    def bulk(self, x_TH: torch.Tensor, span: Span, cache: KvCache) -> torch.Tensor:
        """[T, H] of a prompt span; writes its keys and values."""
        projected = self.qkvg.bulk(x_TH)
        if self.prompt_kernels:
            from pilotfish.kernels.cuda.attention_prompt import attention_prompt  # imports Triton

            place = (span.positions, span.start, span.cos, span.sin, span.table, cache.k, cache.v)
            scales = (cache.k_scale, cache.v_scale)
            return self.output.bulk(attention_prompt(projected, *place, self.qk_norm, self.eps, *scales))
        q, k, v, gate = self._project(projected, span)
        write_kv(cache.k, cache.v, span.pages, span.offsets, k, v, cache.k_scale, cache.v_scale)
        mixed = prefill_attention(q, cache.k, cache.v, span.table, span.start, cache.k_scale, cache.v_scale)
        return self.output.bulk(self._gate(mixed.flatten(1), gate))

    def _project(self, qkvg: torch.Tensor, rope: Window | Span) -> tuple[torch.Tensor, ...]:
        heads, kv, dim = self.num_heads, self.num_kv_heads, self.head_dim
        qk, v, gate = qkvg.split([(heads + kv) * dim, kv * dim, heads * dim], dim=-1)
        qk = rms_norm(qk.reshape(-1, heads + kv, dim), self.qk_norm, self.eps, torch.float32)
        q, k = apply_rope(qk, rope.cos, rope.sin).split([heads, kv], dim=1)
        return q.contiguous(), k, v.reshape(-1, kv, dim), gate

    def _gate(self, mixed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (mixed * sigmoid(gate.float())).to(self.dtype)
