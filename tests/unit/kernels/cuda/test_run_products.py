"""Products, experts, and an embedding in a product's order, as compiled for a GPU and run on the CPU by their PTX
(tests/support/ptx.py): values and bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product as combinations
from typing import Any

import pytest
import torch

from pilotfish.kernels.cuda import launch_shapes, linear, moe, norm, wide
from pilotfish.kernels.cuda.expand import expand
from pilotfish.kernels.cuda.launch_shapes import LaunchShape
from pilotfish.kernels.cuda.linear import PackedLinear
from pilotfish.kernels.cuda.moe import ExpertScratch, GroupedExperts, combine
from pilotfish.kernels.cuda.packing import PackedRows
from pilotfish.kernels.cuda.scratch import PartialSums
from pilotfish.kernels.cuda.swiglu import silu_product
from pilotfish.kernels.cuda.tiled_rows import AnyRows, TiledRows
from pilotfish.kernels.cuda.wide import WideShape
from pilotfish.kernels.linear import in_tree
from tests.support.kernel_references import combine_reference, dequantized, expert_rows_reference
from tests.support.ptx import running
from tests.support.routed import run_routed
from tests.unit.kernels.cuda.test_experts import expert
from tests.unit.kernels.cuda.test_packing import nvfp4, values, weights

KINDS = ["nvfp4", "modelopt", "fp8 tensor", "fp8 channel", "fp8 block", "bf16"]
NAN = float("nan")


def draw(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * scale).bfloat16()


def run(product: PackedLinear, x: AnyRows, rows: int | None = None, dtype=torch.float32, pdl=True) -> torch.Tensor:
    out = torch.full((rows or len(x), product.out_features), NAN, dtype=dtype)
    with running() as names:
        product.rows(x, out, pdl)
    assert len(names) == len(product.launches(len(out)))
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def close(got: torch.Tensor, want: torch.Tensor, error: float) -> None:
    assert ((got.double() - want.double()).abs().max() / want.double().abs().max()) < error


@pytest.mark.parametrize(("kind", "rows"), [("nvfp4", 3), ("nvfp4", 20), *((kind, 13) for kind in KINDS)])
def test_values(kind, rows):
    """A width and a height that are no whole units and tiles; one, two and four tiles of rows."""
    weight, x = weights(40, 400)[kind], draw(rows, 400)
    close(run(PackedLinear([weight]), x), x.double() @ values(weight).double().T, 1e-6)


def tiled_nan(rows: int, width: int) -> TiledRows:
    tiled = TiledRows.empty(rows, width, torch.device("cpu"))
    tiled.memory.fill_(NAN)
    return tiled


@pytest.mark.parametrize(("kind", "segments"), [("nvfp4", 0), ("fp8 block", 0), ("bf16", 0), ("nvfp4", 2)])
@pytest.mark.parametrize("rows", [1, 9, 17])
def test_tiled_rows_give_the_bits_of_others(kind, segments, rows):
    """What stands past the rows, in memory or as rows that are not asked for, is NaN and is not read."""
    product, x = PackedLinear([weights(40, 512)[kind]], segments=segments), draw(rows, 512)
    tiled = TiledRows.of(torch.cat((x, x.new_full((8, 512), NAN))))
    assert same_bits(run(product, tiled, rows), run(product, x))


@pytest.mark.parametrize(("kind", "rows"), [("nvfp4", 1), ("nvfp4", 9), ("nvfp4", 17), ("fp8 channel", 5)])
def test_gate_and_up_write_tiled_rows(kind, rows):
    product, x = PackedLinear([weights(256, 256)[kind]] * 2, swiglu=True), draw(rows, 256, 1e-2)
    out = tiled_nan(rows, 256)
    with running():
        product.rows(TiledRows.of(x), out, True)
    assert same_bits(out.plain(), run(product, x, dtype=torch.bfloat16))
    # what is no row stays as it was
    assert int(out.memory.isnan().sum()) == out.memory.numel() - rows * 256


@pytest.mark.parametrize("rows", [3, 11, 20, 33])
@pytest.mark.parametrize(
    ("swiglu", "columns", "segments", "shape"),
    [
        (True, 1280, 0, LaunchShape(2, 2, 2, 1, 0)),  # in a loop
        (True, 1280, 0, LaunchShape(2, 2, 4, 1, 0)),
        (False, 2048, 8, LaunchShape(4, 2, 4, 1, 0, 8, split=2)),
        (False, 3072, 8, LaunchShape(8, 1, 2, 1, 0, 8)),
        (False, 1536, 0, LaunchShape(4, 2, 4, 1, 0)),
    ],
)
def test_x_a_quarter_of_a_step_at_a_time(swiglu, columns, segments, shape, rows):
    """Of rows that are not there what stands in memory is read, and decides nothing."""
    product = PackedLinear([weights(64, columns)["nvfp4"] for _ in range(2 if swiglu else 1)], swiglu, segments)
    x = draw(rows, columns)
    tiled = TiledRows(TiledRows.of(torch.cat((x, x.new_full((32, columns), NAN)))).memory, rows, columns)
    want, got = (torch.full((rows, product.out_features), NAN) for _ in range(2))
    with running():
        linear.launch(product.ranges[0], x, want, shape, swiglu, True)
        for stages, ring in combinations((1, 2), (False, True)):
            quartered = replace(shape, stages=stages, ring=ring, quarters=True)
            linear.launch(product.ranges[0], tiled, got.fill_(NAN), quartered, swiglu, True)
            assert want.isfinite().all() and same_bits(got, want)


def test_a_rows_bits_depend_on_no_other_row():
    product, x = PackedLinear([weights(32, 512)["nvfp4"]]), draw(20, 512)
    all_rows = run(product, x)
    for row in (0, 7, 8, 19):
        assert same_bits(run(product, x[row : row + 1].contiguous(), pdl=False)[0], all_rows[row])
        others = torch.full_like(x, NAN)
        others[row] = x[row]
        assert same_bits(run(product, others)[row], all_rows[row])
    assert same_bits(run(product, x, 9), all_rows[:9])


@pytest.mark.parametrize("kind", ["nvfp4", "fp8 channel"])
def test_bits_depend_on_no_launch_shape_but_the_shares(kind):
    """With a loop and without, several depths of prefetching to registers and to shared memory, one tile a program and
    four, some past the last."""
    product, x = PackedLinear([weights(40, 1024)[kind]]), draw(9, 1024)
    results = []
    shapes = [(1, 1, 1, 0), (2, 2, 3, 1), (4, 4, 1, 0), (1, 1, 4, 3)]
    for ring, (tiles, row_tiles, stages, ahead) in combinations((False, True), shapes):
        if kind == "fp8 channel" and tiles * stages > 4 and not ring:
            continue
        out = torch.full((9, 40), NAN)
        shape = LaunchShape(2, tiles, row_tiles, stages, ahead, ring=ring)
        with running():
            linear.launch(product.ranges[0], x, out, shape, False, True)
        results.append(out)
    assert all(same_bits(results[0], other) for other in results[1:])
    close(results[0], x.double() @ dequantized(product).double().T, 1e-6)


def test_a_row_parallel_products_units_may_be_on_their_way_to_shared_memory():
    """Shares in turn, a program's and several programs'; a loop over groups of steps and a rest."""
    product, x = PackedLinear([weights(40, 4096)["nvfp4"]], segments=8), draw(3, 4096)
    want = torch.full((3, 40), NAN)
    with running():
        linear.launch(product.ranges[0], x, want, LaunchShape(8, 1, 1, 2, 1, 8), False, True)
    for warps, split, stages in ((8, 1, 1), (4, 1, 2), (4, 2, 3), (2, 2, 2)):
        out = torch.full((3, 40), NAN)
        with running():
            shape = LaunchShape(warps, 2, 1, stages, 1, 8, split, ring=True)
            linear.launch(product.ranges[0], x, out, shape, False, True)
        assert same_bits(out, want)


@pytest.mark.parametrize(
    ("kind", "swiglu", "columns", "segments", "rows", "shape"),
    [
        ("nvfp4", True, 2560, 0, 17, WideShape(32)),
        ("nvfp4", True, 1536, 0, 64, WideShape(64, together=True)),  # a share of an odd number of units behind another
        ("nvfp4", True, 2048, 0, 33, WideShape(64, tiles=4)),
        ("modelopt", False, 2560, 0, 40, WideShape(32, tiles_first=True)),  # rows of two programs
        ("modelopt", False, 2048, 0, 32, WideShape(32, together=True)),
        ("nvfp4", False, 5120, 8, 32, WideShape(32)),  # in a loop and a rest
        ("nvfp4", False, 2048, 8, 33, WideShape(64, tiles=4, tiles_first=True)),
        ("nvfp4", True, 2048, 0, 70, WideShape(64)),  # a launch, of 64 rows and of the rest as one of 32
        ("nvfp4", True, 1536, 0, 80, WideShape(64, together=True)),  # the same
        ("nvfp4", False, 2048, 8, 96, WideShape(64)),  # the same, whose sums do not meet
        ("modelopt", False, 2048, 8, 97, WideShape(64)),  # of twice 64
        ("modelopt", False, 2048, 8, 130, WideShape(64)),  # two, of 128 rows and of the rest
    ],
)
def test_a_wide_product_has_the_bits_of_the_other_kernel(monkeypatch, kind, swiglu, columns, segments, rows, shape):
    """A tile that is not full, and neighbours and rows past the end that are no numbers."""
    monkeypatch.setattr(wide, "REGISTERS", None)
    monkeypatch.setattr(wide, "split", lambda num_tiles, num_units: 4)
    # sums of 128 rows, with 8 shares of 8 tiles or 4 of 16
    monkeypatch.setattr(wide, "MOST_SUMS", 128 * 8 * 8 * 16)
    # of tiled rows whole units are written
    height = 128 if swiglu else 120
    product = PackedLinear([weights(height, columns)[kind] for _ in range(2 if swiglu else 1)], swiglu, segments)
    (part,) = product.ranges
    assert wide.can_take(part, rows, segments, columns)
    x = draw(rows, columns, 1e-2)
    others = torch.full_like(x, NAN)
    others[16] = x[16]
    tiled, beside = (TiledRows(TiledRows.of(torch.cat((each, each.new_full((64, columns), NAN)))).memory, rows, columns)
                     for each in (x, others))  # fmt: skip
    want = torch.full((rows, height), NAN, dtype=torch.bfloat16 if swiglu else torch.float32)
    outs = []
    with running() as names:
        linear.launch(part, x, want, LaunchShape(4, 2, 4, 1, 0, segments), swiglu, True)
        for each in (tiled, beside, x):
            out = tiled_nan(rows, height) if swiglu else torch.full_like(want, NAN)
            wide.launch(part, each, out, shape, swiglu, segments, True)
            outs.append(out.plain() if isinstance(out, TiledRows) else out)
            if isinstance(out, TiledRows) and each is not beside:
                assert int(out.memory.isnan().sum()) == out.memory.numel() - rows * height
    assert names[1:] == ["_wide_kernel"] * 3 * (2 if rows > 128 else 1) and want.isfinite().all()
    assert same_bits(outs[0], want) and same_bits(outs[1][16], want[16]) and same_bits(outs[2], want)
    assert not PartialSums.of(x.device).arrivals.any()


def test_a_product_is_wide_where_a_shape_is_chosen_and_bf16_beside_it_a_launch_of_its_own(monkeypatch):
    parts, x = [nvfp4(1152, 2048), weights(20, 2048)["bf16"]], draw(24, 2048)
    outs = []
    for few, kernels in ((wide.MOST_TILES, ["_rows_kernel"]), (16, ["_wide_kernel", "_rows_kernel"])):
        monkeypatch.setattr(wide, "MOST_TILES", few)
        product = PackedLinear(parts)
        outs.append(torch.full((24, 1172), NAN))
        with running() as names:
            product.rows(TiledRows.of(x), outs[-1], True)
        assert names == kernels
    assert same_bits(*outs)


def test_what_the_wide_kernel_can_take():
    (part,) = PackedLinear([nvfp4(256, 1024)]).ranges
    cases = ((16, 4, False), (17, 4, True), (65, 4, True), (256, 4, True), (17, 8, False))  # a unit a share
    for rows, segments, taken in cases:
        assert wide.can_take(part, rows, segments, 1024) == taken
    assert not wide.can_take(part, 17, 4, 1000)
    assert not wide.can_take(PackedLinear([nvfp4(144, 1024)]).ranges[0], 17, 4, 1024)
    assert not wide.can_take(PackedLinear([weights(256, 1024)["fp8 channel"]]).ranges[0], 17, 4, 1024)


@pytest.mark.parametrize(("kind", "columns", "segments"), [("nvfp4", 1024, 8), ("fp8 block", 512, 2)])
def test_a_row_parallel_product_adds_its_segments_by_the_tree(kind, columns, segments):
    """Whatever warps and programs have them: each segment is what a weight of its columns alone gives, in one share."""
    weight, x = weights(20, columns)[kind], draw(5, columns)
    product = PackedLinear([weight], segments=segments)
    want = run(product, x)
    close(want, x.double() @ values(weight).double().T, 1e-6)
    for warps, split in ((1, 1), (2, 1), (1, 2), (1, segments)):
        out = torch.full((5, 20), NAN)
        with running():
            linear.launch(product.ranges[0], x, out, LaunchShape(warps, 2, 1, 1, 0, segments, split), False, True)
        assert same_bits(out, want), (warps, split)
    assert not PartialSums.of(x.device).arrivals.any()
    part, width = product.ranges[0], columns // segments
    sums = []
    for i in range(segments):
        units = slice(i * width // 128, (i + 1) * width // 128)
        scale = None if part.block_scale is None else part.block_scale[:, units].contiguous()
        own = replace(
            part, data=part.data[:, units].contiguous(), number=torch.ones_like(part.number), block_scale=scale
        )
        sums.append(torch.full((5, 20), NAN))
        with running():
            columns_of_x = x[:, i * width : (i + 1) * width].contiguous()
            shape = LaunchShape(1, 1, 1, 1, 0, 1)
            linear.launch(replace(own, divides=False), columns_of_x, sums[-1], shape, False, True)
    number = part.number[0, 0]
    whole = in_tree(sums) / number if part.divides else in_tree(sums) * number
    assert same_bits(whole, want)


@pytest.mark.parametrize(("kind", "rows"), [("modelopt", 12), ("fp8 channel", 5)])
def test_swiglu(kind, rows):
    parts, x = [weights(40, 256)[kind], weights(40, 256)[kind]], draw(rows, 256, 1e-3)
    gate, up = (x.double() @ values(part).double().T for part in parts)
    close(run(PackedLinear(parts, swiglu=True), x), torch.nn.functional.silu(gate) * up, 1e-5)


def test_parts_of_several_kinds_into_columns_of_a_wider_output():
    parts = [nvfp4(24, 256), nvfp4(16, 256, seed=5), weights(20, 256)["bf16"], weights(7, 256)["fp8 channel"]]
    product, x = PackedLinear(parts), draw(4, 256)
    wide = torch.full((4, 100), -1.0).bfloat16()
    with running() as names:
        product.rows(x, wide[:, 16:83])
    assert len(names) == 3
    close(wide[:, 16:83], x.double() @ torch.cat([values(part) for part in parts]).double().T, 0.005)
    assert (wide[:, :16] == -1).all() and (wide[:, 83:] == -1).all()


@pytest.mark.parametrize(
    ("kind", "columns", "rows", "shape"),
    [
        ("nvfp4", 1024, 3, LaunchShape(2, 2, 1, 2, 1)),  # 8 shares of K, a unit each, by 2 warps
        ("fp8 block", 1024, 11, LaunchShape(2, 2, 2, 1, 0)),
        ("modelopt", 3072, 20, LaunchShape(4, 1, 4, 1, 0)),  # 8 shares of 3 units, by 4 warps
        ("fp8 channel", 5120, 2, LaunchShape(4, 1, 1, 2, 1)),  # in a loop
        ("nvfp4", 400, 5, LaunchShape(4, 2, 1, 1, 0)),  # as many shares as warps, and a width that is no whole unit
    ],
)
def test_bf16_tiles_beside_others_have_the_bits_of_a_launch_of_their_own(kind, columns, rows, shape):
    product = PackedLinear([weights(40, columns)[kind], weights(20, columns)["bf16"]])
    part, plain = product.ranges
    x, together, apart = draw(rows, columns), *(torch.full((rows, 60), NAN) for _ in range(2))
    with running() as names:
        linear.launch(part, x, together, shape, False, True, plain)
        assert len(names) == 1
        linear.launch(part, x, apart, shape, False, True)
        linear.launch(plain, x, apart, launch_shapes.choose_shape(plain, rows), False, True)
    assert same_bits(together, apart)
    close(together, x.double() @ dequantized(product).double().T, 1e-6)


def test_one_launch_for_many_tiles_and_a_few_of_bf16():
    few, many = weights(20, 128)["bf16"], nvfp4(256, 128)
    product, x = PackedLinear([many, few]), draw(9, 128)
    assert len(product.launches(9)) == 1
    got = run(product, x)
    assert same_bits(run(product, x, 2), got[:2])
    others = torch.full_like(x, NAN)
    others[8] = x[8]
    assert same_bits(run(product, others)[8], got[8])
    close(got, x.double() @ dequantized(product).double().T, 1e-6)
    # not where they would be a good part of it, nor where there is nothing to stand beside
    for parts, count in (([nvfp4(240, 128), few], 2), ([few, many], 2), ([many, few, nvfp4(16, 128), few], 3)):
        assert len(PackedLinear(parts).launches(9)) == count
    # nor, past 8 rows, beside FP8 in blocks
    blocks = PackedLinear([weights(256, 256)["fp8 block"], weights(20, 256)["bf16"]])
    assert [len(blocks.launches(rows)) for rows in (8, 9)] == [1, 2]


@pytest.mark.parametrize(("kind", "group"), [("nvfp4", 4), ("modelopt", 0), ("fp8 block", 2), ("bf16", 0)])
def test_expands_to_what_the_format_says(kind, group):
    # more units than a program has
    part = PackedLinear([weights(64, 592)[kind]]).ranges[0]
    want = expand(part, slice(None), torch.empty(64, 592).bfloat16(), group)
    got = torch.full_like(want, NAN)
    with running():
        expand(part, slice(None), got, group, on_device=True)
    assert same_bits(got, want)


def test_silu_of_a_product_s_first_half_times_the_second():
    """As a library leaves them: side by side, to a part of a wider output; more than a program's columns."""
    product, outs = draw(3, 2 * 1104, 4.0), []
    gate, up = product.chunk(2, -1)
    want = torch.nn.functional.silu(gate.double()) * up.double()
    # a multiple of 16 goes 16 bytes at a time, another number by number
    for width in (1104, 1100):
        out = torch.full((3, 1200), NAN).bfloat16()
        with running():
            silu_product(gate[:, :width], up[:, :width], out[:, :width])
        # rounded once
        assert (out[:, :width].double() - want[:, :width]).abs().le(want[:, :width].abs() * 2**-8 + 1e-30).all()
        assert out[:, width:].isnan().all()
        outs.append(out)
    assert same_bits(outs[0][:, :1100].contiguous(), outs[1][:, :1100].contiguous())


