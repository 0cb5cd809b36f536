"""The kernel that attends: items of a window's queries over spans of paged keys and values. Gluon.

It is written so for the order of its loads: an item's place in the plan, its pages, then its first keys and values are
asked for one after the other; its queries, and the keys and values of the window itself, are normed and turned while
those are on their way. What a fold over units means is said in attention_kernels.py.
"""

# Triton compiles no unpacking of tuples, and what grows in a loop has no type that mypy knows:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, attr-defined, misc, var-annotated"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pilotfish.kernels.cuda.mma import in_order

WARPS = 8
"""Warps of a program; one takes a row at a time where rows are normed."""
MAX_WIDTH = 9
"""Window rows whose keys and values are two blocks of WARPS positions at most, wherever the window begins."""


@gluon.jit
def _fold(best, mass, total, other_best, other_mass, other_total):
    """As attention_kernels._fold."""
    new = gl.maximum(best, other_best)
    # of two parts that a row does not see: 2^(-inf), not 2^(-inf - -inf)
    base = gl.where(new == float("-inf"), 0.0, new)
    shrink, grow = gl.exp2(best - base), gl.exp2(other_best - base)
    mass = gl.fma(mass, shrink, other_mass * grow)
    total = gl.fma(total, shrink[:, None], other_total * grow[:, None])
    return new, mass, total


@gluon.jit
def _stand(items, slots, positions, b, B, W):
    """Of some sequences where their items begin and end, where their chunks begin, their slots and positions."""
    there = b < B
    begins = gl.load(items + 1 + b, there, other=0, cache_modifier=".cg")
    ends = gl.load(items + 2 + b, there, other=0, cache_modifier=".cg")
    chunks = gl.load(items + 2 + B + b, there, other=0, cache_modifier=".cg")
    slot = gl.load(slots + b, there, other=0, cache_modifier=".cg")
    return begins, ends, chunks, slot, gl.load(positions + b * W, there, other=0, cache_modifier=".cg")


@gluon.jit
def _owner(stand, item, b):
    """Of the sequence among these whose item it is, if it is one of them, else zeros: where its items and chunks begin,
    its number, slot and position."""
    own = (stand[0] <= item) & (item < stand[1])
    begins = gl.sum(gl.where(own, stand[0], 0), 0)
    chunks = gl.sum(gl.where(own, stand[2], 0), 0)
    number = gl.sum(gl.where(own, b, 0), 0)
    return begins, chunks, number, gl.sum(gl.where(own, stand[3], 0), 0), gl.sum(gl.where(own, stand[4], 0), 0)


@gluon.jit
def _beside(d, HALF: gl.constexpr):
    """Of each column of a head the one that it is turned with."""
    return gl.where(d < HALF, d + HALF, d - HALF)


@gluon.jit
def _pairs(projected, row, head, live, columns, COLUMNS: gl.constexpr, HALF: gl.constexpr):
    """A head of some rows of the projection, and beside each number the one that it is turned with, bf16 [rows, D]; of
    rows that are not live, zeros. columns: all D, [1, D]."""
    D: gl.constexpr = columns.shape[1]
    source = projected + (row.to(gl.int64) * COLUMNS + head * D)[:, None]
    x = gl.load(source + columns, live[:, None], other=0.0)
    return x, gl.load(source + _beside(columns, HALF), live[:, None] & (columns < 2 * HALF), other=0.0)


@gluon.jit
def _angles(cos, sin, row, live, columns, HALF: gl.constexpr):
    """What rows are turned by, fp32 [rows, D]."""
    turned = live[:, None] & (columns < 2 * HALF)
    place = (row * HALF)[:, None] + gl.where(columns < HALF, columns, columns - HALF)
    return gl.load(cos + place, turned, other=1.0), gl.load(sin + place, turned, other=0.0)


@gluon.jit
def _weights(qk_norm, head, columns, HALF: gl.constexpr):
    """A head's norm, and beside each weight that of the column it is turned with, fp32 [1, D]."""
    own = qk_norm + head * columns.shape[1]
    return gl.load(own + columns), gl.load(own + _beside(columns, HALF), columns < 2 * HALF, other=0.0)


@gluon.jit
def _turned(pairs, weights, angles, eps, columns, HALF: gl.constexpr):
    """Norm and RoPE of `_pairs`, fp32, as project_kernel has them."""
    x, other_x = pairs[0].to(gl.float32), pairs[1].to(gl.float32)
    scale = gl.rsqrt(gl.sum(x * x, 1) / x.shape[1] + eps)[:, None]
    x = x * scale * weights[0]
    return gl.fma(other_x * scale * weights[1], gl.where(columns < HALF, -angles[1], angles[1]), x * angles[0])


