"""Products of 17 rows and more with packed NVFP4 weights on the warp group's instruction: linear.py's bits.

A program has 8 tiles of weights (or 4), a share of K or all of them, and 32 or 64 rows of x. Weights go from memory to
the registers of the lane that unpacks them, half a unit at a time, as in group_mma.py. x goes through registers too: a
warp loads 512 bytes of eight rows, which `stmatrix` brings into the order of the weights' fragments as it stores them.
Each share of K has a sum of its own; programs of the same tiles leave theirs in memory (PartialSums), and the one that
arrives last adds them in linear.py's order: in turn, or, of a row-parallel product, by the tree. How many tiles and
rows a program has, and whether one share or all of them, changes no bit.

Reads the packed weights once, x from L1 or L2 for each 8 tiles. R = rows, N, K.
"""

# Triton compiles no unpacking of tuples, and what grows in a loop has no type that mypy knows:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pilotfish.kernels.cuda.carveout import leave_to_l1
from pilotfish.kernels.cuda.group_mma import (
    ROWS_SHARED,
    SCALES,
    UNIT_WORDS,
    UNPACK_ASM,
    UNPACK_CONSTRAINTS,
    axis,
    has_group_products,
    multiply,
    operand,
    sums,
    waited,
)
from pilotfish.kernels.cuda.launch_shapes import split
from pilotfish.kernels.cuda.mma import (
    NVFP4,
    in_order,
    in_tree,
    in_turn,
    row_of_x,
    scaled,
    silu,
    unit_words_of_x,
    word_of_x,
)
from pilotfish.kernels.cuda.packing import TILE, UNIT, Format, Packed
from pilotfish.kernels.cuda.scratch import PartialSums
from pilotfish.kernels.cuda.tiled_rows import AnyRows, column_place, row_place, stored, written

FEWEST_ROWS = 17
MANY_TILES, MOST_TILES = 2048, 8192
"""Tiles of a weight that is not row-parallel, from which on this kernel is faster: with 33 rows and more, with 17."""
SHORT_SHARE, LONG_SHARE = 6, 12
"""Units in a share of a row-parallel weight, likewise."""
MOST_SUMS = 1 << 26
"""Numbers that programs leave for each other in a launch, at most: 256 MiB. Rows for which that is not enough, as 65 of
an lm_head, are launches one behind the other."""
REGISTERS = 168
"""Of a thread, with which three programs are on a multiprocessor."""
_AHEAD = gl.constexpr(2)
"""Units of weights on their way while one is multiplied."""
# of half a unit: [warp, row half, lane, octet, weight]
_WEIGHTS = gl.constexpr(gl.BlockedLayout([1, 1, 1, 2, 8], [1, 1, 32, 1, 1], [4, 1, 1, 1, 1], [4, 3, 2, 1, 0]))
_LANES = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
_CODES = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 32, 1], [4, 1, 1], [2, 1, 0]))
# a lane's words next to each other, which one instruction then stores: [8 rows, row, lane q, word, octet], and of two
# times 32 rows
_STORED = gl.constexpr(gl.BlockedLayout([1, 1, 1, 4, 2], [1, 8, 4, 1, 1], [4, 1, 1, 1, 1], [3, 4, 2, 1, 0]))
_STORED_TWICE = gl.constexpr(
    gl.BlockedLayout([1, 1, 1, 4, 2, 2], [1, 8, 4, 1, 1, 1], [4, 1, 1, 1, 1, 1], [3, 4, 5, 2, 1, 0])
)
_WORDS_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
_PAIRS = gl.constexpr(gl.BlockedLayout([1, 1, 1, 2], [1, 8, 4, 1], [2, 2, 1, 1], [3, 2, 1, 0]))


@dataclass(frozen=True)
class WideShape:
    """How a product is launched; no bit follows from it.

    rows of x a program, 32 or 64; tiles of weights a program, 8 or 4; together: a program has all shares of K, not one,
    of a weight that is not row-parallel; tiles_first: programs of the same share follow each other, and read the same
    x, not those of the same tiles.
    """

    rows: int
    tiles: int = 8
    together: bool = False
    tiles_first: bool = False


