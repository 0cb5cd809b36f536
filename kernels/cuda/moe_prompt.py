"""Experts over a prompt from their packed NVFP4 weights: expanded in registers, and in no memory.

Four launches: one lists the rows of each expert and arranges x, then gate_up with SwiGLU, down, combine (moe.py). A
program of the middle two takes 8 tiles of weights of an expert and up to ROWS of its rows at a time. Weights come to
shared memory packed; a lane's words of a unit, made bf16, are the A operand of the warp group's instruction as they
stand in its registers, since what packing.py gives a lane is a fragment of mma.m16n8k16. So that B agrees, columns of x
are kept in the order in which the fragments have them (`arranged`): gate_up's result is stored so, x is arranged once.
While one half of the tiles is multiplied the other is unpacked. The tensor's number is multiplied in at the end.
Results go to their own (row, rank), so nothing depends on the order of programs. The shared expert is one more, chosen
by all rows.

A sum is over units in order, in a unit over the 8 steps of 16 columns that a round's products have (mma.py), in one
accumulator.

Reads each expert's weights once for ROWS of its rows, 4.5 bits a weight: expanding them first moves ten times that.
T = prompt rows, E = experts, k = experts a token, H = hidden, I = expert width.
"""

# Triton compiles no unpacking of tuples, and what grows in a loop has no type that mypy knows:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma_init

from pilotfish.kernels.cuda.group_mma import (
    CODES,
    OUT,
    PACKED_SHARED,
    ROWS_SHARED,
    SCALES,
    SCALES_IN,
    TILES,
    TILES_AHEAD,
    UNIT_WORDS,
    copy_tiles,
    fragments,
    has_group_products,
    multiply,
    operand,
    sums,
    waited,
)
from pilotfish.kernels.cuda.mma import in_order, silu
from pilotfish.kernels.cuda.moe import ExpertScratch, GroupedExperts, combine
from pilotfish.kernels.cuda.moe_kernels import list_kernel
from pilotfish.kernels.cuda.packing import TILE, UNIT, Format, Packed

ROWS, FEW_ROWS = 96, 32
"""Rows of a program at a time; FEW_ROWS where an expert has 24 or less: then three programs are on an SM, not two."""
FEW_REGISTERS = 168
"""Registers of a thread with which three programs of 128 threads fit."""
PAIRS = 4096
"""Looked through at a time for an expert's rows."""
_ROWS_IN = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


def takes(packed: GroupedExperts) -> bool:
    """Whether the kernels hold these experts: all NVFP4, the shared one of the others' shape."""
    parts = [part for group in packed.groups for part in (group.gate_up, group.down)]
    return len(packed.groups) == 1 and all(part.format is Format.NVFP4 for part in parts)


@triton.jit(do_not_specialize=["num_pairs"])
def _prepare_kernel(
    ids,
    lists,
    x,
    arranged,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS_BLOCK: tl.constexpr,
):
    """Programs up to NUM_EXPERTS list an expert's pairs, those after them arrange a row of x each: WORDS words of two
    numbers, as WIDTH; those past the end are 0."""
    program = tl.program_id(0)
    if program < NUM_EXPERTS:
        list_kernel(ids, lists, num_pairs, TOP_K, BLOCK, False)
    else:
        row = (program - NUM_EXPERTS).to(tl.int64)
        for first in range(0, WIDTH, WORDS_BLOCK):
            place = first + tl.arange(0, WORDS_BLOCK)
            # of a half unit, 32 words: lane q has words 8 q ... (packing.py), step by step all four have two
            word = place // 32 * 32 + place % 4 * 8 + place % 32 // 4
            value = tl.load(x + row * WORDS + word, word < WORDS, other=0)
            tl.store(arranged + row * WIDTH + place, value, place < WIDTH)


@gluon.jit
def _copy_rows(x, shared, sources, unit, slot, SIZES: gl.constexpr, UNITS: gl.constexpr):
    """A unit of the rows on its way to a slot; past the last one nothing."""
    for i in gl.static_range(len(SIZES)):
        offsets, mask = sources[2 + i]
        # added to the offsets, of 32 bits, not to addresses: those would be twice as many registers in the loop
        rows = x + (offsets + unit * 128)
        async_copy.async_copy_global_to_shared(shared[2 + i].index(slot), rows, mask & (unit < UNITS))
    async_copy.commit_group()