@gluon.jit
def _put_queries(
    blocks,
    FIRST: gl.constexpr,
    LAST: gl.constexpr,
    queries,
    weights,
    angles,
    eps,
    factor,
    columns,
    HALF: gl.constexpr,
):
    """Blocks FIRST .. LAST - 1 of the tile's queries, side by side, to shared memory."""
    for block in gl.static_range(FIRST, LAST):
        query = _turned(queries[block], weights, angles[block], eps, columns, HALF)
        blocks.index(block).store((query * factor).to(blocks.dtype))


@gluon.jit
def _copy(target, source, begin, end, LAYOUT: gl.constexpr):
    """A group of copies to shared memory: rows begin .. end - 1 of a unit, the others as zeros."""
    n = gl.arange(0, target.shape[0], gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, target.shape[1], gl.SliceLayout(0, LAYOUT))
    live = (n >= begin) & (n < end)
    async_copy.async_copy_global_to_shared(target, source + (n[:, None] * target.shape[1] + d[None, :]), live[:, None])
    async_copy.commit_group()


@gluon.jit
def _copy_unit(
    keys,
    values,
    k_cache,
    v_cache,
    page,
    unit,
    stop,
    begin,
    end,
    head,
    KV: gl.constexpr,
    PAGE: gl.constexpr,
    K_COPY: gl.constexpr,
    V_COPY: gl.constexpr,
):
    """Two groups: keys and values of positions unit .. that stand in begin .. end - 1, in a page."""
    if unit < stop:
        cell = ((page.to(gl.int64) * KV + head) * PAGE + unit % PAGE) * keys.shape[1]
        _copy(keys, k_cache + cell, begin - unit, end - unit, K_COPY)
        _copy(values, v_cache + cell, begin - unit, end - unit, V_COPY)
    else:
        async_copy.commit_group()
        async_copy.commit_group()


@gluon.jit
def _exchange(rows, new, place, begin, stop, LAYOUT: gl.constexpr):
    """Puts new rows of a block of WARPS positions, those of begin .. stop - 1, into 16 rows in shared memory, which
    begin at position `place`; a warp has rows i and WARPS + i of these, and row i of the new ones."""
    WARPS: gl.constexpr = new.shape[0]
    D: gl.constexpr = new.shape[1]
    both = gl.convert_layout(gl.reshape(gl.permute(gl.join(new, new), (2, 0, 1)), [2 * WARPS, D]), LAYOUT)
    at = place + gl.arange(0, 2 * WARPS, gl.SliceLayout(1, LAYOUT))
    rows.store(gl.where(((at >= begin) & (at < stop))[:, None], both, rows.load(LAYOUT)))


