"""How products are launched: shapes chosen by a weight's shape, its format and the number of rows, measured on an H200.

Shares of K, which decide bits, follow from the weight's shape alone (`split`, or a row-parallel product's segments).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pilotfish.kernels.cuda.packing import UNIT_BYTES, Format, Packed

SM_COUNT = 132  # of an H200: what shapes are chosen for
MANY_TILES = 32 * SM_COUNT  # from here on what is on the way makes no difference
# of a thread, by tiles of rows: four and three programs of 128 threads an SM. The assembler takes more, and need not,
# for kernels of two formats, and for two tiles and 8 rows of x from a width of 20 units on
REGISTERS = {1: 128, 2: 168}
LONG_STEPS = 8
"""A warp that has more units than this finds room for more of them on their way in shared memory than in registers; of
fewer what it takes to read them back costs more."""
FIVE_REGISTERS = 96
"""Of a thread, with which five programs of 128 threads are on an SM."""
# with units in shared memory: five and four of them
RING_REGISTERS = {1: FIVE_REGISTERS, 2: 128}
STATIC_SHARED = 48 << 10
"""Bytes of shared memory that a program may declare."""
FIVE_A_MULTIPROCESSOR = 10 * SM_COUNT
"""So many tiles, two a program, keep five programs an SM busy. At 16 rows five took 31.4 us for 34816x5120, four with a
second unit on their way 34.3; of K = 2048, which are four steps, both took as long (one H200, 2026-12-01)."""


@dataclass(frozen=True)
class LaunchShape:
    """How a product is launched. The shares of K alone decide its bits: a warp's each, or `segments` of a row-parallel
    product, which the warps have in turn.

    tiles of weights and row_tiles of 8 rows of x a program; stages: units of a tile on their way; x_ahead: steps of x;
    split: programs that share the segments; registers: at most so many a thread, 0 for as many as the assembler likes;
    pinned: a step's loads and arithmetic stay apart (mma.products); ring: the units are on their way to shared memory;
    quarters: x of a step is asked for in quarters, of rows in the order of tiled_rows.py and whole programs of tiles.
    """

    warps: int
    tiles: int
    row_tiles: int
    stages: int
    x_ahead: int
    segments: int = 0
    split: int = 1
    registers: int = 0
    pinned: bool = False
    ring: bool = False
    quarters: bool = False


def choose_shape(
    part: Packed,
    num_rows: int,
    swiglu: bool = False,
    plain: Packed | None = None,
    segments: int = 0,
    tiled: bool = False,
) -> LaunchShape:
    """The shape for tiles of one format and a number of rows; `plain`: what is `beside` them; `segments`: of a
    row-parallel product; `tiled`: x is in the order of tiled_rows.py.

    Warps: as many as give each a whole number of units; more where tiles are few. Then enough bytes in flight, an SM's
    registers shared among four programs of 128 threads: measured, or where not, from what compiled without spills.
    """
    warps = split(part.num_tiles, part.num_units)
    if segments:
        if part.format is not Format.BF16 and part.block_scale is None:
            return row_parallel(part, num_rows, segments, tiled)
        warps = min(segments, 4 if part.num_tiles > 2 * SM_COUNT else 8)
    row_tiles = 1 if num_rows <= 8 else 2 if num_rows <= 16 else 4
    # two tiles share what is loaded of x, the more so the more rows; where programs are few, more of them pay more
    tiles = 2 if swiglu or part.num_tiles >= (3 if row_tiles == 1 else 2) * SM_COUNT else 1
    if part.format is Format.BF16 and row_tiles == 4 and not swiglu:
        tiles = 1  # two would spill
    shape = fill(LaunchShape(warps, tiles, row_tiles, 0, 0, segments), part.format, part.num_units)
    steps = part.num_units // warps
    alone = not swiglu and plain is None and part.block_scale is None
    if part.format is Format.FP8 and tiles == row_tiles == 2 and shape.stages == 1 and alone:
        # where x is tiled the assembler would take what leaves room for three programs, and need not
        return replace(shape, registers=REGISTERS[1])
    if part.format is not Format.NVFP4 or tiles == 1:
        return shape
    if row_tiles == 4:
        # of 65 rows and more one kernel serves all: programs are many
        programs = -(-part.num_tiles // 2) * (1 if num_rows <= 32 else 2)
        registers = REGISTERS[2] if num_rows > 64 else three_a_multiprocessor(programs)
        if tiled and num_rows <= 32 and part.num_tiles % tiles == 0:
            # x in quarters leaves registers for four programs an SM, of which there would be room for two
            quartered = replace(shape, stages=1, registers=registers or REGISTERS[1], quarters=True)
            ringed = replace(quartered, stages=2 if registers else 3, ring=True)
            if steps > LONG_STEPS and ring_fits(ringed, part.format):
                return ringed
            if steps > 4 and not registers:
                return quartered
        # so held, a thread would spill what a second unit on its way takes, in a loop
        return replace(shape, registers=registers, stages=1 if registers and steps > 4 else shape.stages)
    if row_tiles == 2 and plain is None and steps > 4 and part.num_tiles >= FIVE_A_MULTIPROCESSOR:
        return replace(shape, stages=1, x_ahead=0, registers=FIVE_REGISTERS)
    if part.num_tiles >= MANY_TILES:
        return shape
    long = steps > LONG_STEPS
    if plain is not None and steps > 4:
        # BF16 takes the registers; what is on the way is spared where that keeps all of a long loop in them
        if long and row_tiles == 2:
            return replace(shape, stages=2, x_ahead=0, ring=True, registers=RING_REGISTERS[2])
        return replace(shape, stages=2, x_ahead=0) if long else shape
    if long and swiglu and row_tiles == 1:
        return replace(shape, stages=2, x_ahead=1, ring=True, registers=RING_REGISTERS[1])
    # less on the way of each program leaves room for more of them; a tile alone may have more, where K is short
    if plain is None:
        tiles = 2 if swiglu else row_tiles
    stages = 3 if tiles == 1 and steps <= 4 else 2
    x_ahead = min(steps - 1, 1 if row_tiles == 1 or steps > 4 else 0)
    return replace(shape, tiles=tiles, stages=min(stages, steps), x_ahead=x_ahead)


def ring_fits(shape: LaunchShape, format: Format) -> bool:
    """Whether units that are on their way stand in shared memory, with a sum of each warp for a tile and 8 rows."""
    num_bytes = UNIT_BYTES[format] * shape.stages + 512
    return num_bytes * shape.warps * shape.tiles <= STATIC_SHARED


def three_a_multiprocessor(programs: int) -> int:
    """The bound on registers that makes room for three programs of 128 threads an SM in place of two, if that is faster
    for so many: three run 1.25 times as fast together, but the last of them may leave more of the GPU idle."""
    waves = [-(-programs // (count * SM_COUNT)) for count in (2, 3)]
    return REGISTERS[2] if 1.2 * waves[1] < waves[0] else 0


def row_parallel(part: Packed, num_rows: int, segments: int, tiled: bool) -> LaunchShape:
    """The shape for NVFP4 and FP8, measured for 320 and for 128 tiles of weights. Where there are few more tiles than
    room for at a time, programs that share K keep all SMs at work."""
    many = part.num_tiles > 2 * SM_COUNT
    if num_rows <= 8 and many and part.format is Format.NVFP4:
        # two programs have K, all of whose units are on their way to shared memory, if it is long or rows are more
        shape = LaunchShape(8, 1, 1, 2, 0)
        if num_rows > 4 or part.num_units > LONG_STEPS * segments:
            shape = LaunchShape(4, 1, 1, 3, 1, split=2, registers=RING_REGISTERS[1], ring=True)
    elif num_rows <= 8:
        shape = LaunchShape(8, 1, 1, 2 if many else 4, 1)
    elif num_rows <= 16:
        shape = LaunchShape(4, 1, 2, 2, 0, split=2) if many else LaunchShape(8, 1, 2, 4, 1)
        if many and tiled and part.format is Format.NVFP4:
            shape = LaunchShape(8, 1, 2, 2, 0, registers=FIVE_REGISTERS, ring=True, quarters=True)
    elif many:
        shape = LaunchShape(4, 2, 4, 1, 0, split=2, registers=REGISTERS[2])
        short = part.format is Format.NVFP4 and part.num_units <= LONG_STEPS * segments
        if tiled and short and num_rows <= 32 and part.num_tiles % 2 == 0:
            shape = LaunchShape(8, 2, 4, 1, 0, registers=REGISTERS[1], quarters=True)
    elif num_rows <= 32:
        shape = LaunchShape(8, 1, 2, 2, 1, registers=REGISTERS[1])
    else:
        shape = LaunchShape(8, 2, 4, 2, 0, registers=REGISTERS[2])
    parts = min(shape.split, segments)
    warps = min(shape.warps, segments // parts)
    steps = part.num_units // parts // warps
    # a unit of FP8 is twice the bytes
    stages = 1 if part.format is Format.FP8 and shape.row_tiles == 4 else min(shape.stages, steps)
    return replace(
        shape, warps=warps, stages=stages, x_ahead=min(shape.x_ahead, steps - 1), segments=segments, split=parts
    )


def fill(shape: LaunchShape, format: Format, num_units: int) -> LaunchShape:
    """The shape with as much in flight as registers hold, 128 to 168 of them."""
    steps = num_units // shape.warps
    in_flight = {Format.NVFP4: 8, Format.FP8: 4, Format.BF16: 2}[format] // (2 if shape.row_tiles == 4 else 1)
    stages = max(1, min(steps, in_flight // shape.tiles))
    if shape.row_tiles == 2 and steps >= 3 * stages:
        stages = -(
            -stages // 2
        )  # a loop takes more registers: more would spill, and room for programs is worth as much
    # a step of x takes 16 registers for each tile of rows
    x_ahead = min(steps - 1, stages, {1: 3 if shape.tiles == 1 else 1, 2: 1, 4: 0}[shape.row_tiles])
    return replace(shape, stages=stages, x_ahead=x_ahead)


def beside(part: Packed, shape: LaunchShape) -> LaunchShape:
    """The shape for a few BF16 tiles in the launch of others, of `shape`; `warps`: the shares of K, as in a launch of
    their own.

    A tile and 8 rows a program, and no more on its way than fits the registers that the others need anyway.
    """
    steps = part.num_units // shape.warps
    return LaunchShape(split(part.num_tiles, part.num_units), 1, 1, min(2, steps), min(1, steps - 1))


def split(num_tiles: int, num_units: int) -> int:
    """The shares of K of a product that is not row-parallel, from the weight's shape alone."""
    wanted = 16 if num_tiles <= SM_COUNT // 2 else 8 if num_tiles <= 2 * SM_COUNT else 4
    return next(warps for warps in (16, 8, 4, 2, 1) if warps <= wanted and num_units % warps == 0)
