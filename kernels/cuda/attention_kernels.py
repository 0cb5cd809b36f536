"""The Triton kernels behind `attention_window` (its items: attention_items.py), `plan_rows` and `project_prompt`.

The output of a row is a fold over units of UNIT positions: each gives the maximum of its scores, the sum of 2^(score -
maximum), and the values summed with these weights. Units of a chunk fold in order, chunks j, j + MERGED, ... of a row
fold in order, and the MERGED results are summed by one tree. A unit that a row does not see is an exact no-op of every
fold, so the bits depend on nothing but the row's own context. Products in the caches' dtype (fp16 for FP8) with fp32
sums; probabilities are rounded to it too.
"""

# Triton compiles no unpacking of tuples, and what grows in a loop has no type that mypy knows:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc, var-annotated"

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


@triton.jit
def _deal(units, each, forced, PROGRAMS: tl.constexpr, UNITS: tl.constexpr):
    """Units of an item: of 32 sizes the one with which PROGRAMS programs are done first, or `forced` if it is not 0.

    units: of each sequence, each for `each` streams of items. Programs that take turns are some two units longer with
    each item, the way to its keys and to its end. Parts of a chunk in several items are kept one by one (UNITS - 1 an
    item), so where items are more than PROGRAMS they are whole chunks.
    """
    k = tl.arange(0, 32)
    # the least that PROGRAMS items hold all units with, and some sizes up to 2.7 times as many; then whole chunks
    least = tl.maximum(tl.cdiv(tl.sum(units, 0) * each, PROGRAMS), 1)
    sizes = tl.where(k < 28, least + k * tl.cdiv(least, 16), UNITS << tl.maximum(k - 28, 0))
    sizes = tl.where(forced > 0, tl.where(k < 28, forced, tl.cdiv(forced, UNITS) * UNITS), sizes)
    # (units - 1) / size is half a size's part away from any whole number that rounding could take it past
    parts = tl.floor((units.to(tl.float32)[:, None] - 0.5) * (1.0 / sizes.to(tl.float32))[None, :]).to(tl.int32) + 1
    items = tl.sum(tl.where(units[:, None] > 0, parts, 0), 0) * each
    turns = tl.cdiv(items, PROGRAMS) * (tl.minimum(sizes, tl.max(units, 0)) + 2)
    turns = tl.where((sizes % UNITS > 0) & (items > PROGRAMS), 1 << 24, turns)
    best = tl.min(turns * 32 + k, 0) % 32
    return tl.sum(tl.where(k == best, sizes, 0), 0)


