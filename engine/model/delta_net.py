"""The GatedDeltaNet layer: projections, short convolution, gates, delta rule, gated norm.

H = hidden, C = convolution channels (q | k | v), Hk / Hv = key / value heads, B = sequences, W = window rows,
T = prompt rows.
Value head j reads key head j // (Hv / Hk).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pilotfish.engine.model.window import Window
from pilotfish.kernels.activation import sigmoid, silu, softplus
from pilotfish.kernels.conv import causal_conv
from pilotfish.kernels.delta_net import delta_prefill, delta_window
from pilotfish.kernels.linear import AnyLinear
from pilotfish.kernels.norm import l2_norm, rms_norm


@dataclass(frozen=True)
class GatedDeltaNet:
    """`in_proj` [C + value_dim + 2 Hv, H]: rows of qkv, z, b, a. `conv_weight` fp32 [J, C]; `decay_rate` fp32 [Hv] is
    -exp(A_log); `gate_norm` fp32 [dv] is the plain weight of the gated norm; `qk_factor` fp32 [2, 1, 1] scales q and k
    after their norm. `prompt_kernels`: prompts by fla-core, in place of plain torch."""

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
    prompt_kernels: bool = False

    def rows(
        self, x_RH: torch.Tensor, window: Window, state: torch.Tensor, history: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """[R, H], row-invariant, and the window's pending rows (k, v, beta, decay, u), [B, W, ...] each.

        state [B, Hv, dk, dv] and history [B, J-1, C] are the committed ones and are not changed.
        """
        batch, width, num_rows = window.num_sequences, window.width, window.num_rows
        u, z, beta, log_decay = self._project(self.in_proj.rows(x_RH))
        u = u[:num_rows].view(batch, width, -1)
        beta, decay = (t[:num_rows].view(batch, width, -1) for t in (beta, log_decay.exp()))
        q, k, v = self._heads(causal_conv(torch.cat((history, u), dim=1), self.conv_weight))
        read = delta_window(state, q, k, v, beta, decay)
        gated = self._gate(read.view(num_rows, self.num_value_heads, -1), z[:num_rows])
        output = self.output.rows(F.pad(gated, (0, 0, 0, x_RH.shape[0] - num_rows)))
        return output, (k, v, beta, decay, u)

    def bulk(self, x_TH: torch.Tensor, state: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        """[T, H] of a prompt span of one sequence; state [Hv, dk, dv] and history [J-1, C] become those after it."""
        projected = self.in_proj.bulk(x_TH)
        if self.prompt_kernels:
            from pilotfish.kernels.cuda.delta_prefill import gdn_prompt  # imports Triton

            weights = (self.conv_weight, self.decay_rate, self.dt_bias, self.gate_norm)
            return self.output.bulk(gdn_prompt(projected, state, history, *weights, self.eps))
        u, z, beta, log_decay = self._project(projected)
        inputs = torch.cat((history, u))
        q, k, v = self._heads(causal_conv(inputs[None], self.conv_weight)[0])
        read, after = delta_prefill(state, q, k, v, beta, log_decay)
        state.copy_(after)
        history.copy_(inputs[-history.shape[0] :])
        return self.output.bulk(self._gate(read, z))

    def _project(self, projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """u, z as they come, and beta and the log decay in fp32 [rows, Hv]."""
        value_dim = self.num_value_heads * self.value_head_dim
        u, z, ba = projected.split(
            [projected.shape[1] - value_dim - 2 * self.num_value_heads, value_dim, 2 * self.num_value_heads], -1
        )
        b, a = (part.float() for part in ba.chunk(2, dim=-1))
        return u, z, sigmoid(b), self.decay_rate * softplus(a + self.dt_bias)

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q (normed and scaled), k (normed), v of the convolved channels, fp32 [..., Hv, width] each."""
        key_dim, dk = self.num_key_heads * self.key_head_dim, self.key_head_dim
        qk, v = mixed.split([2 * key_dim, mixed.shape[-1] - 2 * key_dim], dim=-1)
        qk = l2_norm(qk.unflatten(-1, (2, self.num_key_heads, dk)), self.qk_factor)
        q, k = qk.repeat_interleave(self.num_value_heads // self.num_key_heads, dim=-2).unbind(-3)
        return q, k, v.unflatten(-1, (self.num_value_heads, self.value_head_dim))

    def _gate(self, read: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(read, self.gate_norm, self.eps, torch.float32)
        return (normed.flatten(1) * silu(z.float())).to(self.dtype)
