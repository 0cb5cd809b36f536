"""The kernels of moe.py: which rows an expert has, its products, and the sum over a row's experts."""

# Triton compiles no unpacking of tuples, and what grows in a loop has no type that mypy knows:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pilotfish.kernels.cuda.mma import load_factor, make_ring, over_warps, products, scaled, silu, units_ahead


@triton.jit(do_not_specialize=["num_pairs"])
def list_kernel(ids, lists, num_pairs, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program e lists the pairs of expert e in their order, as row * (k + 1) + rank, after their number."""
    expert = tl.program_id(0)
    own = lists + expert.to(tl.int64) * (num_pairs // TOP_K + 1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    count = expert * 0
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        chosen = (tl.load(ids + pair, pair < num_pairs, other=-1) == expert).to(tl.int32)
        tl.store(own + count + tl.cumsum(chosen, 0), pair + pair // TOP_K, chosen == 1)
        count += tl.sum(chosen, 0)
    tl.store(own, count)


@triton.jit(do_not_specialize=["num_rows", "num_experts", "num_items"])
def groups_kernel(
    lists,
    num_rows,
    num_experts,
    num_items,
    GROUP: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Lists GROUP rows at a time of each expert, as (expert * 32 + which) * 32 + their number, after the experts' own
    lists and the number of what it lists; 0 past them."""
    expert = tl.arange(0, BLOCK_E)
    item = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    rows = tl.load(lists + expert * (num_rows + 1), expert < num_experts, other=0)
    groups = (rows + GROUP - 1) // GROUP
    start = tl.cumsum(groups, 0) - groups
    items = lists + num_experts * (num_rows + 1) + 1
    tl.store(items - 1, tl.sum(groups, 0))
    tl.store(items + item, 0, (item >= tl.sum(groups, 0)) & (item < num_items))
    for group in range(0, (num_rows + GROUP - 1) // GROUP):
        number = tl.minimum(rows - group * GROUP, GROUP)
        tl.store(items + start + group, (expert * 32 + group) * 32 + number, group < groups)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_items"])
def list_groups_kernel(
    ids,
    lists,
    num_pairs,
    num_experts,
    num_items,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """list_kernel and groups_kernel in one: program e counts the pairs of all experts, and so knows where its own items
    stand. GROUPS: the most that an expert has."""
    expert = tl.program_id(0)
    num_rows = num_pairs // TOP_K
    own = lists + expert.to(tl.int64) * (num_rows + 1)
    items = lists + num_experts.to(tl.int64) * (num_rows + 1) + 1
    pair = tl.arange(0, BLOCK)
    other = tl.arange(0, BLOCK_E)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    choice = tl.load(ids + pair, pair < num_pairs, other=-1)
    chosen = (choice == expert).to(tl.int32)
    # a choice of no expert is counted nowhere
    groups = (tl.histogram(tl.maximum(choice, 0), BLOCK_E, mask=choice >= 0) + (GROUP - 1)) // GROUP
    tl.store(own + tl.cumsum(chosen, 0), pair + pair // TOP_K, chosen == 1)
    count = tl.sum(chosen, 0)
    tl.store(own, count)
    start = tl.sum(tl.where(other < expert, groups, 0), 0)
    group = tl.arange(0, GROUPS)
    number = tl.minimum(count - group * GROUP, GROUP)
    tl.store(items + start + group, (expert * 32 + group) * 32 + number, number > 0)
    if expert == 0:
        total = tl.sum(groups, 0)
        tl.store(items - 1, total)
        for first in range(0, num_items, BLOCK):
            tl.store(items + first + pair, 0, (first + pair >= total) & (first + pair < num_items))


@gluon.jit
def _ranks(ids, expert, num_rows, row, rank, TOP_K: gl.constexpr, CACHE: gl.constexpr):
    """At which rank each row chose the expert, -1 if it did not, [ROWS]; and the first pair that is such a choice."""
    pair = row[:, None] * TOP_K + rank[None, :]
    there = (row < num_rows)[:, None] & (rank < TOP_K)[None, :]
    chosen = gl.load(ids + pair, mask=there, other=-1, cache_modifier=CACHE) == expert
    ranks = gl.max(gl.where(chosen, rank[None, :] + row[:, None] * 0, -1), 1)
    return ranks, gl.min(gl.where(ranks >= 0, row * TOP_K + ranks, 1 << 20), 0)


@gluon.jit
def _columns(ranks, index, own, ONE_ROW: gl.constexpr, TOP_K: gl.constexpr):
    """Which (row, rank) columns of a product are, as row * (k + 1) + rank, and whether they are there; `own` where they
    are not.

    index: a column's row; of one row the only one is `own`.
    """
    if ONE_ROW:
        return index * 0 + own, index == 0
    else:
        rank = gl.gather(ranks, index, 0)
        return gl.where(rank >= 0, index * (TOP_K + 1) + rank, own), rank >= 0


@gluon.jit(do_not_specialize=["num_rows", "num_routed"])
def experts_kernel(
    data,
    block_scale,
    place,
    number,
    x,
    ids,
    out,
    num_rows,
    num_routed,
    x_stride,
    out_stride,
    NUM_EXPERTS: gl.constexpr,
    TILES: gl.constexpr,
    K: gl.constexpr,
    UNITS: gl.constexpr,
    MT: gl.constexpr,
    FORMAT: gl.constexpr,
    BLOCKS: gl.constexpr,
    DIVIDES: gl.constexpr,
    ROW_NUMBERS: gl.constexpr,
    SPAN: gl.constexpr,
    DOWN: gl.constexpr,
    ROUTED: gl.constexpr,
    ONE_ROW: gl.constexpr,
    TOP_K: gl.constexpr,
    TOP: gl.constexpr,
    STAGES: gl.constexpr,
    RING: gl.constexpr,
    X_AHEAD: gl.constexpr,
    PINNED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Program (i, p): tiles i MT ... of the expert of pair p, all rows, of which there are up to 8.
    The programs after those are the shared expert's.

    x is [row, H] for gate_up (SPAN 2), [row, rank, I] for down; out [row, rank, ...]. x_stride is in 16 bytes.
    """
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    # hundreds of programs read the few lines that the router wrote at a time: gate_up through L1, so that L2 is asked
    # once an SM; not so down, which reads ahead of its turn, when L1 may hold those of an earlier layer
    cache: gl.constexpr = ".cg" if DOWN else ""
    if PDL:
        # down may read ids before its own wait: gate_up waited for them before it let down start
        if not DOWN:
            gdc_wait()
        gdc_launch_dependents()
    p = gl.program_id(1)
    expert = 0
    is_shared = p >= num_routed
    lanes: gl.constexpr = min(TOP, 32)
    # gate_up's warps have all pairs each, and need not wait for each other before they ask for weights; of down, which
    # asks L2, they have some each
    rows_a_lane: gl.constexpr = 1 if DOWN else max(1, 8 * lanes // 32)
    pairs: gl.constexpr = gl.BlockedLayout([rows_a_lane, 1], [32 // lanes, lanes], [warps, 1], [1, 0])
    row = gl.arange(0, 8, gl.SliceLayout(1, pairs))
    ranks = row * 0 - 1
    first_pair = p
    if ROUTED:
        expert = gl.load(ids + gl.minimum(p, num_routed - 1), cache_modifier=cache)
        if not ONE_ROW:
            rank = gl.arange(0, TOP, gl.SliceLayout(0, pairs))
            ranks, first_pair = _ranks(ids, expert, num_rows, row, rank, TOP_K, cache)
        if is_shared:
            expert = NUM_EXPERTS
    if not is_shared and first_pair < p:
        return
    index = gl.arange(0, 128, flat)
    feature = (index % 32) // 4 + (index // 32) % 2 * 8
    first_tile = gl.program_id(0) * MT
    tiles = ()
    factors = ()
    columns = ()
    counts = ()
    for m in gl.static_range(MT):
        tile = expert * TILES + gl.minimum(first_tile + m, TILES - 1)
        tiles = tiles + (tile,)
        factors = factors + (load_factor(number, tile, feature, ROW_NUMBERS),)
        if m % SPAN == 0:
            columns = columns + (gl.load(place + tile * 2),)
            counts = counts + (gl.load(place + tile * 2 + 1),)
    ring = make_ring(STAGES, MT, FORMAT, warps) if RING else 0
    stages = units_ahead(
        ring, data, block_scale, tiles, 0, UNITS, UNITS, MT, FORMAT, BLOCKS, warps, warps, STAGES, RING
    )
    if not ONE_ROW:
        ranks = gl.where(is_shared, gl.where(row < num_rows, TOP_K, -1), ranks)
    g = (gl.arange(0, warps * 32, gl.SliceLayout(1, layout)) % 32) // 4
    # of one row its experts all differ, and of the shared one the first row is there in any case
    own = gl.where(is_shared, TOP_K, p + p // TOP_K) if ROUTED else p + TOP_K
    pair, _ = _columns(ranks, g, own, ONE_ROW, TOP_K)
    source = pair if DOWN else pair // (TOP_K + 1)
    pair, stored = _columns(ranks, (index % 4) * 2 + index // 64, own, ONE_ROW, TOP_K)
    target = pair.to(gl.int64) * out_stride
    totals = products(
        stages,
        data,
        block_scale,
        x,
        (source * x_stride * 4,),
        tiles,
        0,
        K,
        UNITS,
        UNITS,
        MT,
        1,
        FORMAT,
        BLOCKS,
        warps,
        warps,
        STAGES,
        RING,
        X_AHEAD,
        PINNED,
        PDL and DOWN,
    )
    for m in gl.static_range(0, MT, SPAN):
        counted = (feature < counts[m // SPAN]) & (first_tile + m < TILES)
        value = scaled(over_warps(totals[m::MT], warps, False), factors[m], FORMAT, DIVIDES)
        if SPAN == 2:
            up = scaled(over_warps(totals[m + 1 :: MT], warps, False), factors[m + 1], FORMAT, DIVIDES)
            value = silu(value) * up
        at = out + target + (columns[m // SPAN] + feature)
        gl.store(at, value.to(out.dtype.element_ty), mask=counted & stored)


@gluon.jit
def _work(item, unit, num_listed, num_rows, GROUPS: gl.constexpr, SHARED: gl.constexpr, ROWS: gl.constexpr):
    """Of a unit of work, which belongs to `item` unless it is the shared expert's: its expert, its first row of that
    expert's, how many they are, and whether it is the shared expert's, which is number SHARED."""
    place = unit // GROUPS - num_listed
    is_shared = place >= 0
    expert = gl.where(is_shared, SHARED, item // 1024)
    first = gl.where(is_shared, place, item // 32 % 32) * ROWS
    return expert, first, gl.where(is_shared, gl.minimum(num_rows - first, ROWS), item % 32), is_shared


@gluon.jit
def _tiles(expert, unit, GROUPS: gl.constexpr, TILES: gl.constexpr, MT: gl.constexpr):
    """The tiles of a unit of work; beyond an expert's last one, that."""
    tiles = ()
    for m in gl.static_range(MT):
        tiles = tiles + (expert * TILES + gl.minimum(unit % GROUPS * MT + m, TILES - 1),)
    return tiles


@gluon.jit
def _pairs(lists, expert, first, count, is_shared, index, num_rows, TOP_K: gl.constexpr, CACHE: gl.constexpr):
    """Which (row, rank) the rows of a unit of work are, as row * (k + 1) + rank; index: numbers among them, past whose
    end is the last one once more."""
    own_list = lists + expert * (num_rows + 1) + 1
    index = first + gl.minimum(index, count - 1)
    pair = gl.load(own_list + index, mask=(index >= 0) & (is_shared == 0), other=0, cache_modifier=CACHE)
    return gl.where(is_shared, index * (TOP_K + 1) + TOP_K, pair)


@gluon.jit
def _ahead(
    data,
    block_scale,
    lists,
    item,
    unit,
    num_listed,
    num_rows,
    index,
    stored_index,
    SHARED: gl.constexpr,
    TILES: gl.constexpr,
    GROUPS: gl.constexpr,
    UNITS: gl.constexpr,
    MT: gl.constexpr,
    NT: gl.constexpr,
    FORMAT: gl.constexpr,
    BLOCKS: gl.constexpr,
    TOP_K: gl.constexpr,
    STAGES: gl.constexpr,
    CACHE: gl.constexpr,
):
    """What a unit of work begins with: its first weights, and which (row, rank) its rows are, to be read and stored."""
    warps: gl.constexpr = gl.num_warps()
    expert, first, count, is_shared = _work(item, unit, num_listed, num_rows, GROUPS, SHARED, NT * 8)
    tiles = _tiles(expert, unit, GROUPS, TILES, MT)
    stages = units_ahead(0, data, block_scale, tiles, 0, UNITS, UNITS, MT, FORMAT, BLOCKS, warps, warps, STAGES, False)
    sources = ()
    targets = ()
    for n in gl.static_range(NT):
        read = n * 8 + index
        sources = sources + (_pairs(lists, expert, first, count, is_shared, read, num_rows, TOP_K, CACHE),)
        stored = n * 8 + stored_index
        targets = targets + (_pairs(lists, expert, first, count, is_shared, stored, num_rows, TOP_K, CACHE),)
    return stages, sources, targets


@gluon.jit(do_not_specialize=["num_rows", "most_listed", "num_shared"])
def listed_kernel(
    data,
    block_scale,
    place,
    number,
    x,
    lists,
    out,
    num_rows,
    most_listed,
    num_shared,
    x_stride,
    out_stride,
    NUM_EXPERTS: gl.constexpr,
    TILES: gl.constexpr,
    K: gl.constexpr,
    UNITS: gl.constexpr,
    MT: gl.constexpr,
    NT: gl.constexpr,
    FORMAT: gl.constexpr,
    BLOCKS: gl.constexpr,
    DIVIDES: gl.constexpr,
    ROW_NUMBERS: gl.constexpr,
    SPAN: gl.constexpr,
    DOWN: gl.constexpr,
    ROUTED: gl.constexpr,
    TOP_K: gl.constexpr,
    STAGES: gl.constexpr,
    X_AHEAD: gl.constexpr,
    PINNED: gl.constexpr,
    PDL: gl.constexpr,
):
    """experts_kernel for rows that are listed: each program has some units of work, one after the other: MT tiles of an
    expert and 8 NT of its rows. The tiles of one item (list_experts) are next to each other; the shared expert's come
    after those of all items.

    most_listed: so many items may be listed; num_shared: how many more the shared expert has.
    """
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    groups: gl.constexpr = (TILES + MT - 1) // MT
    shared: gl.constexpr = NUM_EXPERTS if ROUTED else 0
    # as in experts_kernel
    cache: gl.constexpr = ".cg" if DOWN else ""
    if PDL:
        # down may read lists before its own wait: gate_up waited for them before it let down start
        if not DOWN:
            gdc_wait()
        gdc_launch_dependents()
    items = lists + NUM_EXPERTS * (num_rows + 1)
    begin = gl.program_id(0)
    programs = gl.num_programs(0)
    num_listed = 0
    item = 0
    if ROUTED:
        num_listed = gl.load(items, cache_modifier=cache)
        item = gl.load(items + 1 + gl.minimum(begin // groups, most_listed - 1), cache_modifier=cache)
    num_units = (num_listed + num_shared) * groups
    if begin >= num_units:
        return
    feature_index = gl.arange(0, 128, flat)
    feature = (feature_index % 32) // 4 + (feature_index // 32) % 2 * 8
    g = (gl.arange(0, warps * 32, gl.SliceLayout(1, layout)) % 32) // 4
    stored_index = (feature_index % 4) * 2 + feature_index // 64
    stages, sources, targets = _ahead(
        data,
        block_scale,
        lists,
        item,
        begin,
        num_listed,
        num_rows,
        g,
        stored_index,
        shared,
        TILES,
        groups,
        UNITS,
        MT,
        NT,
        FORMAT,
        BLOCKS,
        TOP_K,
        STAGES,
        cache,
    )
    if PDL and DOWN:
        gdc_wait()
    for unit in range(begin, num_units, programs):
        following = unit + programs
        expert, _, count, _ = _work(item, unit, num_listed, num_rows, groups, shared, NT * 8)
        tiles = _tiles(expert, unit, groups, TILES, MT)
        offsets = ()
        for n in gl.static_range(NT):
            source = sources[n] if DOWN else sources[n] // (TOP_K + 1)
            offsets = offsets + (source * x_stride * 4,)
        factors = ()
        columns = ()
        counts = ()
        for m in gl.static_range(MT):
            factors = factors + (load_factor(number, tiles[m], feature, ROW_NUMBERS),)
            if m % SPAN == 0:
                columns = columns + (gl.load(place + tiles[m] * 2),)
                counts = counts + (gl.load(place + tiles[m] * 2 + 1),)
        totals = products(
            stages,
            data,
            block_scale,
            x,
            offsets,
            tiles,
            0,
            K,
            UNITS,
            UNITS,
            MT,
            NT,
            FORMAT,
            BLOCKS,
            warps,
            warps,
            STAGES,
            False,
            X_AHEAD,
            PINNED,
            False,
        )
        if ROUTED:
            # before the sums over warps, which take as long as it does; any earlier it would be a register too many
            item = gl.load(items + 1 + gl.minimum(following // groups, most_listed - 1), cache_modifier=cache)
        for m in gl.static_range(0, MT, SPAN):
            counted = (feature < counts[m // SPAN]) & (unit % groups * MT + m < TILES)
            for n in gl.static_range(NT):
                value = scaled(over_warps(totals[m * NT + n :: MT * NT], warps, False), factors[m], FORMAT, DIVIDES)
                if SPAN == 2:
                    up = scaled(
                        over_warps(totals[(m + 1) * NT + n :: MT * NT], warps, False), factors[m + 1], FORMAT, DIVIDES
                    )
                    value = silu(value) * up
                target = out + targets[n].to(gl.int64) * out_stride + (columns[m // SPAN] + feature)
                gl.store(target, value.to(out.dtype.element_ty), mask=counted & (n * 8 + stored_index < count))
        if following < num_units:
            stages, sources, targets = _ahead(
                data,
                block_scale,
                lists,
                item,
                following,
                num_listed,
                num_rows,
                g,
                stored_index,
                shared,
                TILES,
                groups,
                UNITS,
                MT,
                NT,
                FORMAT,
                BLOCKS,
                TOP_K,
                STAGES,
                cache,
            )


@triton.jit
def combine_kernel(
    parts,
    weights,
    shared_gate,
    x,
    norm_scale,
    out,
    eps,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    if NORM:
        scale = tl.load(norm_scale + cols, mask, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = parts + row * ((TOP_K + 1) * H) + cols
    outputs = ()
    factors = ()
    for rank in tl.static_range(TOP_K + 1):
        outputs = outputs + (tl.load(source + rank * H, mask, other=0.0),)
        factors = factors + (tl.load(weights + row * TOP_K + rank if rank < TOP_K else shared_gate + row),)
    before = tl.load(x + row * H + cols, mask, other=0.0)
    # all of it on its way at once: the assembler would ask for two parts at a time, five ways to the L2 one after the
    # other. An event for profilers is what it moves neither loads nor arithmetic across (mma.in_order)
    tl.inline_asm_elementwise("pmevent 0; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    total = outputs[0].to(tl.float32) * factors[0]
    for rank in tl.static_range(1, TOP_K + 1):
        total = tl.fma(outputs[rank].to(tl.float32), factors[rank], total)
    total += before
    tl.store(x + row * H + cols, total, mask)
    if NORM:
        normed = total * tl.rsqrt(tl.sum(total * total, 0) / H + eps) * scale
        tl.store(out + row * H + cols, normed.to(out.dtype.element_ty), mask)