@pytest.mark.parametrize("hidden", [256, 400])
def test_an_embedding_in_the_order_of_lm_head(hidden):
    """What the first operator of a round and that of the head read of it: the matrix's own numbers, bit for bit."""
    matrix, scale = draw(40, hidden), torch.rand(2, hidden, generator=torch.Generator().manual_seed(1))
    packed = PackedRows(PackedLinear([matrix]).ranges[0], hidden)
    slots, last, drafts = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([39, 7]), torch.tensor([[0], [16]])
    outs = []
    for embedding in (matrix, packed):
        tokens, positions = torch.full((5,), -1), torch.full((5,), -1, dtype=torch.int32)
        x, h = torch.full((5, hidden), NAN), torch.full((5, hidden), NAN).bfloat16()
        pair = torch.full((5, 2 * hidden), NAN).bfloat16()
        with running():
            norm.embed_rows(
                embedding, scale[0], 1e-6, slots, last, drafts, torch.tensor([3, 5]), 2, tokens, positions, x, h
            )
            norm.pair_norm(tokens, embedding, h, scale[0], scale[1], 1e-6, pair, 4)
        outs.append((x, h, pair))
    assert torch.equal(outs[1][0][:4], matrix[[7, 16, 39, 0]].float())
    assert all(same_bits(mine, theirs) for mine, theirs in zip(*outs, strict=True))


