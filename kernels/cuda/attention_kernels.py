"""The Triton kernels behind `attention_window` and `plan_rows`; what they compute is said there.

The output of a row is a fold over units of UNIT positions: each gives the maximum of its scores, the sum of 2^(score -
maximum), and the values summed with these weights. Units of a chunk fold in order, chunks j, j + MERGED, ... of a row
fold in order, and the MERGED results are summed by one tree. A unit that a row does not see is an exact no-op of every
fold, so the bits depend on nothing but the row's own context. Products in the caches' dtype (fp16 for FP8) with fp32
sums; probabilities are rounded to it too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _fold(best, mass, total, other_best, other_mass, other_total):
    """(best, mass, total) and another part of the same rows, whose columns come later; totals have one axis more."""
    new = tl.maximum(best, other_best)
    # of two parts that a row does not see: 2^(-inf), not 2^(-inf - -inf)
    base = tl.where(new == float("-inf"), 0.0, new)
    shrink, grow = tl.exp2(best - base), tl.exp2(other_best - base)
    mass = tl.fma(mass, shrink, other_mass * grow)
    total = tl.fma(total, shrink[:, None], other_total * grow[:, None])
    return new, mass, total


@triton.jit(do_not_specialize=["B", "W", "step"])
def plan_kernel(
    slots,
    length,
    inv_freq,
    positions,
    cos,
    sin,
    items,
    B,
    W,
    step,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_B: tl.constexpr,
    GROUP: tl.constexpr,
    KV: tl.constexpr,
    MAX_LAG: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    FEW: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program a row for its angles; the last program counts the items."""
    row = tl.program_id(0)
    f = tl.arange(0, BLOCK_HALF)
    frequency = tl.load(inv_freq + f, f < HALF, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if row < B * W:
        slot = tl.load(slots + row // W).to(tl.int64)
        position = tl.load(length + slot).to(tl.int32) + step + row % W
        tl.store(positions + row, position)
        angle = position.to(tl.float32) * frequency
        tl.store(cos + row * HALF + f, tl.cos(angle), f < HALF)
        tl.store(sin + row * HALF + f, tl.sin(angle), f < HALF)
    else:
        b = tl.arange(0, BLOCK_B)
        all_slots = tl.load(slots + b, b < B, other=0).to(tl.int64)
        end = tl.load(length + all_slots, b < B, other=0).to(tl.int32) + step + W + MAX_LAG
        each = KV * tl.cdiv(W * GROUP, TILE)
        chunks = tl.sum(tl.where(b < B, tl.cdiv(end, CHUNK), 0), 0)
        span = tl.where(chunks * each < FEW, UNIT, CHUNK)
        ends = tl.cumsum(tl.where(b < B, tl.cdiv(end, span) * each, 0), 0)
        tl.store(items, span)
        tl.store(items + 1, 0)
        tl.store(items + 2 + b, ends, b < B)


@triton.jit(do_not_specialize=["W", "max_pages", "lag"])
def project_kernel(
    projected,
    slots,
    positions,
    cos,
    sin,
    tables,
    qk_norm,
    k_cache,
    v_cache,
    q_out,
    eps,
    q_factor,
    k_scale,
    v_scale,
    W,
    max_pages,
    lag,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm and RoPE of one query or key head of a row; a key's program stores its value too."""
    row = tl.program_id(0) // (H + KV)
    head = tl.program_id(0) % (H + KV)
    d = tl.arange(0, D)
    turned = d < 2 * HALF
    other = tl.where(d < HALF, d + HALF, d - HALF)
    w = tl.load(qk_norm + head * D + d)
    other_w = tl.load(qk_norm + head * D + other, turned, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = projected + row.to(tl.int64) * ((2 * H + 2 * KV) * D)
    x = tl.load(source + head * D + d).to(tl.float32)
    other_x = tl.load(source + head * D + other, turned, other=0.0).to(tl.float32)
    angle = row * HALF + tl.where(d < HALF, d, other)
    c = tl.load(cos + angle, turned, other=1.0)
    s = tl.load(sin + angle, turned, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    x = x * scale * w
    x = tl.fma(other_x * scale * other_w, tl.where(d < HALF, -s, s), x * c)
    if head < H:
        tl.store(q_out + (row * H + head).to(tl.int64) * D + d, (x * q_factor).to(q_out.dtype.element_ty))
    else:
        place = tl.load(positions + row) + lag
        slot = tl.load(slots + row // W).to(tl.int64)
        page = tl.load(tables + slot * max_pages + place // PAGE).to(tl.int64)
        cell = ((page * KV + head - H) * PAGE + place % PAGE) * D + d
        v = tl.load(source + (H + KV) * D + (head - H) * D + d).to(tl.float32)
        # comparisons with NaN are false
        v = tl.where(tl.abs(v) < float("inf"), v, 0.0)
        if FP8:
            # a key that is no number must not become the largest one
            x = tl.clamp(x / k_scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
            v = tl.clamp(v / v_scale, -448.0, 448.0)
        tl.store(k_cache + cell, x.to(k_cache.dtype.element_ty))
        tl.store(v_cache + cell, v.to(v_cache.dtype.element_ty))


@triton.jit(do_not_specialize=["B", "W", "max_pages", "lag"])
def items_kernel(
    q,
    slots,
    positions,
    items,
    tables,
    k_cache,
    v_cache,
    partial,
    stats,
    k_scale,
    B,
    W,
    max_pages,
    lag,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """Takes items (sequence, span of positions, key head, tile of rows) until there are none: any grid will do."""
    GROUP: tl.constexpr = H // KV
    m, n, d = tl.arange(0, TILE), tl.arange(0, UNIT), tl.arange(0, D)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tiles = tl.cdiv(W * GROUP, TILE)
    span = tl.load(items)
    num_items = tl.load(items + 1 + B)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        b = 0
        while tl.load(items + 2 + b) <= item:
            b += 1
        index = item - tl.load(items + 1 + b)
        tile = index % tiles
        head = index // tiles % KV
        first = index // (tiles * KV) * span
        slot = tl.load(slots + b).to(tl.int64)
        start = tl.load(positions + b * W) + lag
        end = start + W
        flat = tile * TILE + m
        w = tl.minimum(flat // GROUP, W - 1)
        sees = start + w
        rows = ((b * W + w) * H + head * GROUP + flat % GROUP).to(tl.int64)
        query = tl.load(q + rows[:, None] * D + d[None, :], (flat < W * GROUP)[:, None], other=0.0)
        best = tl.full((TILE,), float("-inf"), tl.float32)
        mass = tl.zeros((TILE,), tl.float32)
        total = tl.zeros((TILE, D), tl.float32)
        for unit in range(first, tl.minimum(first + span, end), UNIT):
            page = tl.load(tables + slot * max_pages + unit // PAGE).to(tl.int64)
            cell = ((page * KV + head) * PAGE + unit % PAGE) * D
            column = unit + n
            written = (column >= lag) & (column < end)
            k = tl.load(k_cache + cell + n[None, :] * D + d[:, None], written[None, :], other=0.0)
            v = tl.load(v_cache + cell + n[:, None] * D + d[None, :], written[:, None], other=0.0)
            scores = tl.dot(query, k.to(query.dtype), input_precision="ieee")
            if FP8:
                scores = scores * k_scale
            seen = (column[None, :] >= lag) & (column[None, :] <= sees[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            highest = tl.max(scores, 1)
            base = tl.where(highest == float("-inf"), 0.0, highest)
            p = tl.exp2(scores - base[:, None])
            values = tl.dot(p.to(query.dtype), v.to(query.dtype), input_precision="ieee")
            best, mass, total = _fold(best, mass, total, highest, tl.sum(p, 1), values)
        place = item * TILE + m.to(tl.int64)
        tl.store(partial + place[:, None] * D + d[None, :], total)
        tl.store(stats + place * 2, best)
        tl.store(stats + place * 2 + 1, mass)


@triton.jit
def _load_part(partial, stats, place, seen, d, D: tl.constexpr):
    """What items wrote for one row; as from columns the row does not see where `seen` is false."""
    return (
        tl.load(stats + place * 2, seen, other=float("-inf")),
        tl.load(stats + place * 2 + 1, seen, other=0.0),
        tl.load(partial + place[:, None] * D + d[None, :], seen[:, None], other=0.0),
    )


@triton.jit(do_not_specialize=["W", "lag"])
def merge_kernel(
    projected,
    positions,
    items,
    partial,
    stats,
    out,
    v_scale,
    W,
    lag,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    MERGED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program for BLOCK_D columns of a row's head."""
    GROUP: tl.constexpr = H // KV
    UNITS: tl.constexpr = CHUNK // UNIT
    d = tl.program_id(0) % (D // BLOCK_D) * BLOCK_D + tl.arange(0, BLOCK_D)
    head = tl.program_id(0) // (D // BLOCK_D) % H
    row = tl.program_id(0) // (D // BLOCK_D * H)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(projected + row.to(tl.int64) * ((2 * H + 2 * KV) * D) + (H + 2 * KV + head) * D + d)
    b = row // W
    span, base, place = tl.load(items), tl.load(items + 1 + b), tl.load(positions + row) + lag
    flat = row % W * GROUP + head % GROUP
    tiles = tl.cdiv(W * GROUP, TILE)
    stride = KV * tiles
    base += head // GROUP * tiles + flat // TILE
    spans = place // span + 1
    lane = tl.arange(0, MERGED)
    best = tl.full((MERGED,), float("-inf"), tl.float32)
    mass = tl.zeros((MERGED,), tl.float32)
    total = tl.zeros((MERGED, BLOCK_D), tl.float32)
    if span == UNIT:
        for first in range(0, place // CHUNK + 1, MERGED):
            part_best = tl.full((MERGED,), float("-inf"), tl.float32)
            part_mass = tl.zeros((MERGED,), tl.float32)
            part_total = tl.zeros((MERGED, BLOCK_D), tl.float32)
            for u in tl.static_range(UNITS):
                index = (first + lane) * UNITS + u
                part = (base + index * stride).to(tl.int64) * TILE + flat % TILE
                unit_best, unit_mass, unit_total = _load_part(partial, stats, part, index < spans, d, D)
                part_best, part_mass, part_total = _fold(
                    part_best, part_mass, part_total, unit_best, unit_mass, unit_total
                )
            best, mass, total = _fold(best, mass, total, part_best, part_mass, part_total)
    else:
        for first in range(0, spans, 2 * MERGED):
            # two, so that their loads are on their way together
            for half in tl.static_range(2):
                index = first + half * MERGED + lane
                part = (base + index * stride).to(tl.int64) * TILE + flat % TILE
                part_best, part_mass, part_total = _load_part(partial, stats, part, index < spans, d, D)
                best, mass, total = _fold(best, mass, total, part_best, part_mass, part_total)
    weight = tl.exp2(best - tl.max(best, 0))
    attended = tl.sum(total * weight[:, None], 0) / tl.sum(mass * weight, 0) * v_scale
    gated = attended / (1.0 + tl.exp(-gate.to(tl.float32)))
    tl.store(out + row.to(tl.int64) * (H * D) + head * D + d, gated.to(out.dtype.element_ty))