def shares_of(part: Packed, segments: int) -> int:
    """The shares of K, as linear.py has them."""
    return segments or split(part.num_tiles, part.num_units)


def can_take(part: Packed, num_rows: int, segments: int, width: int) -> bool:
    """Whether the kernel has this product of x [num_rows, width]: NVFP4 in whole programs of tiles, shares of several
    units."""
    shares = shares_of(part, segments)
    return (
        num_rows >= FEWEST_ROWS
        and part.format is Format.NVFP4
        and part.number.shape[1] == 1
        and width % UNIT == 0
        and part.num_tiles % 8 == 0
        and part.num_units % shares == 0
        and part.num_units // shares >= _AHEAD.value
        and shares in (1, 2, 4, 8)
        and has_group_products(part.data.device)
    )


def choose_wide_shape(part: Packed, num_rows: int, segments: int, width: int) -> WideShape | None:
    """None where linear.py's kernel takes the product: this one does not have it, or is slower, as it is where the
    programs are few or have few units each (docs/measurements.md)."""
    if not can_take(part, num_rows, segments, width):
        return None
    share = part.num_units // shares_of(part, segments)
    if num_rows <= 32:
        if segments:
            return WideShape(32, tiles_first=True) if share >= LONG_SHARE else None
        return WideShape(32, together=True) if part.num_tiles >= MOST_TILES else None
    if segments:
        # 4 tiles were faster with 64 rows; with more 8 are taken by count, and have not been timed
        short = WideShape(64, tiles=4, tiles_first=True) if num_rows <= 64 else WideShape(64)
        return WideShape(64) if share >= LONG_SHARE else short if share >= SHORT_SHARE else None
    return WideShape(64) if part.num_tiles >= MANY_TILES else None


@gluon.jit
def _load_group(
    codes, scales, UNIT_OF: gl.constexpr, GROUP: gl.constexpr, UNITS: gl.constexpr, MASKED: gl.constexpr, more
):
    """A unit of four tiles: two loads of codes and one of scales a lane."""
    place: gl.constexpr = (GROUP * UNITS + UNIT_OF) * UNIT_WORDS
    if MASKED:
        mask = more & (gl.full(codes.shape, 1, gl.int1, codes.type.layout))
        low = gl.load(codes + place, mask=mask, cache_modifier=".cg")
        high = gl.load(codes + (place + 128), mask=mask, cache_modifier=".cg")
        mask = more & (gl.full(scales.shape, 1, gl.int1, scales.type.layout))
        own = gl.load(scales + place, mask=mask, cache_modifier=".cg")
    else:
        low = gl.load(codes + place, cache_modifier=".cg")
        high = gl.load(codes + (place + 128), cache_modifier=".cg")
        own = gl.load(scales + place, cache_modifier=".cg")
    return (low, high, own)


@gluon.jit
def _words_of(unit):
    """A unit's codes, int32 [tile, row half, lane, octet], of its first half of 64 columns and of its second."""
    words = gl.reshape(gl.join(unit[0], unit[1]), [4, 32, 2, 2, 2])
    return gl.split(gl.permute(words, [0, 4, 1, 3, 2]))


