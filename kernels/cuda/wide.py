"""Products of 17 and more rows by many tiles of NVFP4, on the warp group's instruction: the bits of linear.py's kernel.

A program has 8 tiles of weights and 32 or 64 rows of x, which it copies to shared memory word by word, into the order
of the weights' fragments (group_mma.py). K's shares are added one after the other: each has a sum of its own, then the
shares' sums in order, as the warps of linear.py have them.

Reads the packed weights once for 64 rows. R = rows, N, K.
"""

# what grows in a loop has no type that mypy knows:
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma_init
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
from pilotfish.kernels.cuda.launch_shapes import SM_COUNT
from pilotfish.kernels.cuda.mma import NVFP4, in_order, scaled, silu
from pilotfish.kernels.cuda.packing import Format, Packed

FEW_ROWS, ROWS = 32, 64
FEW_REGISTERS = 168
"""Of a thread, with which three programs are on an SM; without SwiGLU what ends a product would spill."""
ROWS_AHEAD = gl.constexpr(2)
_WORDS_IN = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
_WORDS_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))


def takes(part: Packed, num_rows: int, shares: int) -> bool:
    """Whether the kernel is for this product: NVFP4, of more programs than an H200 has multiprocessors."""
    return (
        part.format is Format.NVFP4
        and num_rows > 16
        and part.number.shape[1] == 1
        and part.num_tiles >= TILES * SM_COUNT
        and part.num_units % shares == 0
        and has_group_products(part.data.device)
    )


