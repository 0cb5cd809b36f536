"""Packed products on a GPU: a row's bits depend on that row alone, and its values are those of the checkpoint."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from pilotfish.engine.checkpoint.fp8 import per_tensor
from pilotfish.engine.checkpoint.nvfp4 import quantize
from pilotfish.kernels.cuda import carveout, linear, wide
from pilotfish.kernels.cuda.launch_shapes import LaunchShape, choose_shape
from pilotfish.kernels.cuda.linear import PackedLinear
from pilotfish.kernels.cuda.packing import Format
from pilotfish.kernels.cuda.tiled_rows import AnyRows, TiledRows
from pilotfish.kernels.cuda.warm import compile_all
from pilotfish.kernels.cuda.wide import WideShape
from tests.support.kernel_references import dequantized
from tests.unit.kernels.cuda.test_packing import nvfp4, values, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KINDS = ["nvfp4", "modelopt", "fp8 tensor", "fp8 channel", "fp8 block", "bf16"]
ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 33, 64, 200, 256]


def on_gpu(weight):
    return weight.cuda() if isinstance(weight, torch.Tensor) else weight.to("cuda")


def packed(kind: str, rows: int, columns: int, swiglu: bool = False, segments: int = 0) -> PackedLinear:
    return PackedLinear([on_gpu(weights(rows, columns)[kind]) for _ in range(2 if swiglu else 1)], swiglu, segments)


def draw(rows: int, columns: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * scale).bfloat16().cuda()


def run(product: PackedLinear, x: AnyRows, rows: int | None = None, dtype=torch.float32, pdl=False) -> torch.Tensor:
    out = torch.full((rows or len(x), product.out_features), float("nan"), dtype=dtype, device="cuda")
    product.rows(x, out, pdl)
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_unpacks_every_weight_exactly(kind):
    """x with a single 1 takes a column of the matrix, which nothing is added to."""
    product = packed(kind, 272, 256)
    eye = torch.eye(256, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(run(product, eye), dequantized(product).T)


@pytest.mark.parametrize("shape", [(300, 416), (2048, 2048), (6400, 1024), (257, 2048)])
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind, shape):
    product, x = packed(kind, *shape), draw(19, shape[1])
    x[3] *= 1e5
    want = x.double() @ dequantized(product).double().T
    bound = x.double().abs() @ dequantized(product).double().abs().T
    # fp32 sums of K products, in some order: a few ulp of the sum of magnitudes
    assert ((run(product, x).double() - want).abs() <= 2e-6 * bound).all()


@pytest.mark.parametrize(("swiglu", "segments"), [(False, 0), (True, 0), (False, 8), (False, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_depend_on_no_other_row(kind, swiglu, segments):
    """Of a row-parallel product (segments) too, whose warps have one segment or several."""
    product, x = packed(kind, 400, 1024, swiglu, segments), draw(256, 1024)
    if swiglu:
        x *= 1e-3
    alone = torch.cat([run(product, x[row : row + 1].contiguous()) for row in range(256)])
    assert alone.isfinite().all()
    for rows in ROWS:
        assert same_bits(run(product, x, rows), alone[:rows]), rows
        # a row among others, and those NaN or huge
        for fill in (float("nan"), 1e5, 0.0):
            others = torch.full_like(x[:rows], fill)
            row = rows * 2 // 3
            others[row] = x[row]
            assert same_bits(run(product, others)[row], alone[row]), (rows, fill)


TILED = [1, 3, 8, 9, 16, 17, 32, 64, 100]


def tiled_nan(rows: int, width: int) -> TiledRows:
    tiled = TiledRows.empty(rows, width, torch.device("cuda"))
    tiled.memory.fill_(float("nan"))
    return tiled


@pytest.mark.parametrize(
    ("heights", "columns", "segments"),
    [((400,), 1024, 0), ((4608, 96), 5120, 0), ((5120,), 17408, 8), ((5120,), 6144, 8), ((257,), 2048, 0)],
)
@pytest.mark.parametrize("kind", ["nvfp4", "fp8 block", "bf16"])
def test_tiled_rows_give_the_bits_of_others(kind, heights, columns, segments):
    """With a BF16 part beside, as q|k|v|z has, and of row-parallel products; what is no row is NaN."""
    first, *others = heights
    parts = [weights(first, columns)[kind], *(weights(height, columns)["bf16"] for height in others)]
    product, x = PackedLinear([on_gpu(part) for part in parts], segments=segments), draw(100, columns)
    part, plain = product.launches(32)[0]
    quarters = choose_shape(part, 32, plain=plain, segments=segments, tiled=True).quarters
    assert quarters == (kind == "nvfp4" and (columns, segments) in ((5120, 0), (6144, 8)))
    for rows in TILED:
        tiled = TiledRows.of(torch.cat((x[:rows], torch.full_like(x[:8], float("nan")))))
        for pdl in (False, True):
            assert same_bits(run(product, tiled, rows, pdl=pdl), run(product, x, rows)), (rows, pdl)


@pytest.mark.parametrize(("kind", "height", "columns"), [("nvfp4", 17408, 5120), ("fp8 channel", 1024, 1024)])
def test_gate_and_up_write_tiled_rows(kind, height, columns):
    product, x = packed(kind, height, columns, swiglu=True), draw(100, columns, scale=1e-2)
    for rows in TILED:
        out = tiled_nan(rows, height)
        product.rows(TiledRows.of(x[:rows]), out, True)
        want = run(product, x, rows, torch.bfloat16)
        assert want.isfinite().all() and torch.equal(out.plain().view(torch.int16), want.view(torch.int16)), rows
        # what is no row stays as it was
        assert int(out.memory.isnan().sum()) == out.memory.numel() - rows * height


@pytest.mark.parametrize("kind", ["nvfp4", "fp8 block", "bf16"])
def test_bits_depend_on_no_launch_shape_but_the_shares(kind):
    product, x = packed(kind, 1000, 2048), draw(16, 2048)
    part = product.ranges[0]
    chosen = choose_shape(part, 16)
    want = run(product, x)
    for tiles in (1, 2):
        for row_tiles in (1, 2, 4):
            for stages in (1, 2, 4):
                if stages * tiles * (1 if part.format is Format.NVFP4 else 4) > 8:
                    continue
                out = torch.empty_like(want)
                steps = part.num_units // chosen.warps
                ahead = min(stages, steps - 1, 2 if row_tiles == 1 else 1)
                shape = LaunchShape(chosen.warps, tiles, row_tiles, min(stages, steps), ahead)
                linear.launch(part, x, out, shape, False, False)
                assert same_bits(out, want), shape


@pytest.mark.parametrize(
    ("heights", "columns", "swiglu", "segments"), [((2304, 2304), 5120, True, 0), ((4352,), 9216, False, 8)]
)
def test_units_on_their_way_to_shared_memory_change_no_bit(heights, columns, swiglu, segments):
    """Launched again and again, the next one's copies beside the products of the one before."""
    product = PackedLinear([on_gpu(nvfp4(height, columns)) for height in heights], swiglu, segments)
    (part,), x = product.ranges, draw(8, columns, scale=1e-2)
    for rows in (1, 5, 8):
        shape = choose_shape(part, rows, swiglu, None, segments)
        assert shape.ring
        want = torch.empty(rows, product.out_features, device="cuda")
        linear.launch(part, x, want, replace(shape, stages=1, x_ahead=0, ring=False, registers=0), swiglu, False)
        assert want.isfinite().all()
        outs = [torch.empty_like(want) for _ in range(40)]
        for each in outs:
            linear.launch(part, x, each, shape, swiglu, True)
        assert all(same_bits(each, want) for each in outs), rows