@triton.jit(do_not_specialize=["B", "W", "step", "forced"])
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
    forced,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_B: tl.constexpr,
    GROUP: tl.constexpr,
    KV: tl.constexpr,
    MAX_LAG: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program a row for its angles; the last program deals the items."""
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
        units = tl.where(b < B, tl.cdiv(end, UNIT), 0)
        size = _deal(units, each, forced, PROGRAMS, CHUNK // UNIT)
        tl.store(items, size * UNIT)
        tl.store(items + 1, 0)
        tl.store(items + 2 + b, tl.cumsum(tl.cdiv(units, size) * each, 0), b < B)
        # chunks, which a partial result each is kept of
        tl.store(items + 2 + B, 0)
        tl.store(items + 3 + B + b, tl.cumsum(tl.cdiv(units, CHUNK // UNIT) * each, 0), b < B)


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
def _load_part(where, place, seen, d, D: tl.constexpr, TILE: tl.constexpr):
    """Partial results of one row at some places, and where they are not seen those of columns that it does not see.

    where: partial, stats, the row's line in their tiles.
    """
    partial, stats, line = where
    place = place.to(tl.int64) * TILE + line
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
def _fold_chunks(
    where, rows, chunk, d, D: tl.constexpr, UNITS: tl.constexpr, TILE: tl.constexpr, TOGETHER: tl.constexpr
):
    """Chunks of one row: what the item that began them kept, then units that others kept one by one, in order, loads of
    TOGETHER of them on their way at once.

    rows: units that the row sees, units of an item, the row's first chunk's and first item's place, places from one
    chunk or item to the next, and where units begin that are kept one by one.
    """
    units, size, chunks, items, stride, alone = rows
    best, mass, total = _load_part(where, chunks + chunk * stride, chunk * UNITS < units, d, D, TILE)
    if size % UNITS != 0:
        item = chunk * UNITS // size
        begun, rest = item, chunk * UNITS - item * size
        for u in range(1, UNITS, TOGETHER):
            for i in tl.static_range(TOGETHER):
                rest += 1
                item += (rest == size).to(tl.int32)
                rest = tl.where(rest == size, 0, rest)
                place = alone + (items + item * stride) * (UNITS - 1) + u + i - 1
                seen = (item > begun) & (chunk * UNITS + u + i < units) & (u + i < UNITS)
                unit_best, unit_mass, unit_total = _load_part(where, place, seen, d, D, TILE)
                best, mass, total = _fold(best, mass, total, unit_best, unit_mass, unit_total)
    return best, mass, total


@triton.jit
def _merge_few(where, rows, d, D: tl.constexpr, UNITS: tl.constexpr, TILE: tl.constexpr, FEW: tl.constexpr):
    """As _merge_many of a row of FEW chunks or less; FEW are a lane or a warp each, so none is added in a thread."""
    part_best, part_mass, part_total = _fold_chunks(where, rows, tl.arange(0, FEW), d, D, UNITS, TILE, UNITS - 1)
    best, mass, total = _nothing(FEW, d.shape[0])
    best, mass, total = _fold(best, mass, total, part_best, part_mass, part_total)
    weight = tl.exp2(best - tl.max(best, 0))
    # each product is rounded before others are added, as a thread's sum of several is
    return tl.sum(tl.fma(total, weight[:, None], 0.0), 0) / tl.sum(tl.fma(mass, weight, 0.0), 0)


@triton.jit
def _merge_many(where, rows, d, D: tl.constexpr, UNITS: tl.constexpr, TILE: tl.constexpr, MERGED: tl.constexpr):
    """A row's values: chunks j, j + MERGED, ... folded in order, then the MERGED results summed."""
    lane = tl.arange(0, MERGED)
    best, mass, total = _nothing(MERGED, d.shape[0])
    units, size, chunks, _, stride, _ = rows
    if size % UNITS != 0:
        for first in range(0, tl.cdiv(units, UNITS), MERGED):
            part_best, part_mass, part_total = _fold_chunks(where, rows, first + lane, d, D, UNITS, TILE, 3)
            best, mass, total = _fold(best, mass, total, part_best, part_mass, part_total)
    else:
        for first in range(0, tl.cdiv(units, UNITS), 2 * MERGED):
            # two, so that their loads are on their way together
            for half in tl.static_range(2):
                chunk = first + half * MERGED + lane
                seen = chunk * UNITS < units
                part_best, part_mass, part_total = _load_part(where, chunks + chunk * stride, seen, d, D, TILE)
                best, mass, total = _fold(best, mass, total, part_best, part_mass, part_total)
    weight = tl.exp2(best - tl.max(best, 0))
    return tl.sum(total * weight[:, None], 0) / tl.sum(mass * weight, 0)


@triton.jit
def _merge_pairs(where, rows, most, D: tl.constexpr, UNITS: tl.constexpr, TILE: tl.constexpr):
    """As _merge_few of several rows' heads of four chunks or less, a thread having all chunks of its columns.

    where, rows: as _fold_chunks has them, for each head what they have not in common. most: units of the longest row.
    """
    line = where[2]
    units, size, chunks, items, stride, alone = rows
    d = tl.arange(0, D)
    bests, masses, totals = (), (), ()
    for chunk in tl.static_range(4):
        best = tl.full(line.shape, float("-inf"), tl.float32)
        mass = tl.zeros(line.shape, tl.float32)
        total = tl.zeros((line.shape[0], D), tl.float32)
        if chunk * UNITS < most:
            place = chunks + chunk * stride
            part_best, part_mass, part_total = _load_part(where, place, chunk * UNITS < units, d, D, TILE)
            if size % UNITS != 0:
                item = chunk * UNITS // size
                begun, rest = item, chunk * UNITS - item * size
                parts = ()
                for u in tl.static_range(1, UNITS):
                    rest += 1
                    item += (rest == size).to(tl.int32)
                    rest = tl.where(rest == size, 0, rest)
                    place = alone + (items + item * stride) * (UNITS - 1) + u - 1
                    seen = (item > begun) & (chunk * UNITS + u < units)
                    parts = parts + (_load_part(where, place, seen, d, D, TILE),)
                for u in tl.static_range(UNITS - 1):
                    part_best, part_mass, part_total = _fold(
                        part_best, part_mass, part_total, parts[u][0], parts[u][1], parts[u][2]
                    )
            best, mass, total = _fold(best, mass, total, part_best, part_mass, part_total)
        bests, masses, totals = bests + (best,), masses + (mass,), totals + (total,)
    highest = tl.maximum(tl.maximum(bests[0], bests[1]), tl.maximum(bests[2], bests[3]))
    sums, weights = (), ()
    for chunk in tl.static_range(4):
        weight = tl.exp2(bests[chunk] - highest)
        sums = sums + (tl.fma(totals[chunk], weight[:, None], 0.0),)
        weights = weights + (tl.fma(masses[chunk], weight, 0.0),)
    # the trees of _merge_few, with the zeros of its other chunks
    total = (sums[0] + sums[1]) + (sums[2] + sums[3]) + 0.0
    mass = (weights[0] + weights[2]) + (weights[1] + weights[3])
    return total / mass[:, None]


