"""The products' machine code for sm_90, made without a GPU: what their speed rests on.

Every load of weights is 16 bytes a lane, as many as were meant to be are on their way before the first product; nothing
spills; few instructions a weight. A change that loses one of these is slower by a factor, and no value shows it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product as combinations

import pytest
import torch

from pilotfish.kernels.cuda import launch_shapes, linear, moe, wide
from pilotfish.kernels.cuda.launch_shapes import LaunchShape
from pilotfish.kernels.cuda.linear import PackedLinear
from pilotfish.kernels.cuda.moe import ExpertGroup, ExpertScratch, ExpertWeights, GroupedExperts
from pilotfish.kernels.cuda.packing import UNIT_BYTES, Format
from pilotfish.kernels.cuda.swiglu import silu_product
from pilotfish.kernels.cuda.tiled_rows import TiledRows
from tests.support.check_products import EXPERTS, empty, experts_of
from tests.support.compiled import Code, compiling
from tests.support.routed import outputs
from tests.unit.kernels.cuda.test_packing import nvfp4, weights

LANES = 32


def some_rows(rows: int, width: int, tiled: bool = True, device: str = "cpu"):
    """As rounds have them, or row-major."""
    if tiled:
        return TiledRows.empty(rows, width, torch.device(device))
    return torch.empty((rows, width), dtype=torch.bfloat16, device=device)


def code_of(
    parts, rows: int, swiglu: bool = False, pdl: bool = True, tiled: bool = True
) -> tuple[Code, LaunchShape, int]:
    """The kernel's code, its launch shape, and how many weights a lane multiplies."""
    product = PackedLinear(parts, swiglu)
    out = some_rows(rows, product.out_features, tiled and swiglu)
    with compiling() as kernels:
        product.rows(some_rows(rows, product.in_features, tiled), out, pdl)
    assert len(kernels) == len(product.ranges)
    kernel = kernels[0]
    assert kernel.metadata.launch_pdl == pdl
    shape = launch_shapes.choose_shape(product.ranges[0], rows, swiglu, tiled=tiled)
    return Code(kernel), shape, shape.tiles * 16 * product.in_features // shape.warps // LANES


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize(("rows", "swiglu", "most_registers"), [(8, False, 128), (16, False, 168), (8, True, 128)])
def test_nvfp4_loads_wide_and_early(rows, swiglu, most_registers, tiled):
    # enough tiles that four warps share K
    parts = [nvfp4(6400 // 2, 2048)] * 2
    code, shape, lane_weights = code_of(parts, rows, swiglu, tiled=tiled)
    assert shape.warps == 4
    assert code.stack == 0 and code.count("LDL") == code.count("STL") == 0
    assert code.registers <= most_registers
    # 32 codes a load, and a word of scales for 64
    assert code.loads["LDG.E.EF.128"] == lane_weights // 32 and code.loads["LDG.E.EF"] == lane_weights // 64
    # x: 8 numbers a load for each 8 rows, shared by all tiles
    row_tiles = 2 if rows > 8 else 1
    assert code.loads["LDG.E.128"] == 4 * row_tiles * 2048 // 128 // shape.warps
    # as many weights as are meant to be are on their way before the wait for x, which is before the first product
    assert code.before("LDG.E.EF.128", "ACQBULK") == 2 * shape.tiles * shape.stages
    assert code.before("ACQBULK", "HMMA") == 1 and code.before("LDG.E.128", "ACQBULK") == 0
    assert code.count("HMMA") == lane_weights // 8 * row_tiles
    # 2.1 of them a weight in the middle, the rest before and after
    assert len(code.instructions) / lane_weights < (3.1 if shape.tiles == 2 else 3.5)


@pytest.mark.parametrize("kind", ["fp8 channel", "fp8 block", "bf16"])
def test_other_formats_load_as_wide(kind):
    code, _, lane_weights = code_of([weights(256, 2048)[kind]], 8)
    assert code.stack == 0 and code.registers <= 128
    assert code.loads["LDG.E.EF.128"] == lane_weights // (8 if kind == "bf16" else 16)
    assert code.loads["LDG.E.128"] == lane_weights // 16
    assert code.count("HMMA") == lane_weights // 8


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("rows", [1, 4, 8, 40])
def test_experts_load_wide_and_early(rows, tiled):
    expert = ExpertWeights(nvfp4(512, 2048), nvfp4(512, 2048), nvfp4(2048, 512))
    packed = GroupedExperts([expert], expert, 1)
    scratch = ExpertScratch.make(rows, 1, 1, packed.width, 2048, torch.device("cpu"))
    with compiling() as kernels:
        packed.rows(some_rows(rows, 2048, tiled), torch.zeros(rows, 2), *outputs(rows, 1, "cpu"), scratch, True)
    assert len(kernels) == (2 if rows <= moe.CHOICE_ROWS else 3 if rows <= 8 else 4)
    parts = (packed.groups[0].gate_up, packed.groups[0].down)
    gate_up, down = codes = [Code(kernel) for kernel in kernels[-2:]]
    for code, part in zip(codes, parts, strict=True):
        shape = moe.choose_shape(part.format, part.num_tiles // 2, part.num_units, rows)
        # 384 threads an SM at least where programs are few, else 512
        assert code.stack == 0 and code.registers <= (168 if rows <= 4 else 128)
        assert code.before("LDGSTS.E.BYPASS.128" if shape.ring else "LDG.E.EF.128", "HMMA") >= (
            2 * shape.tiles * shape.stages
        )
        # x of a step at once, not one load after each other's product
        assert code.before("LDG.E.128", "HMMA") >= (4 * (1 + shape.x_ahead) if shape.pinned else 1)
    if rows > 8:
        # of a unit x waits for the number of items, the item and its rows: not for what its end needs
        for code in codes:
            before_x = code.instructions[: code.instructions.index("LDG.E.128")]
            assert sum(op in ("LDG.E", "LDG.E.STRONG.GPU") for op in before_x) == 3
    if rows <= 8:
        # programs that find their rows by themselves: warps of gate_up do not wait for each other to ask for weights,
        # but to hand each other what they have chosen, a row a warp
        barriers = 1 if 1 < rows <= moe.CHOICE_ROWS else 0
        assert gate_up.before("BAR", "LDG.E.EF.128") == barriers
    if rows == 1:
        # half of down's weights before the wait, all of x before the first product
        assert down.loads["LDG.E.EF.128"] == 2 * weights_before_waits(down)[-1]["LDG.E.EF.128"] == 8
        assert down.before("LDG.E.128", "HMMA") == down.loads["LDG.E.128"] == 8


@pytest.mark.parametrize(
    ("format", "model", "rows", "programs"),
    [
        (Format.NVFP4, "35B-A3B", 16, (7, 14)),
        (Format.NVFP4, "35B-A3B", 128, (4, 9)),
        (Format.NVFP4, "122B-A10B", 32, (7, 5)),
        (Format.FP8, "35B-A3B", 16, (4, 8)),
    ],
)
def test_so_many_programs_of_listed_experts_are_there_as_there_is_room_for(format, model, rows, programs):
    """The first of moe.WAVES is all there at once, the number of programs being a multiple of it; nothing spills."""
    hidden, width = EXPERTS[model]
    group = ExpertGroup(empty(format, 6 * width, hidden), empty(format, 3 * hidden, width), 3, width)
    scratch = ExpertScratch.make(rows, 1, 2, width, hidden, torch.device("meta"))
    x, logits = some_rows(rows, hidden, device="meta"), torch.empty((rows, 3), device="meta")
    with compiling() as kernels:
        GroupedExperts.of([group], 1, 2, hidden).rows(x, logits, *outputs(rows, 1, "meta"), scratch, True)
    for kernel, part, most in zip(kernels[-2:], (group.gate_up, group.down), programs, strict=True):
        code, shape = Code(kernel), moe.choose_shape(format, part.num_tiles // 3, part.num_units, rows)
        assert code.stack == code.count("LDL") == code.count("STL") == 0
        assert moe.num_programs(format, shape) == moe.WAVES * launch_shapes.SM_COUNT * most
        assert 65536 // (-(-code.registers // 8) * 8 * 32 * shape.warps) >= most


@pytest.mark.parametrize(("rows", "most_registers"), [(1, (168, 112)), (4, (128, 128))])
def test_experts_choose_in_few_instructions(rows, most_registers):
    """As the 35B-A3B has them: gate_up's programs run at once, with 288 of one row of 384 threads an SM; what they wait
    for is one load of the logits, the sort, and two reductions a rank."""
    packed = experts_of(Format.NVFP4, 2048, 512)
    scratch = ExpertScratch.make(rows, 8, 256, 512, 2048, torch.device("meta"))
    x, logits = some_rows(rows, 2048, device="meta"), torch.empty((rows, 257), device="meta")
    with compiling() as kernels:
        packed.rows(x, logits, *outputs(rows, 8, "meta"), scratch, True)
    assert [kernel.metadata.name for kernel in kernels] == ["experts_kernel"] * 2
    gate_up, down = codes = [Code(kernel) for kernel in kernels]
    for code, most in zip(codes, most_registers, strict=True):
        assert code.stack == code.count("LDL") == code.count("STL") == 0 and code.registers <= most
    first = gate_up.instructions.index("LDG.E.EF.128")
    waited = gate_up.instructions[gate_up.instructions.index("ACQBULK") : first]
    assert sum(op.startswith("REDUX") for op in waited) == 2 * 8 and len(waited) < (380 if rows == 1 else 440)
    # down chooses before its wait: of what it writes in one way, of the experts in the other
    waits = [place for place, op in enumerate(down.instructions) if op == "ACQBULK"]
    assert len(waits) == 2 and down.count("REDUX") >= 2 * 16
    assert all("REDUX" not in op for op in down.instructions[waits[-1] :])


@pytest.mark.parametrize(("hidden", "top_k"), [(2048, 8), (4096, 10)])
def test_combine_asks_for_all_at_once(hidden, top_k):
    """The assembler would load two parts of a row at a time, as many ways to the L2 one after the other."""
    x, parts, factors = torch.zeros(1, hidden), torch.zeros(1, top_k + 1, hidden).bfloat16(), torch.zeros(1, top_k)
    with compiling() as kernels:
        moe.combine(parts, factors, torch.zeros(1), x, torch.zeros(hidden), 1e-6, some_rows(1, hidden), True)
    code = Code(kernels[0])
    assert code.stack == 0 and code.count("LDL") == code.count("STL") == 0
    for first in ("FMUL", "FFMA", "FADD"):
        assert code.before("LDG", first) == code.count("LDG") == 2 * (top_k + 1) + 4
    # of them the norm's scale alone before the wait
    assert code.before("LDG", "ACQBULK") == 2


@pytest.mark.parametrize(
    ("height", "width", "rows", "swiglu", "segments", "plain"),
    [
        (34816, 5120, 1, True, 0, 0),
        (5120, 17408, 8, False, 8, 0),
        (5120, 6144, 8, False, 8, 0),
        (16384, 5120, 16, False, 0, 96),
    ],
)
def test_units_of_a_long_loop_are_on_their_way_to_shared_memory(height, width, rows, swiglu, segments, plain):
    """Of the 27B: five programs of 128 threads an SM, four beside BF16, and no unit in flight in registers."""
    part, beside = empty(Format.NVFP4, height, width), empty(Format.BF16, plain, width) if plain else None
    shape = launch_shapes.choose_shape(part, rows, swiglu, beside, segments, tiled=True)
    x, out = (
        some_rows(rows, width, device="meta"),
        some_rows(rows, height // 2 if swiglu else height + plain, swiglu, "meta"),
    )
    with compiling() as kernels:
        linear.launch(part, x, out, shape, swiglu, True, beside)
    code = Code(kernels[0])
    assert shape.ring and code.stack == 0 and code.registers <= (128 if plain else 96)
    copies = 3 * shape.tiles * shape.stages
    assert code.count("LDGSTS") >= copies
    if not plain:  # whose tiles have a way of their own, by registers, before
        assert code.before("LDGSTS", "HMMA") >= copies
        assert not any(load.startswith("LDG.E.EF") for load in code.loads)


def weights_before_waits(code: Code) -> list[Counter[str]]:
    """For each wait, the loads of weights between it and the end of the way that stands before it."""
    found, begin = [], 0
    for place, op in enumerate(code.instructions):
        if op == "EXIT":
            begin = place
        elif op == "ACQBULK":
            found.append(Counter(load for load in code.instructions[begin:place] if load.startswith("LDG.E.EF")))
    return found


@pytest.mark.parametrize(
    ("format", "height", "width", "rows", "alone", "both"),
    [
        # q|k|v|z with b|a of the 35B-A3B, and of the 27B
        (Format.NVFP4, 12288, 2048, 8, 4, 4),
        (Format.NVFP4, 12288, 2048, 16, 3, 3),
        (Format.FP8, 16384, 5120, 8, 4, 4),
        (Format.FP8, 16384, 5120, 16, 4, 3),
        (Format.NVFP4, 16384, 5120, 8, 4, 4),
    ],
)
def test_bf16_tiles_in_the_launch_of_others(format, height, width, rows, alone, both):
    """So many programs of 128 threads an SM without and with them, of which only FP8 from 9 rows on has fewer then; no
    spill, and the same loads and products."""
    part, plain = empty(format, height, width, row_numbers=format is Format.FP8), empty(Format.BF16, 64, width)
    shape = launch_shapes.choose_shape(part, rows, plain=plain, tiled=True)
    x, out = some_rows(rows, width, device="meta"), some_rows(rows, height + 64, False, "meta")
    with compiling() as kernels:
        # alone with the registers that it has alone
        own = replace(shape, registers=launch_shapes.choose_shape(part, rows, tiled=True).registers)
        linear.launch(part, x, out, own, False, True)
        linear.launch(part, x, out, shape, False, True, plain)
    without, beside = codes = [Code(kernel) for kernel in kernels]
    assert shape.warps == 4 and beside.stack == beside.count("LDL") == beside.count("STL") == 0
    assert [65536 // (-(-code.registers // 8) * 8 * 128) for code in codes] == [alone, both]
    # of the two ways through the kernel one asks for the same weights before its wait
    (before,), ways = weights_before_waits(without), weights_before_waits(beside)
    assert len(ways) == 2 and before in ways and before["LDG.E.EF.128"] >= 8
    # BF16's: 8 loads a unit, and three numbers of the end
    more = beside.loads - without.loads
    assert set(more) == {"LDG.E.EF.128", "LDG.E.128", "LDG.E"} and more["LDG.E"] == 3
    assert more["LDG.E.EF.128"] == 2 * more["LDG.E.128"] >= 32 and more["LDG.E.EF.128"] % 8 == 0


@pytest.mark.parametrize(
    ("height", "width", "segments", "rows", "programs"),
    [
        (34816, 5120, 0, 32, 3),
        (5120, 17408, 8, 16, 3),
        (5120, 17408, 8, 64, 3),
        (2048, 4096, 8, 32, 2),
        (2048, 4096, 8, 64, 1),
    ],
)
def test_many_rows_leave_room_for_several_programs(height, width, segments, rows, programs):
    """Of 17 rows on three of 128 threads an SM, of 16 as many of 256, for which at most a word is kept elsewhere."""
    part = empty(Format.NVFP4, height, width)
    shape = launch_shapes.choose_shape(part, rows, segments=segments, tiled=True)
    x, out = some_rows(rows, width, device="meta"), some_rows(rows, height, False, "meta")
    with compiling() as kernels:
        linear.launch(part, x, out, shape, False, True)
    code = Code(kernels[0])
    assert 65536 // (-(-code.registers // 8) * 8 * 32 * shape.warps) >= programs
    assert code.stack <= 8 and code.count("LDL") <= 2


@pytest.mark.parametrize("rows", [1, 4, 8, 16, 32])
def test_a_ring_fits_beside_the_sums(rows):
    """Of any weight: in 48 KB, with a sum of each warp for a tile and 8 rows."""
    seen = set()
    for tiles, units, segments in combinations(
        (1, 20, 264, 266, 320, 2176, 16000), (2, 5, 16, 40, 72, 80, 136), (0, 8)
    ):
        part = empty(Format.NVFP4, 16 * tiles, 128 * units)
        if units % max(segments, 1) == 0:
            for swiglu in {False, tiles % 2 == 0 and not segments}:
                shape = launch_shapes.choose_shape(part, rows, swiglu, None, segments, True)
                num_bytes = UNIT_BYTES[Format.NVFP4] * shape.warps * shape.tiles * shape.stages
                assert not shape.ring or num_bytes + 512 * shape.warps * shape.tiles <= 48 << 10, (tiles, units, shape)
                assert shape.stages <= units // shape.split // shape.warps, (tiles, units, shape)
                seen.add(shape.ring)
    assert True in seen


@pytest.mark.parametrize(
    ("height", "width", "segments", "plain", "programs"),
    [(16384, 5120, 0, 96, 4), (14336, 5120, 0, 0, 4), (5120, 6144, 8, 0, 2)],
)
def test_x_in_quarters_leaves_room_for_twice_the_programs(height, width, segments, plain, programs):
    """At 32 rows, of as many threads as they have; what is kept elsewhere is not of the loop."""
    part, beside = empty(Format.NVFP4, height, width), empty(Format.BF16, plain, width) if plain else None
    shape = launch_shapes.choose_shape(part, 32, plain=beside, segments=segments, tiled=True)
    x, out = some_rows(32, width, device="meta"), some_rows(32, height + plain, False, "meta")
    with compiling() as kernels:
        linear.launch(part, x, out, shape, False, True, beside)
    code = Code(kernels[0])
    assert shape.quarters and 65536 // (-(-code.registers // 8) * 8 * 32 * shape.warps) >= programs
    assert code.stack <= 24 and code.count("LDL") <= 6
    # of row-major rows there may be no more memory than rows
    assert not launch_shapes.choose_shape(part, 32, plain=beside, segments=segments).quarters


@pytest.mark.parametrize(
    ("height", "width", "swiglu", "segments", "rows", "most"),
    [
        (34816, 5120, True, 0, 64, 306),
        (34816, 5120, True, 0, 96, 308),
        (5120, 17408, False, 8, 32, 295),
        (5120, 17408, False, 8, 64, 308),
        (5120, 17408, False, 8, 96, 310),
        (5120, 6144, False, 8, 64, 172),
        (5120, 6144, False, 8, 128, 308),
        (248320, 5120, False, 0, 32, 295),
        (248320, 5120, False, 0, 96, 310),
    ],
)
def test_a_wide_product_unpacks_into_the_warp_groups_operands(height, width, swiglu, segments, rows, most):
    """At most six words are spilled, past 64 rows eight, no weight stored or brought from another lane; a unit takes
    few instructions, one barrier, and no store of single words; two units of weights are asked for before the wait for
    x. Past 64 rows a program has 64 of them or 32, and a loop for each."""
    part = empty(Format.NVFP4, height, width)
    out = some_rows(rows, height // 2 if swiglu else height, swiglu, "meta")
    shape = wide.choose_wide_shape(part, rows, segments, width)
    with compiling() as kernels:
        wide.launch(part, some_rows(rows, width, True, "meta"), out, shape, swiglu, segments, True)
    # launches one behind the other are of one kernel
    assert len({kernel.hash for kernel in kernels}) == 1
    code = Code(kernels[0])
    assert code.registers <= 168 and code.stack <= (24 if rows <= 64 else 32)
    # three programs beside 156 KB of L1
    assert (kernels[0].metadata.shared + 1024) * 3 <= 100 << 10
    loops = [Counter(op.split(".")[0] for op in loop) for loop in loops_with(code, "HGMMA")]
    assert sorted(loop["STSM"] for loop in loops) == ([rows // 4] if rows <= 64 else [8, 16])
    for loop in loops:
        assert loop["HGMMA"] == 4 * shape.tiles and loop["SHFL"] == loop["STS"] == loop["LDS"] == 0
        assert loop["BAR"] == 2 and loop.total() / 2 <= most
    assert code.before("LDG.E.128.STRONG", "ACQBULK") == shape.tiles


def loops_with(code: Code, op: str) -> Iterator[list[str]]:
    """The instructions of each loop that has such a one, but for those around another."""
    lines = re.findall(r"^\s+/\*([0-9a-f]+)\*/\s+((?:@!?U?P\w+\s+)?[A-Z0-9_.]+[^;]*);", code.text, re.M)
    places = {int(place, 16): number for number, (place, _) in enumerate(lines)}
    end_of_last = 0
    for number, (place, line) in enumerate(lines):
        back = re.search(r"BRA (?:`\S+ )?.*?(0x[0-9a-f]+)", line)
        begin = places[int(back[1], 16)] if back and int(back[1], 16) < int(place, 16) else -1
        if begin >= end_of_last and any(op in line for _, line in lines[begin:number]):
            yield code.instructions[begin : number + 1]
            end_of_last = number


def test_fewer_registers_only_where_no_more_of_the_gpu_idles():
    # 34816x5120 and 12288x2048 at 32 rows; 16384x5120 there (512 programs: 2 waves either way), and at 64
    assert [bool(launch_shapes.three_a_multiprocessor(n)) for n in (1088, 384, 512, 1024)] == [True, True, False, True]


def test_silu_of_a_part_of_a_wide_product_moves_16_bytes_at_a_time():
    """Number by number it took three times as long as its bytes."""
    with compiling() as kernels:
        # the second part of two, as `bulk` has them
        silu_product(*torch.zeros(2, 8608).bfloat16().chunk(2, -1), torch.zeros(2, 17408).bfloat16()[:, 13104:])
    code = Code(kernels[0])
    assert code.loads == {"LDG.E.128": 2} and code.count("STG.E.128") == code.count("STG") == 1
