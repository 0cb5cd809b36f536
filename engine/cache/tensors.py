"""The memory that sequences live in: paged keys and values, and recurrent-state slots.

L = linear layers, S = slots, P = pages, Hv = value heads, C = convolution channels, J = convolution width,
W = window rows of the largest k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pilotfish.engine.config import ModelConfig
from pilotfish.kernels.attention import PAGE
from pilotfish.kernels.delta_net import delta_replay


@dataclass(frozen=True)
class KvCache:
    """One attention layer's keys (normed, rotated) and values, [P, kv, PAGE, D] each; in FP8 divided by the scales.

    The entry of position p stands at place p + `lag` of its sequence's pages; the places before are never read. A draft
    head's cache lags by 1: its entry p holds token p + 1, and so the pages of places [0, N) hold tokens before N alone.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0
    lag: int = 0

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        lag: int = 0,
    ) -> KvCache:
        shape = (num_pages, config.num_key_value_heads, PAGE, config.head_dim)
        k, v = (torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2))
        return cls(k, v, k_scale, v_scale, lag)


@dataclass(frozen=True)
class Pending:
    """What a window leaves for the next round's replay: the inputs of its rows, kept until it is known how many count.

    k [L, S, W, Hv, dk], v [L, S, W, Hv, dv], beta and decay [L, S, W, Hv], all fp32; u [L, S, W, C] pre-activation
    convolution inputs in the model's dtype. Rows at or past a slot's count hold rejected drafts and are never read.
    """

    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    decay: torch.Tensor
    u: torch.Tensor

    def store(self, slots: torch.Tensor, rows: list[tuple[torch.Tensor, ...]]) -> None:
        """rows[l] = (k, v, beta, decay, u) of layer l, [B, w, ...] with w <= W."""
        for buffer, layers in zip(
            (self.k, self.v, self.beta, self.decay, self.u), zip(*rows, strict=True), strict=True
        ):
            buffer[:, slots, : layers[0].shape[1]] = torch.stack(layers)


@dataclass(frozen=True)
class RecurrentState:
    """Committed state of every linear layer and slot, and the pending rows that come after it.

    s [L, S, Hv, dk, dv] in fp32: a narrower state would round at each store, and bits would depend on run lengths.
    conv [L, S, J-1, C]: the last pre-activation convolution inputs.
    last_hidden [S, H]: the trunk's final-norm hidden of the newest prompt row, which the head pairs with the token that
    follows. PromptPass.end_span writes it, rounds do not.
    """

    s: torch.Tensor
    conv: torch.Tensor
    last_hidden: torch.Tensor
    pending: Pending

    @classmethod
    def empty(
        cls, config: ModelConfig, num_slots: int, max_window: int, dtype: torch.dtype, device: torch.device
    ) -> RecurrentState:
        layers, heads = len(config.linear_layers), config.linear_num_value_heads
        dk, dv = config.linear_key_head_dim, config.linear_value_head_dim

        def buffer(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((layers, num_slots, *shape), float("nan"), dtype=kind, device=device)

        pending = Pending(
            buffer(max_window, heads, dk),
            buffer(max_window, heads, dv),
            buffer(max_window, heads),
            buffer(max_window, heads),
            buffer(max_window, config.conv_dim, kind=dtype),
        )
        history = config.linear_conv_kernel_dim - 1
        last_hidden = torch.full((num_slots, config.hidden_size), float("nan"), dtype=dtype, device=device)
        return cls(buffer(heads, dk, dv), buffer(history, config.conv_dim, kind=dtype), last_hidden, pending)

    def of_slot(self, slot: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All that a sequence carries from one piece of its prompt to the next: s, conv and last_hidden."""
        return self.s[:, slot], self.conv[:, slot], self.last_hidden[slot]

    def reset(self, slot: int) -> None:
        """The state before the first token: zero. There is no hidden row yet, and none is read."""
        self.s[:, slot].zero_()
        self.conv[:, slot].zero_()

    def replay(self, slots: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Brings s and conv of `slots` to the accepted prefix, stores them once, and returns them [L, B, ...].

        All layers at once: the recurrence is the same few operations for each. The caller sets counts to 0.
        """
        s, conv = self.s[:, slots], self.conv[:, slots]
        most = max(counts)
        if most == 0:
            return s, conv
        pending = self.pending
        k, v, beta, decay, u = (
            t[:, slots, :most] for t in (pending.k, pending.v, pending.beta, pending.decay, pending.u)
        )
        s = delta_replay(s, k, v, beta, decay, counts)
        conv = _advance_conv(conv, u, counts)
        self.s[:, slots], self.conv[:, slots] = s, conv
        return s, conv


def _advance_conv(conv_LBJC: torch.Tensor, u_LBWC: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """The newest J-1 inputs once counts[b] rows of u have followed the history."""
    inputs = torch.cat((conv_LBJC, u_LBWC), dim=2)
    history = conv_LBJC.shape[2]
    if len(set(counts)) == 1:
        return inputs[:, :, counts[0] : counts[0] + history].contiguous()
    return torch.stack([inputs[:, b, count : count + history] for b, count in enumerate(counts)], dim=1)