H, WIDTH, E, TOP_K = 256, 48, 5, 2


def make_experts(kind: str, shared_kind: str, shared_width: int) -> GroupedExperts:
    return GroupedExperts([expert(kind, n, WIDTH) for n in range(E)], expert(shared_kind, 99, shared_width), TOP_K)


def choose(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return draw(rows, H), torch.rand(rows, E - 1, generator=generator).topk(TOP_K, -1).indices.int()


def run_experts(packed: GroupedExperts, x: AnyRows, ids: torch.Tensor, pdl: bool = True) -> torch.Tensor:
    scratch = ExpertScratch.make(len(ids), TOP_K, E, packed.width, H, ids.device)
    scratch.inner.fill_(NAN)
    scratch.out.fill_(NAN)
    scratch.lists.fill_(1 << 20)
    with running():
        return run_routed(packed, x, ids, scratch, pdl)


def check_experts(packed: GroupedExperts, rows: int) -> torch.Tensor:
    x, ids = (tensor[:rows].contiguous() for tensor in choose(20))
    got = run_experts(packed, x, ids)
    # the inner activations are rounded to bf16, where an ulp may differ
    want = expert_rows_reference(packed, x, ids, ExpertScratch.make(rows, TOP_K, E, packed.width, H, x.device))
    close(got, want, 0.01)
    return got


def test_experts_and_bits_of_rows_alone():
    """Programs by rank, by pair and by list; of the 20 rows some experts have many and one has none."""
    packed = make_experts("nvfp4", "nvfp4", WIDTH)
    many, few = check_experts(packed, 20), check_experts(packed, 11)
    assert same_bits(many[:11], few)
    x, ids = choose(20)
    for rows in (1, 3, 6):
        assert same_bits(run_experts(packed, x[:rows].contiguous(), ids[:rows].contiguous()), few[:rows])
    others = torch.full_like(x[:11], NAN)
    others[6] = x[6]
    assert same_bits(run_experts(packed, others, ids[:11].contiguous(), False)[6], few[6])


@pytest.mark.parametrize("rows", [1, 5, 11, 20])
def test_experts_of_tiled_rows(rows):
    packed, (x, ids) = make_experts("nvfp4", "nvfp4", WIDTH), (part[:rows].contiguous() for part in choose(20))
    assert same_bits(run_experts(packed, TiledRows.of(x), ids), run_experts(packed, x, ids))


def of_so_many_programs(monkeypatch: pytest.MonkeyPatch, programs: int, *operands: Any) -> torch.Tensor:
    monkeypatch.setattr(moe, "num_programs", lambda *shape: programs)
    return run_experts(*operands)


@pytest.mark.parametrize(
    ("kind", "shared_kind", "shared_width", "rows"),
    [("nvfp4", "nvfp4", WIDTH, 20), ("fp8 channel", "modelopt", 80, 11), ("nvfp4", "bf16", WIDTH, 66)],
)
def test_bits_depend_on_no_number_of_programs(monkeypatch, kind, shared_kind, shared_width, rows):
    """Of listed rows programs have units of work in turn: one each, or several."""
    packed, (x, ids) = make_experts(kind, shared_kind, shared_width), choose(rows)
    want = run_experts(packed, x, ids)
    assert same_bits(want[:1], run_experts(packed, x[:1].contiguous(), ids[:1].contiguous()))
    others = torch.full_like(x, NAN)
    others[rows - 9 :] = x[rows - 9 :]
    got = of_so_many_programs(monkeypatch, 7, packed, others, ids)
    assert same_bits(got[rows - 9 :], want[rows - 9 :])


def test_an_expert_that_all_rows_choose(monkeypatch):
    packed, (x, ids) = make_experts("nvfp4", "nvfp4", WIDTH), choose(18)
    ids[:] = torch.tensor([3, 0])
    alone = [run_experts(packed, x[row : row + 1].contiguous(), ids[:1]) for row in (0, 8, 17)]
    for programs in (5, 1000):
        got = of_so_many_programs(monkeypatch, programs, packed, x, ids)
        assert same_bits(got[[0, 8, 17]], torch.cat(alone))


@pytest.mark.parametrize(("rows", "num_experts", "top_k"), [(9, 40, 2), (40, 5, 3), (64, 256, 8), (70, 5, 2)])
def test_one_launch_lists_what_two_do(monkeypatch, rows, num_experts, top_k):
    ids = torch.rand(rows, num_experts, generator=torch.Generator().manual_seed(rows)).topk(top_k, -1).indices.int()
    ids[:, 0] = torch.where((ids == 4).any(1), ids[:, 0], 4)  # one that all rows choose
    lists = [torch.full((moe.list_size(rows, top_k, num_experts),), -7, dtype=torch.int32) for _ in range(2)]
    with running() as names:
        moe.list_experts(ids, num_experts, lists[0], True)
        monkeypatch.setattr(moe, "ONE_LIST_PAIRS", 0)
        moe.list_experts(ids, num_experts, lists[1])
    assert names == ["list_groups_kernel", "list_kernel", "groups_kernel"]
    assert torch.equal(*lists)


def test_a_shared_expert_of_another_kind_and_width():
    packed = make_experts("fp8 channel", "modelopt", 80)
    assert same_bits(check_experts(packed, 1), check_experts(packed, 2)[:1])


@pytest.mark.parametrize(("hidden", "norm"), [(H, True), (H, False), (96, True)])
def test_combine(hidden, norm):
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn(3, TOP_K + 1, hidden, generator=generator).bfloat16()
    chosen, gate = torch.rand(3, TOP_K, generator=generator), torch.rand(3, generator=generator)
    x, scale = torch.randn(4, hidden, generator=generator), torch.rand(hidden, generator=generator) if norm else None
    want, got = x.clone(), x.clone()
    outs = [torch.full((4, hidden), NAN).bfloat16() if norm else None for _ in range(2)]
    combine_reference(parts, chosen, gate, want, scale, 1e-6, outs[0])
    with running():
        combine(parts, chosen, gate, got, scale, 1e-6, outs[1], True)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert torch.equal(got[3], x[3])
    if norm:
        torch.testing.assert_close(outs[1][:3].float(), outs[0][:3].float(), rtol=0.01, atol=0.001)
        assert outs[1][3].isnan().all()


def test_combine_writes_tiled_rows():
    generator = torch.Generator().manual_seed(2)
    parts = torch.randn(9, TOP_K + 1, H, generator=generator).bfloat16()
    chosen, gate = torch.rand(9, TOP_K, generator=generator), torch.rand(9, generator=generator)
    x, scale = torch.randn(9, H, generator=generator), torch.rand(H, generator=generator)
    plain, tiled = torch.full((9, H), NAN).bfloat16(), tiled_nan(9, H)
    for out in (plain, tiled):
        with running():
            combine(parts, chosen, gate, x.clone(), scale, 1e-6, out, True)
    assert plain.isfinite().all() and same_bits(tiled.plain(), plain)
