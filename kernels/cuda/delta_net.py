"""GatedDeltaNet over a decode window: replay of accepted rows, one store of the state, then the window itself. While
accepted rows and the window's are few the state is not stored: they stay pending, and are replayed once more.

What a window leaves pending is its rows of the projection (u | b | a, bf16): replay convolves, norms and steps them
again. It is the same code as the window's, put into the kernel twice, and without contraction (no multiplication and
addition become one but where fma stands here), so a replayed state has the bits it had inside the window.

Two launches. `_steps_kernel`: one program for 8 WARPS columns of a head's state, which are independent of the others.
It convolves, norms and gates a row a warp, into shared memory, then steps through these rows with the state in
registers; a step has no barrier. `_finish_kernel`: the gated norm, which needs whole heads, and, once nobody reads them
any more, the history and the pending rows.

A step: with kept = S'k and seen = S'q of the state before, delta = beta v - beta decay kept, the row's output is decay
seen + (q.k) delta and the state becomes decay S + k delta: both sums over dk at once, neither behind the other.

Dependent launches: state, history, pending rows and counts are what the round before left; a round's first kernels let
others start only when that round is done (`embed_rows`), so all of them are read before the wait, accepted rows
replayed, and the state that this makes stored: nobody else in a round has it. Loads of what kernels write go past L1,
which nothing empties between kernels that overlap.
Bytes: the state, read once and written at most once (2 * 4 Hv dk dv a sequence), beside which the rest is small.
"""

# Triton compiles no unpacking of tuples, and what grows in a loop has no type that mypy knows:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pilotfish.kernels.cuda.tiled_rows import AnyRows, at, stored

