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
def _fold(best, mass, totals, other_best, other_mass, other_totals):
    """As attention_kernels._fold, of the sums of `_no_sums`."""
    new = gl.maximum(best, other_best)
    # of two parts that a row does not see: 2^(-inf), not 2^(-inf - -inf)
    base = gl.where(new == float("-inf"), 0.0, new)
    shrink, grow = gl.exp2(best - base), gl.exp2(other_best - base)
    mass = gl.fma(mass, shrink, other_mass * grow)
    folded = ()
    for part in gl.static_range(len(totals)):
        folded = folded + (gl.fma(totals[part], shrink[:, None], other_totals[part] * grow[:, None]),)
    return new, mass, folded


@gluon.jit
def _unpacked(words, ORDER: gl.constexpr):
    """Of words of two FP8 numbers, int16, of which a lane has two neighbours in one register, the four numbers as two
    neighbours in each of two tensors, fp16, which holds them all. ORDER: of the register's bytes."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 four; .reg .b16 two, others; prmt.b32 four, $2, 0, " + ORDER + "; mov.b32 {two, others}, four;"
        "cvt.rn.f16x2.e4m3x2 $0, two; cvt.rn.f16x2.e4m3x2 $1, others;}",
        "=r,=r,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _keys_of(kept, RIGHT: gl.constexpr, FP8: gl.constexpr):
    """Keys of a unit as a product's right side, [D, UNIT]; of FP8 pages their columns stand as `_dealt` has them."""
    key = kept.permute((1, 0)).load(RIGHT)
    if FP8:
        WORDS: gl.constexpr = key.shape[0]
        UNIT: gl.constexpr = key.shape[1]
        two, others = _unpacked(key, "0x3210")
        both = gl.join(gl.reshape(two, [WORDS // 8, 8, UNIT]), gl.reshape(others, [WORDS // 8, 8, UNIT]))
        both = gl.reshape(gl.permute(both, (0, 3, 1, 2)), [2 * WORDS, UNIT])
        key = gl.convert_layout(both, RIGHT, assert_trivial=True)
    return key


@gluon.jit
def _dealt(query):
    """Queries for FP8 keys, of which a lane loads four columns at a time. A product wants of 16 columns two of each of
    four lanes, then two more of each: columns 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, ..."""
    ROWS: gl.constexpr = query.shape[0]
    D: gl.constexpr = query.shape[1]
    return gl.reshape(gl.permute(gl.reshape(query, [ROWS, D // 16, 4, 2, 2]), (0, 1, 3, 2, 4)), [ROWS, D])


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
    FP8: gl.constexpr,
):
    """Blocks FIRST .. LAST - 1 of the tile's queries, side by side, to shared memory."""
    for block in gl.static_range(FIRST, LAST):
        query = _turned(queries[block], weights, angles[block], eps, columns, HALF)
        query = (query * factor).to(blocks.dtype)
        blocks.index(block).store(_dealt(query) if FP8 else query)


@gluon.jit
def _no_sums(TILE: gl.constexpr, D: gl.constexpr, FP8: gl.constexpr, LAYOUT: gl.constexpr):
    """Sums of no unit: of each column, or of the even ones and of the odd ones."""
    zeros = gl.zeros([TILE, D // 2 if FP8 else D], gl.float32, LAYOUT)
    return (zeros, zeros) if FP8 else (zeros,)


@gluon.jit
def _store_sums(partial, totals, line, there):
    """Sums to their lines, columns side by side."""
    total = totals[0]
    if len(totals) == 2:
        both = gl.join(totals[0], totals[1])
        total = gl.reshape(both, [both.shape[0], 2 * both.shape[1]])
    LAYOUT: gl.constexpr = total.type.layout
    OF_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    target = partial + gl.convert_layout(line, OF_ROW)[:, None] * total.shape[1]
    column = gl.arange(0, total.shape[1], gl.SliceLayout(0, LAYOUT))
    gl.store(target + column[None, :], total, gl.convert_layout(there, OF_ROW)[:, None])


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
    later_page,
    k_cache,
    v_cache,
    pages,
    page,
    unit,
    stop,
    begin,
    end,
    head,
    KV: gl.constexpr,
    PAGE: gl.constexpr,
    AHEAD: gl.constexpr,
    COPY: gl.constexpr,
    LINE: gl.constexpr,
):
    """Two groups: keys and values of positions unit .. that stand in begin .. end - 1, in a page. With the first comes
    the page of the unit AHEAD positions further."""
    if unit < stop:
        # through L1, as 4 bytes must: tables are written between rounds, whose first kernels are no dependents
        later = unit + AHEAD
        place = gl.arange(0, 1, LINE) + later // PAGE
        async_copy.async_copy_global_to_shared(later_page, pages + place, place * PAGE < stop)
        cell = ((page.to(gl.int64) * KV + head) * PAGE + unit % PAGE) * keys.shape[1]
        _copy(keys, k_cache + cell, begin - unit, end - unit, COPY)
        _copy(values, v_cache + cell, begin - unit, end - unit, COPY)
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
    # of FP8 pages two columns are one word: what moves and turns rows on their way to a product does so by 16 bits
    WORD: gl.constexpr = gl.int16 if FP8 else KEPT
    WORDS: gl.constexpr = D // 2 if FP8 else D
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    OF_ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    # a warp has whole rows where rows are normed
    ROWS: gl.constexpr = gl.BlockedLayout([1, max(D // 32, 1)], [1, 32], [WARPS, 1], [1, 0])
    # 16 bytes a lane
    ACROSS: gl.constexpr = min(WORDS // 8, 32)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    # rows of less than 128 bytes share a phase
    PER: gl.constexpr = max(64 // WORDS, 1)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, PER, 8 // PER, [1, 0])
    BY_NUMBER: gl.constexpr = gl.SwizzledSharedLayout(8 * D // WORDS, PER, 8 // PER, [1, 0])
    Q_PER: gl.constexpr = max(64 // D, 1)
    Q_SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, Q_PER, 8 // Q_PER, [1, 0])
    P_SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])

    q_shared = gl.allocate_shared_memory(DTYPE, [TILE, D], Q_SHARED)
    p_shared = gl.allocate_shared_memory(DTYPE, [TILE, UNIT], P_SHARED)
    q_blocks = q_shared._reinterpret(DTYPE, [TILE // WARPS, WARPS, D], Q_SHARED)
    keys = gl.allocate_shared_memory(WORD, [BUFFERS, UNIT, WORDS], SHARED)
    values = gl.allocate_shared_memory(WORD, [BUFFERS, UNIT, WORDS], SHARED)
    k_words = k_cache.to(gl.pointer_type(WORD), bitcast=True)
    v_words = v_cache.to(gl.pointer_type(WORD), bitcast=True)
    # of a buffer's next unit: loaded to a register they would be waited for where a turn of the loop ends
    later_pages = gl.allocate_shared_memory(gl.int32, [BUFFERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    key_blocks = keys._reinterpret(KEPT, [BUFFERS * UNIT // (2 * WARPS), 2 * WARPS, D], BY_NUMBER)
    value_blocks = values._reinterpret(KEPT, [BUFFERS * UNIT // (2 * WARPS), 2 * WARPS, D], BY_NUMBER)
    nothing = _no_sums(TILE, D, FP8, MMA)
    tiles = (W * GROUP + (TILE - 1)) // TILE
    lane = gl.arange(0, 32, LINE)
    m_of = gl.arange(0, TILE, OF_ROW)
    n_of = gl.arange(0, UNIT, gl.SliceLayout(0, MMA))
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
        for ahead in gl.static_range(BUFFERS):
            begin = first + ahead * UNIT
            unit_pages = unit_pages + (gl.load(pages + begin // PAGE, begin < stop, other=0, cache_modifier=".cg"),)
        # of the window's own rows, two at most
        page = gl.load(pages + start // PAGE, stop > start, other=0, cache_modifier=".cg")
        next_page = gl.load(pages + (end - 1) // PAGE, stop > start, other=0, cache_modifier=".cg")
        for ahead in gl.static_range(BUFFERS):
            _copy_unit(
                keys.index(ahead), values.index(ahead), later_pages.index(ahead), k_words, v_words, pages,
                unit_pages[ahead], first + ahead * UNIT, stop, lag, start, head, KV, PAGE, BUFFERS * UNIT, COPY, LINE,
            )  # fmt: skip

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
        _put_queries(q_blocks, 0, 1, queries, query_weights, query_angles, eps, q_factor, columns, HALF, FP8)
        # a window of one row has no more than the first block, of most models
        if num_flat > WARPS:
            _put_queries(
                q_blocks, 1, TILE // WARPS, queries, query_weights, query_angles, eps, q_factor, columns, HALF, FP8
            )  # fmt: skip
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
        totals = nothing
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
            later_page = gl.sum(later_pages.index(buffer).load(LINE), 0)
            query_of = q_shared.load(LEFT)
            scores = mma_v2(query_of, _keys_of(keys.index(buffer), RIGHT, FP8), gl.zeros([TILE, UNIT], gl.float32, MMA))
            if FP8:
                scores = scores * k_scale
            column = (unit + n_of)[None, :]
            scores = gl.where((column >= lag) & (column <= sees[:, None]), scores, float("-inf"))
            highest = gl.max(scores, 1)
            base = gl.where(highest == float("-inf"), 0.0, highest)
            p = gl.exp2(scores - base[:, None])
            p_shared.store(p.to(DTYPE))
            async_copy.wait_group(2 * BUFFERS - 2)
            value_of = values.index(buffer).load(RIGHT)
            value_of = _unpacked(value_of, "0x3120") if FP8 else (value_of,)
            p_of = p_shared.load(LEFT)
            sums = ()
            for part in gl.static_range(len(value_of)):
                sums = sums + (mma_v2(p_of, value_of[part], nothing[part]),)
            best, mass, totals = _fold(best, mass, totals, highest, gl.sum(p, 1), sums)
            _copy_unit(
                keys.index(buffer), values.index(buffer), later_pages.index(buffer), k_words, v_words, pages,
                later_page, unit + BUFFERS * UNIT, stop, lag, start, head, KV, PAGE, BUFFERS * UNIT, COPY, LINE,
            )  # fmt: skip
            buffer = gl.where(buffer == BUFFERS - 1, 0, buffer + 1)
            alone = unit < begun_before
            if alone | ((unit + UNIT) % CHUNK == 0) | (unit + UNIT >= stop):
                kept = num_chunks + item * (CHUNK // UNIT - 1) + unit % CHUNK // UNIT - 1
                kept = gl.where(alone, kept, chunk_line + unit // CHUNK * (KV * tiles))
                line = kept.to(gl.int64) * ROOM + m_of
                _store_sums(partial, totals, line, there)
                gl.store(stats + line * 2, best, there)
                gl.store(stats + line * 2 + 1, mass, there)
                best = gl.full([TILE], float("-inf"), gl.float32, OF_ROW)
                mass = gl.zeros([TILE], gl.float32, OF_ROW)
                totals = nothing


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