def test_parts_of_several_formats_and_heights_and_a_wider_output():
    parts = [nvfp4(48, 512), weights(20, 512)["bf16"], weights(33, 512)["fp8 block"], nvfp4(7, 512, True)]
    product, x = PackedLinear([on_gpu(part) for part in parts]), draw(9, 512)
    wide = torch.full((9, 200), -1.0, dtype=torch.bfloat16, device="cuda")
    product.rows(x, wide[:, 40:148])
    want = x.double() @ torch.cat([values(part) for part in parts]).cuda().double().T
    torch.testing.assert_close(wide[:, 40:148].double(), want, rtol=0.01, atol=1e-3 * float(want.abs().max()))
    assert (wide[:, :40] == -1).all() and (wide[:, 148:] == -1).all()


@pytest.mark.parametrize(
    ("kind", "height", "columns"),
    [
        *(("nvfp4", *shape) for shape in ((12288, 2048), (16384, 5120), (8192, 1024), (12288, 2560))),
        *((kind, 16384, 5120) for kind in ("fp8 channel", "fp8 block")),
    ],
)
def test_bf16_tiles_beside_others_have_the_bits_of_a_launch_of_their_own(kind, height, columns):
    """q|k|v|z with b|a: for every number of rows, beside rows of NaN too, with dependent launches and without."""
    matrix = weights(96, columns)["bf16"]
    product = PackedLinear([on_gpu(weights(height, columns)[kind]), on_gpu(matrix)])
    ((part, plain),) = product.launches(8)
    assert plain is not None
    x = draw(256, columns)

    def run_apart(rows: int) -> torch.Tensor:
        out = torch.full((rows, height + 96), float("nan"), device="cuda")
        for alone in (part, plain):
            linear.launch(alone, x, out, choose_shape(alone, rows), False, False)
        return out

    compile_all(lambda: [(run_apart(n), run(product, x, n), run(product, x, n, pdl=True)) for n in (8, 16, 17)])
    for rows in ROWS:
        apart = run_apart(rows)
        for pdl in (False, True):
            assert same_bits(run(product, x, rows, pdl=pdl), apart), (rows, pdl)
        others = torch.full_like(x[:rows], float("nan"))
        others[rows // 2] = x[rows // 2]
        assert same_bits(run(product, others)[rows // 2], apart[rows // 2]), rows
    want = x.double() @ matrix.cuda().double().T
    got = run(product, x)[:, height:].double()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


def test_swiglu_values():
    product, x = packed("nvfp4", 400, 1024, True), draw(11, 1024, scale=1e-3)
    gate, up = (x.double() @ dequantized(product).double().T).chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(run(product, x).double(), want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_chain_of_dependent_launches_gives_the_same_bits(rows):
    """Each product reads what the one before wrote; with programmatic launches its weights are read before that."""
    generator = torch.Generator().manual_seed(rows)
    matrix = torch.randn(1024, 1024, generator=generator) / 32
    first = PackedLinear([quantize(matrix).to("cuda")])
    second = PackedLinear([per_tensor(matrix.T.contiguous().to(torch.float8_e4m3fn), torch.ones(1)).to("cuda")])
    x = draw(rows, 1024)

    def chain(pdl: bool) -> list[torch.Tensor]:
        buffers = [x.clone(), torch.zeros_like(x)]
        kept = []
        for step in range(60):
            (first, second)[step % 2].rows(buffers[step % 2], buffers[1 - step % 2], pdl)
            if step % 20 == 19:
                kept.append(buffers[1 - step % 2].clone())
        return kept

    for plain, dependent in zip(chain(False), chain(True), strict=True):
        assert plain.isfinite().all() and torch.equal(plain.view(torch.int16), dependent.view(torch.int16))


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_bulk_is_the_libraries_product_of_the_same_weights(kind, swiglu):
    product, x = packed(kind, 300, 416, swiglu), draw(70, 416, scale=1e-3)
    expanded = dequantized(product).bfloat16()
    want = x @ expanded.T
    if swiglu:
        gate, up = want.chunk(2, -1)
        want = torch.nn.functional.silu(gate) * up
    scratch = torch.full((product.scratch_size,), float("nan"), dtype=torch.bfloat16, device="cuda")
    got = product.bulk(x, scratch)
    torch.testing.assert_close(got.double(), want.double(), rtol=0.02, atol=0.01 * float(want.abs().max()))
    # several at once have the bits of each alone
    other = draw(33, 416, scale=1e-3)
    alone, together = product.bulk(other, scratch), product.bulk_each([other, x], scratch)
    assert torch.equal(together[0], alone) and torch.equal(together[1], got)


@triton.jit
def _dot_kernel(a, b, out, K: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    total = tl.zeros((M, N), tl.float32)
    for first in range(0, K, 16):
        k = first + tl.arange(0, 16)
        left = tl.load(a + rows[:, None] * K + k[None, :])
        right = tl.load(b + columns[None, :] * K + k[:, None])
        total = tl.dot(left, right, total)
    tl.store(out + rows[:, None] * N + columns[None, :], total)


@pytest.mark.parametrize(
    ("kind", "swiglu", "height", "width", "segments", "together"),
    [
        ("nvfp4", True, 8704, 5120, 0, False),
        ("modelopt", False, 17408, 2048, 0, True),
        ("nvfp4", False, 5120, 6144, 8, False),
    ],
)
def test_wide_products_have_the_bits_of_a_warps(monkeypatch, kind, swiglu, height, width, segments, together):
    """In every one of many launches, beside which what programs leave for each other is written and read."""
    product, x = packed(kind, height, width, swiglu, segments), draw(256, width, scale=0.01)
    x[3] *= 1e4
    x[5, 1::2] = -x[5, ::2]
    (part,) = product.ranges
    # room for the sums of 128 rows of the largest: 256 rows of it are two launches
    monkeypatch.setattr(wide, "MOST_SUMS", 17408 * 4 * 128)
    for rows, tiles in ((17, 8), (32, 4), (33, 4), (64, 8), (65, 8), (96, 8), (256, 8)):
        own = x[:rows].contiguous()
        want = torch.full((rows, product.out_features), float("nan"), device="cuda")
        linear.launch(part, own, want, choose_shape(part, rows, swiglu, None, segments), swiglu, False)
        shape = WideShape(32 if rows <= 32 else 64, tiles, together, tiles_first=tiles == 4)
        for launch in range(20):
            got = torch.full_like(want, float("nan"))
            wide.launch(part, TiledRows.of(own), got, shape, swiglu, segments, launch > 10)
            assert same_bits(got, want), (rows, launch)


@pytest.mark.parametrize("kind", ["normal", "wide", "cancelling"])
def test_a_warp_groups_instruction_adds_as_a_warps_does(kind):
    """wgmma (four warps) and mma.sync (one), 16 columns of K at a time in the same order: what lets a kernel for many
    rows use either. A column does not depend on how many there are."""
    a, b = draw(64, 4096, 1).float(), draw(64, 4096, 2).float()
    if kind == "wide":
        a, b = (x * torch.exp(4 * draw(64, 4096, 3).float()) for x in (a, b))
    if kind == "cancelling":
        a[:, 1::2], b[:, 1::2] = -a[:, ::2], b[:, ::2] * (1 + 2**-7)
    a, b = a.bfloat16(), b.bfloat16()
    outs = {}
    for warps in (1, 4):
        for columns in (16, 32, 64):
            out = torch.full((64, columns), float("nan"), device="cuda")
            kernel = _dot_kernel[(1,)](a, b, out, 4096, 64, columns, num_warps=warps)
            assert ("wgmma" in kernel.asm["ptx"]) == (warps == 4) and ("mma.sync" in kernel.asm["ptx"]) == (warps == 1)
            outs[warps, columns] = out
    for out in outs.values():
        assert same_bits(out.contiguous(), outs[1, 64][:, : out.shape[1]].contiguous())


def test_products_that_read_much_of_x_ask_for_room_in_l1(monkeypatch):
    """Behind attention's items they would else have what 228 KB of shared memory leave."""
    launched = {}
    monkeypatch.setattr(linear, "leave_to_l1", lambda kernel: launched.setdefault(kernel.function, kernel))
    narrow, wide = packed("nvfp4", 256, 2048), packed("nvfp4", 256, 5120)
    for product, rows in ((narrow, 1), (narrow, 16), (wide, 1), (wide, 32)):
        launched.clear()
        run(product, draw(rows, product.in_features))
        assert len(launched) == (0 if product is narrow and rows == 1 else 1), (product.in_features, rows)
        for kernel in launched.values():
            carveout.leave_to_l1(kernel)
            assert asked_for(kernel.function) == carveout.PERCENT


def asked_for(function: int) -> int:
    """Percent of shared memory, by the driver; -1 for none."""
    found = ctypes.c_int()
    driver, attribute = ctypes.CDLL("libcuda.so.1"), carveout.PREFERRED_SHARED_MEMORY_CARVEOUT
    assert driver.cuFuncGetAttribute(ctypes.byref(found), attribute, ctypes.c_void_p(function)) == 0
    return found.value
