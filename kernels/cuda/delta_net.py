"""GatedDeltaNet over a decode window: replay of accepted rows, one store of the state, then the window itself.

What a window leaves pending is its rows of the projection (u | b | a, bf16): replay convolves, norms and steps them
again, by one loop over accepted and window rows whose code is the same for every (B, W), so a replayed state has the
bits it had inside the window.

Two launches. `_steps_kernel`: one program for 8 WARPS columns of a head's state, which are independent of the others.
It first convolves, norms and gates all its rows at once, into scratch, then steps through them with the state in
registers; a step has no barrier. `_finish_kernel`: the gated norm, which needs whole heads, and, once nobody reads them
any more, the history and the pending rows.
Bytes: the state, read and written once (2 * 4 Hv dk dv a sequence), beside which the rest is small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pilotfish.kernels.activation import sigmoid, silu, softplus
from pilotfish.kernels.conv import causal_conv
from pilotfish.kernels.delta_net import delta_read, delta_step
from pilotfish.kernels.norm import l2_norm, rms_norm

TAPS = 4
WARPS = 4
"""Warps of a program; each holds 8 columns of the state and all their rows, so that no sum over dk crosses warps."""
ROWS = 4
"""Window rows that a program of `_finish_kernel` has at once. The layout of a block, and with it the order of a sum
along it, follows the block's shape: that must be the same for every k."""
_HISTORY = tl.constexpr(TAPS - 1)


