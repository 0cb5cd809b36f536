"""Products of up to 256 rows with packed weights, bitwise independent of what the other rows are and how many.

y = x W^T, W a fusion of parts [N_i, K] in NVFP4, FP8 or BF16, in the order of packing.py. K is cut into shares, each
of as many units in a row; a share's units are added one after the other, by mma.m16n8k16 with 8 rows of x as columns,
then the shares' sums: in order, or, of a row-parallel product, whose shares are the segments of kernels/linear.py, by
the tree. The shares follow from the weight's shape alone. One CTA takes 16 rows of W, or a few times 16, and its warps
have a share each, or in turn. How many tiles a CTA has, how many units are in flight and how many rows of x share a
weight's unpacking follow from the number of rows, and change no bit. A few tiles of BF16 beside many of another format
(b and a of GatedDeltaNet) are programs of the same launch, with the bits of one of their own. From 17 rows on wide.py
takes NVFP4 where it is faster, with the same bits.

Reads the packed weights once, x from L1 or L2. The floor is those bytes over the memory's rate. R = rows, N, K.
"""

# Triton compiles no unpacking of tuples, and what grows in a loop has no type that mypy knows:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents

from pilotfish.kernels.cuda import packing, wide
from pilotfish.kernels.cuda.carveout import leave_to_l1
from pilotfish.kernels.cuda.expand import expand
from pilotfish.kernels.cuda.launch_shapes import REGISTERS, SM_COUNT, LaunchShape, beside, choose_shape
from pilotfish.kernels.cuda.mma import (
    BF16,
    FORMATS,
    in_tree,
    load_factor,
    make_ring,
    over_warps,
    products,
    row_of_x,
    scaled,
    silu,
    units_ahead,
)
from pilotfish.kernels.cuda.packing import TILE, UNIT, Format, Packed
from pilotfish.kernels.cuda.scratch import PartialSums
from pilotfish.kernels.cuda.swiglu import silu_product
from pilotfish.kernels.cuda.tiled_rows import AnyRows, TiledRows, at, stored, written
from pilotfish.kernels.cuda.wide import WideShape

MAX_ROWS = 256
MOST_X = 32768
"""Numbers of x, 64 KB, that a program may read again and again through whatever L1 it finds: with few rows of a short K
there was nothing to gain. A round of the 35B-A3B at k = 0 with one sequence took 0.3 % longer when all products and
experts asked for their L1, 2 % when all kernels did (one H200, 2026-12-01)."""
BULK_NUMBERS, BULK_TILES = 1 << 27, 64  # expanded at a time for prefill: 256 MiB, if that is 1024 rows