@gluon.jit
def _take_items(
    memory,
    plan,
    factors,
    sizes,
    H: gl.constexpr,
    KV: gl.constexpr,
    D: gl.constexpr,
    HALF: gl.constexpr,
    PAGE: gl.constexpr,
    UNIT: gl.constexpr,
    CHUNK: gl.constexpr,
    TILE: gl.constexpr,
    ROOM: gl.constexpr,
    BUFFERS: gl.constexpr,
    FP8: gl.constexpr,
    SETTLED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Every n-th item by a program, TILE query rows of it in room for ROOM. What tuples hold: see items_kernel."""
    projected, cos, sin, tables, qk_norm, k_cache, v_cache, partial, stats = memory
    items, slots, positions, stand, span, num_items, num_chunks = plan
    eps, q_factor, k_scale, v_scale = factors
    B, W, max_pages, lag = sizes
    GROUP: gl.constexpr = H // KV
    COLUMNS: gl.constexpr = (2 * H + 2 * KV) * D
    WARPS: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = gl.float16 if FP8 else gl.bfloat16
    KEPT: gl.constexpr = k_cache.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    WIDE: gl.constexpr = 4 if FP8 else 2
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, WIDE)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, WIDE)
    OF_ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    # a warp has whole rows where rows are normed
    ROWS: gl.constexpr = gl.BlockedLayout([1, max(D // 32, 1)], [1, 32], [WARPS, 1], [1, 0])
    # 16 bytes a lane; of FP8 values 8, which unpacking wants
    K_WIDE: gl.constexpr = 16 if FP8 else 8
    K_COPY: gl.constexpr = gl.BlockedLayout(
        [1, K_WIDE], [32 // min(D // K_WIDE, 32), min(D // K_WIDE, 32)], [WARPS, 1], [1, 0]
    )
    V_COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // min(D // 8, 32), min(D // 8, 32)], [WARPS, 1], [1, 0])
    # rows of less than 128 bytes share a phase
    BYTES: gl.constexpr = D if FP8 else 2 * D
    PER: gl.constexpr = max(128 // BYTES, 1)
    K_SHARED: gl.constexpr = gl.SwizzledSharedLayout(K_WIDE, PER, 8 // PER, [1, 0])
    V_SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, PER, (16 if FP8 else 8) // PER, [1, 0])
    Q_PER: gl.constexpr = max(64 // D, 1)
    Q_SHARED: gl.constexpr = gl.SwizzledSharedLayout(2 * WIDE * 2, Q_PER, (4 if FP8 else 8) // Q_PER, [1, 0])
    P_SHARED: gl.constexpr = gl.SwizzledSharedLayout(2 * WIDE * 2, 1, 4 if FP8 else 8, [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])

    q_shared = gl.allocate_shared_memory(DTYPE, [TILE, D], Q_SHARED)
    p_shared = gl.allocate_shared_memory(DTYPE, [TILE, UNIT], P_SHARED)
    q_blocks = q_shared._reinterpret(DTYPE, [TILE // WARPS, WARPS, D], Q_SHARED)
    keys = gl.allocate_shared_memory(KEPT, [BUFFERS, UNIT, D], K_SHARED)
    values = gl.allocate_shared_memory(KEPT, [BUFFERS, UNIT, D], V_SHARED)
    key_blocks = keys._reinterpret(KEPT, [BUFFERS * UNIT // (2 * WARPS), 2 * WARPS, D], K_SHARED)
    value_blocks = values._reinterpret(KEPT, [BUFFERS * UNIT // (2 * WARPS), 2 * WARPS, D], V_SHARED)
    tiles = (W * GROUP + (TILE - 1)) // TILE
    lane = gl.arange(0, 32, LINE)
    m_of = gl.arange(0, TILE, OF_ROW)
    n_of = gl.arange(0, UNIT, gl.SliceLayout(0, MMA))
    d_of = gl.arange(0, D, gl.SliceLayout(0, MMA))
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, ROWS))
    columns = gl.arange(0, D, gl.SliceLayout(0, ROWS))[None, :]
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        # whose item it is, and where that sequence stands
        begun, chunks_begun, b, slot, start = _owner(stand, item, lane)
        for block in range(32, B, 32):
            more = _owner(_stand(items, slots, positions, block + lane, B, W), item, block + lane)
            begun, chunks_begun, b = begun + more[0], chunks_begun + more[1], b + more[2]
            slot, start = slot + more[3], start + more[4]
        start += lag
        index = item - begun
        rest = index // tiles
        tile = index - rest * tiles
        head = rest % KV
        first = rest // KV * span
        end = start + W
        stop = gl.minimum(first + span, end)
        pages = tables + slot.to(gl.int64) * max_pages
        unit_pages = ()
        for ahead in gl.static_range(BUFFERS + 1):
            begin = first + ahead * UNIT
            unit_pages = unit_pages + (gl.load(pages + begin // PAGE, begin < stop, other=0, cache_modifier=".cg"),)
        # of the window's own rows, two at most
        page = gl.load(pages + start // PAGE, stop > start, other=0, cache_modifier=".cg")
        next_page = gl.load(pages + (end - 1) // PAGE, stop > start, other=0, cache_modifier=".cg")
        for ahead in gl.static_range(BUFFERS):
            _copy_unit(
                keys.index(ahead), values.index(ahead), k_cache, v_cache, unit_pages[ahead], first + ahead * UNIT, stop,
                lag, start, head, KV, PAGE, K_COPY, V_COPY,
            )  # fmt: skip
        coming = unit_pages[BUFFERS]

        # all that rows are normed and turned with, and then all that is wanted of the projection, before any of it is
        # looked at
        query_weights = _weights(qk_norm, 0, columns, HALF)
        key_weights = _weights(qk_norm, H, columns, HALF)
        flats = ()
        query_angles = ()
        for block in gl.static_range(TILE // WARPS):
            flat = tile * TILE + block * WARPS + warp
            flats = flats + (flat,)
            query_angles = query_angles + (_angles(cos, sin, b * W + flat // GROUP, flat < W * GROUP, columns, HALF),)
        # the window's own keys and values: a warp has one position of a block of WARPS, and one of the next
        aligned = start // WARPS * WARPS
        own_places = ()
        own_angles = ()
        for block in gl.static_range(2):
            place = aligned + block * WARPS + warp
            made = (place >= start) & (place >= first) & (place < stop)
            own_places = own_places + ((place, made),)
            own_angles = own_angles + (_angles(cos, sin, b * W + place - start, made, columns, HALF),)
        num_flat = W * GROUP - tile * TILE
        if PDL and SETTLED:
            # for the first item; then it is no more than an instruction
            gdc_wait()
        queries = ()
        for block in gl.static_range(TILE // WARPS):
            flat = flats[block]
            row, of = b * W + flat // GROUP, head * GROUP + flat % GROUP
            queries = queries + (_pairs(projected, row, of, flat < W * GROUP, columns, COLUMNS, HALF),)
        own_pairs = ()
        own_values = ()
        for block in gl.static_range(2):
            place, made = own_places[block]
            row = b * W + place - start
            own_pairs = own_pairs + (_pairs(projected, row, warp * 0 + (H + head), made, columns, COLUMNS, HALF),)
            source = projected + (row.to(gl.int64) * COLUMNS + ((H + KV) + head) * D)[:, None]
            own_values = own_values + (gl.load(source + columns, made[:, None], other=0.0),)
        _put_queries(q_blocks, 0, 1, queries, query_weights, query_angles, eps, q_factor, columns, HALF)
        # a window of one row has no more than the first block, of most models
        if num_flat > WARPS:
            _put_queries(q_blocks, 1, TILE // WARPS, queries, query_weights, query_angles, eps, q_factor, columns, HALF)
        else:
            for block in gl.static_range(1, TILE // WARPS):
                q_blocks.index(block).store(gl.zeros([WARPS, D], DTYPE, ROWS))
        new_keys = ()
        new_values = ()
        for block in gl.static_range(2):
            x = gl.zeros([WARPS, D], gl.float32, ROWS)
            v = gl.zeros([WARPS, D], gl.float32, ROWS)
            if (stop > start) & (aligned + block * WARPS < stop):
                place, made = own_places[block]
                x = _turned(own_pairs[block], key_weights, own_angles[block], eps, columns, HALF)
                v = own_values[block].to(gl.float32)
                # comparisons with NaN are false
                v = gl.where(gl.abs(v) < float("inf"), v, 0.0)
                if FP8:
                    # a key that is no number must not become the largest one
                    x = gl.where(x == x, gl.maximum(gl.minimum(x / k_scale, 448.0), -448.0), x)
                    v = gl.maximum(gl.minimum(v / v_scale, 448.0), -448.0)
                if tile == 0:
                    page_of = gl.where(place // PAGE == start // PAGE, page, next_page).to(gl.int64)
                    cells = (((page_of * KV + head) * PAGE + place % PAGE) * D)[:, None] + columns
                    gl.store(k_cache + cells, x.to(KEPT), made[:, None])
                    gl.store(v_cache + cells, v.to(KEPT), made[:, None])
            new_keys = new_keys + (x.to(KEPT),)
            new_values = new_values + (v.to(KEPT),)

        sees = start + gl.minimum((tile * TILE + m_of) // GROUP, W - 1)
        best = gl.full([TILE], float("-inf"), gl.float32, OF_ROW)
        mass = gl.zeros([TILE], gl.float32, OF_ROW)
        total = gl.zeros([TILE, D], gl.float32, MMA)
        buffer = 0
        chunk_line = chunks_begun + rest % KV * tiles + tile
        begun_before = (first + (CHUNK - 1)) // CHUNK * CHUNK
        there = tile * TILE + m_of < W * GROUP
        for unit in range(first, stop, UNIT):
            async_copy.wait_group(2 * BUFFERS - 1)
            if unit + UNIT > start:
                async_copy.wait_group(2 * BUFFERS - 2)
                for block in gl.static_range(2):
                    begin = aligned + block * WARPS
                    if (begin >= unit) & (begin < unit + UNIT):
                        at, whole = (buffer * UNIT + begin - unit) // (2 * WARPS), begin // (2 * WARPS) * (2 * WARPS)
                        since, until = gl.maximum(begin, start), gl.minimum(begin + WARPS, stop)
                        _exchange(key_blocks.index(at), new_keys[block], whole, since, until, ROWS)
                        _exchange(value_blocks.index(at), new_values[block], whole, since, until, ROWS)
            query_of = q_shared.load(LEFT)
            key_of = keys.index(buffer).permute((1, 0)).load(RIGHT).to(DTYPE)
            scores = mma_v2(query_of, key_of, gl.zeros([TILE, UNIT], gl.float32, MMA))
            if FP8:
                scores = scores * k_scale
            column = (unit + n_of)[None, :]
            scores = gl.where((column >= lag) & (column <= sees[:, None]), scores, float("-inf"))
            highest = gl.max(scores, 1)
            base = gl.where(highest == float("-inf"), 0.0, highest)
            p = gl.exp2(scores - base[:, None])
            p_shared.store(p.to(DTYPE))
            async_copy.wait_group(2 * BUFFERS - 2)
            value_of = values.index(buffer).load(RIGHT).to(DTYPE)
            sums = mma_v2(p_shared.load(LEFT), value_of, gl.zeros([TILE, D], gl.float32, MMA))
            best, mass, total = _fold(best, mass, total, highest, gl.sum(p, 1), sums)
            _copy_unit(
                keys.index(buffer), values.index(buffer), k_cache, v_cache, coming, unit + BUFFERS * UNIT, stop, lag,
                start, head, KV, PAGE, K_COPY, V_COPY,
            )  # fmt: skip
            # asked for a unit before it is wanted
            after = unit + (BUFFERS + 1) * UNIT
            coming = gl.load(pages + after // PAGE, after < stop, other=0, cache_modifier=".cg")
            buffer = gl.where(buffer == BUFFERS - 1, 0, buffer + 1)
            alone = unit < begun_before
            if alone | ((unit + UNIT) % CHUNK == 0) | (unit + UNIT >= stop):
                kept = num_chunks + item * (CHUNK // UNIT - 1) + unit % CHUNK // UNIT - 1
                kept = gl.where(alone, kept, chunk_line + unit // CHUNK * (KV * tiles))
                line = kept.to(gl.int64) * ROOM + m_of
                gl.store(partial + line[:, None] * D + d_of[None, :], total, there[:, None])
                gl.store(stats + line * 2, best, there)
                gl.store(stats + line * 2 + 1, mass, there)
                best = gl.full([TILE], float("-inf"), gl.float32, OF_ROW)
                mass = gl.zeros([TILE], gl.float32, OF_ROW)
                total = gl.zeros([TILE, D], gl.float32, MMA)


@gluon.jit(do_not_specialize=["B", "W", "max_pages", "lag"])
def items_kernel(
    projected,
    slots,
    positions,
    cos,
    sin,
    items,
    tables,
    qk_norm,
    k_cache,
    v_cache,
    partial,
    stats,
    eps,
    q_factor,
    k_scale,
    v_scale,
    B,
    W,
    max_pages,
    lag,
    H: gl.constexpr,
    KV: gl.constexpr,
    D: gl.constexpr,
    HALF: gl.constexpr,
    PAGE: gl.constexpr,
    UNIT: gl.constexpr,
    CHUNK: gl.constexpr,
    TILE: gl.constexpr,
    NARROW: gl.constexpr,
    BUFFERS: gl.constexpr,
    FP8: gl.constexpr,
    SETTLED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Takes items (sequence, span of positions, key head, tile of rows) until there are none: any grid will do.

    The same source stands in the kernel twice, for windows whose query rows of a key head are 16 at most and for
    others: what the first would multiply in vain is half of its work. A row has the same bits in both.

    Of an item's chunks one partial result each is kept, in the chunk's place. Units of a chunk that an item before it
    began are kept one by one, CHUNK / UNIT - 1 an item, behind those of all chunks.

    The item whose span holds a row of the window makes its key and value, and that of the first tile stores them.
    """
    WARPS: gl.constexpr = gl.num_warps()
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    if PDL:
        gdc_launch_dependents()
        if not SETTLED:
            gdc_wait()
    span = gl.load(items, cache_modifier=".cg")
    num_items = gl.load(items + 1 + B, cache_modifier=".cg")
    num_chunks = gl.load(items + 2 + 2 * B, cache_modifier=".cg")
    lane = gl.arange(0, 32, LINE)
    # of all sequences together, no load awaits another; of the first ones before it is known how many items there are
    stand = _stand(items, slots, positions, lane, B, W)
    in_order()
    memory = (projected, cos, sin, tables, qk_norm, k_cache, v_cache, partial, stats)
    plan = (items, slots, positions, stand, span, num_items, num_chunks)
    factors, sizes = (eps, q_factor, k_scale, v_scale), (B, W, max_pages, lag)
    if W * (H // KV) <= NARROW:
        _take_items(
            memory, plan, factors, sizes, H, KV, D, HALF, PAGE, UNIT, CHUNK, NARROW, TILE, BUFFERS, FP8, SETTLED, PDL
        )  # fmt: skip
    else:
        _take_items(
            memory, plan, factors, sizes, H, KV, D, HALF, PAGE, UNIT, CHUNK, TILE, TILE, BUFFERS, FP8, SETTLED, PDL
        )  # fmt: skip
    if PDL and SETTLED:
        # those that had no item
        gdc_wait()