TAPS = 4
WARPS = 4
"""Warps of a program; each holds 8 columns of the state, and convolves a row at a time."""
LANES = 8
"""Lanes that share a column of the state; decides the order of sums over dk."""
ROWS = 4
"""Window rows that a program of `_finish_kernel` has at once. The layout of a block, and with it the order of a sum
along it, follows the block's shape: that must be the same for every k."""
_HISTORY = tl.constexpr(TAPS - 1)
_VECTORS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_MATRIX = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_EXP2 = gl.constexpr("ex2.approx.ftz.f32 $0, $1;")
_INVERSE = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@gluon.jit
def _unary(asm: gl.constexpr, x):
    return gl.inline_asm_elementwise(asm, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _sigmoid(x):
    """The sigmoid without the cases of denormal numbers: of exp(-x) they become 0 and infinity, it is 1 and 0 there."""
    return _unary(_INVERSE, 1.0 + _unary(_EXP2, x * -1.4426950408889634))


@gluon.jit
def _sources(
    t, old, accepted, window, count, C: gl.constexpr, HELD: gl.constexpr, COLUMNS: gl.constexpr, REPLAY: gl.constexpr
):
    """Where the inputs of times t - 3 .. t are: in the history (before 0), the accepted rows or the window."""
    newest = accepted + t * HELD if REPLAY else window + (t - count) * COLUMNS
    before, oldest = accepted + t * HELD, old + t * C
    found = ()
    for tap in gl.static_range(3):
        row = before + (tap - 3) * HELD
        if not REPLAY:
            row = gl.where(t + (tap - 3) < count, row, newest + (tap - 3) * COLUMNS)
        found = found + (gl.where(t + (tap - 3) < 0, oldest + tap * C, row),)
    return found + (newest,)


@gluon.jit
def _inputs(sources, columns, mask):
    """Inputs of some channels, a tensor a tap. Past L1, which may hold what was there before."""
    found = ()
    for tap in gl.static_range(4):
        places = sources[tap][:, None] + columns[None, :]
        found = found + (gl.load(places, mask[:, None], other=0.0, cache_modifier=".cg"),)
    return found


@gluon.jit
def _taps(weight, columns, C: gl.constexpr):
    found = ()
    for tap in gl.static_range(4):
        found = found + (gl.load(weight + tap * C + columns)[None, :],)
    return found


@gluon.jit
def _mix(inputs, taps):
    """silu(conv)."""
    x = inputs[0].to(gl.float32) * taps[0]
    for tap in gl.static_range(1, 4):
        x = gl.fma(inputs[tap].to(gl.float32), taps[tap], x)
    return x * _sigmoid(x)


@gluon.jit
def _keep(rows, values):
    """All rows at once, into shared memory where they are vectors."""
    rows._reinterpret(gl.float32, values.shape, _MATRIX).store(values)


@gluon.jit
def _parts(vector, layout: gl.constexpr, PARTS: gl.constexpr, PART: gl.constexpr):
    """k or q of a row in shared memory, a column for each part of the state."""
    found = ()
    for part in gl.static_range(PARTS):
        found = found + (vector.slice(part * PART, PART).load(layout)[:, None],)
    return found


@gluon.jit
def _dot(cells, factors, PARTS: gl.constexpr):
    """Sums over dk, one a column: over the parts, a thread's rows, then lanes."""
    total = cells[0] * factors[0]
    for part in gl.static_range(1, PARTS):
        total = gl.fma(cells[part], factors[part], total)
    return gl.sum(total, 0)


@gluon.jit(do_not_specialize=["W", "MOST", "MOST_PENDING"])
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
    read,
    W,
    MOST,
    MOST_PENDING,
    HK: gl.constexpr,
    HV: gl.constexpr,
    DK: gl.constexpr,
    DV: gl.constexpr,
    LANES: gl.constexpr,
    PDL: gl.constexpr,
):
    C: gl.constexpr = 2 * HK * DK + HV * DV
    COLUMNS: gl.constexpr = C + HV * DV + 2 * HV
    HELD: gl.constexpr = C + 2 * HV
    WARPS: gl.constexpr = gl.num_warps()
    BLOCK_V: gl.constexpr = 8 * WARPS
    TILES: gl.constexpr = DV // BLOCK_V
    # The state in parts of 4 LANES x BLOCK_V: a thread has 4 rows and LANES / 4 columns of each, a warp 8 columns.
    PART: gl.constexpr = 4 * LANES
    PARTS: gl.constexpr = DK // PART
    CELLS: gl.constexpr = gl.BlockedLayout([4, LANES // 4], [LANES, 32 // LANES], [1, WARPS], [1, 0])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, CELLS)
    OF_COLUMN: gl.constexpr = gl.SliceLayout(0, CELLS)
    # Projected rows: one a warp, q's and k's channels, and v's.
    KEYS: gl.constexpr = gl.BlockedLayout([1, max(DK // 32, 1)], [1, 32], [WARPS, 1], [1, 0])
    VALUES: gl.constexpr = gl.BlockedLayout([1, max(BLOCK_V // 32, 1)], [1, 32], [WARPS, 1], [1, 0])

    tile = gl.program_id(0) % TILES
    head = gl.program_id(0) // TILES % HV
    b = gl.program_id(0) // (TILES * HV)
    slot = gl.load(slots + b, cache_modifier=".cg").to(gl.int64)
    rate, bias = gl.load(decay_rate + head), gl.load(dt_bias + head)
    q_columns = head // (HV // HK) * DK + gl.arange(0, DK, gl.SliceLayout(0, KEYS))
    k_columns = HK * DK + q_columns
    v_columns = 2 * HK * DK + head * DV + tile * BLOCK_V + gl.arange(0, BLOCK_V, gl.SliceLayout(0, VALUES))
    # a null slot may hold anything
    count = gl.minimum(gl.maximum(gl.load(counts + slot, cache_modifier=".cg").to(gl.int32), 0), MOST)
    j = gl.arange(0, BLOCK_V, OF_COLUMN)
    cells = state + (slot * HV + head) * (DK * DV) + tile * BLOCK_V
    cells = cells + (gl.arange(0, PART, OF_ROW)[:, None] * DV + j[None, :])
    s = ()
    for part in gl.static_range(PARTS):
        s = s + (gl.load(cells + part * (PART * DV), cache_modifier=".cg"),)
    q_taps = _taps(conv_weight, q_columns, C)
    k_taps = _taps(conv_weight, k_columns, C)
    v_taps = _taps(conv_weight, v_columns, C)

    old = history + slot * (3 * C)
    accepted = pending + slot * (MOST * HELD)
    window = projected + (b * W).to(gl.int64) * COLUMNS
    out = read + (b * W * HV + head).to(gl.int64) * DV + tile * BLOCK_V + j
    q_rows = gl.allocate_shared_memory(gl.float32, [WARPS, DK], _VECTORS)
    k_rows = gl.allocate_shared_memory(gl.float32, [WARPS, DK], _VECTORS)
    # beta v, -beta decay, decay and q . k, one for each column
    v_rows = gl.allocate_shared_memory(gl.float32, [WARPS, BLOCK_V], _VECTORS)
    shrink_rows = gl.allocate_shared_memory(gl.float32, [WARPS, BLOCK_V], _VECTORS)
    decay_rows = gl.allocate_shared_memory(gl.float32, [WARPS, BLOCK_V], _VECTORS)
    qk_rows = gl.allocate_shared_memory(gl.float32, [WARPS, BLOCK_V], _VECTORS)

    # accepted rows, which no kernel of this round has written; then the window
    for phase in gl.static_range(2):
        begin = 0 if phase == 0 else count
        end = count if phase == 0 else count + W
        if phase == 1:
            # before the wait: of all kernels of a round this program alone reads and writes these cells, and who waits
            # for it would wait for what it stores last
            if (count > 0) & (count + W > MOST_PENDING):
                for part in gl.static_range(PARTS):
                    gl.store(cells + part * (PART * DV), s[part])
            if PDL:
                gdc_wait()
                gdc_launch_dependents()
        for first in range(begin, end, WARPS):
            t = first + gl.arange(0, WARPS, gl.SliceLayout(1, KEYS))
            sources = _sources(t, old, accepted, window, count, C, HELD, COLUMNS, phase == 0)
            if phase == 1:
                q_inputs = _inputs(sources, q_columns, t < end)
            k_inputs = _inputs(sources, k_columns, t < end)
            t = gl.convert_layout(t, gl.SliceLayout(1, VALUES))
            sources = _sources(t, old, accepted, window, count, C, HELD, COLUMNS, phase == 0)
            v_inputs = _inputs(sources, v_columns, t < end)
            own = sources[3] + (head + (C if phase == 0 else C + HV * DV))
            beta = gl.load(own, t < end, other=0.0, cache_modifier=".cg").to(gl.float32)
            a = gl.load(own + HV, t < end, other=0.0, cache_modifier=".cg").to(gl.float32) + bias
            k = _mix(k_inputs, k_taps)
            k_scale = gl.rsqrt(gl.sum(k * k, 1) + 1e-6)
            v = _mix(v_inputs, v_taps)
            zeros = gl.zeros([WARPS, BLOCK_V], gl.float32, VALUES)
            softplus = gl.where(a > 20.0, a, gl.log(1.0 + gl.exp(gl.minimum(a, 20.0))))
            beta, decay = _sigmoid(beta), gl.exp(rate * softplus)
            # nobody reads the rows before these any more
            _barrier()
            _keep(k_rows, k * k_scale[:, None])
            _keep(v_rows, v * beta[:, None])
            _keep(shrink_rows, (-beta * decay)[:, None] + zeros)
            _keep(decay_rows, decay[:, None] + zeros)
            if phase == 1:
                q = _mix(q_inputs, q_taps)
                q_scale = gl.rsqrt(gl.sum(q * q, 1) + 1e-6) * DK**-0.5
                qk = gl.convert_layout(gl.sum(q * k, 1) * q_scale * k_scale, gl.SliceLayout(1, VALUES))
                _keep(q_rows, q * q_scale[:, None])
                _keep(qk_rows, qk[:, None] + zeros)
            _barrier()
            for row in range(min(WARPS, end - first)):
                k_own = _parts(k_rows.index(row), OF_ROW, PARTS, PART)
                kept = _dot(s, k_own, PARTS)
                decays = decay_rows.index(row).load(OF_COLUMN)
                delta = gl.fma(shrink_rows.index(row).load(OF_COLUMN), kept, v_rows.index(row).load(OF_COLUMN))
                if phase == 1:
                    seen = _dot(s, _parts(q_rows.index(row), OF_ROW, PARTS, PART), PARTS)
                    o = gl.fma(qk_rows.index(row).load(OF_COLUMN), delta, seen * decays)
                    gl.store(out + (first - count + row) * (HV * DV), o)
                after = ()
                for part in gl.static_range(PARTS):
                    after = after + (gl.fma(k_own[part], delta[None, :], s[part] * decays[None, :]),)
                s = after


@triton.jit
def _window_rows(
    source, w, W, column, head, d, live, C: tl.constexpr, COLUMNS: tl.constexpr, HV: tl.constexpr, DV: tl.constexpr
):
    """What rows w of the window bring: u, beta, a and z of the head; zeros past W and where there is no value head."""
    mask, counted = (w < W) & live, (w < W) & (head >= 0)
    row = source + w * COLUMNS
    gates = row + C + HV * DV + head
    u = tl.load(row + column + d, mask, other=0.0, cache_modifier=".cg")
    beta = tl.load(gates, counted, other=0.0, cache_modifier=".cg")
    a = tl.load(gates + HV, counted, other=0.0, cache_modifier=".cg")
    z = tl.load(row + C + head * DV + d, mask & (head >= 0), other=0.0, cache_modifier=".cg")
    return u, beta, a, z


@triton.jit(do_not_specialize=["W", "MOST", "MOST_PENDING"])
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
    MOST_PENDING,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILED: tl.constexpr,
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
    if PDL:
        gdc_launch_dependents()
    slot = tl.load(slots + b, cache_modifier=".cg").to(tl.int64)
    # as wide as the rows, so that a column of the norm lies where it is used
    w = tl.arange(0, ROWS)[:, None]
    d = w * 0 + tl.arange(0, BLOCK)[None, :]
    live = d < tl.where(head < 0, DK, DV)
    norm = tl.load(gate_norm + d, d < DV, other=0.0)
    column = tl.where(head < 0, part * DK, 2 * HK * DK + head * DV)
    source = projected + (b * W).to(tl.int64) * COLUMNS
    target = pending + slot * (MOST * HELD)
    old = history + slot * (_HISTORY * C)
    # `_steps_kernel` waits before it lets this one start, so what it read is there to be read before the wait too
    u, beta, a, z = _window_rows(source, w, W, column, head, d, live, C, COLUMNS, HV, DV)
    count = tl.load(counts + slot, cache_modifier=".cg").to(tl.int32)
    count = tl.minimum(tl.maximum(count, 0), MOST)
    # accepted rows that stay where they are, before the window's: the state has not taken them in
    left = tl.where(count + W > MOST_PENDING, 0, count)
    # the newest inputs of history and accepted rows, one after the other
    tap = tl.arange(0, _HISTORY + 1)[:, None]
    e = tap * 0 + tl.arange(0, BLOCK)[None, :]
    order = count + tap
    kept = (tap < _HISTORY) & (e < tl.where(head < 0, DK, DV))
    earlier = tl.load(old + order * C + column + e, kept & (order < _HISTORY), other=0.0, cache_modifier=".cg")
    rows = target + (order - _HISTORY) * HELD
    later = tl.load(rows + column + e, kept & (order >= _HISTORY), other=0.0, cache_modifier=".cg")
    newest = tl.where(order < _HISTORY, earlier, later)
    # every thread has read what it moves before anything is overwritten
    tl.debug_barrier()
    if PDL:
        gdc_wait()
    for _ in range(0, W, ROWS):
        mask, counted = (w < W) & live, (w < W) & (head >= 0)
        shown = mask & (head >= 0)
        row = (b * W + w).to(tl.int64)
        o = tl.load(read + at(row, head * DV + d, HV * DV, False), shown, other=0.0)
        held = target + (left + w) * HELD
        tl.store(held + column + d, u, mask)
        tl.store(held + C + head, beta, counted)
        tl.store(held + C + HV + head, a, counted)
        scale = tl.rsqrt(tl.sum(o * o, 1) / DV + eps)
        o = o * scale[:, None] * norm * _silu(z.to(tl.float32))
        tl.store(out + at(row, head * DV + d, HV * DV, TILED), o.to(out.dtype.element_ty), shown)
        w += ROWS
        u, beta, a, z = _window_rows(source, w, W, column, head, d, live, C, COLUMNS, HV, DV)
    tl.store(old + tap * C + column + e, newest, kept & (left == 0))


def pending_width(num_channels: int, num_value_heads: int) -> int:
    """Values of one pending row: u, b and a."""
    return num_channels + 2 * num_value_heads


@dataclass(frozen=True)
class DeltaScratch:
    """What the first launch leaves for the second; one for all layers: what the recurrence put out, fp32 [R, Hv dv]."""

    read: torch.Tensor

    @classmethod
    def empty(cls, max_rows: int, heads: int, dv: int, device: torch.device) -> DeltaScratch:
        return cls(torch.zeros((max_rows, heads * dv), device=device))

    @property
    def num_bytes(self) -> int:
        return self.read.nbytes


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
    out: AnyRows,
    most_pending: int = 0,
    pdl: bool = False,
) -> None:
    """One linear layer's mixer between its two products; changes state, history, pending, scratch and out.

    Where accepted rows and the window's are no more than most_pending together, they stay pending side by side, and
    state and history as they were (`spec.accept.rows_left`).

    projected  bf16 [>= R, C + Hv dv + 2 Hv]: u | z | b | a of the window's rows
    slots      int32 [B]; slot 0 may repeat (padding), others may not
    counts     int [S]: pending rows of a slot that were accepted, 0..M; not changed
    state      fp32 [S, Hv, dk, dv]: replayed counts[slot] rows forward and stored
    history    bf16 [S, J-1, C]: likewise
    pending    bf16 [<= S, M, pending_width], M at least W and most_pending: accepted rows in; the window's rows out,
               from the first on, or behind those that stay
    conv_weight fp32 [J, C], decay_rate (-exp(A_log)) and dt_bias fp32 [Hv], gate_norm fp32 [dv]
    out        bf16 [>= R, Hv dv]: the gated norm's output; may be TiledRows
    pdl        for launches in a chain in which, since slots, counts, state, history and pending were last written, a
               kernel has let the next one start only after its own wait: never twice in a row on the same memory
    """
    _, heads, dk, dv = state.shape
    channels, most, batch = history.shape[2], pending.shape[1], len(slots)
    key_heads = (channels - heads * dv) // (2 * dk)
    _check(projected, state, history, pending, conv_weight, scratch, out, batch * width, width)
    warps = min(WARPS, dv // 8)
    memory, tiled = stored(out)
    assert 0 <= most_pending <= most, (most_pending, most)
    sizes = {"MOST": most, "MOST_PENDING": most_pending, "HK": key_heads, "HV": heads, "DK": dk, "DV": dv, "PDL": pdl}
    options = {"enable_fp_fusion": False} | ({"launch_pdl": True} if pdl else {})
    _steps_kernel[(batch * heads * (dv // (8 * warps)),)](
        projected, slots, counts, state, history, pending, conv_weight, decay_rate, dt_bias,
        scratch.read, width,
        LANES=min(LANES, dk // 4), num_warps=warps, **sizes, **options,
    )  # fmt: skip
    _finish_kernel[(batch * (2 * key_heads + heads),)](
        projected, slots, counts, history, pending, gate_norm, scratch.read, memory, eps, width,
        ROWS=ROWS, BLOCK=max(dk, dv), TILED=tiled, num_warps=4, **sizes, **options,
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
    out: AnyRows,
    num_rows: int,
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
    assert min(len(projected), len(scratch.read), len(out)) >= num_rows
    assert all(t.is_contiguous() for t in (conv_weight, state, history, pending, projected))