@gluon.jit
def _fragments(unit, HALF: gl.constexpr, ROWS: gl.constexpr):
    """bf16 [64, 64], times 2^-8, as the warp group's A operand: group_mma.fragments of half a unit, for half of its
    registers."""
    words: gl.constexpr = gl.SliceLayout(4, _WEIGHTS)
    lanes: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, words))
    codes = gl.convert_layout(_words_of(unit)[HALF], words, assert_trivial=True)
    scales = gl.convert_layout(unit[2], lanes, assert_trivial=True)[:, None, :, None]
    row_half = gl.arange(0, 2, axis(words, 1))[None, :, None, None]
    scales = (scales >> (row_half * 16 + HALF * 8) & 0xFF) * 0x00100010 + 0x70007000
    scales, _ = gl.broadcast(scales, codes)
    each = (gl.arange(0, 8, axis(_WEIGHTS, 4)) * 0)[None, None, None, None, :]
    # not pure: else it might be moved to before the wait for what still reads these registers
    weights = gl.inline_asm_elementwise(
        UNPACK_ASM,
        UNPACK_CONSTRAINTS,
        [codes[:, :, :, :, None] + each, scales[:, :, :, :, None] + each],
        dtype=gl.bfloat16,
        is_pure=False,
        pack=8,
    )
    # warp, row half, g, q, octet, pair 4, 2 of it -> a pair of each lane q together
    weights = gl.permute(gl.reshape(weights, [4, 2, 8, 4, 2, 4, 2]), [0, 1, 2, 4, 5, 3, 6])
    return gl.convert_layout(gl.reshape(weights, [64, 64]), operand(0, ROWS, True), assert_trivial=True)


