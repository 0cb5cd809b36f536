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

from pilotfish.kernels.cuda.mma import (
    in_order,
    in_shared,
    load_factor,
    over_warps,
    parts_of,
    products,
    row_of_x,
    scaled,
    silu,
    total_of,
    units_ahead,
)
from pilotfish.kernels.cuda.norm import normed
from pilotfish.kernels.cuda.router import choice, choices, of_ranks, rows_by_warps, store_choice
from pilotfish.kernels.cuda.tiled_rows import at


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


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def groups_kernel(
    lists,
    num_rows,
    num_experts,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Lists the rows of the shared expert, which are all, behind the others' lists; then how many items there are, and
    these: GROUP rows at a time of each expert, as (expert * 32 + which) * 32 + their number."""
    expert = tl.arange(0, BLOCK_E)
    shared_list = lists + num_experts * (num_rows + 1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    rows = tl.load(lists + expert * (num_rows + 1), expert < num_experts, other=0)
    rows = tl.where(expert == num_experts, num_rows, rows)
    tl.store(shared_list, num_rows)
    for first in range(0, num_rows, BLOCK_E):
        tl.store(shared_list + 1 + first + expert, (first + expert) * (TOP_K + 1) + TOP_K, first + expert < num_rows)
    groups = (rows + GROUP - 1) // GROUP
    start = tl.cumsum(groups, 0) - groups
    items = lists + (num_experts + 1) * (num_rows + 1) + 1
    tl.store(items - 1, tl.sum(groups, 0))
    for group in range(0, (num_rows + GROUP - 1) // GROUP):
        number = tl.minimum(rows - group * GROUP, GROUP)
        tl.store(items + start + group, (expert * 32 + group) * 32 + number, group < groups)


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def list_groups_kernel(
    ids,
    lists,
    num_pairs,
    num_experts,
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
    items = lists + (num_experts + 1).to(tl.int64) * (num_rows + 1) + 1
    pair = tl.arange(0, BLOCK)
    other = tl.arange(0, BLOCK_E)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    choice = tl.load(ids + pair, pair < num_pairs, other=-1)
    # a choice of no expert is counted nowhere
    groups = (tl.histogram(tl.maximum(choice, 0), BLOCK_E, mask=choice >= 0) + (GROUP - 1)) // GROUP
    # all rows are the shared expert's
    is_shared = expert == num_experts
    chosen = tl.where(is_shared, pair < num_rows, choice == expert).to(tl.int32)
    listed = tl.where(is_shared, pair * (TOP_K + 1) + TOP_K, pair + pair // TOP_K)
    tl.store(own + tl.cumsum(chosen, 0), listed, chosen == 1)
    count = tl.sum(chosen, 0)
    tl.store(own, count)
    start = tl.sum(tl.where(other < expert, groups, 0), 0)
    group = tl.arange(0, GROUPS)
    number = tl.minimum(count - group * GROUP, GROUP)
    tl.store(items + start + group, (expert * 32 + group) * 32 + number, number > 0)
    if is_shared:
        tl.store(items - 1, start + (num_rows + GROUP - 1) // GROUP)


@gluon.jit
def _ranks(ids, expert, row, rank, TOP_K: gl.constexpr):
    """At which rank each row chose the expert, -1 if it did not, [ROWS]; and the first pair that is such a choice."""
    ranks = gl.max(gl.where(ids == expert, rank[None, :] + row[:, None] * 0, -1), 1)
    return ranks, gl.min(gl.where(ranks >= 0, row * TOP_K + ranks, 1 << 20), 0)


@gluon.jit
def _columns(ranks, index, own, ROWS: gl.constexpr, TOP_K: gl.constexpr):
    """Which (row, rank) columns of a product are, as row * (k + 1) + rank, and whether they are there; `own` where they
    are not.

    index: a column's row; of one row the only one is `own`.
    """
    if ROWS == 1:
        return index * 0 + own, index == 0
    else:
        rank = gl.gather(ranks, index % ROWS, 0)
        there = (rank >= 0) & (index < ROWS)
        return gl.where(there, index * (TOP_K + 1) + rank, own), there


@gluon.jit
def _chosen(
    logits,
    stride,
    num_rows,
    ROWS: gl.constexpr,
    NUM_EXPERTS: gl.constexpr,
    TOP_K: gl.constexpr,
    EACH: gl.constexpr,
    CACHE: gl.constexpr,
):
    """For each rank the experts that the rows choose, [ROWS]; of rows that are not there those of the last one."""
    layout: gl.constexpr = rows_by_warps(gl.num_warps())
    row = gl.minimum(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), num_rows - 1)
    experts, _ = choices(logits + row * stride, NUM_EXPERTS, TOP_K, EACH, CACHE)
    return experts


@gluon.jit(do_not_specialize=["num_rows", "num_routed", "logits_stride"])
def experts_kernel(
    data,
    block_scale,
    place,
    number,
    x,
    logits,
    weights,
    ids,
    gate,
    out,
    num_rows,
    num_routed,
    logits_stride,
    x_stride,
    out_stride,
    NUM_EXPERTS: gl.constexpr,
    TILES: gl.constexpr,
    K: gl.constexpr,
    TILED: gl.constexpr,
    UNITS: gl.constexpr,
    MT: gl.constexpr,
    FORMAT: gl.constexpr,
    BLOCKS: gl.constexpr,
    DIVIDES: gl.constexpr,
    ROW_NUMBERS: gl.constexpr,
    SPAN: gl.constexpr,
    DOWN: gl.constexpr,
    ROUTED: gl.constexpr,
    SHARED: gl.constexpr,
    CHOOSES: gl.constexpr,
    ROWS: gl.constexpr,
    TOP_K: gl.constexpr,
    BLOCK_K: gl.constexpr,
    EACH: gl.constexpr,
    STAGES: gl.constexpr,
    X_AHEAD: gl.constexpr,
    PINNED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Program (i, p): tiles i MT ... of the expert of pair p, all rows, of which there are up to ROWS (1, 4 or 8).
    The programs after those are the shared expert's.

    With CHOOSES each program finds by itself what the logits choose, and further ones of down write it, weights, ids
    and the shared expert's gate, for those that come after; else ids are read. x is [row, H] for gate_up (SPAN 2), in
    the order of tiled_rows.py with TILED, [row, rank, I] for down; out [row, rank, ...]. x_stride is in 16 bytes.
    """
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    one_row: gl.constexpr = ROWS == 1
    # hundreds of programs read the few lines that the router wrote at a time: gate_up through L1, so that L2 is asked
    # once an SM; not so down, which reads ahead of its turn, when L1 may hold those of an earlier layer
    cache: gl.constexpr = ".cg" if DOWN else ""
    if PDL:
        # down may read logits and ids before its own wait: gate_up waited for them before it let down start
        if not DOWN:
            gdc_wait()
        gdc_launch_dependents()
    p = gl.program_id(1)
    expert = 0
    is_shared = p >= num_routed
    if DOWN and CHOOSES:  # noqa: SIM102 (the second is looked at when it runs)
        if p >= num_routed + SHARED:
            written = (p - num_routed - SHARED) * gl.num_programs(0) + gl.program_id(0)
            if written < num_rows:
                chosen = choice(logits + written * logits_stride, NUM_EXPERTS, TOP_K, BLOCK_K, EACH, cache)
                if PDL:
                    gdc_wait()
                store_choice(chosen, weights, ids, gate, written, TOP_K, BLOCK_K)
            return
    lanes: gl.constexpr = min(BLOCK_K, 32)
    # warps have all pairs each, and need not wait for each other before they ask for weights; where down asks L2 for
    # them, they have some each
    rows_a_lane: gl.constexpr = 1 if DOWN and not CHOOSES else max(1, ROWS * lanes // 32)
    pairs: gl.constexpr = gl.BlockedLayout([rows_a_lane, 1], [32 // lanes, lanes], [warps, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, pairs))
    rank = gl.arange(0, BLOCK_K, gl.SliceLayout(0, pairs))
    there = (row < num_rows)[:, None] & (rank < TOP_K)[None, :]
    pair = row[:, None] * TOP_K + rank[None, :]
    ranks = row * 0 - 1
    first_pair = p
    if CHOOSES:
        if is_shared:
            expert = NUM_EXPERTS
        else:
            chosen = _chosen(logits, logits_stride, num_rows, ROWS, NUM_EXPERTS, TOP_K, EACH, cache)
            by_row: gl.constexpr = rows_by_warps(warps)
            if one_row:
                own_rank = gl.full([1, 1], 0, gl.int32, by_row) + p
                expert = gl.max(gl.max(of_ranks(chosen, own_rank), 1), 0)
            else:
                all_ranks = gl.arange(0, BLOCK_K, gl.SliceLayout(0, by_row))[None, :]
                found = gl.convert_layout(of_ranks(chosen, all_ranks), pairs)
                found = gl.where(there, found, -1)
                expert = gl.max(gl.max(gl.where(pair == p, found, -1), 1), 0)
                ranks, first_pair = _ranks(found, expert, row, rank, TOP_K)
    elif ROUTED:
        expert = gl.load(ids + gl.minimum(p, num_routed - 1), cache_modifier=cache)
        if not one_row:
            found = gl.load(ids + pair, mask=there, other=-1, cache_modifier=cache)
            ranks, first_pair = _ranks(found, expert, row, rank, TOP_K)
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
    stages = units_ahead(0, data, block_scale, tiles, 0, UNITS, UNITS, MT, FORMAT, BLOCKS, warps, warps, STAGES, False)
    if not one_row:
        ranks = gl.where(is_shared, gl.where(row < num_rows, TOP_K, -1), ranks)
    g = (gl.arange(0, warps * 32, gl.SliceLayout(1, layout)) % 32) // 4
    # of one row its experts all differ, and of the shared one the first row is there in any case
    own = gl.where(is_shared, TOP_K, p + p // TOP_K) if ROUTED else p + TOP_K
    pair, _ = _columns(ranks, g, own, ROWS, TOP_K)
    source = pair if DOWN else pair // (TOP_K + 1)
    pair, stored = _columns(ranks, (index % 4) * 2 + index // 64, own, ROWS, TOP_K)
    target = pair.to(gl.int64) * out_stride
    totals = products(
        stages,
        data,
        block_scale,
        x,
        (row_of_x(source, K, True) if TILED else source * x_stride * 4,),
        tiles,
        0,
        K,
        TILED,
        UNITS,
        UNITS,
        MT,
        1,
        FORMAT,
        BLOCKS,
        warps,
        warps,
        STAGES,
        False,
        X_AHEAD,
        False,
        PINNED,
        PDL and DOWN,
    )
    for m in gl.static_range(0, MT, SPAN):
        counted = (feature < counts[m // SPAN]) & (first_tile + m < TILES)
        value = scaled(over_warps(totals[m::MT], warps, False), factors[m], FORMAT, DIVIDES)
        if SPAN == 2:
            up = scaled(over_warps(totals[m + 1 :: MT], warps, False), factors[m + 1], FORMAT, DIVIDES)
            value = silu(value) * up
        cell = out + target + (columns[m // SPAN] + feature)
        gl.store(cell, value.to(out.dtype.element_ty), mask=counted & stored)


@gluon.jit
def _at_lanes(value, lane, WARPS: gl.constexpr):
    """Of what each lane has, [warps * 32], that of a lane of its own warp, as `lane`, [128] of the layout of sums."""
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    copies: gl.constexpr = 4 // WARPS
    rows: gl.constexpr = gl.BlockedLayout([copies, 1], [1, 32], [1, WARPS], [1, 0])
    value = gl.convert_layout(value, gl.SliceLayout(0, rows), assert_trivial=True)[None, :]
    value = gl.reshape(value + gl.full([copies, 1], 0, gl.int32, rows), [128])
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;",
        "=r,r,r",
        [gl.convert_layout(value, flat, assert_trivial=True), lane],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _sums(totals, WARPS: gl.constexpr):
    """over_warps of each of the totals, one for each warp's: all to shared memory before any is read."""
    memories = ()
    for i in gl.static_range(len(totals)):
        memories = memories + (in_shared(totals[i], WARPS),)
    sums = ()
    for i in gl.static_range(len(totals)):
        sums = sums + (total_of(parts_of(memories[i], WARPS), WARPS, False),)
    return sums


@gluon.jit
def _tiles(item, group, BEFORE: gl.constexpr, TILES: gl.constexpr, MT: gl.constexpr):
    """The tiles of a unit of work; beyond an expert's last one, that. BEFORE: experts whose tiles are elsewhere."""
    tiles = ()
    for m in gl.static_range(MT):
        tile = group * MT + m
        if TILES % MT != 0:
            tile = gl.minimum(tile, TILES - 1)
        tiles = tiles + (((item >> 10) - BEFORE) * TILES + tile,)
    return tiles


@gluon.jit
def _pairs(lists, item, row, num_rows, NT: gl.constexpr, CACHE: gl.constexpr):
    """Which (row, rank) an item's rows are, as row * (k + 1) + rank, a tensor for 8 of them; past their end the last
    one once more. row: of those 8, which a lane has."""
    own_list = lists + ((item >> 10) * (num_rows + 1) + (item >> 5 & 31) * (NT * 8) + 1)
    pairs = ()
    for n in gl.static_range(NT):
        pairs = pairs + (gl.load(own_list + gl.minimum(n * 8 + row, (item & 31) - 1), cache_modifier=CACHE),)
    return pairs


@gluon.jit(do_not_specialize=["num_rows"])
def listed_kernel(
    data,
    block_scale,
    place,
    number,
    x,
    lists,
    out,
    num_rows,
    x_stride,
    out_stride,
    NUM_EXPERTS: gl.constexpr,
    TILES: gl.constexpr,
    K: gl.constexpr,
    TILED: gl.constexpr,
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
    SHARED: gl.constexpr,
    TOP_K: gl.constexpr,
    STAGES: gl.constexpr,
    X_AHEAD: gl.constexpr,
    PINNED: gl.constexpr,
    PDL: gl.constexpr,
):
    """experts_kernel for rows that are listed: each program has units of work next to each other, MT tiles of an expert
    and 8 NT of its rows. The tiles of one item (list_experts) are next to each other.

    ROUTED, SHARED: whether the items of the routed experts are this launch's, and those of the shared one.
    """
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    groups: gl.constexpr = (TILES + MT - 1) // MT
    before: gl.constexpr = 0 if ROUTED else NUM_EXPERTS
    # as in experts_kernel
    cache: gl.constexpr = ".cg" if DOWN else ""
    if PDL:
        # down may read lists before its own wait: gate_up waited for them before it let down start
        if not DOWN:
            gdc_wait()
        gdc_launch_dependents()
    items = lists + (NUM_EXPERTS + 1) * (num_rows + 1) + 1
    last = gl.load(items - 1, cache_modifier=cache)
    num_shared = (num_rows + NT * 8 - 1) // (NT * 8)
    first = 0 if ROUTED else last - num_shared
    if not SHARED:
        last -= num_shared
    # units next to each other, which mostly are of one item: it is looked up once, and its rows of x stay near
    num_units = (last - first) * groups
    program = gl.program_id(0)
    each = num_units // gl.num_programs(0)
    longer = num_units - each * gl.num_programs(0)
    begin = first * groups + program * each + gl.minimum(program, longer)
    end = begin + each + (program < longer).to(gl.int32)
    if begin >= end:
        return
    item = gl.load(items + begin // groups, cache_modifier=cache)
    feature_index = gl.arange(0, 128, flat)
    feature = (feature_index % 32) // 4 + (feature_index // 32) % 2 * 8
    g = (gl.arange(0, warps * 32, gl.SliceLayout(1, layout)) % 32) // 4
    stored_index = (feature_index % 4) * 2 + feature_index // 64
    # the first unit's, as any later one's of another item, are loaded behind its weights
    changes = True
    pairs = ()
    for _ in gl.static_range(NT):
        pairs = pairs + (g,)
    for unit in range(begin, end):
        tiles = _tiles(item, unit % groups, before, TILES, MT)
        stages = units_ahead(
            0, data, block_scale, tiles, 0, UNITS, UNITS, MT, FORMAT, BLOCKS, warps, warps, STAGES, False
        )
        if changes:
            pairs = _pairs(lists, item, g, num_rows, NT, cache)
        if PDL and DOWN:
            gdc_wait()
        count = item & 31
        offsets = ()
        for n in gl.static_range(NT):
            source = pairs[n] if DOWN else pairs[n] // (TOP_K + 1)
            offsets = offsets + (row_of_x(source, K, True) if TILED else source * x_stride * 4,)
        totals = products(
            stages,
            data,
            block_scale,
            x,
            offsets,
            tiles,
            0,
            K,
            TILED,
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
            False,
            PINNED,
            False,
        )
        # before the sums over warps, which take as long; before the products, what all of them need is waited for
        following = unit + 1
        changes = following % groups == 0
        item = gl.load(items + following // groups, changes & (following < end), other=item, cache_modifier=cache)
        factors = ()
        for m in gl.static_range(MT):
            factors = factors + (load_factor(number, tiles[m], feature, ROW_NUMBERS),)
        sums = _sums(totals, warps)
        columns = ()
        counts = ()
        for m in gl.static_range(0, MT, SPAN):
            columns = columns + (gl.load(place + tiles[m] * 2),)
            counts = counts + (gl.load(place + tiles[m] * 2 + 1),)
        for m in gl.static_range(0, MT, SPAN):
            counted = feature < counts[m // SPAN]
            if TILES % MT != 0:
                counted = counted & (unit % groups * MT + m < TILES)
            for n in gl.static_range(NT):
                value = scaled(sums[m * NT + n], factors[m], FORMAT, DIVIDES)
                if SPAN == 2:
                    value = silu(value) * scaled(sums[(m + 1) * NT + n], factors[m + 1], FORMAT, DIVIDES)
                pair = _at_lanes(pairs[n], stored_index * 4, warps)
                target = out + pair.to(gl.int64) * out_stride + (columns[m // SPAN] + feature)
                gl.store(target, value.to(out.dtype.element_ty), mask=counted & (n * 8 + stored_index < count))


@gluon.jit
def combine_kernel(
    parts,
    weights,
    shared_gate,
    x,
    norm_scale,
    out,
    eps,
    H: gl.constexpr,
    TOP_K: gl.constexpr,
    NORM: gl.constexpr,
    TILED: gl.constexpr,
    BLOCK: gl.constexpr,
    PDL: gl.constexpr,
):
    # 8 numbers a thread in all loads and stores, as in norm.py
    cols = gl.arange(0, BLOCK, gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    row = gl.program_id(0).to(gl.int64)
    mask = cols < H
    if NORM:
        scale = gl.load(norm_scale + cols, mask, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = parts + row * ((TOP_K + 1) * H) + cols
    outputs = ()
    factors = ()
    for rank in gl.static_range(TOP_K + 1):
        outputs = outputs + (gl.load(source + rank * H, mask, other=0.0),)
        factors = factors + (gl.load(weights + row * TOP_K + rank if rank < TOP_K else shared_gate + row),)
    before = gl.load(x + row * H + cols, mask, other=0.0)
    # all of it on its way at once: the assembler would ask for two parts at a time, five ways to the L2 one after the
    # other
    in_order(True)
    total = outputs[0].to(gl.float32) * factors[0]
    for rank in gl.static_range(1, TOP_K + 1):
        total = gl.fma(outputs[rank].to(gl.float32), factors[rank], total)
    total += before
    gl.store(x + row * H + cols, total, mask)
    if NORM:
        gl.store(out + at(row, cols, H, TILED), normed(total, scale, eps, H).to(out.dtype.element_ty), mask)
