"""Experts over a prompt from their packed NVFP4 weights: no matrix is expanded in memory.

Four launches: the rows of each expert, gate_up with SwiGLU, down, combine (moe.py). A program of the middle two takes
COLUMNS output columns of an expert and up to ROWS of its rows at a time: weights are made bf16 in registers and
multiplied by the warp group's instruction, the rows of x from shared memory; the tensor's number is multiplied in at
the end. Results go to their own (row, rank), so nothing depends on the order of programs. The shared expert is one
more, chosen by all rows.

Reads each expert's weights once for ROWS of its rows, 4.5 bits a weight: expanding them first moves ten times that.
T = prompt rows, E = experts, k = experts a token, H = hidden, I = expert width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pilotfish.kernels.cuda.mma import nvfp4_word
from pilotfish.kernels.cuda.moe import ExpertScratch, GroupedExperts, combine
from pilotfish.kernels.cuda.moe_kernels import list_kernel
from pilotfish.kernels.cuda.packing import Format, Packed

ROWS, FEW_ROWS = 64, 32
"""Rows of a program at a time; FEW_ROWS where an expert has 24 or less: then three programs are on an SM, not two."""
FEW_REGISTERS = 168
"""Registers of a thread with which three programs of 128 threads fit. With 64 rows the loop would spill, held to it."""
COLUMNS = 64
"""Columns of gate and of up each; of down twice as many."""
SPLIT = 4
"""Programs that share the rows of an expert, or two where one would do for most: one that many rows chose would else be
waited for. No bit depends on it."""
PAIRS = 4096
"""Looked through at a time for an expert's rows."""
STAGES = 3
UNIT_WORDS = tl.constexpr(288)

_ASM = tl.constexpr(
    "\n".join(["{", ".reg .b32 t, u, z;", "mov.b32 z, 0x80008000;", *nvfp4_word("$4", [0, 1, 2, 3], "$5"), "}"])
)
"""mma.py's unpacking for one word $4 of 8 codes and its scale times 2^118, twice in $5: four pairs of bf16."""


def takes(packed: GroupedExperts) -> bool:
    """Whether the kernels hold these experts: all NVFP4, the shared one of the others' shape."""
    parts = [part for group in packed.groups for part in (group.gate_up, group.down)]
    return len(packed.groups) == 1 and all(part.format is Format.NVFP4 for part in parts)


@triton.jit
def _row_of(i):
    """Which row is loaded as the i-th: so that warps load, unpack and multiply the same rows. A warp loads 8 rows of
    each 32, and multiplies 16 of each 64."""
    return i // 64 * 64 + i // 8 % 4 * 16 + i // 32 % 2 * 8 + i % 8


