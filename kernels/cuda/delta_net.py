"""GatedDeltaNet over a decode window: replay of accepted rows, one store of the state, then the window itself.

What a window leaves pending is its rows of the projection (u | b | a, bf16): replay convolves, norms and steps them
again, through the same instructions, so a replayed state has the bits it had inside the window.
B = sequences, W = window rows, R = B * W, row r belongs to sequence r // W. S = slots, C = convolution channels
(q | k | v), J = taps, Hk / Hv = key / value heads; value head j reads key head j // (Hv / Hk).
"""

from __future__ import annotations

import torch

from pilotfish.kernels.activation import sigmoid, silu, softplus
from pilotfish.kernels.conv import causal_conv
from pilotfish.kernels.delta_net import delta_read, delta_step
from pilotfish.kernels.norm import l2_norm, rms_norm


def pending_width(num_channels: int, num_value_heads: int) -> int:
    """Values of one pending row: u, b and a."""
    return num_channels + 2 * num_value_heads


def gdn_window(
    projected: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    state: torch.Tensor,
    history: torch.Tensor,
    pending: torch.Tensor,
    conv_weight: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    gate_norm: torch.Tensor,
    eps: float,
    width: int,
    read: torch.Tensor,
    out: torch.Tensor,
    *,
    launch_pdl: bool = False,
) -> None:
    """One linear layer's mixer between its two products; changes state, history, pending, read and out.

    projected  bf16 [>= R, C + Hv dv + 2 Hv]: u | z | b | a of the window's rows
    slots      int32 [B]; slot 0 may repeat (padding), others may not
    counts     int [S]: pending rows of a slot that were accepted, 0..W_max; not changed
    state      fp32 [S, Hv, dk, dv]: replayed counts[slot] rows forward and stored
    history    bf16 [S, J-1, C]: likewise
    pending    bf16 [S, W_max, pending_width]: accepted rows in; the window's rows out, in [:W]
    conv_weight fp32 [J, C], decay_rate (-exp(A_log)) and dt_bias fp32 [Hv], gate_norm fp32 [dv]
    read       fp32 [>= R, Hv dv], scratch
    out        bf16 [>= R, Hv dv]: the gated norm's output
    """
    gdn_window_reference(
        projected, slots, counts, state, history, pending, conv_weight, decay_rate, dt_bias, gate_norm, eps, width,
        read, out,
    )  # fmt: skip


def gdn_window_reference(
    projected: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    state: torch.Tensor,
    history: torch.Tensor,
    pending: torch.Tensor,
    conv_weight: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    gate_norm: torch.Tensor,
    eps: float,
    width: int,
    read: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """`gdn_window` in plain torch, without a wait for the device."""
    slots = slots.long()
    batch, num_rows = len(slots), len(slots) * width
    heads, dk, dv = state.shape[1:]
    channels, most = history.shape[2], pending.shape[1]
    u, z, gates = projected[:num_rows].split([channels, heads * dv, 2 * heads], dim=-1)
    rows = torch.cat((u, gates), dim=-1).view(batch, width, -1)
    count = counts[slots].long().clamp(0, most)
    # time t of a sequence: its accepted rows, then the window's; past those the last one again, unused
    time = torch.arange(most + width, device=state.device)
    index = torch.where(time < count[:, None], time, most + (time - count[:, None]).clamp(max=width - 1))
    joined = torch.cat((pending[slots], rows), dim=1)
    taken = joined.gather(1, index[..., None].expand(-1, -1, joined.shape[2]))
    inputs = torch.cat((history[slots], taken[..., :channels]), dim=1)
    b, a = taken[..., channels:].float().chunk(2, dim=-1)
    beta, decay = sigmoid(b), (decay_rate * softplus(a + dt_bias)).exp()
    q, k, v = _heads(causal_conv(inputs, conv_weight), heads, dk, dv)

    after, committed, reads = state[slots], state[slots], []
    for t in range(most + width):
        committed = torch.where((count == t)[:, None, None, None], after, committed)
        after = delta_step(
            after, k[:, t, :, :, None], v[:, t, :, None], *(g[:, t, :, None, None] for g in (beta, decay))
        )
        reads.append(delta_read(after, q[:, t, :, :, None]))
    own = count[:, None] + torch.arange(width, device=state.device)
    window = torch.stack(reads, dim=1).gather(1, own[..., None, None].expand(-1, -1, heads, dv))
    read[:num_rows] = window.reshape(num_rows, -1)
    normed = rms_norm(read[:num_rows].view(num_rows, heads, dv), gate_norm, eps, torch.float32)
    out[:num_rows] = (normed.flatten(1) * silu(z.float())).to(out.dtype)

    newest = count[:, None] + torch.arange(history.shape[1], device=state.device)
    history[slots] = inputs.gather(1, newest[..., None].expand(-1, -1, channels))
    state[slots] = committed
    pending[slots, :width] = rows


def _heads(mixed: torch.Tensor, heads: int, dk: int, dv: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (normed and scaled), k (normed), v of the convolved channels, fp32 [B, T, Hv, width] each."""
    qk, v = mixed.split([mixed.shape[-1] - heads * dv, heads * dv], dim=-1)
    factor = torch.tensor([dk**-0.5, 1.0], device=qk.device)[:, None, None]
    qk = l2_norm(qk.unflatten(-1, (2, -1, dk)), factor)
    q, k = qk.repeat_interleave(heads // qk.shape[-2], dim=-2).unbind(-3)
    return q, k, v.unflatten(-1, (heads, dv))