@gluon.jit
def _tile(first, place, num_tiles, SPAN: gl.constexpr):
    """The tile at a place of the program's eight: gate's, which alternate with up's, before up's. Past the end the last
    one."""
    return gl.minimum(first + (place if SPAN == 1 else place % 4 * 2 + place // 4), num_tiles - 1)


@gluon.jit
def _copy_rows(x, memory, offsets, there, column, unit, slot, UNITS: gl.constexpr, K: gl.constexpr):
    mask = there & (unit < UNITS)
    if K % 128 != 0:
        mask = mask & (column + unit * 64 < K // 2)
    async_copy.async_copy_global_to_shared(memory.index(slot), x + (offsets + unit * 64), mask)
    async_copy.commit_group()


@gluon.jit
def _store(value, out, place, first_row, num_rows, tile, num_tiles, stride):
    """value fp32 [64, rows], of the tiles `tile`, to the rows first_row ... of out."""
    value = gl.convert_layout(gl.permute(value.to(out.dtype.element_ty), [1, 0]), OUT)
    feature = gl.arange(0, 64, gl.SliceLayout(0, OUT)) % 16
    row = first_row + gl.arange(0, value.shape[0], gl.SliceLayout(1, OUT))
    column = gl.load(place + tile * 2, mask=tile < num_tiles, other=0) + feature
    count = gl.load(place + tile * 2 + 1, mask=tile < num_tiles, other=0)
    there = (feature < count)[None, :] & (row < num_rows)[:, None]
    gl.store(out + (row.to(gl.int64) * stride)[:, None] + column[None, :], value, mask=there)


@gluon.jit(do_not_specialize=["num_rows", "num_tiles"])
def _wide_kernel(
    data,
    place,
    number,
    x,
    out,
    num_rows,
    num_tiles,
    out_stride,
    K: gl.constexpr,
    UNITS: gl.constexpr,
    SHARES: gl.constexpr,
    SPAN: gl.constexpr,
    DIVIDES: gl.constexpr,
    ROWS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Program (j, i): tiles 8 i ..., rows j ROWS ... of x."""
    if PDL:
        gdc_launch_dependents()
    first_tile = gl.program_id(1) * 8
    first_row = gl.program_id(0) * ROWS
    tile_slots: gl.constexpr = TILES_AHEAD + 1
    row_slots: gl.constexpr = ROWS_AHEAD + 2
    shared = (
        gl.allocate_shared_memory(gl.int32, [tile_slots, 8, 256], PACKED_SHARED),
        gl.allocate_shared_memory(gl.int32, [tile_slots, 8, 32], PACKED_SHARED),
    )
    words = gl.allocate_shared_memory(gl.int32, [row_slots, ROWS, 64], _WORDS_SHARED)
    tile = _tile(first_tile, gl.arange(0, 8, gl.SliceLayout(1, CODES)), num_tiles, SPAN).to(gl.int64)
    codes = data + (tile * (UNITS * UNIT_WORDS))[:, None] + gl.arange(0, 256, gl.SliceLayout(0, CODES))[None, :]
    tile = _tile(first_tile, gl.arange(0, 8, gl.SliceLayout(1, SCALES_IN)), num_tiles, SPAN).to(gl.int64)
    scales = (
        data + (tile * (UNITS * UNIT_WORDS) + 256)[:, None] + gl.arange(0, 32, gl.SliceLayout(0, SCALES_IN))[None, :]
    )
    sources = (codes, scales)
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, _WORDS_IN))
    word = gl.arange(0, 64, gl.SliceLayout(0, _WORDS_IN))
    column = (word // 32 * 32 + word % 4 * 8 + word % 32 // 4)[None, :]
    offsets = (row * (K // 2))[:, None] + column
    there = (row < num_rows)[:, None] & (column >= 0)
    for early in gl.static_range(-TILES_AHEAD, 0):
        # the first tiles are asked for before what writes x is done
        if PDL and early == -ROWS_AHEAD:
            gdc_wait()
        if early + ROWS_AHEAD >= 0:
            _copy_rows(x, words, offsets, there, column, early + ROWS_AHEAD, early + ROWS_AHEAD, UNITS, K)
        copy_tiles(shared, sources, early + TILES_AHEAD, early + TILES_AHEAD, UNITS)
    low_total = gl.zeros([64, ROWS], gl.float32, sums(ROWS, True))
    high_total = gl.zeros([64, ROWS], gl.float32, sums(ROWS, True))
    units: gl.constexpr = UNITS // SHARES
    for share in range(SHARES):
        low = (gl.zeros([64, ROWS], gl.float32, sums(ROWS, True)),)
        high = (warpgroup_mma_init(gl.zeros([64, ROWS], gl.float32, sums(ROWS, True))),)
        for step in range(units):
            unit = share * units + step
            # see moe_prompt.py
            async_copy.wait_group(2 * ROWS_AHEAD - 1)
            fence_async_shared()
            packed = shared[0].index(unit % tile_slots)
            packed_scales = shared[1].index(unit % tile_slots)
            low_codes = packed.slice(0, 4).load(CODES)
            low_scales = packed_scales.slice(0, 4).load(SCALES)
            high_codes = packed.slice(4, 4).load(CODES)
            high_scales = packed_scales.slice(4, 4).load(SCALES)
            after = unit + ROWS_AHEAD
            _copy_rows(x, words, offsets, there, column, after, after % row_slots, UNITS, K)
            copy_tiles(shared, sources, unit + TILES_AHEAD, (unit + TILES_AHEAD) % tile_slots, UNITS)
            rows = (words.index(unit % row_slots)._reinterpret(gl.bfloat16, [ROWS, 128], ROWS_SHARED),)
            weights = fragments(low_codes, low_scales, operand(0, ROWS, True))
            in_order(True)
            high = waited(0, high, True)
            low = multiply(rows, weights, low, True)
            in_order(True)
            weights = fragments(high_codes, high_scales, operand(0, ROWS, True))
            high = multiply(rows, weights, high, True)
            low = waited(1, low, True)
            in_order(True)
        low_total += low[0]
        high_total += waited(0, high, True)[0]
    feature = gl.arange(0, 64, gl.SliceLayout(1, sums(ROWS, True)))
    low_factor = gl.load(number + _tile(first_tile, feature // 16, num_tiles, SPAN))[:, None]
    high_factor = gl.load(number + _tile(first_tile, feature // 16 + 4, num_tiles, SPAN))[:, None]
    one = scaled(low_total, low_factor, NVFP4, DIVIDES)
    two = scaled(high_total, high_factor, NVFP4, DIVIDES)
    place_of = gl.arange(0, 64, gl.SliceLayout(0, OUT)) // 16
    tile = first_tile + (place_of if SPAN == 1 else place_of * 2)
    if SPAN == 1:
        _store(one, out, place, first_row, num_rows, tile, num_tiles, out_stride)
        _store(two, out, place, first_row, num_rows, tile + 4, num_tiles, out_stride)
    else:
        _store(silu(one) * two, out, place, first_row, num_rows, tile, num_tiles, out_stride)


def launch(part: Packed, x: torch.Tensor, out: torch.Tensor, shares: int, swiglu: bool, pdl: bool) -> None:
    """As linear.launch: out [R, N] of x bf16 [>= R, K]."""
    rows = FEW_ROWS if len(out) <= FEW_ROWS else ROWS
    _wide_kernel[(-(-len(out) // rows), -(-part.num_tiles // TILES))](
        part.data.view(torch.int32),
        part.place,
        part.number,
        x.view(torch.int32),
        out,
        len(out),
        part.num_tiles,
        out.stride(0),
        K=x.shape[1],
        UNITS=part.num_units,
        SHARES=shares,
        SPAN=2 if swiglu else 1,
        DIVIDES=part.divides,
        ROWS=rows,
        PDL=pdl,
        num_warps=4,
        enable_fp_fusion=False,
        maxnreg=FEW_REGISTERS if swiglu and rows == FEW_ROWS else None,
        launch_pdl=pdl,
    )
