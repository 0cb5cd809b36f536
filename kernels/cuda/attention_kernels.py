"""The Triton kernels behind `attention_window` (its items: attention_items.py), `plan_rows` and `project_prompt`.

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

from pilotfish.kernels.cuda.tiled_rows import at


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


@triton.jit
def _load_part(where, index, spans, d, D: tl.constexpr, TILE: tl.constexpr):
    """What items wrote for one row, of spans [...]; as from columns the row does not see past `spans`.

    where: partial, stats, the row's first item, how many items further its next span is, its line in their tiles.
    """
    partial, stats, base, stride, line = where
    place = (base + index * stride).to(tl.int64) * TILE + line
    seen = index < spans
    return (
        tl.load(stats + place * 2, seen, other=float("-inf")),
        tl.load(stats + place * 2 + 1, seen, other=0.0),
        tl.load(partial + place[:, None] * D + d[None, :], seen[:, None], other=0.0),
    )


@triton.jit
def _nothing(N: tl.constexpr, BLOCK_D: tl.constexpr):
    """N parts of columns that a row does not see."""
    best, mass = tl.full((N,), float("-inf"), tl.float32), tl.zeros((N,), tl.float32)
    return best, mass, tl.zeros((N, BLOCK_D), tl.float32)


@triton.jit
def _fold_units(where, chunk, spans, d, D: tl.constexpr, UNITS: tl.constexpr, TILE: tl.constexpr):
    """Chunks of one row, each folded from its units in order."""
    best, mass, total = _nothing(chunk.shape[0], d.shape[0])
    for u in tl.static_range(UNITS):
        unit_best, unit_mass, unit_total = _load_part(where, chunk * UNITS + u, spans, d, D, TILE)
        best, mass, total = _fold(best, mass, total, unit_best, unit_mass, unit_total)
    return best, mass, total


@triton.jit
def _merge_few(where, spans, are_units, d, D: tl.constexpr, UNITS: tl.constexpr, TILE: tl.constexpr, FEW: tl.constexpr):
    """As _merge_many of a row of FEW chunks or less; FEW are a lane or a warp each, so none is added in a thread."""
    chunk = tl.arange(0, FEW)
    if are_units:
        part_best, part_mass, part_total = _fold_units(where, chunk, spans, d, D, UNITS, TILE)
    else:
        part_best, part_mass, part_total = _load_part(where, chunk, spans, d, D, TILE)
    best, mass, total = _nothing(FEW, d.shape[0])
    best, mass, total = _fold(best, mass, total, part_best, part_mass, part_total)
    weight = tl.exp2(best - tl.max(best, 0))
    # each product is rounded before others are added, as a thread's sum of several is
    return tl.sum(tl.fma(total, weight[:, None], 0.0), 0) / tl.sum(tl.fma(mass, weight, 0.0), 0)


@triton.jit
def _merge_many(
    where, spans, are_units, d, D: tl.constexpr, UNITS: tl.constexpr, TILE: tl.constexpr, MERGED: tl.constexpr
):
    """A row's values: chunks j, j + MERGED, ... folded in order, then the MERGED results summed."""
    lane = tl.arange(0, MERGED)
    best, mass, total = _nothing(MERGED, d.shape[0])
    if are_units:
        for first in range(0, tl.cdiv(spans, UNITS), MERGED):
            part_best, part_mass, part_total = _fold_units(where, first + lane, spans, d, D, UNITS, TILE)
            best, mass, total = _fold(best, mass, total, part_best, part_mass, part_total)
    else:
        for first in range(0, spans, 2 * MERGED):
            # two, so that their loads are on their way together
            for half in tl.static_range(2):
                part_best, part_mass, part_total = _load_part(where, first + half * MERGED + lane, spans, d, D, TILE)
                best, mass, total = _fold(best, mass, total, part_best, part_mass, part_total)
    weight = tl.exp2(best - tl.max(best, 0))
    return tl.sum(total * weight[:, None], 0) / tl.sum(mass * weight, 0)


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
    FEW: tl.constexpr,
    TILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program for BLOCK_D columns of a row's head. Most contexts are of FEW chunks or less."""
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
    where = partial, stats, base, stride, flat % TILE
    if place < FEW * CHUNK:
        attended = _merge_few(where, spans, span == UNIT, d, D, UNITS, TILE, FEW)
    else:
        attended = _merge_many(where, spans, span == UNIT, d, D, UNITS, TILE, MERGED)
    attended *= v_scale
    gated = attended / (1.0 + tl.exp(-gate.to(tl.float32)))
    tl.store(out + at(row.to(tl.int64), head * D + d, H * D, TILED), gated.to(out.dtype.element_ty))