@triton.jit
def _in_order(values):
    """[rows, 128] of rows as they are loaded."""
    parts = values.reshape(values.shape[0] // 64, 2, 4, 8, 128)
    return parts.permute(0, 2, 1, 3, 4).reshape(values.shape[0], 128)


@triton.jit
def _pairs(words, scales):
    """bf16 [rows, 128], times 2^-8: of words [rows, 4, 4] of codes, scales [rows, 4, 4] their stored bytes."""
    p0, p1, p2, p3 = tl.inline_asm_elementwise(
        _ASM,
        "=&r,=&r,=&r,=&r,r,r",
        [words, scales * 0x00100010 + 0x70007000],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    # in this order a thread's registers lie as they are stored; a permutation afterwards Triton 3.6 stores one by one
    pairs = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    halves = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).reshape(words.shape[0], 128)
    # after the reshape: Triton 3.6 refuses a product whose operand is one
    return _in_order(halves).to(tl.bfloat16, bitcast=True)


@triton.jit
def _weights(base, tile, row, unit, UNITS: tl.constexpr):
    """A unit of rows `row` of tiles `tile`: a row's words as they lie, lane by lane (packing.py)."""
    start = (tile * UNITS + unit) * UNIT_WORDS
    # rows follow each other, 64 bytes each: a warp's load is 512 in one piece
    words = tl.load(base + ((start + row * 16)[:, None] + tl.arange(0, 16)[None, :])).reshape(row.shape[0], 4, 4)
    lane = (row % 8 * 4)[:, None] + tl.arange(0, 4)[None, :]
    word = tl.arange(0, 4)[None, None, :]
    # a lane's four bytes: of its two rows, of each the two halves
    scales = tl.load(base + (start[:, None] + 256 + lane)) >> (row // 8 * 16)[:, None]
    return _pairs(words, scales[:, :, None] >> word // 2 * 8 & 0xFF)


@triton.jit
def _scaled(total, number, tile, DIVIDES: tl.constexpr):
    factor = tl.load(number + tile)
    return total * (256.0 / factor if DIVIDES else 256.0 * factor)[:, None]


@triton.jit(do_not_specialize=["num_rows", "split"])
def _experts_kernel(
    data,
    number,
    x,
    lists,
    out,
    num_rows,
    split,
    NUM_EXPERTS: tl.constexpr,
    TILES: tl.constexpr,
    UNITS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    DOWN: tl.constexpr,
    DIVIDES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (i, p): columns i COLUMNS ... of an expert, of its rows each split-th ROWS. The programs after those of
    all experts are the shared one's, one for ROWS rows each.

    x is [row, K] for gate_up, [row, rank, K] for down; out [row, rank, N].
    """
    p = tl.program_id(1)
    expert = tl.minimum(p // split, NUM_EXPERTS)
    is_shared = expert == NUM_EXPERTS
    own_list = lists + tl.minimum(expert, NUM_EXPERTS - 1).to(tl.int64) * (num_rows + 1)
    count = tl.where(is_shared, num_rows, tl.load(own_list))
    begin = tl.where(is_shared, p - NUM_EXPERTS * split, p % split) * ROWS
    step = tl.where(is_shared, num_rows, split * ROWS)
    feature = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    loaded = tl.program_id(0) * COLUMNS + _row_of(tl.arange(0, COLUMNS))
    row = loaded % 16
    base = data + expert.to(tl.int64) * (TILES * UNITS * UNIT_WORDS)
    number += expert * TILES
    span: tl.constexpr = 1 if DOWN else 2
    # past the end: the last tiles once more, not stored
    tile = tl.minimum(feature // 16 * span, TILES - span)
    loaded_tile = tl.minimum(loaded // 16 * span, TILES - span)
    # the order of the words in `_weights`: a lane's 16 columns of the first half, of the second, the next lane's
    k = tl.arange(0, 128)
    column = k // 32 * 16 + k // 16 % 2 * 64 + k % 16
    for first in range(begin, count, step):
        index = first + tl.arange(0, ROWS)
        there = index < count
        pair = tl.load(own_list + 1 + index, there & (is_shared == 0), other=0)
        pair = tl.where(is_shared, index * (TOP_K + 1) + TOP_K, pair).to(tl.int64)
        source = x + (pair if DOWN else pair // (TOP_K + 1))[:, None] * K
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
        up_total = tl.zeros((COLUMNS, ROWS), tl.float32)
        for unit in tl.range(0, UNITS, num_stages=STAGES):
            mask = there[:, None] & (unit * 128 + column < K)[None, :]
            values = tl.load(source + (unit * 128 + column)[None, :], mask, other=0.0)
            total = tl.dot(_weights(base, loaded_tile, row, unit, UNITS), values.T, total)
            if not DOWN:
                up_total = tl.dot(_weights(base, loaded_tile + 1, row, unit, UNITS), values.T, up_total)
        result = _scaled(total, number, tile, DIVIDES)
        if not DOWN:
            result = result / (1.0 + tl.exp(-result)) * _scaled(up_total, number, tile + 1, DIVIDES)
        target = out + pair[:, None] * N + feature[None, :]
        tl.store(target, result.to(out.dtype.element_ty).T, there[:, None] & (feature < N)[None, :])


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
    """x's dtype [T, k + 1, H]: what each row's experts give, in rank order, then the shared one; as for `experts`."""
    num_rows, top_k = ids.shape
    (group,) = packed.groups
    assert x.is_contiguous() and ids.is_contiguous() and ids.dtype == torch.int32, (x.stride(), ids.dtype)
    lists = torch.empty((packed.num_experts, num_rows + 1), dtype=torch.int32, device=x.device)
    list_kernel[(packed.num_experts,)](ids, lists, ids.numel(), TOP_K=top_k, BLOCK=PAIRS, PDL=False)
    inner = torch.empty((num_rows, top_k + 1, group.width), dtype=x.dtype, device=x.device)
    out = torch.empty((num_rows, top_k + 1, packed.hidden), dtype=x.dtype, device=x.device)
    _launch(packed, group.gate_up, x, lists, inner, down=False)
    _launch(packed, group.down, inner, lists, out, down=True)
    return out


def parts_of_few(packed: GroupedExperts, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The same by the kernels of a round, of any format: for linear.MAX_ROWS rows at most.

    They multiply 8 or 16 of an expert's rows at a time, and are the faster ones while an expert has no more.
    """
    scratch = ExpertScratch.make(len(ids), packed.top_k, packed.num_experts, packed.width, packed.hidden, x.device)
    return packed.rows(x, ids, scratch)


def _launch(
    packed: GroupedExperts, part: Packed, x: torch.Tensor, lists: torch.Tensor, out: torch.Tensor, down: bool
) -> None:
    num_rows, tiles = lists.shape[1] - 1, part.num_tiles // (packed.num_experts + 1)
    columns = 2 * COLUMNS if down else COLUMNS
    few = num_rows * packed.top_k <= 24 * packed.num_experts
    rows = FEW_ROWS if few else ROWS
    split = 2 if num_rows * packed.top_k <= packed.num_experts * rows else SPLIT
    grid = (-(-out.shape[2] // columns), packed.num_experts * split + -(-num_rows // rows))
    _experts_kernel[grid](
        part.data.view(torch.int32),
        part.number,
        x,
        lists,
        out,
        num_rows,
        split,
        NUM_EXPERTS=packed.num_experts,
        TILES=tiles,
        UNITS=part.num_units,
        K=x.shape[-1],
        N=out.shape[2],
        TOP_K=packed.top_k,
        DOWN=down,
        DIVIDES=part.divides,
        ROWS=rows,
        COLUMNS=columns,
        STAGES=STAGES,
        num_warps=4,
        maxnreg=FEW_REGISTERS if few else None,
    )