@gluon.jit
def _own_list(lists, expert, num_rows, NUM_EXPERTS: gl.constexpr):
    """Where an expert's pairs stand, behind their number; of the shared one, which has none, another's."""
    return lists + gl.minimum(expert, NUM_EXPERTS - 1).to(gl.int64) * (num_rows + 1)


@gluon.jit
def _pairs_of(
    lists,
    expert,
    first,
    count,
    num_rows,
    NUM_EXPERTS: gl.constexpr,
    TOP_K: gl.constexpr,
    SIZE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Which (row, rank) the expert's rows first ... are, as row * (k + 1) + rank, and whether they are there."""
    index = first + gl.arange(0, SIZE, LAYOUT)
    there = index < count
    routed = expert < NUM_EXPERTS
    pair = gl.load(_own_list(lists, expert, num_rows, NUM_EXPERTS) + 1 + index, mask=there & routed, other=0)
    return gl.where(routed, pair, index * (TOP_K + 1) + TOP_K), there


@gluon.jit
def _scaled(total, number, tile, DIVIDES: gl.constexpr):
    factor = gl.load(number + tile)
    return total * (256.0 / factor if DIVIDES else 256.0 * factor)[:, None]


@gluon.jit
def _tile(first, place, NUM_TILES: gl.constexpr, DOWN: gl.constexpr):
    """The tile at a place of the program's eight: of down in turn; gate's, which alternate with up's, before up's. Past
    the end the last one, whose products are not stored."""
    tile = first + (place if DOWN else place % 4 * 2 + place // 4)
    return gl.minimum(tile, NUM_TILES - 1)


@gluon.jit
def _products(
    data,
    x,
    lists,
    expert,
    first,
    count,
    num_rows,
    SIZES: gl.constexpr,
    NUM_EXPERTS: gl.constexpr,
    NUM_TILES: gl.constexpr,
    UNITS: gl.constexpr,
    TOP_K: gl.constexpr,
    DOWN: gl.constexpr,
    ROWS_AHEAD: gl.constexpr,
    GROUP: gl.constexpr,
):
    """fp32 [64, SIZES[i]] twice: the first and the second four tiles by the expert's rows first ..., SIZES[0] of them,
    then SIZES[1]. While a unit is multiplied, TILES_AHEAD further ones of the tiles and ROWS_AHEAD of the rows are on
    their way."""
    gl.static_assert(ROWS_AHEAD < TILES_AHEAD)
    tile_slots: gl.constexpr = TILES_AHEAD + 1
    # the products of the unit before may still read its rows
    row_slots: gl.constexpr = ROWS_AHEAD + 2
    shared = (
        gl.allocate_shared_memory(gl.int32, [tile_slots, 8, 256], PACKED_SHARED),
        gl.allocate_shared_memory(gl.int32, [tile_slots, 8, 32], PACKED_SHARED),
    )
    data += expert.to(gl.int64) * (NUM_TILES * UNITS * UNIT_WORDS)
    first_tile = gl.program_id(0) * 8
    tile = _tile(first_tile, gl.arange(0, 8, gl.SliceLayout(1, CODES)), NUM_TILES, DOWN)
    codes = data + (tile * (UNITS * UNIT_WORDS))[:, None] + gl.arange(0, 256, gl.SliceLayout(0, CODES))[None, :]
    tile = _tile(first_tile, gl.arange(0, 8, gl.SliceLayout(1, SCALES_IN)), NUM_TILES, DOWN)
    scales = (
        data + (tile * (UNITS * UNIT_WORDS) + 256)[:, None] + gl.arange(0, 32, gl.SliceLayout(0, SCALES_IN))[None, :]
    )
    sources = (codes, scales)
    begin = first
    low = ()
    high = ()
    for i in gl.static_range(len(SIZES)):
        shared = shared + (gl.allocate_shared_memory(gl.bfloat16, [row_slots, SIZES[i], 128], ROWS_SHARED),)
        pair, there = _pairs_of(
            lists, expert, begin, count, num_rows, NUM_EXPERTS, TOP_K, SIZES[i], gl.SliceLayout(1, _ROWS_IN)
        )
        row = pair if DOWN else pair // (TOP_K + 1)
        offsets = (row * (UNITS * 128))[:, None] + gl.arange(0, 128, gl.SliceLayout(0, _ROWS_IN))[None, :]
        sources = sources + ((offsets, there[:, None]),)
        begin += SIZES[i]
        zeros = gl.zeros([64, SIZES[i]], gl.float32, sums(SIZES[i], GROUP))
        low = low + (zeros,)
        high = high + (warpgroup_mma_init(zeros) if GROUP else zeros,)
    # as if units before the first one had been multiplied: what is waited for is counted by copies
    for unit in gl.static_range(-TILES_AHEAD, 0):
        if unit + ROWS_AHEAD >= 0:
            _copy_rows(x, shared, sources, unit + ROWS_AHEAD, unit + ROWS_AHEAD, SIZES, UNITS)
        copy_tiles(shared, sources, unit + TILES_AHEAD, unit + TILES_AHEAD, UNITS)
    layout: gl.constexpr = operand(0, SIZES[0], GROUP)
    for unit in range(UNITS):
        # of copies later than this unit's rows: tiles of the units after ROWS_AHEAD ones, and of those the rows. What
        # the other threads copied is there too: the compiler puts a barrier behind this wait
        async_copy.wait_group(2 * ROWS_AHEAD - 1)
        if GROUP:
            fence_async_shared()
        packed = shared[0].index(unit % tile_slots)
        packed_scales = shared[1].index(unit % tile_slots)
        low_codes = packed.slice(0, 4).load(CODES)
        low_scales = packed_scales.slice(0, 4).load(SCALES)
        high_codes = packed.slice(4, 4).load(CODES)
        high_scales = packed_scales.slice(4, 4).load(SCALES)
        # to slots that nobody reads any more: all threads have read the tiles of the unit before, and have waited for
        # the products of the one before that
        _copy_rows(x, shared, sources, unit + ROWS_AHEAD, (unit + ROWS_AHEAD) % row_slots, SIZES, UNITS)
        copy_tiles(shared, sources, unit + TILES_AHEAD, (unit + TILES_AHEAD) % tile_slots, UNITS)
        rows = ()
        for i in gl.static_range(len(SIZES)):
            rows = rows + (shared[2 + i].index(unit % row_slots),)
        weights = fragments(low_codes, low_scales, layout)
        in_order(True)
        high = waited(0, high, GROUP)
        low = multiply(rows, weights, low, GROUP)
        in_order(True)
        weights = fragments(high_codes, high_scales, layout)
        high = multiply(rows, weights, high, GROUP)
        low = waited(len(SIZES), low, GROUP)
        in_order(True)
    return low, waited(0, high, GROUP)


@gluon.jit
def _store(values, target, pair, there, column, STRIDE: gl.constexpr, ARRANGED: gl.constexpr):
    """values fp32 [64, rows] to columns `column` ... of out's rows `pair`; ARRANGED: in the fragments' order."""
    rows: gl.constexpr = values.shape[1]
    values = values.to(target.dtype.element_ty)
    if ARRANGED:
        values = gl.permute(gl.reshape(values, [4, 8, 2, rows]), [3, 1, 0, 2])
        values = gl.convert_layout(gl.reshape(values, [rows, 64]), OUT)
    else:
        # the layout is one that is stored transposed, in one go; that of a conversion takes several
        values = gl.allocate_shared_memory(values.dtype, [rows, 64], ROWS_SHARED, gl.permute(values, [1, 0])).load(OUT)
    place = column + gl.arange(0, 64, gl.SliceLayout(0, OUT))
    mask = there[:, None]
    if STRIDE % 64 != 0:
        mask = mask & (place < STRIDE)[None, :]
    gl.store(target + pair.to(gl.int64)[:, None] * STRIDE + place[None, :], values, mask=mask)


@gluon.jit
def _some_rows(
    data,
    number,
    x,
    lists,
    out,
    expert,
    first,
    count,
    num_rows,
    SIZES: gl.constexpr,
    NUM_EXPERTS: gl.constexpr,
    NUM_TILES: gl.constexpr,
    UNITS: gl.constexpr,
    N: gl.constexpr,
    STRIDE: gl.constexpr,
    TOP_K: gl.constexpr,
    DOWN: gl.constexpr,
    DIVIDES: gl.constexpr,
    ROWS_AHEAD: gl.constexpr,
    GROUP: gl.constexpr,
):
    """The program's columns of the expert's rows first ..., as many as SIZES are together."""
    low, high = _products(
        data,
        x,
        lists,
        expert,
        first,
        count,
        num_rows,
        SIZES,
        NUM_EXPERTS,
        NUM_TILES,
        UNITS,
        TOP_K,
        DOWN,
        ROWS_AHEAD,
        GROUP,
    )
    first_tile = gl.program_id(0) * 8
    number += expert * NUM_TILES
    begin = first
    for i in gl.static_range(len(SIZES)):
        feature = gl.arange(0, 64, gl.SliceLayout(1, sums(SIZES[i], GROUP)))
        tile = _tile(first_tile, feature // 16, NUM_TILES, DOWN)
        other = _tile(first_tile, feature // 16 + 4, NUM_TILES, DOWN)
        one = _scaled(low[i], number, tile, DIVIDES)
        two = _scaled(high[i], number, other, DIVIDES)
        pair, there = _pairs_of(
            lists, expert, begin, count, num_rows, NUM_EXPERTS, TOP_K, SIZES[i], gl.SliceLayout(1, OUT)
        )
        begin += SIZES[i]
        if DOWN:
            _store(one, out, pair, there, gl.program_id(0) * 128, STRIDE, False)
            _store(two, out, pair, there, gl.program_id(0) * 128 + 64, STRIDE, False)
        else:
            value = silu(one) * two
            if N % 64 != 0:
                # what pads the units that down reads
                value = gl.where((gl.program_id(0) * 64 + feature < N)[:, None], value, 0.0)
            _store(value, out, pair, there, gl.program_id(0) * 64, STRIDE, True)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _further(lists, number, num_rows, NUM_EXPERTS: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr):
    """The number-th, in order of experts, of all ROWS rows that are not an expert's first: its expert and its first
    row; past the last one an expert's end."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    expert = gl.arange(0, BLOCK, layout)
    count = gl.load(lists + expert.to(gl.int64) * (num_rows + 1), mask=expert < NUM_EXPERTS, other=0)
    groups = gl.maximum((count + (ROWS - 1)) // ROWS - 1, 0)
    before = gl.associative_scan(groups, 0, _add) - groups
    # the last that has any and begins no later
    own = gl.max(gl.where((before <= number) & (groups > 0), expert, 0), 0)
    begin = gl.sum(gl.where(expert == own, before, 0), 0)
    return own, (number - begin + 1) * ROWS


@gluon.jit
def _of_a_warp(number):
    """The same number, known to the assembler as one of all lanes: what stands in a branch that it decides may then use
    registers that a warp has once, as descriptors of shared memory want to."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit(do_not_specialize=["num_rows"])
def _experts_kernel(
    data,
    number,
    x,
    lists,
    out,
    num_rows,
    NUM_EXPERTS: gl.constexpr,
    NUM_TILES: gl.constexpr,
    UNITS: gl.constexpr,
    N: gl.constexpr,
    STRIDE: gl.constexpr,
    TOP_K: gl.constexpr,
    DOWN: gl.constexpr,
    DIVIDES: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Program (i, p): tiles 8 i ... of an expert by ROWS of its rows. The first p are the shared expert's; then come
    the first rows of all others, then what further rows they have.

    x is [row, UNITS * 128] for gate_up, [row, rank, UNITS * 128] for down, arranged; out [row, rank, STRIDE], of
    gate_up arranged too.
    """
    shared_programs = (num_rows + ROWS - 1) // ROWS
    p = gl.program_id(1) - shared_programs
    is_shared = p < 0
    expert = p
    first = p * 0
    if is_shared:
        expert = p * 0 + NUM_EXPERTS
        first = (p + shared_programs) * ROWS
    elif p >= NUM_EXPERTS:
        expert, first = _further(lists, p - NUM_EXPERTS, num_rows, NUM_EXPERTS, BLOCK, ROWS)
    count = gl.where(is_shared, num_rows, gl.load(_own_list(lists, expert, num_rows, NUM_EXPERTS)))
    left = _of_a_warp(count - first)
    if left <= 0:
        return
    if ROWS <= 32 or left <= 32:
        _some_rows(
            data, number, x, lists, out, expert, first, count, num_rows, (32,), NUM_EXPERTS, NUM_TILES, UNITS, N,
            STRIDE, TOP_K, DOWN, DIVIDES, 2, GROUP,
        )  # fmt: skip
    elif ROWS <= 64 or left <= 64:
        _some_rows(
            data, number, x, lists, out, expert, first, count, num_rows, (64,), NUM_EXPERTS, NUM_TILES, UNITS, N,
            STRIDE, TOP_K, DOWN, DIVIDES, 2, GROUP,
        )  # fmt: skip
    else:
        _some_rows(
            data, number, x, lists, out, expert, first, count, num_rows, (64, 32), NUM_EXPERTS, NUM_TILES, UNITS, N,
            STRIDE, TOP_K, DOWN, DIVIDES, 1, GROUP,
        )  # fmt: skip


def experts(
    packed: GroupedExperts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, shared_gate: torch.Tensor
) -> torch.Tensor:
    """fp32 [T, H] for prefill: each row's experts and the shared one, weighted, summed in rank order.

    x bf16 [T, H], contiguous; weights fp32 [T, k]; ids int32 [T, k], all different within a row; shared_gate fp32 [T].
    Only for experts that `takes` holds.
    """
    total = torch.zeros((len(ids), packed.hidden), dtype=torch.float32, device=x.device)
    combine(parts(packed, x, ids), weights, shared_gate, total)
    return total


def parts(packed: GroupedExperts, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """bf16 [T, k + 1, H]: what each row's experts give, in rank order, then the shared one; as for `experts`."""
    (group,) = packed.groups
    assert x.is_contiguous() and ids.is_contiguous() and ids.dtype == torch.int32, (x.stride(), ids.dtype)
    assert x.dtype == torch.bfloat16, x.dtype
    lists, arranged = prepare(packed, x, ids)
    inner = products(packed, group.gate_up, arranged, lists, group.width, down=False)
    return products(packed, group.down, inner, lists, packed.hidden, down=True)


def prepare(packed: GroupedExperts, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of each expert, int32 [E, T + 1], after their number; and x arranged, bf16 [T, units * 128]."""
    num_rows, top_k = ids.shape
    lists = torch.empty((packed.num_experts, num_rows + 1), dtype=torch.int32, device=x.device)
    width = packed.groups[0].gate_up.num_units * UNIT
    arranged = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    _prepare_kernel[(packed.num_experts + num_rows,)](
        ids,
        lists,
        x.view(torch.int32),
        arranged.view(torch.int32),
        ids.numel(),
        NUM_EXPERTS=packed.num_experts,
        TOP_K=top_k,
        WORDS=x.shape[1] // 2,
        WIDTH=width // 2,
        BLOCK=PAIRS,
        WORDS_BLOCK=1024,
    )
    return lists, arranged


def parts_of_few(
    packed: GroupedExperts,
    x: torch.Tensor,
    logits: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate: torch.Tensor,
) -> torch.Tensor:
    """The same by the kernels of a round, of any format: for linear.MAX_ROWS rows at most. They choose from the
    router's logits, and write weights, ids and gate.

    They multiply 8 or 16 of an expert's rows at a time, and are the faster ones while an expert has no more.
    """
    scratch = ExpertScratch.make(len(ids), packed.top_k, packed.num_experts, packed.width, packed.hidden, x.device)
    return packed.rows(x, logits, weights, ids, gate, scratch)


def products(
    packed: GroupedExperts, part: Packed, x: torch.Tensor, lists: torch.Tensor, columns: int, down: bool
) -> torch.Tensor:
    """bf16 [T, k + 1, columns]: each expert's product with its rows of x, arranged: [T, units * 128] for gate_up, with
    SwiGLU, [T, k + 1, units * 128] for down. gate_up's is arranged too, and filled up with zeros to whole units."""
    num_rows, tiles = lists.shape[1] - 1, part.num_tiles // (packed.num_experts + 1)
    width = columns if down else -(-columns // UNIT) * UNIT
    out = torch.empty((num_rows, packed.top_k + 1, width), dtype=x.dtype, device=x.device)
    assert max(x.numel(), lists.numel()) < 1 << 31, (x.shape, lists.shape)
    group = has_group_products(x.device)
    few = num_rows * packed.top_k <= 24 * packed.num_experts or not group
    rows = FEW_ROWS if few else ROWS
    # the shared expert's, each other's first rows, and at most so many times further ones
    programs = -(-num_rows // rows) + packed.num_experts + num_rows * packed.top_k // rows
    # of gate_up also those that only fill up
    blocks = -(-tiles // TILES) if down else width // (TILES // 2 * TILE)
    _experts_kernel[(blocks, programs)](
        part.data.view(torch.int32),
        part.number,
        x,
        lists,
        out,
        num_rows,
        NUM_EXPERTS=packed.num_experts,
        NUM_TILES=tiles,
        UNITS=part.num_units,
        N=columns,
        STRIDE=width,
        TOP_K=packed.top_k,
        DOWN=down,
        DIVIDES=part.divides,
        ROWS=rows,
        BLOCK=triton.next_power_of_2(packed.num_experts),
        GROUP=group,
        num_warps=4,
        maxnreg=FEW_REGISTERS if few else None,
    )
    return out
