"""The inner product of the packed weights' kernels: one warp's units, and the sum over warps. Gluon.

Every tensor of a warp's step is [warps * 32, 4]: a row for a lane, four 32-bit registers in it; which element of a
matrix each is follows from packing.py and mma.m16n8k16. So all loads are 16 bytes a lane, nothing moves between lanes,
and the unpacking, which is elementwise, is written in PTX, two weights at a time.
"""

# Triton compiles no unpacking of tuples, and what grows in a loop has no type that mypy knows:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from collections.abc import Sequence

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from pilotfish.kernels.cuda.packing import UNIT_BYTES, Format
from pilotfish.kernels.cuda.tiled_rows import row_place

NVFP4 = gl.constexpr(0)
FP8 = gl.constexpr(1)
BF16 = gl.constexpr(2)
FORMATS = {Format.NVFP4: NVFP4, Format.FP8: FP8, Format.BF16: BF16}

_WORDS = tuple(UNIT_BYTES[format] // 4 for format in FORMATS)

# e2m1 * 2^-126 times scale * 2^118: what the sum must be multiplied by
NVFP4_RESCALE = gl.constexpr(256.0)


def nvfp4_word(source: str, outs: Sequence[int], scale: str) -> list[str]:
    """8 codes to four pairs of bf16, with their scale times 2^118, twice in a register; t and u are used, z is -0."""
    a, b, c, d = (f"${out}" for out in outs)
    lines = [
        f"and.b32 {a}, {source}, 0x81C081C0;",
        f"shf.r.wrap.b32 t, {source}, {source}, 4;",
        f"and.b32 {b}, t, 0x81C081C0;",
        f"shl.b32 t, {source}, 6;",
        f"and.b32 {c}, t, 0x81C081C0;",
        f"shl.b32 t, {source}, 2;",
        "and.b32 t, t, 0x80C080C0;",
        f"shr.u32 u, {source}, 6;",
        f"lop3.b32 {d}, u, 0x01000100, t, 0xEA;",
    ]
    # a product by fma with -0: mul.bf16x2 needs sm_90
    return lines + [f"fma.rn.bf16x2 {pair}, {pair}, {scale}, z;" for pair in (a, b, c, d)]


def _scale_lines(byte: int, source: str, out: str) -> list[str]:
    """A byte b of the scales to 0x00bb00bb, then to the bf16 pair whose exponent and mantissa it is, times 2^118."""
    return [f"prmt.b32 t, {source}, 0, 0x4{byte}4{byte};", f"mad.lo.u32 {out}, t, 16, 0x70007000;"]


def _nvfp4_asm(row_half: int) -> str:
    """Codes $16..$19, four words, and the lane's scale bytes $20 (all four registers hold it) to $0..$15."""
    lines = [".reg .b32 s<2>, t, u, z;", "mov.b32 z, 0x80008000;"]
    for half in range(2):
        lines += _scale_lines(2 * row_half + half, "$20", f"s{half}")
    for word in range(4):
        lines += nvfp4_word(f"${16 + word}", range(4 * word, 4 * word + 4), f"s{word // 2}")
    return "{\n" + "\n".join(lines) + "\n}"


def _nvfp4_word_asm(row_half: int, load: int) -> str:
    """Of codes $4..$7 the word that meets a load of x, and the lane's scale bytes $8 (all four hold it) to $0..$3."""
    lines = [".reg .b32 s, t, u, z;", "mov.b32 z, 0x80008000;", *_scale_lines(2 * row_half + load // 2, "$8", "s")]
    return "{\n" + "\n".join(lines + nvfp4_word(f"${4 + load}", range(4), "s")) + "\n}"


def _fp8_asm() -> str:
    """Codes $8..$11, four words, to $0..$7."""
    lines = [".reg .b32 t, u, s, z;", "mov.b32 s, 0x7B807B80;", "mov.b32 z, 0x80008000;"]  # 2^120
    for word in range(4):
        source, out = f"${8 + word}", 2 * word
        lines += [
            f"and.b32 ${out}, {source}, 0x87F087F0;",
            f"shl.b32 t, {source}, 4;",
            "and.b32 t, t, 0x80F080F0;",
            f"shr.u32 u, {source}, 4;",
            f"lop3.b32 ${out + 1}, u, 0x07000700, t, 0xEA;",
        ]
        lines += [f"fma.rn.bf16x2 ${out + pair}, ${out + pair}, s, z;" for pair in range(2)]
    return "{\n" + "\n".join(lines) + "\n}"


def _mma_asm() -> str:
    """Two steps of 16 columns: rows g $4..$7, rows g + 8 $8..$11, x $12..$15, the sum so far $16..$19, out $0..$3."""
    mma = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    out = "{$0,$1,$2,$3}"
    return (
        f"{mma} {out}, {{$4,$8,$5,$9}}, {{$12,$13}}, {{$16,$17,$18,$19}};\n"
        f"{mma} {out}, {{$6,$10,$7,$11}}, {{$14,$15}}, {out};"
    )


def _constraints(outs: int, ins: int, kind: str = "r") -> str:
    return ",".join([f"=&{kind}"] * outs + ["r"] * ins)


NVFP4_ASM = tuple(gl.constexpr(_nvfp4_asm(half)) for half in range(2))
NVFP4_LOW, NVFP4_HIGH = NVFP4_ASM
NVFP4_CONSTRAINTS = gl.constexpr(_constraints(16, 8))
NVFP4_WORD_ASM = tuple(_nvfp4_word_asm(half, load) for half in range(2) for load in range(4))
NVFP4_WORD_CONSTRAINTS = gl.constexpr(_constraints(4, 8))
FP8_ASM = gl.constexpr(_fp8_asm())
FP8_CONSTRAINTS = gl.constexpr(_constraints(8, 4))
MMA_ASM = gl.constexpr(_mma_asm())
MMA_CONSTRAINTS = gl.constexpr(",".join(["=&f"] * 4 + ["r"] * 12 + ["f"] * 4))


@gluon.constexpr_function
def unit_words(FORMAT):
    """32-bit words of a unit."""
    return _WORDS[FORMAT]


@gluon.constexpr_function
def _code_loads(FORMAT):
    """Loads of 16 bytes a lane of a unit; a word of scales is left over."""
    return _WORDS[FORMAT] // 128


@gluon.constexpr_function
def _ring_asm(num_bytes):
    """Room in shared memory for a program: its address, to $0, and 16 bytes further for each thread $1."""
    return f"{{\n.shared .align 16 .b8 ring[{num_bytes}];\nmov.u32 $0, ring;\nmad.lo.u32 $0, $1, 16, $0;\n}}"


@gluon.jit
def in_order(ARITHMETIC: gl.constexpr = False):
    """Loads stay on their side of this: the assembler would else put off those made early until they are needed.

    With ARITHMETIC that stays on its side too: by an event for profilers, which costs nothing else, of many
    instructions the one that no arithmetic is moved across.
    """
    asm: gl.constexpr = "pmevent 0; // $0" if ARITHMETIC else "bar.warp.sync 0xffffffff; // $0"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_unit(codes, scales, FORMAT: gl.constexpr):
    """A unit's registers: loads of 4 words a lane, rows g before rows g + 8; NVFP4 with a word of scales last. codes,
    scales: where these begin, [threads, 4] and [threads]."""
    unit = ()
    for load in gl.static_range(_code_loads(FORMAT)):
        unit = unit + (gl.load(codes + load * 128, eviction_policy="evict_first"),)
    if FORMAT == NVFP4:
        unit = unit + (gl.load(scales, eviction_policy="evict_first")[:, None],)
    return unit


@gluon.jit
def unpack_half(unit, ROW_HALF: gl.constexpr, FORMAT: gl.constexpr):
    """Four tensors, one for each load of x: the pairs of bf16 weights that meet it."""
    if FORMAT == NVFP4:
        asm: gl.constexpr = NVFP4_LOW if ROW_HALF == 0 else NVFP4_HIGH
        out = gl.inline_asm_elementwise(
            asm,
            NVFP4_CONSTRAINTS,
            [unit[ROW_HALF], unit[2]],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
            is_pure=True,
            pack=4,
        )
        return out
    elif FORMAT == FP8:
        low = gl.inline_asm_elementwise(
            FP8_ASM, FP8_CONSTRAINTS, [unit[2 * ROW_HALF]], dtype=(gl.int32, gl.int32), is_pure=True, pack=4
        )
        high = gl.inline_asm_elementwise(
            FP8_ASM, FP8_CONSTRAINTS, [unit[2 * ROW_HALF + 1]], dtype=(gl.int32, gl.int32), is_pure=True, pack=4
        )
        return low + high
    else:
        return unit[4 * ROW_HALF : 4 * ROW_HALF + 4]


@gluon.constexpr_function
def _word_asm(row_half, load):
    return NVFP4_WORD_ASM[4 * row_half + load]


@gluon.jit
def unpack_word(unit, ROW_HALF: gl.constexpr, LOAD: gl.constexpr):
    """What unpack_half has for one load of x, of NVFP4."""
    asm: gl.constexpr = _word_asm(ROW_HALF, LOAD)
    return gl.inline_asm_elementwise(
        asm, NVFP4_WORD_CONSTRAINTS, [unit[ROW_HALF], unit[2]], dtype=gl.int32, is_pure=True, pack=4
    )


@gluon.constexpr_function
def unit_words_of_x(tiled):
    """From a unit of a row to the next one."""
    return 512 if tiled else 64


@gluon.constexpr_function
def word_of_x(unit, load, tiled):
    """Of a row, from its lane's first one on. Of rows as they come 32 words a half, 4 an octet; of tiled ones 128 a
    load, which are those of a warp."""
    return unit * unit_words_of_x(tiled) + (load * 128 if tiled else load // 2 * 32 + load % 2 * 4)


@gluon.jit
def row_of_x(row, K: gl.constexpr, TILED: gl.constexpr):
    """Where a row of x begins, in words; with TILED as tiled_rows.row_place has it."""
    if TILED:
        return row_place(row, K) >> 1
    else:
        return row * (K // 2)


@gluon.jit
def load_x(rows, columns, UNIT: gl.constexpr, NT: gl.constexpr, K: gl.constexpr, TILED: gl.constexpr):
    """Four loads of 16 bytes a lane for each tile of 8 rows of x, of the UNIT-th unit from where `rows` are; columns:
    where those are, in words, for a K that is not a whole number of units."""
    out = ()
    for n in gl.static_range(NT):
        for t in gl.static_range(4):
            if K % 128 != 0:
                mask = columns + word_of_x(UNIT, t, TILED) < K // 2
                out = out + (gl.load(rows[n] + word_of_x(UNIT, t, TILED), mask=mask, other=0),)
            else:
                out = out + (gl.load(rows[n] + word_of_x(UNIT, t, TILED)),)
    return out


@gluon.jit
def multiply(
    units,
    xs,
    totals,
    scales,
    SHARE: gl.constexpr,
    MT: gl.constexpr,
    NT: gl.constexpr,
    FORMAT: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """Adds one step's products to the MT * NT sums of one of the warp's shares."""
    begin: gl.constexpr = SHARE * MT * NT
    out = totals[:begin]
    for m in gl.static_range(MT):
        low = unpack_half(units[m], 0, FORMAT)
        high = unpack_half(units[m], 1, FORMAT)
        for n in gl.static_range(NT):
            total = totals[begin + m * NT + n]
            part = gl.zeros_like(total) if BLOCKS else total
            for t in gl.static_range(4):
                part = gl.inline_asm_elementwise(
                    MMA_ASM,
                    MMA_CONSTRAINTS,
                    [low[t], high[t], xs[n * 4 + t], part],
                    dtype=gl.float32,
                    is_pure=False,
                    pack=4,
                )
            if BLOCKS:
                part = gl.fma(part, scales[m], total)
            out = out + (part,)
    return out + totals[begin + MT * NT :]


@gluon.jit
def _multiply_quarters(
    units,
    rows,
    ahead,
    totals,
    UNIT: gl.constexpr,
    NEXT: gl.constexpr,
    SHARE: gl.constexpr,
    MT: gl.constexpr,
    NT: gl.constexpr,
    K: gl.constexpr,
):
    """`multiply` of NVFP4 that asks for a quarter of the step's x at a time, one ahead: half of its registers, and the
    same sums in the same order. ahead: the first quarter; NEXT: the unit whose first one is returned beside the sums,
    or None."""
    begin: gl.constexpr = SHARE * MT * NT
    parts = totals[begin : begin + MT * NT]
    for t in gl.static_range(4):
        xs = ahead
        if t < 3:
            ahead = _quarter_of_x(rows, UNIT, t + 1, NT, K)
        elif NEXT is not None:
            ahead = _quarter_of_x(rows, NEXT, 0, NT, K)
        out = ()
        for m in gl.static_range(MT):
            low = unpack_word(units[m], 0, t)
            high = unpack_word(units[m], 1, t)
            for n in gl.static_range(NT):
                out = out + (
                    gl.inline_asm_elementwise(
                        MMA_ASM,
                        MMA_CONSTRAINTS,
                        [low, high, xs[n], parts[m * NT + n]],
                        dtype=gl.float32,
                        is_pure=False,
                        pack=4,
                    ),
                )
        parts = out
    return totals[:begin] + parts + totals[begin + MT * NT :], ahead


@gluon.jit
def _quarter_of_x(rows, UNIT: gl.constexpr, LOAD: gl.constexpr, NT: gl.constexpr, K: gl.constexpr):
    """One load a lane for each of NT tiles of 8 rows, which stand behind each other from rows[0] on."""
    out = ()
    for n in gl.static_range(NT):
        out = out + (gl.load(rows[0] + (n * (4 * K) + word_of_x(UNIT, LOAD, True))),)
    in_order(True)
    return out


@gluon.jit
def _placed(
    tiles,
    data,
    block_scale,
    first_unit,
    WIDTH: gl.constexpr,
    MT: gl.constexpr,
    FORMAT: gl.constexpr,
    BLOCKS: gl.constexpr,
    WARPS: gl.constexpr,
    APART: gl.constexpr,
):
    """Where each lane's words of its warp's units begin, those of its scales and the block scales, a tensor a tile of
    `tiles`; the warps' units are APART.

    All that is loaded is at a constant distance from these: it goes into the instruction, and costs none of its own.
    """
    words: gl.constexpr = unit_words(FORMAT)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    thread = gl.arange(0, WARPS * 32, gl.SliceLayout(1, layout))
    warp = thread // 32
    lane = thread % 32
    codes = ()
    scales = ()
    block_scales = ()
    for m in gl.static_range(len(tiles)):
        base = data + (tiles[m].to(gl.int64) * WIDTH + first_unit) * words
        codes = codes + (base + (warp * (APART * words) + lane * 4),)
        scales = scales + (base + (warp * (APART * words) + lane + 256),)
        if BLOCKS:
            block_scales = block_scales + (block_scale + (tiles[m] * WIDTH + first_unit + warp * APART),)
    return codes, scales, block_scales


@gluon.jit
def _further(pointers, DISTANCE: gl.constexpr):
    """Each of the pointers, so much further."""
    out = ()
    for i in gl.static_range(len(pointers)):
        out = out + (pointers[i] + DISTANCE,)
    return out


@gluon.jit
def units_ahead(
    ring,
    data,
    block_scale,
    tiles,
    first_unit,
    WIDTH: gl.constexpr,
    UNITS: gl.constexpr,
    MT: gl.constexpr,
    FORMAT: gl.constexpr,
    BLOCKS: gl.constexpr,
    WARPS: gl.constexpr,
    SHARES: gl.constexpr,
    STAGES: gl.constexpr,
    RING: gl.constexpr,
):
    """Asks for the first STAGES units of each warp and tile: what `products` begins with. Nothing that comes after goes
    before it. With RING they are on their way to `ring`, of make_ring."""
    places = _placed(tiles, data, block_scale, first_unit, WIDTH, MT, FORMAT, BLOCKS, WARPS, UNITS // SHARES)
    if RING:
        # a scale for each unit would be one more load
        gl.static_assert(not BLOCKS)
        stages = ring
        for step in gl.static_range(STAGES):
            _copy_step(stages, step, places, _unit_of(step, UNITS, WARPS, SHARES), STAGES, WIDTH, MT, FORMAT, WARPS)
    else:
        stages = ()
        for step in gl.static_range(STAGES):
            stages = stages + (
                _load_step(places, _unit_of(step, UNITS, WARPS, SHARES), WIDTH, MT, FORMAT, BLOCKS, WARPS),
            )
        in_order()
    return stages


@gluon.jit
def make_ring(STAGES: gl.constexpr, MT: gl.constexpr, FORMAT: gl.constexpr, WARPS: gl.constexpr):
    """Room in shared memory for STAGES units of each warp and tile, as each thread's address, int32 [warps * 32].

    A thread reads what it has copied itself and nothing else, so that it waits for its own copies and for no other
    thread. Of each slot, a tile's unit, stand each load of 16 bytes of all threads, then, behind those of all slots,
    their words of scales.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    thread = gl.arange(0, WARPS * 32, gl.SliceLayout(1, layout))
    lane_bytes: gl.constexpr = _code_loads(FORMAT) * 16 + (4 if FORMAT == NVFP4 else 0)
    return gl.inline_asm_elementwise(
        _ring_asm(STAGES * MT * WARPS * 32 * lane_bytes), "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _ring_scales(ring, slot, STAGES: gl.constexpr, MT: gl.constexpr, WARPS: gl.constexpr):
    """Where the word of a slot's scales is: NVFP4 has two loads of 16 bytes before them."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    thread = gl.arange(0, WARPS * 32, gl.SliceLayout(1, layout))
    return ring - thread * 12 + (STAGES * MT * 2 * 16 + slot * 4) * (WARPS * 32)


@gluon.constexpr_function
def _unit_place(m, unit, width, num_places, kind):
    """How far tile m's unit is from the tile's place; where there is the first tile's alone, from that: the others
    stand behind it."""
    return (unit if num_places > 1 else unit + m * width) * unit_words(kind)


@gluon.jit
def _copy_step(
    ring,
    stage,
    places,
    UNIT: gl.constexpr,
    STAGES: gl.constexpr,
    WIDTH: gl.constexpr,
    MT: gl.constexpr,
    FORMAT: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Asks for the UNIT-th unit of each of MT tiles (`_placed`), to a stage of the ring.

    A stage may be copied to as soon as its products are written down: a thread's read of shared memory goes before its
    later copy, which writes when device memory has answered.
    """
    codes, scales, _ = places
    loads: gl.constexpr = _code_loads(FORMAT)
    for m in gl.static_range(MT):
        slot = stage * MT + m
        place = _unit_place(m, UNIT, WIDTH, len(codes), FORMAT)
        for load in gl.static_range(loads):
            gl.inline_asm_elementwise(
                "cp.async.cg.shared.global [$1], [$2], 16; // $0",
                "=r,r,l",
                [ring + (slot * loads + load) * (WARPS * 512), codes[m % len(codes)] + (place + load * 128)],
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )
        if FORMAT == NVFP4:
            gl.inline_asm_elementwise(
                "cp.async.ca.shared.global [$1], [$2], 4; // $0",
                "=r,r,l",
                [_ring_scales(ring, slot, STAGES, MT, WARPS), scales[m % len(codes)] + place],
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )
    gl.inline_asm_elementwise("cp.async.commit_group; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _left(step, steps, stages):
    """Steps asked for behind this one when it is its turn."""
    return min(steps, step + stages) - step - 1


@gluon.constexpr_function
def _wait_asm(left):
    return f"cp.async.wait_group {left}; // $0"


@gluon.jit
def _read_step(
    ring,
    LEFT: gl.constexpr,
    STAGE: gl.constexpr,
    STAGES: gl.constexpr,
    MT: gl.constexpr,
    FORMAT: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The units that `_copy_step` has copied to a stage, as `_load_step` gives them, when no more than the LEFT steps
    asked for last are still to come."""
    loads: gl.constexpr = _code_loads(FORMAT)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    word = gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :]
    gl.inline_asm_elementwise(_wait_asm(LEFT), "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    units = ()
    for m in gl.static_range(MT):
        slot = STAGE * MT + m
        unit = ()
        for load in gl.static_range(loads):
            codes = gl.inline_asm_elementwise(
                "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
                "=r,=r,=r,=r,r,r,r,r",
                [(ring + (slot * loads + load) * (WARPS * 512))[:, None] + word * 0],
                dtype=gl.int32,
                is_pure=False,
                pack=4,
            )
            unit = unit + (codes,)
        if FORMAT == NVFP4:
            scales = gl.inline_asm_elementwise(
                "ld.shared.b32 $0, [$1];",
                "=r,r",
                [_ring_scales(ring, slot, STAGES, MT, WARPS)],
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )
            unit = unit + (scales[:, None],)
        units = units + (unit,)
    return (units, ())


@gluon.constexpr_function
def _unit_of(step, units, warps, shares):
    """The unit that a warp multiplies at a step, counted from the first of its first share: its shares take turns."""
    turns = shares // warps
    return step % turns * (warps * (units // shares)) + step // turns


@gluon.jit
def products(
    stages,
    data,
    block_scale,
    x,
    x_offsets,
    tiles,
    first_unit,
    K: gl.constexpr,
    TILED: gl.constexpr,
    WIDTH: gl.constexpr,
    UNITS: gl.constexpr,
    MT: gl.constexpr,
    NT: gl.constexpr,
    FORMAT: gl.constexpr,
    BLOCKS: gl.constexpr,
    WARPS: gl.constexpr,
    SHARES: gl.constexpr,
    STAGES: gl.constexpr,
    RING: gl.constexpr,
    X_AHEAD: gl.constexpr,
    QUARTERS: gl.constexpr,
    PINNED: gl.constexpr,
    WAIT: gl.constexpr,
):
    """Sums of each warp's units, MT * NT tensors fp32 [warps * 32, 4], tile by tile: mma's accumulators.

    stages: of `units_ahead`: so many units a tile are on their way while one is multiplied, and X_AHEAD steps of x;
    with RING to shared memory, else to registers.
    data int32, x int32 (two bf16 each), with TILED in the order of tiled_rows.py; x_offsets: for each of NT tiles of 8
    rows of x, where a lane's row g begins (row_of_x), [warps * 32], and for one that is not there any that is; tiles:
    MT numbers of tiles, of WIDTH units, of which UNITS from first_unit on are this program's. WAIT: for what writes x,
    before the first load of it. PINNED: a step's loads and arithmetic stay apart, so that no more registers are in use
    than was meant. QUARTERS: x of a step is asked for in quarters; the rows stand behind each other then, as the tiles
    of weights do, and x_offsets and tiles hold the first of them alone: fewer pointers.

    SHARES, a multiple of WARPS, are the parts of K that are summed apart: share i is the i-th of them in order of K,
    warp w has the shares w, w + WARPS, ..., and there are MT * NT sums for each share of a warp, one share's after the
    other.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    steps: gl.constexpr = UNITS // WARPS
    turns: gl.constexpr = SHARES // WARPS
    apart: gl.constexpr = UNITS // SHARES
    thread = gl.arange(0, WARPS * 32, gl.SliceLayout(1, layout))
    word = gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :]
    x_words: gl.constexpr = unit_words_of_x(TILED)
    gl.static_assert(not TILED or K % 128 == 0)
    first = first_unit * x_words + thread // 32 * (apart * x_words)
    columns = (first + thread % 4 * (4 if TILED else 8))[:, None] + word
    rows = ()
    for n in gl.static_range(len(x_offsets)):
        rows = rows + (x + (x_offsets[n][:, None] + columns),)
    places = _placed(tiles, data, block_scale, first_unit, WIDTH, MT, FORMAT, BLOCKS, WARPS, apart)
    totals = ()
    for _ in gl.static_range(turns * MT * NT):
        totals = totals + (gl.zeros([WARPS * 32, 4], gl.float32, layout),)
    if WAIT:
        gdc_wait()
    xs = ()
    if QUARTERS:
        xs = _quarter_of_x(rows, _unit_of(0, UNITS, WARPS, SHARES), 0, NT, K)
    for s in gl.static_range(X_AHEAD):
        xs = xs + (load_x(rows, columns, _unit_of(s, UNITS, WARPS, SHARES), NT, K, TILED),)
    if X_AHEAD > 0:
        in_order(True)
    # whole groups of steps in a loop, if more than one of them, and the rest written out
    gl.static_assert(X_AHEAD <= STAGES)
    size: gl.constexpr = max(STAGES, turns)
    gl.static_assert(size % STAGES == 0 and size % turns == 0)
    groups: gl.constexpr = (steps - STAGES) // size
    looped: gl.constexpr = groups * size if groups > 1 else 0
    if looped > 0:
        group_units: gl.constexpr = size // turns
        for _ in range(groups):
            for s in gl.static_range(size):
                if not QUARTERS:
                    xs = xs + (load_x(rows, columns, _unit_of(s + X_AHEAD, UNITS, WARPS, SHARES), NT, K, TILED),)
                    in_order(PINNED)
                now = _read_step(stages, STAGES - 1, s % STAGES, STAGES, MT, FORMAT, WARPS) if RING else stages[0]
                if QUARTERS:
                    totals, xs = _multiply_quarters(
                        now[0],
                        rows,
                        xs,
                        totals,
                        _unit_of(s, UNITS, WARPS, SHARES),
                        _unit_of(s + 1, UNITS, WARPS, SHARES),
                        s % turns,
                        MT,
                        NT,
                        K,
                    )
                else:
                    totals = multiply(now[0], xs[0], totals, now[1], s % turns, MT, NT, FORMAT, BLOCKS)
                    xs = xs[1:]
                if RING:
                    _copy_step(
                        stages,
                        s % STAGES,
                        places,
                        _unit_of(s + STAGES, UNITS, WARPS, SHARES),
                        STAGES,
                        WIDTH,
                        MT,
                        FORMAT,
                        WARPS,
                    )
                else:
                    loaded = _load_step(
                        places, _unit_of(s + STAGES, UNITS, WARPS, SHARES), WIDTH, MT, FORMAT, BLOCKS, WARPS
                    )
                    in_order(PINNED)
                    stages = stages[1:] + (loaded,)
            codes, scales, block_scales = places
            codes = _further(codes, group_units * unit_words(FORMAT))
            scales = _further(scales, group_units * unit_words(FORMAT))
            places = (codes, scales, _further(block_scales, group_units))
            rows = _further(rows, group_units * x_words)
            if K % 128 != 0:
                columns += group_units * 64
    for s in gl.static_range(looped, steps):
        if not QUARTERS and s + X_AHEAD < steps:
            xs = xs + (load_x(rows, columns, _unit_of(s + X_AHEAD - looped, UNITS, WARPS, SHARES), NT, K, TILED),)
            in_order(PINNED)
        if RING:
            now = _read_step(stages, _left(s, steps, STAGES), s % STAGES, STAGES, MT, FORMAT, WARPS)
        else:
            now = stages[0]
            stages = stages[1:]
        if QUARTERS:
            totals, xs = _multiply_quarters(
                now[0],
                rows,
                xs,
                totals,
                _unit_of(s - looped, UNITS, WARPS, SHARES),
                _unit_of(s + 1 - looped, UNITS, WARPS, SHARES) if s + 1 < steps else None,
                s % turns,
                MT,
                NT,
                K,
            )
        else:
            totals = multiply(now[0], xs[0], totals, now[1], s % turns, MT, NT, FORMAT, BLOCKS)
            xs = xs[1:]
        if s + STAGES < steps:
            if RING:
                _copy_step(
                    stages,
                    s % STAGES,
                    places,
                    _unit_of(s + STAGES - looped, UNITS, WARPS, SHARES),
                    STAGES,
                    WIDTH,
                    MT,
                    FORMAT,
                    WARPS,
                )
            else:
                loaded = _load_step(
                    places, _unit_of(s + STAGES - looped, UNITS, WARPS, SHARES), WIDTH, MT, FORMAT, BLOCKS, WARPS
                )
                in_order(PINNED)
                stages = stages + (loaded,)
    return totals


@gluon.jit
def _load_step(
    places,
    UNIT: gl.constexpr,
    WIDTH: gl.constexpr,
    MT: gl.constexpr,
    FORMAT: gl.constexpr,
    BLOCKS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The UNIT-th unit of each of MT tiles (`_placed`), and their block scales if there are such."""
    codes, scales, block_scales = places
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    word = gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :]
    units = ()
    found = ()
    for m in gl.static_range(MT):
        place = _unit_place(m, UNIT, WIDTH, len(codes), FORMAT)
        own = codes[m % len(codes)][:, None] + word + place
        units = units + (load_unit(own, scales[m % len(codes)] + place, FORMAT),)
        if BLOCKS:
            found = found + (gl.load(block_scales[m] + UNIT)[:, None],)
    return (units, found)


@gluon.jit
def over_warps(shares, WARPS: gl.constexpr, TREE: gl.constexpr):
    """The sum of the shares' tensors, in order of K or (TREE) neighbours first, fp32 [128]: element 64 c + 32 r + lane
    is row g + 8 r of the tile and row 2 q + c of x's."""
    parts = ()
    for share in gl.static_range(len(shares)):
        parts = parts + parts_of(in_shared(shares[share], WARPS), WARPS)
    return total_of(parts, WARPS, TREE)


@gluon.jit
def in_shared(total, WARPS: gl.constexpr):
    """A share's tensor in shared memory, fp32 [warps, 128] as `over_warps` has a row."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ordered = gl.reshape(gl.permute(gl.reshape(total, [WARPS, 32, 2, 2]), [0, 3, 2, 1]), [WARPS, 128])
    return gl.allocate_shared_memory(gl.float32, [WARPS, 128], shared, ordered)


@gluon.jit
def parts_of(memory, WARPS: gl.constexpr):
    """Each warp's part of what `in_shared` has there."""
    row: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, WARPS], [1, 0])
    parts = ()
    for warp in gl.static_range(WARPS):
        parts = parts + (memory.slice(warp, 1).load(row),)
    return parts


@gluon.jit
def total_of(parts, WARPS: gl.constexpr, TREE: gl.constexpr):
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    out = in_tree(parts) if TREE else in_turn(parts)
    return gl.convert_layout(gl.reshape(out, [128]), flat, assert_trivial=True)


@gluon.jit
def in_turn(parts):
    """The parts added one after the other."""
    out = parts[0]
    for i in gl.static_range(1, len(parts)):
        out = out + parts[i]
    return out


@gluon.jit
def in_tree(parts):
    """((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) of 8 parts; of 4, 2 or 1 the same."""
    gl.static_assert(len(parts) <= 8)
    pairs = ()
    for i in gl.static_range(len(parts) // 2):
        pairs = pairs + (parts[2 * i] + parts[2 * i + 1],)
    if len(parts) == 1:
        return parts[0]
    elif len(parts) == 2:
        return pairs[0]
    elif len(parts) == 4:
        return pairs[0] + pairs[1]
    else:
        gl.static_assert(len(parts) == 8)
        return (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])


@gluon.jit
def load_factor(number, tile, feature, ROW_NUMBERS: gl.constexpr):
    """The number of a tile, or those of its rows; fp32 as `feature`."""
    if ROW_NUMBERS:
        return gl.load(number + tile * 16 + feature)
    else:
        return gl.load(number + (tile + feature * 0))


@gluon.jit
def scaled(total, factor, FORMAT: gl.constexpr, DIVIDES: gl.constexpr):
    """A sum under the weight's own number."""
    if FORMAT == NVFP4:
        total = total * NVFP4_RESCALE
    if DIVIDES:
        return gl.div_rn(total, factor)
    else:
        return total * factor


@gluon.jit
def silu(x):
    return x / (1.0 + gl.exp(-x))
