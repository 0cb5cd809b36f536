"""Packed weights as plain bf16 rows, for prefill: a library multiplies better than 16 rows' kernels can.

w = bf16(value * number), as `dequantize(torch.bfloat16)` rounds it, or value / number. Reads the packed bytes, writes 2
a weight, and is bound by that: 2.6 bytes for each NVFP4 weight, at 3.8 TB/s on an H200. Never resident: into scratch. A
quotient costs what six products cost, not a division; pairs of lanes exchange what they hold, so that a store writes
whole sectors of 32 bytes.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pilotfish.kernels.cuda import packing
from pilotfish.kernels.cuda.mma import FORMATS, NVFP4, NVFP4_RESCALE, load_unit, unit_words, unpack_half
from pilotfish.kernels.cuda.packing import TILE, Packed

WARPS = 4


@gluon.jit
def _as_float(bits):
    return gl.cast(bits, gl.float32, bitcast=True)


@gluon.jit
def _quotient(value, number, reciprocal):
    """value / number to the nearest, given 1 / number to the nearest: two corrections by what the product is too much
    (so, and not by what it lacks, a zero keeps its sign)."""
    found = value * reciprocal
    found = gl.fma(gl.fma(found, number, -value), -reciprocal, found)
    return gl.fma(gl.fma(found, number, -value), -reciprocal, found)


@gluon.jit
def _from_neighbour(words):
    """What the lane beside holds, of each pair of lanes."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;", "=r,r", [words], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _rounded(pairs, number, reciprocal, DIVIDES: gl.constexpr):
    """Pairs of bf16 with the number multiplied in, or divided by it."""
    low = _as_float(pairs << 16)
    high = _as_float(pairs & -65536)
    if DIVIDES:
        low = _quotient(low, number, reciprocal)
        high = _quotient(high, number, reciprocal)
    else:
        low = low * number
        high = high * number
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,r,r", [high, low], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _expand_kernel(
    data,
    block_scale,
    number,
    out,
    K: gl.constexpr,
    UNITS: gl.constexpr,
    GROUP: gl.constexpr,
    FORMAT: gl.constexpr,
    BLOCKS: gl.constexpr,
    DIVIDES: gl.constexpr,
    ROW_NUMBERS: gl.constexpr,
    SPAN: gl.constexpr,
):
    """A program has some units of one tile, a unit a warp; programs that follow each other write a tile's rows from
    their beginning to their end. With SPAN 2, of each GROUP tiles gate's rows come before up's."""
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0])
    words: gl.constexpr = unit_words(FORMAT)
    blocks: gl.constexpr = (UNITS + warps - 1) // warps
    tile = gl.program_id(0) // blocks
    block = gl.program_id(0) % blocks
    thread = gl.arange(0, warps * 32, gl.SliceLayout(1, layout))
    lane = thread % 32
    unit = block * warps + thread // 32
    # past the last unit: that one once more, not stored
    source = gl.minimum(unit, UNITS - 1) * words
    word = gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :]
    base = data + tile.to(gl.int64) * (UNITS * words)
    registers = load_unit(base + ((source + lane * 4)[:, None] + word), base + (source + lane + 256), FORMAT)
    if SPAN == 2:
        local = tile % GROUP
        target_tile = tile - local + local // 2 + local % 2 * (GROUP // 2)
    else:
        target_tile = tile
    even = (lane % 2 == 0)[:, None]
    for half in gl.static_range(2):
        row = lane // 4 + half * 8
        if ROW_NUMBERS:
            factor = gl.load(number + tile * 16 + row)[:, None]
        else:
            factor = gl.load(number + (tile + row * 0))[:, None]
        if BLOCKS:
            factor = gl.load(block_scale + (tile * UNITS + gl.minimum(unit, UNITS - 1)))[:, None]
        if FORMAT == NVFP4:
            # a power of two, so that it may stand in the one or in the other
            factor = factor / NVFP4_RESCALE if DIVIDES else factor * NVFP4_RESCALE
        reciprocal = gl.div_rn(factor * 0 + 1.0, factor) if DIVIDES else factor
        target = out + (target_tile * 16 + row).to(gl.int64)[:, None] * (K // 2)
        pairs = unpack_half(registers, half, FORMAT)
        for t in gl.static_range(2):
            # of a lane 8 words in a row, of which a store writes 4: the first 8 of two lanes, then the others
            first = _rounded(pairs[2 * t], factor, reciprocal, DIVIDES)
            second = _rounded(pairs[2 * t + 1], factor, reciprocal, DIVIDES)
            received = _from_neighbour(gl.where(even, second, first))
            column = (unit * 64 + t * 32 + lane % 4 // 2 * 16 + lane % 2 * 4)[:, None] + word
            gl.store(target + column, gl.where(even, first, received), mask=column < K // 2)
            gl.store(target + (column + 8), gl.where(even, received, second), mask=column + 8 < K // 2)


def expand(
    part: Packed, tiles: slice, out: torch.Tensor, group: int = 0, on_device: bool | None = None
) -> torch.Tensor:
    """bf16 [tiles * 16, K] in `out`, which has at least so many numbers; K is `out`'s last axis. Padding rows are 0.

    With group > 0 tiles are gate and up in turn: of each `group` of them gate's rows come first, then up's. on_device:
    by the kernel; if not given, where the weights are on a GPU.
    """
    begin, end, _ = tiles.indices(part.num_tiles)
    whole = (begin, end) == (0, part.num_tiles)
    data, number = (t if whole else t[begin:end] for t in (part.data, part.number))
    scale = part.block_scale if whole or part.block_scale is None else part.block_scale[begin:end]
    width = out.shape[1]
    if not (data.is_cuda if on_device is None else on_device):
        chosen = Packed(part.format, data, part.place[begin:end], number, part.divides, scale)
        values = packing.unpack(chosen, width).to(out.dtype)
        if group:
            values = values.view(-1, group // 2, 2, TILE, width).transpose(1, 2).reshape(-1, width)
        return out.copy_(values)
    assert out.is_contiguous() and out.dtype == torch.bfloat16 and len(out) == (end - begin) * TILE, out.shape
    _expand_kernel[((end - begin) * -(-part.num_units // WARPS),)](
        data.view(torch.int32),
        number if scale is None else scale,
        number,
        out.view(torch.int32),
        K=width,
        UNITS=part.num_units,
        GROUP=max(1, group),
        FORMAT=FORMATS[part.format],
        BLOCKS=scale is not None,
        DIVIDES=part.divides,
        ROW_NUMBERS=number.shape[1] > 1,
        SPAN=2 if group else 1,
        num_warps=WARPS,
    )
    return out