@triton.jit(do_not_specialize=["B", "W", "lag"])
def merge_kernel(
    projected,
    positions,
    items,
    partial,
    stats,
    out,
    v_scale,
    B,
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
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """PAIRS heads of rows are a group, and all groups have the same number of programs. One for each block of BLOCK_D
    columns is fastest where all run at once. Where groups have fewer, the first program of one does all of it if no row
    has more than four chunks; else each has some of the blocks.
    """
    GROUP: tl.constexpr = H // KV
    UNITS: tl.constexpr = CHUNK // UNIT
    BLOCKS: tl.constexpr = D // BLOCK_D
    num_groups = tl.cdiv(B * W * H, PAIRS)
    group, share = tl.program_id(0) % num_groups, tl.program_id(0) // num_groups
    num_shares = tl.num_programs(0) // num_groups
    tiles = tl.cdiv(W * GROUP, TILE)
    stride = KV * tiles
    pairs = group * PAIRS + tl.arange(0, PAIRS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    span, alone = tl.load(items), tl.load(items + 2 + 2 * B)
    row, few_shares = pairs // H, num_shares < PAIRS * BLOCKS
    live = (pairs < B * W * H) & few_shares
    places = tl.load(positions + row, live, other=-1) + lag
    first_item = tl.load(items + 1 + row // W, live, other=0)
    first_chunk = tl.load(items + 2 + B + row // W, live, other=0)
    most = tl.where(few_shares, tl.max(places, 0), 4 * CHUNK)
    if most < 4 * CHUNK:
        if share == 0:
            head, d = pairs % H, tl.arange(0, D)
            gates = projected + row.to(tl.int64) * ((2 * H + 2 * KV) * D) + (H + 2 * KV + head) * D
            gate = tl.load(gates[:, None] + d[None, :], live[:, None], other=0.0)
            flat = row % W * GROUP + head % GROUP
            stream = head // GROUP * tiles + flat // TILE
            where = partial, stats, flat % TILE
            units = tl.where(live, places // UNIT + 1, 0)
            rows = units, span // UNIT, first_chunk + stream, first_item + stream, stride, alone
            attended = _merge_pairs(where, rows, most // UNIT + 1, D, UNITS, TILE) * v_scale
            gated = attended / (1.0 + tl.exp(-gate.to(tl.float32)))
            # a head begins at a multiple of its columns, so where it is and where they are adds up
            target = out + at(row.to(tl.int64), head * D, H * D, TILED)
            tl.store(target[:, None] + at(0, d, H * D, TILED)[None, :], gated.to(out.dtype.element_ty), live[:, None])
    else:
        for part in range(share, PAIRS * BLOCKS, num_shares):
            pair = group * PAIRS + part // BLOCKS
            if pair < B * W * H:
                line, head = pair // H, pair % H
                d = part % BLOCKS * BLOCK_D + tl.arange(0, BLOCK_D)
                gate = tl.load(projected + line.to(tl.int64) * ((2 * H + 2 * KV) * D) + (H + 2 * KV + head) * D + d)
                place = tl.load(positions + line) + lag
                item, chunk = tl.load(items + 1 + line // W), tl.load(items + 2 + B + line // W)
                flat = line % W * GROUP + head % GROUP
                stream = head // GROUP * tiles + flat // TILE
                where = partial, stats, flat % TILE
                rows = place // UNIT + 1, span // UNIT, chunk + stream, item + stream, stride, alone
                if place < FEW * CHUNK:
                    attended = _merge_few(where, rows, d, D, UNITS, TILE, FEW)
                else:
                    attended = _merge_many(where, rows, d, D, UNITS, TILE, MERGED)
                attended *= v_scale
                gated = attended / (1.0 + tl.exp(-gate.to(tl.float32)))
                target = out + at(line.to(tl.int64), head * D, H * D, TILED) + at(0, d, H * D, TILED)
                tl.store(target, gated.to(out.dtype.element_ty))