@gluon.jit
def _load_rows(
    rows,
    UNIT_OF: gl.constexpr,
    PIECE: gl.constexpr,
    ROWS: gl.constexpr,
    K: gl.constexpr,
    TILED: gl.constexpr,
    MASKED: gl.constexpr,
    more,
):
    """A unit of x, of 64 rows the PIECE-th half of one: four loads a lane, of 8 rows a warp or of twice 8."""
    out = ()
    for t in gl.static_range(4):
        if ROWS == 32:
            where = rows[0] + word_of_x(UNIT_OF, t, TILED)
        elif TILED:
            where = rows[0] + (word_of_x(UNIT_OF, 2 * PIECE + t % 2, TILED) + t // 2 * (16 * K))
        else:
            where = rows[t // 2] + word_of_x(UNIT_OF, 2 * PIECE + t % 2, TILED)
        if MASKED:
            out = out + (gl.load(where, mask=more & (gl.full(where.shape, 1, gl.int1, where.type.layout))),)
        else:
            out = out + (gl.load(where),)
    return out


@gluon.jit
def _store_rows(memory, xs, PIECE: gl.constexpr, ROWS: gl.constexpr):
    """These in the fragments' order: of each octet the four words of a lane q apart, those of four q together."""
    if ROWS == 32:
        for half in gl.static_range(2):
            own = gl.reshape(gl.join(xs[2 * half], xs[2 * half + 1]), [4, 8, 4, 4, 2])
            own = gl.permute(gl.convert_layout(own, _STORED, assert_trivial=True), [0, 1, 4, 3, 2])
            memory[half].store(gl.reshape(own, [32, 32]))
    else:
        own = gl.reshape(gl.join(gl.join(xs[0], xs[1]), gl.join(xs[2], xs[3])), [4, 8, 4, 4, 2, 2])
        own = gl.permute(gl.convert_layout(own, _STORED_TWICE, assert_trivial=True), [5, 0, 1, 4, 3, 2])
        memory[PIECE].store(gl.reshape(own, [64, 32]))


@gluon.jit
def _waited_for_one(totals, BEFORE: gl.constexpr):
    """The sums, when all but the products begun last are done, those of one of them."""
    return totals[:BEFORE] + (waited(1, totals[BEFORE], True),) + totals[BEFORE + 1 :]


@gluon.jit
def _multiply_unit(
    memory,
    next_memory,
    places,
    ahead,
    totals,
    UNIT_OF: gl.constexpr,
    NEXT_X: gl.constexpr,
    NEXT: gl.constexpr,
    MASKED_X: gl.constexpr,
    MASKED: gl.constexpr,
    more,
    UNITS: gl.constexpr,
    ROWS: gl.constexpr,
    GROUPS: gl.constexpr,
    K: gl.constexpr,
    TILED: gl.constexpr,
):
    """Adds one unit's products, of x in `memory`. NEXT_X, NEXT: whether the next unit of x, to next_memory, and the
    second of weights are asked for; if MASKED only with `more`. `ahead`: the units on their way, each of GROUPS times
    four tiles.

    Half a unit of four tiles is unpacked while the one before is multiplied. One barrier: behind it all threads have
    stored this unit of x, and are done with the products of the one before, so that there is room for the next one.
    The fence behind x's stores may wait for all that a thread has asked for: of weights that is what it asked for a
    unit ago.
    """
    rows = places[2]
    pieces: gl.constexpr = ROWS // 32
    xs = ()
    later = ()
    if NEXT_X:
        xs = _load_rows(rows, UNIT_OF + 1, 0, ROWS, K, TILED, MASKED_X, more)
        if pieces == 2 and GROUPS == 1:
            later = _load_rows(rows, UNIT_OF + 1, 1, ROWS, K, TILED, MASKED_X, more)
    in_order(True)
    unit = ()
    for half in gl.static_range(2):
        right = (memory[half]._reinterpret(gl.bfloat16, [ROWS, 64], ROWS_SHARED),)
        for i in gl.static_range(GROUPS):
            weights = _fragments(ahead[0][i], half, ROWS)
            if half == 0 and i == 0:
                # not behind the wait
                in_order(True)
            if NEXT and half == 1:
                # to the registers of what has just been unpacked
                unit = unit + (_load_group(places[0], places[1], UNIT_OF + _AHEAD, i, UNITS, MASKED, more),)
            if half == 0 and i == 0:
                totals = totals[: GROUPS - 1] + (waited(0, totals[GROUPS - 1], True),)
                tl.debug_barrier()
            total = multiply(right, weights, totals[i], True)
            totals = totals[:i] + (total,) + totals[i + 1 :]
            if half == 0 and i == 0 and NEXT_X and pieces == 2:
                _store_rows(next_memory, xs, 0, ROWS)
                in_order(True)
                xs = later if GROUPS == 1 else _load_rows(rows, UNIT_OF + 1, 1, ROWS, K, TILED, MASKED_X, more)
            if half == 1 or i > 0:
                # what was begun before this
                totals = _waited_for_one(totals, (i + GROUPS - 1) % GROUPS)
            in_order(True)
        if half == 0:
            if NEXT_X:
                _store_rows(next_memory, xs, pieces - 1, ROWS)
                fence_async_shared()
            in_order(True)
    ahead = ahead[1:]
    if NEXT:
        ahead = ahead + (unit,)
    return ahead, totals


@gluon.jit
def _further(places, COUNT: gl.constexpr, TILED: gl.constexpr):
    codes, scales, rows = places
    moved = ()
    for n in gl.static_range(len(rows)):
        moved = moved + (rows[n] + COUNT * unit_words_of_x(TILED),)
    return codes + COUNT * UNIT_WORDS, scales + COUNT * UNIT_WORDS, moved


@gluon.jit
def _zeros(ROWS: gl.constexpr, GROUPS: gl.constexpr):
    out = ()
    for _ in gl.static_range(GROUPS):
        out = out + ((gl.zeros([64, ROWS], gl.float32, sums(ROWS, True)),),)
    return out


@gluon.jit
def _multiply_share(
    memory,
    places,
    ahead,
    more,
    LAST: gl.constexpr,
    COUNT: gl.constexpr,
    UNITS: gl.constexpr,
    ROWS: gl.constexpr,
    GROUPS: gl.constexpr,
    K: gl.constexpr,
    TILED: gl.constexpr,
):
    """A share's COUNT units, in order, the first of x in memory[0]: its sums, and what is on its way of the next one,
    if there is one: LAST says that there is none, else `more`."""
    totals = _zeros(ROWS, GROUPS)
    groups: gl.constexpr = (COUNT - _AHEAD) // 2 if (COUNT - _AHEAD) // 2 > 1 else 0
    for _ in range(groups):
        for s in gl.static_range(2):
            ahead, totals = _multiply_unit(
                memory[s],
                memory[1 - s],
                places,
                ahead,
                totals,
                s,
                True,
                True,
                False,
                False,
                more,
                UNITS,
                ROWS,
                GROUPS,
                K,
                TILED,
            )
        places = _further(places, 2, TILED)
    rest: gl.constexpr = COUNT - groups * 2
    for s in gl.static_range(rest):
        ahead, totals = _multiply_unit(
            memory[s % 2],
            memory[1 - s % 2],
            places,
            ahead,
            totals,
            s,
            s + 1 < rest or not LAST,
            s + _AHEAD < rest or not LAST,
            s + 1 >= rest,
            s + _AHEAD >= rest,
            more,
            UNITS,
            ROWS,
            GROUPS,
            K,
            TILED,
        )
    out = ()
    for i in gl.static_range(GROUPS):
        out = out + (waited(0, totals[i], True)[0],)
    return out, _further(places, rest, TILED), ahead


# of eight rows of x at a time: [eight, thread, 4]
_FLAT = gl.constexpr(gl.BlockedLayout([4, 1, 4], [1, 32, 1], [1, 4, 1], [2, 1, 0]))


@gluon.jit
def _rows_of(total, CHUNK: gl.constexpr, ROWS: gl.constexpr):
    """Of [64, ROWS] the CHUNK-th 32 rows of x, [64, 32]; nothing moves."""
    if ROWS == 32:
        return total
    else:
        parts = gl.split(gl.permute(gl.reshape(total, [64, 2, 32]), [0, 2, 1]))
        return gl.convert_layout(parts[CHUNK], sums(32, True), assert_trivial=True)


@gluon.jit
def _store_sums(own, totals, slot, ROWS: gl.constexpr):
    """A share's sums to its place, as `_own` has it."""
    groups: gl.constexpr = len(totals)
    for i in gl.static_range(groups):
        for chunk in gl.static_range(ROWS // 32):
            parts = gl.reshape(_rows_of(totals[i], chunk, ROWS), [4, 2, 8, 4, 4, 2])
            # warp, row half, g, eight rows, q, c
            parts = gl.reshape(gl.permute(parts, [3, 0, 2, 4, 1, 5]), [4, 128, 4])
            parts = gl.convert_layout(parts, _FLAT, assert_trivial=True)
            gl.store(own + (slot * groups + i) * (64 * ROWS) + chunk * 2048, parts)


@gluon.jit
def _from_flat(parts):
    """[64, 32] of what `_store_sums` has stored."""
    total = gl.permute(gl.reshape(parts, [4, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    return gl.convert_layout(gl.reshape(total, [64, 32]), sums(32, True), assert_trivial=True)


@gluon.jit
def _added(where, APART: gl.constexpr, SHARES: gl.constexpr, TREE: gl.constexpr):
    """[64, 32] of what the shares have left at `where`, each APART numbers behind the one before, in linear.py's
    order."""
    parts = ()
    for s in gl.static_range(SHARES):
        parts = parts + (gl.load(where + s * APART, cache_modifier=".cg"),)
    return _from_flat(in_tree(parts) if TREE else in_turn(parts))


@gluon.jit
def _own(partial, number, SIZE: gl.constexpr):
    """Where the sums of programs that share K stand, of the number-th of such groups, each of SIZE numbers."""
    within = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, _FLAT)))[:, None, None] * 512
    within = within + gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, _FLAT)))[None, :, None] * 4
    within = within + gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, _FLAT)))[None, None, :]
    return partial + (number.to(gl.int64) * SIZE + within)