@triton.jit
def _prefetch(pointers):
    """Asks for the lines at the pointers to come to L2. A hint: nothing is read, so it may stand before the wait."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _source(t, old, accepted, window, count, C: tl.constexpr, HELD: tl.constexpr, COLUMNS: tl.constexpr):
    """Where the inputs of time t are: in the history (t < 0), the accepted rows or the window."""
    return tl.where(
        t < 0, old + (t + _HISTORY) * C, tl.where(t < count, accepted + t * HELD, window + (t - count) * COLUMNS)
    )


@triton.jit
def _mixed(rows, columns, weight, C: tl.constexpr, mask):
    """silu(conv) of channels: `rows` are the pointers of the inputs, oldest first."""
    x = tl.load(rows[0] + columns, mask, other=0.0).to(tl.float32) * tl.load(weight + columns)
    x = tl.fma(tl.load(rows[1] + columns, mask, other=0.0).to(tl.float32), tl.load(weight + C + columns), x)
    x = tl.fma(tl.load(rows[2] + columns, mask, other=0.0).to(tl.float32), tl.load(weight + 2 * C + columns), x)
    x = tl.fma(tl.load(rows[3] + columns, mask, other=0.0).to(tl.float32), tl.load(weight + 3 * C + columns), x)
    return _silu(x)


@triton.jit
def _dot_rows(a, b, x, y):
    """Sum over dk of (a | b) * (x | y): registers first, then lanes."""
    return tl.sum(tl.sum(a * x, 0, keep_dims=True) + tl.sum(b * y, 0, keep_dims=True), 2, keep_dims=True)


@triton.jit
def _halves(row, columns, DK: tl.constexpr):
    """The two halves of a head's k or q; of 16 dimensions the second is empty: zeros."""
    first = tl.load(row + columns)
    second = tl.load(row + columns + DK // 2) if DK > 16 else tl.zeros_like(first)
    return first, second


@triton.jit
def _operands(row, gates, k_columns, q_columns, v_columns, DK: tl.constexpr):
    """k and q in halves, v, beta and decay of a row."""
    ka, kb = _halves(row, k_columns, DK)
    qa, qb = _halves(row, q_columns, DK)
    return ka, kb, qa, qb, tl.load(row + v_columns), tl.load(gates), tl.load(gates + 1)


@triton.jit(do_not_specialize=["W", "MOST"])
def _steps_kernel(
    projected,
    slots,
    counts,
    state,
    history,
    pending,
    conv_weight,
    decay_rate,
    dt_bias,
    mixed,
    gates,
    read,
    W,
    MOST,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    C: tl.constexpr = 2 * HK * DK + HV * DV
    COLUMNS: tl.constexpr = C + HV * DV + 2 * HV
    HELD: tl.constexpr = C + 2 * HV
    BLOCK_V: tl.constexpr = 8 * GROUPS
    TILES: tl.constexpr = DV // BLOCK_V
    tile = tl.program_id(0) % TILES
    head = tl.program_id(0) // TILES % HV
    b = tl.program_id(0) // (TILES * HV)
    q_first = head // (HV // HK) * DK
    k_first = HK * DK + q_first
    v_first = 2 * HK * DK + head * DV + tile * BLOCK_V
    rate, bias = tl.load(decay_rate + head), tl.load(dt_bias + head)
    if PDL:
        gdc_launch_dependents()
        # Lines of 128 bytes of what no kernel of this round has written: the state, the taps, the history. A slot read
        # too early would only make the hint useless.
        early = tl.load(slots + b).to(tl.int64)
        line = tl.arange(0, DK)
        _prefetch(state + ((early * HV + head) * DK + line) * DV + tile * BLOCK_V)
        tap = tl.arange(0, 4)[:, None]
        chunk = tl.arange(0, 4)[None, :] * (DK // 4)
        _prefetch(conv_weight + tap * C + q_first + chunk)
        _prefetch(conv_weight + tap * C + k_first + chunk)
        _prefetch(conv_weight + tap * C + v_first + chunk % BLOCK_V)
        past = history + early * (_HISTORY * C) + tl.minimum(tap, _HISTORY - 1) * C
        _prefetch(past + q_first + chunk)
        _prefetch(past + k_first + chunk)
        gdc_wait()

    slot = tl.load(slots + b).to(tl.int64)
    # a null slot may hold anything
    count = tl.minimum(tl.maximum(tl.load(counts + slot).to(tl.int32), 0), MOST)
    # The state in two halves of axes (DK / 32, GROUPS, 16, 8). The compiler deals registers, lanes and warps out to the
    # axes by their contiguity: a warp shall have one group, its lanes the 16 and the 8 by fours. Only the last axis is
    # contiguous; the other hints are not true of the memory, they put the axes in that order in every release.
    HIGH: tl.constexpr = max(DK // 32, 1)
    high = tl.arange(0, HIGH)[:, None, None, None]
    group = tl.arange(0, GROUPS)[None, :, None, None]
    low = tl.arange(0, 16)[None, None, :, None]
    column = tl.arange(0, 8)[None, None, None, :]
    i = high * 16 + low
    j = group * 8 + column
    cells = state + (slot * HV + head) * (DK * DV) + tile * BLOCK_V
    cells_a = tl.max_contiguous(cells + (i * DV + j), [1, 2, 4, 8])
    cells_b = tl.max_contiguous(cells + ((i + DK // 2) * DV + j), [1, 2, 4, 8])
    sa = tl.load(cells_a)
    sb = tl.load(cells_b) if DK > 16 else tl.zeros_like(sa)

    # q, k and v of all rows, a row a warp; the programs of a head write the same values to the same places
    old = history + slot * (_HISTORY * C)
    accepted = pending + slot * (MOST * HELD)
    window = projected + (b * W).to(tl.int64) * COLUMNS
    mixed += b.to(tl.int64) * (2 * MOST * C)
    gates += b * (2 * MOST * HV * 2) + head * 2
    for first in range(0, count + W, GROUPS):
        t = first + tl.arange(0, GROUPS)[:, None]
        mask = t < count + W
        inputs = (
            _source(t - 3, old, accepted, window, count, C, HELD, COLUMNS),
            _source(t - 2, old, accepted, window, count, C, HELD, COLUMNS),
            _source(t - 1, old, accepted, window, count, C, HELD, COLUMNS),
            _source(t, old, accepted, window, count, C, HELD, COLUMNS),
        )
        # as wide as the rows, so that taps and inputs lie in the same lanes
        d = t * 0 + tl.arange(0, DK)[None, :]
        own_v = t * 0 + tl.arange(0, BLOCK_V)[None, :]
        q = _mixed(inputs, q_first + d, conv_weight, C, mask)
        k = _mixed(inputs, k_first + d, conv_weight, C, mask)
        v = _mixed(inputs, v_first + own_v, conv_weight, C, mask)
        q = q * (tl.rsqrt(tl.sum(q * q, 1, keep_dims=True) + 1e-6) * DK**-0.5)
        k = k * tl.rsqrt(tl.sum(k * k, 1, keep_dims=True) + 1e-6)
        tl.store(mixed + t * C + q_first + d, q, mask)
        tl.store(mixed + t * C + k_first + d, k, mask)
        tl.store(mixed + t * C + v_first + own_v, v, mask)
        own = inputs[3] + head + tl.where(t < count, C, C + HV * DV)
        beta = tl.load(own, mask, other=0.0).to(tl.float32)
        a = tl.load(own + HV, mask, other=0.0).to(tl.float32) + bias
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        tl.store(gates + t * (2 * HV), 1.0 / (1.0 + tl.exp(-beta)), mask)
        tl.store(gates + t * (2 * HV) + 1, tl.exp(rate * softplus), mask)
    tl.debug_barrier()

    # the one step of replay and window
    ia = tl.arange(0, HIGH)[:, None] * 16 + tl.arange(0, 16)[None, :]
    jv = tl.arange(0, GROUPS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    out = read + (b * W * HV + head).to(tl.int64) * DV + tile * BLOCK_V
    places = tl.max_contiguous(out + (low * DV + j), [1, 2, 4, 8])
    ka, kb, qa, qb, v, beta, decay = _operands(mixed, gates, k_first + ia, q_first + ia, v_first + jv, DK)
    for t in range(0, count + W):
        if (t == count) & (count > 0):
            tl.store(cells_a, sa)
            if DK > 16:
                tl.store(cells_b, sb)
        # the next row's operands, on their way while this one's step runs
        after = tl.minimum(t + 1, count + W - 1)
        row, own = mixed + after * C, gates + after * (2 * HV)
        next_ka, next_kb, next_qa, next_qb, next_v, next_beta, next_decay = _operands(
            row, own, k_first + ia, q_first + ia, v_first + jv, DK
        )
        k4a, k4b = ka[:, None, :, None], kb[:, None, :, None]
        sa, sb = sa * decay, sb * decay
        delta = (v[None, :, None, :] - _dot_rows(sa, sb, k4a, k4b)) * beta
        sa, sb = tl.fma(k4a, delta, sa), tl.fma(k4b, delta, sb)
        if t >= count:
            o = _dot_rows(sa, sb, qa[:, None, :, None], qb[:, None, :, None])
            tl.store(
                tl.max_contiguous(places + (t - count) * (HV * DV), [1, 2, 4, 8]),
                tl.broadcast_to(o, (1, GROUPS, 16, 8)),
                low == 0,
            )
        ka, kb, qa, qb, v, beta, decay = next_ka, next_kb, next_qa, next_qb, next_v, next_beta, next_decay


@triton.jit(do_not_specialize=["W", "MOST"])
def _finish_kernel(
    projected,
    slots,
    counts,
    history,
    pending,
    gate_norm,
    read,
    out,
    eps,
    W,
    MOST,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for the channels of one head of q, k or v of a sequence, and that value head's output."""
    C: tl.constexpr = 2 * HK * DK + HV * DV
    COLUMNS: tl.constexpr = C + HV * DV + 2 * HV
    HELD: tl.constexpr = C + 2 * HV
    PARTS: tl.constexpr = 2 * HK + HV
    part = tl.program_id(0) % PARTS
    b = tl.program_id(0) // PARTS
    head = part - 2 * HK
    d = tl.arange(0, BLOCK)
    live = d < tl.where(head < 0, DK, DV)
    norm = tl.load(gate_norm + d, d < DV, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    slot = tl.load(slots + b).to(tl.int64)
    count = tl.minimum(tl.maximum(tl.load(counts + slot).to(tl.int32), 0), MOST)
    column = tl.where(head < 0, part * DK, 2 * HK * DK + head * DV)
    source = projected + (b * W).to(tl.int64) * COLUMNS
    target = pending + slot * (MOST * HELD)
    old = history + slot * (_HISTORY * C)
    is_value = head >= 0
    # the newest inputs of history and accepted rows, one after the other
    tap = tl.arange(0, _HISTORY + 1)[:, None]
    order = count + tap
    kept = (tap < _HISTORY) & live[None, :]
    earlier = tl.load(old + order * C + column + d, kept & (order < _HISTORY), other=0.0)
    later = tl.load(target + (order - _HISTORY) * HELD + column + d, kept & (order >= _HISTORY), other=0.0)
    newest = tl.where(order < _HISTORY, earlier, later)
    for first in range(0, W, ROWS):
        w = first + tl.arange(0, ROWS)[:, None]
        mask = (w < W) & live[None, :]
        shown, counted = mask & is_value, (w < W) & is_value
        u = tl.load(source + w * COLUMNS + column + d, mask, other=0.0)
        gates = source + w * COLUMNS + C + HV * DV + head
        beta, a = tl.load(gates, counted, other=0.0), tl.load(gates + HV, counted, other=0.0)
        cells = (b * W + w).to(tl.int64) * (HV * DV) + head * DV + d
        o = tl.load(read + cells, shown, other=0.0)
        z = tl.load(source + w * COLUMNS + C + head * DV + d, shown, other=0.0).to(tl.float32)
        # every thread has read what it moves before anything is overwritten; and all loads are on their way together
        tl.debug_barrier()
        tl.store(target + w * HELD + column + d, u, mask)
        tl.store(target + w * HELD + C + head, beta, counted)
        tl.store(target + w * HELD + C + HV + head, a, counted)
        scale = tl.rsqrt(tl.sum(o * o, 1) / DV + eps)
        tl.store(out + cells, (o * scale[:, None] * norm[None, :] * _silu(z)).to(out.dtype.element_ty), shown)
    tl.store(old + tap * C + column + d, newest, kept)


def pending_width(num_channels: int, num_value_heads: int) -> int:
    """Values of one pending row: u, b and a."""
    return num_channels + 2 * num_value_heads


@dataclass(frozen=True)
class DeltaScratch:
    """What a layer's window needs besides its operands; one for all layers.

    mixed fp32 [B, 2 W_max, C] and gates fp32 [B, 2 W_max, Hv, 2] hold convolved rows, beta and decay; read fp32
    [R, Hv dv] what the recurrence put out.
    """

    mixed: torch.Tensor
    gates: torch.Tensor
    read: torch.Tensor

    @classmethod
    def empty(
        cls, max_rows: int, max_sequences: int, max_width: int, channels: int, heads: int, dv: int, device: torch.device
    ) -> DeltaScratch:
        rows = (max_sequences, 2 * max_width)
        return cls(
            torch.zeros((*rows, channels), device=device),
            torch.zeros((*rows, heads, 2), device=device),
            torch.zeros((max_rows, heads * dv), device=device),
        )

    @property
    def num_bytes(self) -> int:
        return self.mixed.nbytes + self.gates.nbytes + self.read.nbytes


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
    scratch: DeltaScratch,
    out: torch.Tensor,
    pdl: bool = False,
) -> None:
    """One linear layer's mixer between its two products; changes state, history, pending, scratch and out.

    projected  bf16 [>= R, C + Hv dv + 2 Hv]: u | z | b | a of the window's rows
    slots      int32 [B]; slot 0 may repeat (padding), others may not
    counts     int [S]: pending rows of a slot that were accepted, 0..W_max; not changed
    state      fp32 [S, Hv, dk, dv]: replayed counts[slot] rows forward and stored
    history    bf16 [S, J-1, C]: likewise
    pending    bf16 [<= S, W_max, pending_width]: accepted rows in; the window's rows out, in [:W]
    conv_weight fp32 [J, C], decay_rate (-exp(A_log)) and dt_bias fp32 [Hv], gate_norm fp32 [dv]
    out        bf16 [>= R, Hv dv]: the gated norm's output
    """
    _, heads, dk, dv = state.shape
    channels, most, batch = history.shape[2], pending.shape[1], len(slots)
    key_heads = (channels - heads * dv) // (2 * dk)
    _check(projected, state, history, pending, conv_weight, scratch, out, batch, width)
    warps = min(WARPS, dv // 8)
    sizes = {"MOST": most, "HK": key_heads, "HV": heads, "DK": dk, "DV": dv, "PDL": pdl}
    options = {"launch_pdl": True} if pdl else {}
    _steps_kernel[(batch * heads * (dv // (8 * warps)),)](
        projected, slots, counts, state, history, pending, conv_weight, decay_rate, dt_bias,
        scratch.mixed, scratch.gates, scratch.read, width,
        GROUPS=warps, num_warps=warps, **sizes, **options,
    )  # fmt: skip
    _finish_kernel[(batch * (2 * key_heads + heads),)](
        projected, slots, counts, history, pending, gate_norm, scratch.read, out, eps, width,
        ROWS=ROWS, BLOCK=max(dk, dv), num_warps=4, **sizes, **options,
    )  # fmt: skip


def check_sizes(key_heads: int, heads: int, dk: int, dv: int, taps: int) -> None:
    """Raises ValueError naming the first size that the kernels do not hold."""
    for name, value in (("linear_key_head_dim", dk), ("linear_value_head_dim", dv)):
        if value not in (16, 32, 64, 128, 256):
            raise ValueError(f"{name}: the GPU kernels want 16, 32, 64, 128 or 256, got {value}")
    if taps != TAPS:
        raise ValueError(f"linear_conv_kernel_dim: the GPU kernels want {TAPS}, got {taps}")
    if heads % key_heads:
        raise ValueError(f"linear_num_value_heads: want a multiple of {key_heads}, got {heads}")


def _check(
    projected: torch.Tensor,
    state: torch.Tensor,
    history: torch.Tensor,
    pending: torch.Tensor,
    conv_weight: torch.Tensor,
    scratch: DeltaScratch,
    out: torch.Tensor,
    batch: int,
    width: int,
) -> None:
    num_slots, heads, _, dv = state.shape
    channels, most, values = history.shape[2], pending.shape[1], heads * dv
    assert history.shape == (num_slots, TAPS - 1, channels) and conv_weight.shape == (TAPS, channels)
    # rounds may be made for fewer slots than the model has
    assert len(pending) <= num_slots and pending.shape[2] == pending_width(channels, heads) and 1 <= width <= most
    assert state.dtype == conv_weight.dtype == torch.float32
    assert projected.dtype == history.dtype == pending.dtype == out.dtype
    assert projected.shape[1] == channels + values + 2 * heads and out.shape[1] == values
    assert min(len(projected), len(scratch.read), len(out)) >= batch * width
    assert len(scratch.mixed) >= batch and scratch.mixed.shape[1:] == (2 * most, channels)
    assert all(t.is_contiguous() for t in (conv_weight, state, history, pending, projected, out))


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
    scratch: DeltaScratch | None,
    out: torch.Tensor,
) -> None:
    """`gdn_window` in plain torch, without a wait for the device; `scratch` is left alone."""
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
    normed = rms_norm(window.flatten(0, 1), gate_norm, eps, torch.float32)
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