@gluon.jit
def _tiles(
    data,
    block_scale,
    place,
    number,
    x,
    out,
    partial,
    arrivals,
    first_tile,
    first_row,
    num_tiles,
    num_rows,
    out_stride,
    K: gl.constexpr,
    TILED: gl.constexpr,
    TILED_OUT: gl.constexpr,
    UNITS: gl.constexpr,
    MT: gl.constexpr,
    NT: gl.constexpr,
    FORMAT: gl.constexpr,
    BLOCKS: gl.constexpr,
    DIVIDES: gl.constexpr,
    ROW_NUMBERS: gl.constexpr,
    SPAN: gl.constexpr,
    SHARES: gl.constexpr,
    TREE: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    RING: gl.constexpr,
    X_AHEAD: gl.constexpr,
    QUARTERS: gl.constexpr,
    PINNED: gl.constexpr,
    PDL: gl.constexpr,
):
    """MT tiles of weights, NT 8 rows of x. SPAN 2: tiles are gate and up in turn. SPLIT: programs that share K. TILED,
    TILED_OUT: x and out are in the order of tiled_rows.py."""
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0])
    g = (gl.arange(0, warps * 32, gl.SliceLayout(1, layout)) % 32) // 4
    offsets = ()
    if QUARTERS:
        offsets = (row_of_x(first_row + g, K, TILED),)
    else:
        for n in gl.static_range(NT):
            # past the end: the last row once more, not stored
            offsets = offsets + (row_of_x(gl.minimum(first_row + n * 8 + g, num_rows - 1), K, TILED),)
    tiles = ()
    for m in gl.static_range(MT):
        # past the end: the last tile once more, not stored
        tiles = tiles + (gl.minimum(first_tile + m, num_tiles - 1),)
    # the numbers of the end are asked for at the start: nothing of them depends on x
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    index = gl.arange(0, 128, flat)
    feature = (index % 32) // 4 + (index // 32) % 2 * 8
    factors = ()
    columns = ()
    counts = ()
    for m in gl.static_range(MT):
        factors = factors + (load_factor(number, tiles[m], feature, ROW_NUMBERS),)
        if m % SPAN == 0:
            columns = columns + (gl.load(place + tiles[m] * 2),)
            counts = counts + (gl.load(place + tiles[m] * 2 + 1),)
    units: gl.constexpr = UNITS // SPLIT
    shares: gl.constexpr = SHARES // SPLIT
    first_unit = gl.program_id(2) * units if SPLIT > 1 else 0
    ring = make_ring(STAGES, MT, FORMAT, warps) if RING else 0
    # in quarters one pointer is enough, and the other tiles stand behind the first
    pointed = tiles[:1] if QUARTERS else tiles
    stages = units_ahead(
        ring,
        data,
        block_scale,
        pointed,
        first_unit,
        UNITS,
        units,
        MT,
        FORMAT,
        BLOCKS,
        warps,
        shares,
        STAGES,
        RING,
    )
    totals = products(
        stages,
        data,
        block_scale,
        x,
        offsets,
        pointed,
        first_unit,
        K,
        TILED,
        UNITS,
        units,
        MT,
        NT,
        FORMAT,
        BLOCKS,
        warps,
        shares,
        STAGES,
        RING,
        X_AHEAD,
        QUARTERS,
        PINNED,
        PDL,
    )
    if SPLIT > 1:
        block = gl.program_id(0)
        place_of = (block * SPLIT).to(gl.int64) * num_tiles + first_tile
        own = partial + place_of * (NT * 128) + index
        stride = num_tiles.to(gl.int64) * (NT * 128)
        for m in gl.static_range(MT):
            for n in gl.static_range(NT):
                total = over_warps(totals[m * NT + n :: MT * NT], warps, TREE)
                # past the end there is no room
                there = (index >= 0) & (first_tile + m < num_tiles)
                gl.store(own + gl.program_id(2) * stride + (m * NT + n) * 128, total, mask=there)
        # all that the program's threads have stored is there for who sees its arrival
        tl.debug_barrier()
        counter = arrivals + (block * gl.num_programs(1) + gl.program_id(1))
        if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") != SPLIT - 1:
            return
        gl.store(counter, 0)
    for m in gl.static_range(0, MT, SPAN):
        there = (feature < counts[m // SPAN]) & (first_tile + m < num_tiles)
        for n in gl.static_range(NT):
            own_row = (index % 4) * 2 + index // 64
            row = first_row + n * 8 + own_row
            if SPLIT > 1:
                parts = ()
                for s in gl.static_range(SPLIT):
                    parts = parts + (
                        gl.load(own + s * stride + (m * NT + n) * 128, mask=there, other=0.0, cache_modifier=".cg"),
                    )
                total = in_tree(parts)
            else:
                total = over_warps(totals[m * NT + n :: MT * NT], warps, TREE)
            value = scaled(total, factors[m], FORMAT, DIVIDES)
            if SPAN == 2:
                up = scaled(
                    over_warps(totals[(m + 1) * NT + n :: MT * NT], warps, TREE), factors[m + 1], FORMAT, DIVIDES
                )
                value = silu(value) * up
            if TILED_OUT:
                # row and column begin at multiples of 8 and 16, so what is within them adds up
                first = at(first_row + n * 8, columns[m // SPAN], out_stride, True)
                target = out + first + at(own_row, feature, out_stride, True)
            else:
                target = out + row.to(gl.int64) * out_stride + (columns[m // SPAN] + feature)
            gl.store(target, value.to(out.dtype.element_ty), mask=there & (row < num_rows))


@gluon.jit(do_not_specialize=["num_rows", "num_tiles", "num_plain"])
def _rows_kernel(
    data,
    block_scale,
    place,
    number,
    plain_data,
    plain_place,
    plain_number,
    x,
    out,
    partial,
    arrivals,
    num_rows,
    num_tiles,
    num_plain,
    out_stride,
    K: gl.constexpr,
    TILED: gl.constexpr,
    TILED_OUT: gl.constexpr,
    UNITS: gl.constexpr,
    MT: gl.constexpr,
    NT: gl.constexpr,
    FORMAT: gl.constexpr,
    BLOCKS: gl.constexpr,
    DIVIDES: gl.constexpr,
    ROW_NUMBERS: gl.constexpr,
    SPAN: gl.constexpr,
    SHARES: gl.constexpr,
    TREE: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    RING: gl.constexpr,
    X_AHEAD: gl.constexpr,
    QUARTERS: gl.constexpr,
    PLAIN_SHARES: gl.constexpr,
    PLAIN_STAGES: gl.constexpr,
    PLAIN_AHEAD: gl.constexpr,
    PINNED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Program (j, i, s): tiles i MT ..., rows j NT 8 ... of x, the s-th of SPLIT parts of K; those of the same weights
    follow each other, so that one reads them from memory. Where K has PLAIN_SHARES the first programs, which read the
    most, take a tile of BF16 and 8 of these rows each.

    partial: fp32 [j, s, tiles, NT, 128], what is left for the program that comes last of those that share K; arrivals:
    int32 [j, i], 0 before and after.
    """
    if PDL:
        gdc_launch_dependents()
    program = gl.program_id(1)
    first_row = gl.program_id(0) * (NT * 8)
    if PLAIN_SHARES > 0:
        if program < num_plain * NT:
            row = first_row + program % NT * 8
            _tiles(
                plain_data,
                plain_data,
                plain_place,
                plain_number,
                x,
                out,
                out,
                out,
                program // NT,
                row,
                num_plain,
                num_rows,
                out_stride,
                K,
                TILED,
                TILED_OUT,
                UNITS,
                1,
                1,
                BF16,
                False,
                False,
                False,
                1,
                PLAIN_SHARES,
                False,
                1,
                PLAIN_STAGES,
                False,
                PLAIN_AHEAD,
                False,
                True,
                PDL,
            )
            return
        program -= num_plain * NT
    _tiles(
        data,
        block_scale,
        place,
        number,
        x,
        out,
        partial,
        arrivals,
        program * MT,
        first_row,
        num_tiles,
        num_rows,
        out_stride,
        K,
        TILED,
        TILED_OUT,
        UNITS,
        MT,
        NT,
        FORMAT,
        BLOCKS,
        DIVIDES,
        ROW_NUMBERS,
        SPAN,
        SHARES,
        TREE,
        SPLIT,
        STAGES,
        RING,
        X_AHEAD,
        QUARTERS,
        PINNED,
        PDL,
    )


class PackedLinear:
    """Parts [N_i, K] fused to one product with N = the sum of N_i, on one device.

    parts: bf16 tensors, NvFp4Weight or Fp8Weight; they are not referred to afterwards. With `swiglu` the parts are gate
    and up, of one shape and format, and the product is silu(gate) * up, N = N_0. `segments`: those of a row-parallel
    product (kernels.linear.segments), 0 for another. Raises ValueError for a part that cannot be packed, with the
    part's number.
    """

    def __init__(self, parts: Sequence[Any], swiglu: bool = False, segments: int = 0):
        columns = {int(part.shape[1]) for part in parts}
        if len(columns) != 1:
            raise ValueError(f"want parts of one width, got {sorted(columns)}")
        self.in_features = columns.pop()
        heights = [int(part.shape[0]) for part in parts]
        self.swiglu = swiglu
        self.out_features = heights[0] if swiglu else sum(heights)
        packed = [_pack_part(number, part, 0 if swiglu else sum(heights[:number])) for number, part in enumerate(parts)]
        if swiglu:
            if len(parts) != 2 or heights[0] != heights[1] or packed[0].kind != packed[1].kind:
                got = [(part.format.value, height) for part, height in zip(packed, heights, strict=True)]
                raise ValueError(f"want gate and up of one shape and format, got {got}")
            self.ranges = [packing.interleave(*packed)]
        else:
            self.ranges = [packing.join(list(run)) for _, run in groupby(packed, key=lambda part: part.kind)]
        if self.in_features % 8:
            raise ValueError(f"want a width that is a multiple of 8 (16 bytes of x), got {self.in_features}")
        self.segments = segments
        assert not segments or self.in_features % (UNIT * segments) == 0 or segments == 1, (segments, self.in_features)
        if segments > 1:
            for part in self.ranges:
                PartialSums.of(part.data.device).reserve(part.num_tiles, segments, MAX_ROWS)
        self._runs = _runs(torch.cat([part.place[:: 2 if swiglu else 1] for part in self.ranges]).tolist())
        self.num_bytes = sum(part.num_bytes for part in self.ranges)

    def rows(self, x: AnyRows, out: AnyRows, pdl: bool = False) -> None:
        """Writes out [R, N], bf16 or fp32, R of 1 .. MAX_ROWS. x: bf16 [>= R, K], contiguous or TiledRows; out may be
        TiledRows if it is of gate and up.

        A row's bits depend on that row of x alone. With `pdl` the kernels start while what came before still runs.
        """
        num_rows = len(out)
        assert 1 <= num_rows <= MAX_ROWS and out.shape[1] == self.out_features, out.shape
        assert x.dtype == torch.bfloat16 and len(x) >= num_rows, (x.dtype, x.shape)
        assert x.shape[1] == self.in_features, (x.shape, self.in_features)
        for part, plain in self.launches(num_rows):
            if (wide_shape := self._wide_shape(part, num_rows)) is not None:
                wide.launch(part, x, out, wide_shape, self.swiglu, self.segments, pdl)
            else:
                shape = choose_shape(part, num_rows, self.swiglu, plain, self.segments, isinstance(x, TiledRows))
                launch(part, x, out, shape, self.swiglu, pdl, plain)

    def _wide_shape(self, part: Packed, num_rows: int) -> WideShape | None:
        return wide.choose_wide_shape(part, num_rows, self.segments, self.in_features)

    def launches(self, num_rows: int) -> list[tuple[Packed, Packed | None]]:
        """What each launch takes: a range, and the next one if that is BF16 and small beside it."""
        found: list[tuple[Packed, Packed | None]] = []
        for part in self.ranges:
            last, plain = found[-1] if found else (part, part)
            small = part.format is Format.BF16 and part.num_tiles <= min(SM_COUNT, last.num_tiles) // 8
            # past 8 rows the scales of blocks leave no registers for another format; wide.py has one alone
            alone = last.block_scale is not None and num_rows > 8
            if small and plain is None and not alone and self._wide_shape(last, num_rows) is None:
                found[-1] = (last, part)
            else:
                found.append((part, None))
        return found

    def bulk(self, x: torch.Tensor, scratch: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """bf16 [T, N] for prefill: any T. Rows are contiguous; N that is no multiple of 8 leaves a gap between them. In
        `out` if that is given, contiguous, of such a multiple.

        scratch: bf16, at least `least_scratch` numbers; overwritten: by as many tiles at a time as it holds.
        """
        return self.bulk_each([x], scratch, None if out is None else [out])[0]

    def bulk_each(
        self, xs: Sequence[torch.Tensor], scratch: torch.Tensor, outs: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """`bulk` of each x, with the bits that each would have alone; the weights are expanded once for all."""
        span = 2 if self.swiglu else 1
        step = scratch.numel() // (TILE * self.in_features) // span * span
        assert step > 0, f"want scratch of at least {self.least_scratch} numbers, got {scratch.numel()}"
        # the library wants rows at multiples of 16 bytes
        width = -(-self.out_features // 8) * 8
        if outs is None:
            outs = [torch.empty((len(x), width), dtype=x.dtype, device=x.device) for x in xs]
        for x, out in zip(xs, outs, strict=True):
            assert out.shape == (len(x), width) and out.is_contiguous(), out.shape
        num_tiles = sum(part.num_tiles for part in self.ranges)
        for begin in range(0, num_tiles, step):
            end = min(begin + step, num_tiles)
            matrix = self._expand(begin, end, scratch)
            for x, out in zip(xs, outs, strict=True):
                self._multiply(x, matrix, begin // span, end // span, out)
        return [out[:, : self.out_features] for out in outs]

    def _expand(self, begin: int, end: int, scratch: torch.Tensor) -> torch.Tensor:
        """Tiles begin .. end as one matrix of bf16, in scratch; with SwiGLU gate's rows, then up's."""
        matrix = scratch[: (end - begin) * TILE * self.in_features].view(-1, self.in_features)
        first = 0
        for part in self.ranges:
            tiles = slice(max(0, begin - first), min(part.num_tiles, end - first))
            if tiles.start < tiles.stop:
                rows = matrix[(first + tiles.start - begin) * TILE : (first + tiles.stop - begin) * TILE]
                expand(part, tiles, rows, tiles.stop - tiles.start if self.swiglu else 0)
            first += part.num_tiles
        return matrix

    def _multiply(self, x: torch.Tensor, matrix: torch.Tensor, begin: int, end: int, out: torch.Tensor) -> None:
        """Columns of tiles begin .. end of the product (with SwiGLU, of gate and of up), expanded in `matrix`."""
        for tile, column, count in self._runs:
            low, high = max(0, begin - tile) * TILE, min(count, (end - tile) * TILE)
            if low >= high:
                continue
            if column + high == self.out_features:
                # where there are rows of padding, which are zero
                high = min(high + out.shape[1] - self.out_features, -(-high // TILE) * TILE)
            rows = slice((tile - begin) * TILE + low, (tile - begin) * TILE + high)
            target = out[:, column + low : column + high]
            if self.swiglu:
                gate, up = (part[:, rows] for part in F.linear(x, matrix).chunk(2, -1))
                if x.is_cuda:
                    silu_product(gate, up, target)
                else:
                    torch.mul(F.silu(gate), up, out=target)
            else:
                torch.mm(x, matrix[rows].T, out=target)

    @property
    def scratch_size(self) -> int:
        """Numbers of bf16 that `bulk` wants: the matrix expanded, or as much of it as is fastest."""
        return self._scratch_of(max(BULK_TILES, BULK_NUMBERS // (TILE * self.in_features)))

    @property
    def least_scratch(self) -> int:
        """Numbers that `bulk` can do with: the matrix expanded, or as much of it as still fills a GPU."""
        return self._scratch_of(BULK_TILES)

    def _scratch_of(self, most: int) -> int:
        tiles = sum(part.num_tiles for part in self.ranges)
        return self.in_features * TILE * min(tiles, most // 2 * 2)


def _runs(places: list[list[int]]) -> list[tuple[int, int, int]]:
    """Tiles whose columns follow each other: (the first tile, its first column, number of columns) of each run."""
    runs: list[tuple[int, int, int]] = []
    for tile, (column, count) in enumerate(places):
        first, start, length = runs[-1] if runs else (0, -1, 0)
        if start + length == column and length == (tile - first) * TILE:
            runs[-1] = (first, start, length + count)
        else:
            runs.append((tile, column, count))
    return runs


def launch(
    part: Packed,
    x: AnyRows,
    out: AnyRows,
    shape: LaunchShape,
    swiglu: bool,
    pdl: bool,
    plain: Packed | None = None,
) -> None:
    """One launch for `part` and, if given, `plain`: some tiles of BF16 as wide, with fewer of them."""
    other = LaunchShape(0, 0, 0, 0, 0) if plain is None else beside(plain, shape)
    num_plain = 0 if plain is None else plain.num_tiles
    num_rows, (memory, tiled), (target, stride, tiled_out) = len(out), stored(x), written(out)
    # tiles begin at multiples of 16 columns
    assert not tiled_out or swiglu
    if shape.quarters:
        # tiles next to each other, in whole programs, and rows that there is room for
        assert tiled and part.format is Format.NVFP4 and part.num_tiles % shape.tiles == shape.x_ahead == 0, shape
    wide = part.num_units > 16 and part.format is not Format.BF16
    shared = PartialSums.of(memory.device) if shape.split > 1 else None
    bounded = plain is not None or (wide and shape.tiles == 2 and shape.row_tiles == 1)
    programs = num_plain * shape.row_tiles + -(-part.num_tiles // shape.tiles)
    grid = (-(-num_rows // (8 * shape.row_tiles)), programs, shape.split)
    kernel = _rows_kernel[grid](
        part.data.view(torch.int32),
        part.number if part.block_scale is None else part.block_scale,
        part.place,
        part.number,
        *((None,) * 3 if plain is None else (plain.data.view(torch.int32), plain.place, plain.number)),
        memory.view(torch.int32),
        target,
        None if shared is None else shared.memory,
        None if shared is None else shared.arrivals,
        num_rows,
        part.num_tiles,
        num_plain,
        stride,
        K=x.shape[1],
        TILED=tiled,
        TILED_OUT=tiled_out,
        UNITS=part.num_units,
        MT=shape.tiles,
        NT=shape.row_tiles,
        FORMAT=FORMATS[part.format],
        BLOCKS=part.block_scale is not None,
        DIVIDES=part.divides,
        ROW_NUMBERS=part.number.shape[1] > 1,
        SPAN=2 if swiglu else 1,
        SHARES=shape.segments or shape.warps,
        TREE=shape.segments > 0,
        SPLIT=shape.split,
        STAGES=shape.stages,
        RING=shape.ring,
        X_AHEAD=shape.x_ahead,
        QUARTERS=shape.quarters,
        PLAIN_SHARES=other.warps,
        PLAIN_STAGES=other.stages,
        PLAIN_AHEAD=other.x_ahead,
        PINNED=shape.pinned,
        PDL=pdl,
        num_warps=shape.warps,
        # variants for more rows are compiled apart, and round alike
        enable_fp_fusion=False,
        maxnreg=shape.registers or (REGISTERS.get(shape.row_tiles) if bounded else None),
        launch_pdl=pdl,
    )
    if shape.row_tiles > 1 or 8 * x.shape[1] > MOST_X:
        leave_to_l1(kernel)


def _pack_part(number: int, part: Any, first_column: int) -> Packed:
    try:
        return packing.pack(part, first_column)
    except ValueError as error:
        raise ValueError(f"part {number}: {error}") from error