@gluon.constexpr_function
def _out_layout(features, tiled):
    """Of tiled rows eight columns are in one piece; others are stored one by one, next to each other by lanes."""
    if tiled:
        return gl.BlockedLayout([1, 8], [32 * 8 // features, features // 8], [4, 1], [1, 0])
    return gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])


@gluon.jit
def _store(value, out, place, first_tile, first_row, num_rows, stride, STEP: gl.constexpr, TILED_OUT: gl.constexpr):
    """value [features, rows], of every STEP-th tile from first_tile on, to the rows first_row ... of out."""
    layout: gl.constexpr = _out_layout(value.shape[0], TILED_OUT)
    value = gl.convert_layout(gl.permute(value.to(out.dtype.element_ty), [1, 0]), layout)
    feature = gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))
    row = first_row + gl.arange(0, value.shape[0], gl.SliceLayout(1, layout))
    if TILED_OUT:
        # gate's and up's tiles in turn, all of them whole
        column = first_tile // 2 * 16 + feature
        gl.static_assert(STEP == 2)
        target = out + row_place(row, stride)[:, None] + column_place(column)[None, :]
        gl.store(target, value, mask=(row < num_rows)[:, None])
    else:
        tile = first_tile + feature // 16 * STEP
        column = gl.load(place + tile * 2) + feature % 16
        there = (feature % 16 < gl.load(place + tile * 2 + 1))[None, :] & (row < num_rows)[:, None]
        gl.store(out + (row.to(gl.int64) * stride)[:, None] + column[None, :], value, mask=there)


@gluon.jit
def _multiply_rows(
    weights,
    x,
    out,
    left,
    place,
    number,
    block,
    num_blocks,
    share,
    first_row,
    num_rows,
    out_stride,
    K: gl.constexpr,
    TILED: gl.constexpr,
    TILED_OUT: gl.constexpr,
    UNITS: gl.constexpr,
    ROWS: gl.constexpr,
    MOST_ROWS: gl.constexpr,
    SPAN: gl.constexpr,
    DIVIDES: gl.constexpr,
    SHARES: gl.constexpr,
    TREE: gl.constexpr,
    TOGETHER: gl.constexpr,
    PDL: gl.constexpr,
):
    """What a program does with ROWS rows of x, of which others of the launch may have MOST_ROWS, once its first weights
    are on their way; block: the program's tiles, of num_blocks times as many."""
    codes, scales, ahead = weights
    partial, arrivals = left
    groups: gl.constexpr = len(ahead[0])
    first_tile = block * (groups * 4)
    apart: gl.constexpr = UNITS // SHARES
    thread = gl.arange(0, 128, gl.SliceLayout(1, _LANES))
    columns = (share * apart * unit_words_of_x(TILED) + thread % 4 * (4 if TILED else 8))[:, None]
    columns = columns + gl.arange(0, 4, gl.SliceLayout(0, _LANES))[None, :]
    rows = ()
    for n in gl.static_range(1 if TILED else ROWS // 32):
        own_row = first_row + n * 32 + thread // 4
        if not TILED:
            # past the end: the last row once more, not stored; of tiled rows what stands there
            own_row = gl.minimum(own_row, num_rows - 1)
        rows = rows + (x + (row_of_x(own_row, K, TILED)[:, None] + columns),)
    memory = ()
    for _ in gl.static_range(2):
        first_half = gl.allocate_shared_memory(gl.int32, [ROWS, 32], _WORDS_SHARED)
        memory = memory + ((first_half, gl.allocate_shared_memory(gl.int32, [ROWS, 32], _WORDS_SHARED)),)
    if PDL:
        gdc_wait()
    for piece in gl.static_range(ROWS // 32):
        _store_rows(memory[0], _load_rows(rows, 0, piece, ROWS, K, TILED, False, True), piece, ROWS)
    fence_async_shared()
    in_order(True)
    places = (codes, scales, rows)
    apart_sums: gl.constexpr = SHARES > 1 and not TOGETHER
    if TOGETHER:
        gl.static_assert(not TREE)
        kept = ()
        for _ in gl.static_range(groups):
            # to which a sum is added as it is
            kept = kept + (gl.full([64, ROWS], -0.0, gl.float32, sums(ROWS, True)),)
        # a share of an odd number of units ends where the next one's x goes to the other half of memory
        turns: gl.constexpr = 1 + apart % 2
        for some in range(SHARES // turns):
            for turn in gl.static_range(turns):
                more = some * turns + turn + 1 < SHARES
                now = memory[turn:] + memory[:turn]
                totals, places, ahead = _multiply_share(
                    now, places, ahead, more, False, apart, UNITS, ROWS, groups, K, TILED
                )
                added = ()
                for i in gl.static_range(groups):
                    added = added + (kept[i] + totals[i],)
                kept = added
        totals = kept
    else:
        totals, places, ahead = _multiply_share(memory, places, ahead, True, True, apart, UNITS, ROWS, groups, K, TILED)
    own = partial
    last = True
    sharing = gl.program_id(0) * num_blocks + block
    if apart_sums:
        own = _own(partial, sharing, SHARES * groups * 64 * MOST_ROWS)
        _store_sums(own, totals, share, ROWS)
        # all that the program's threads have stored is there for who sees its arrival
        tl.debug_barrier()
        last = gl.atomic_add(arrivals + sharing, 1, sem="acq_rel", scope="gpu") == SHARES - 1
    if last:
        if apart_sums:
            gl.store(arrivals + sharing, 0)
        # 32 rows at a time, for fewer registers
        for chunk in gl.static_range(ROWS // 32):
            row = first_row + chunk * 32
            values = ()
            for i in gl.static_range(groups):
                if apart_sums:
                    total = _added(own + (i * (64 * ROWS) + chunk * 2048), groups * 64 * ROWS, SHARES, TREE)
                else:
                    total = _rows_of(totals[i], chunk, ROWS)
                feature = gl.arange(0, 64, gl.SliceLayout(1, sums(32, True)))
                factor = gl.load(number + (first_tile + feature // 16 * groups + i))[:, None]
                values = values + (scaled(total, gl.broadcast(factor, total)[0], NVFP4, DIVIDES),)
            if SPAN == 1:
                for i in gl.static_range(groups):
                    _store(values[i], out, place, first_tile + i, row, num_rows, out_stride, groups, TILED_OUT)
            elif groups == 2:
                value = silu(values[0]) * values[1]
                _store(value, out, place, first_tile, row, num_rows, out_stride, 2, TILED_OUT)
            else:
                # gate and up are different warps'
                pair = gl.permute(gl.reshape(values[0], [2, 2, 16, 32]), [0, 2, 3, 1])
                gate, up = gl.split(gl.convert_layout(pair, _PAIRS))
                value = gl.reshape(silu(gate) * up, [32, 32])
                _store(value, out, place, first_tile, row, num_rows, out_stride, 2, TILED_OUT)


@gluon.jit(do_not_specialize=["first_group", "num_rows"])
def _wide_kernel(
    data,
    place,
    number,
    x,
    out,
    partial,
    arrivals,
    first_group,
    num_rows,
    out_stride,
    K: gl.constexpr,
    TILED: gl.constexpr,
    TILED_OUT: gl.constexpr,
    UNITS: gl.constexpr,
    TILES: gl.constexpr,
    ROWS: gl.constexpr,
    REST: gl.constexpr,
    SPAN: gl.constexpr,
    DIVIDES: gl.constexpr,
    SHARES: gl.constexpr,
    TREE: gl.constexpr,
    TOGETHER: gl.constexpr,
    TILES_FIRST: gl.constexpr,
    PDL: gl.constexpr,
):
    """Program (j, i, p), or (j, p, i): tiles i TILES ..., rows (first_group + j) ROWS ... of x, the p-th of K's
    SHARES; TOGETHER: all of them. REST: where no more than 32 rows are left it has no more, in the place of ROWS.

    partial: fp32 [j, i, SHARES, TILES, 16 ROWS], what is left for the program that comes last of those that share K;
    arrivals: int32 [j, i], 0 before and after.
    """
    if PDL:
        gdc_launch_dependents()
    groups: gl.constexpr = TILES // 4
    block = gl.program_id(1)
    share = gl.program_id(2)
    num_blocks = gl.num_programs(1)
    if not TILES_FIRST:
        block = gl.program_id(2)
        share = gl.program_id(1)
        num_blocks = gl.num_programs(2)
    first_tile = block * TILES
    first_row = (first_group + gl.program_id(0)) * ROWS
    first_unit = share * (UNITS // SHARES)
    # weights: each warp has tiles next to each other, as gate and up are
    base = data + (first_tile.to(gl.int64) * UNITS + first_unit) * UNIT_WORDS
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, _CODES)))[:, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, _CODES)))[None, :, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, _CODES)))[None, None, :]
    codes = base + (warp * (groups * UNITS * UNIT_WORDS) + lane * 4 + word)
    warp = gl.arange(0, 4, gl.SliceLayout(1, SCALES))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, SCALES))[None, :]
    scales = base + (warp * (groups * UNITS * UNIT_WORDS) + 256 + lane)
    ahead = ()
    for s in gl.static_range(_AHEAD):
        unit = ()
        for i in gl.static_range(groups):
            unit = unit + (_load_group(codes, scales, s, i, UNITS, False, True),)
        ahead = ahead + (unit,)
    in_order()
    weights, left = (codes, scales, ahead), (partial, arrivals)
    if REST and num_rows - first_row <= 32:
        _multiply_rows(
            weights, x, out, left, place, number, block, num_blocks, share, first_row, num_rows, out_stride,
            K, TILED, TILED_OUT, UNITS, 32, ROWS, SPAN, DIVIDES, SHARES, TREE, TOGETHER, PDL,
        )  # fmt: skip
    else:
        _multiply_rows(
            weights, x, out, left, place, number, block, num_blocks, share, first_row, num_rows, out_stride,
            K, TILED, TILED_OUT, UNITS, ROWS, ROWS, SPAN, DIVIDES, SHARES, TREE, TOGETHER, PDL,
        )  # fmt: skip


def launch(part: Packed, x: AnyRows, out: AnyRows, shape: WideShape, swiglu: bool, segments: int, pdl: bool) -> None:
    """As linear.launch, for what `can_take` says. Room for sums is made here, at the first launch that wants it: rounds
    of so many rows may never be served, and those that are have been launched before they are captured."""
    shares = shares_of(part, segments)
    (memory, tiled), (target, stride, tiled_out) = stored(x), written(out)
    assert not tiled_out or swiglu
    assert part.num_tiles % shape.tiles == 0 and x.shape[1] == part.num_units * UNIT
    blocks, row_groups = part.num_tiles // shape.tiles, -(-len(out) // shape.rows)
    programs = 1 if shape.together else shares
    shared, most = None, row_groups
    if programs > 1:
        shared = PartialSums.of(memory.device)
        most = max(1, min(most, MOST_SUMS // (part.num_tiles * TILE * shares * shape.rows)))
        shared.reserve(part.num_tiles, shares, most * shape.rows)
    for first in range(0, row_groups, most):
        count = min(most, row_groups - first)
        grid = (count, blocks, programs) if shape.tiles_first else (count, programs, blocks)
        kernel = _wide_kernel[grid](
            part.data.view(torch.int32),
            part.place,
            part.number,
            memory.view(torch.int32),
            target,
            None if shared is None else shared.memory,
            None if shared is None else shared.arrivals,
            first,
            len(out),
            stride,
            K=x.shape[1],
            TILED=tiled,
            TILED_OUT=tiled_out,
            UNITS=part.num_units,
            TILES=shape.tiles,
            ROWS=shape.rows,
            REST=shape.rows > 32 and row_groups > 1,
            SPAN=2 if swiglu else 1,
            DIVIDES=part.divides,
            SHARES=shares,
            TREE=segments > 0,
            TOGETHER=shape.together and shares > 1,
            TILES_FIRST=shape.tiles_first,
            PDL=pdl,
            num_warps=4,
            # rounded as the kernel for fewer rows does
            enable_fp_fusion=False,
            maxnreg=REGISTERS,
            launch_pdl=pdl,
        )
        leave_to_l1(kernel)
