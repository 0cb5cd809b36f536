"""Packed experts: their values and sums, against plain products; the small kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from pilotfish.kernels.cuda import linear
from pilotfish.kernels.cuda.expand import expand
from pilotfish.kernels.cuda.linear import PackedLinear
from pilotfish.kernels.cuda.moe import ExpertScratch, ExpertWeights, GroupedExperts
from pilotfish.kernels.norm import rms_norm
from tests.support.interpreter import run_interpreted
from tests.support.kernel_references import combine_reference, dequantized_expert, expert_rows_reference
from tests.unit.kernels.cuda.test_packing import nvfp4, values, weights

H, WIDTH, E, TOP_K = 256, 48, 6, 2


def small(weight):
    """Of a size at which bf16 products neither overflow nor vanish."""
    if isinstance(weight, torch.Tensor):
        return weight * 0.1
    if hasattr(weight, "packed"):
        return type(weight)(weight.packed, weight.scale, 2e4 if not weight.multiplies else 5e-5, weight.multiplies)
    return type(weight)(weight.weight, weight.scale * 0.002, weight.block)


def expert(kind: str, seed: int, width: int = WIDTH) -> ExpertWeights:
    def part(rows, columns, number):
        if kind in ("nvfp4", "modelopt"):
            return small(nvfp4(rows, columns, kind == "modelopt", seed * 3 + number))
        return small(weights(rows, columns)[kind])

    return ExpertWeights(part(width, H, 0), part(width, H, 1), part(H, width, 2))


def experts(kind: str = "nvfp4", shared_kind: str | None = None, shared_width: int = WIDTH):
    shared = expert(shared_kind or kind, 99, shared_width)
    routed = [expert(kind, number) for number in range(E)]
    return GroupedExperts(routed, shared, TOP_K), [*routed, shared]


def by_hand(x: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    gate, up = (x.double() @ values(part).double().T for part in (weights.gate, weights.up))
    return (torch.nn.functional.silu(gate) * up).bfloat16().double() @ values(weights.down).double().T


def inputs(rows: int):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, H, generator=generator).bfloat16()
    logits = torch.randn(rows, E, generator=generator)
    chosen, ids = logits.topk(TOP_K, -1)
    return x, chosen.softmax(-1), ids.int(), torch.rand(rows, generator=generator)


@pytest.mark.parametrize("kind", ["nvfp4", "modelopt", "fp8 tensor", "fp8 channel", "fp8 block", "bf16"])
def test_each_expert_gives_back_the_formats_own_values(kind):
    packed, plain = experts(kind)
    assert len(packed.groups) == 1
    for number, want in enumerate(plain):
        gate_up, down = dequantized_expert(packed, number)
        assert torch.equal(gate_up, torch.cat([values(want.gate), values(want.up)]))
        assert torch.equal(down, values(want.down))


@pytest.mark.parametrize(
    ("shared_kind", "width"), [("nvfp4", WIDTH), ("bf16", WIDTH), ("nvfp4", 80), ("fp8 block", 32)]
)
def test_rows_meet_their_experts_in_rank_order(shared_kind, width):
    packed, plain = experts("nvfp4", shared_kind, width)
    x, _, ids, _ = inputs(5)
    scratch = ExpertScratch.make(5, TOP_K, E, packed.width, H, torch.device("cpu"))
    parts = expert_rows_reference(packed, x, ids, scratch)
    for row in range(5):
        for rank, number in enumerate([*ids[row].tolist(), E]):
            want = by_hand(x[row : row + 1], plain[number])[0]
            torch.testing.assert_close(parts[row, rank].double(), want, rtol=0.01, atol=0.01 * want.abs().max())


@pytest.mark.parametrize(("kind", "shared_kind", "width"), [("nvfp4", "nvfp4", WIDTH), ("fp8 block", "bf16", 80)])
def test_bulk_agrees_with_the_rows(kind, shared_kind, width):
    packed, plain = experts(kind, shared_kind, width)
    x, chosen, ids, gate = inputs(40)
    memory = torch.full((packed.scratch_size,), float("nan")).bfloat16()
    got = packed.bulk(x, chosen, ids, gate, memory)
    want = torch.zeros(40, H, dtype=torch.float64)
    for row in range(40):
        for rank in range(TOP_K):
            want[row] += chosen[row, rank] * by_hand(x[row : row + 1], plain[int(ids[row, rank])])[0]
        want[row] += gate[row] * by_hand(x[row : row + 1], plain[E])[0]
    # products, SwiGLU and weights are rounded to bf16
    torch.testing.assert_close(got.double(), want, rtol=0.05, atol=0.02 * want.abs().max())


@pytest.mark.parametrize("swiglu", [False, True])
def test_bulk_of_a_product_takes_as_much_as_scratch_holds(swiglu):
    parts = [small(nvfp4(72, H, seed=1)), small(nvfp4(72, H, seed=2))]
    product = PackedLinear(parts, swiglu)
    x = torch.randn(20, H, generator=torch.Generator().manual_seed(4)).bfloat16()
    first, second = (x.double() @ values(part).double().T for part in parts)
    want = torch.nn.functional.silu(first) * second if swiglu else torch.cat((first, second), -1)
    for size in (product.scratch_size, 4 * 16 * H):
        got = product.bulk(x, torch.full((size,), float("nan")).bfloat16())
        torch.testing.assert_close(got.double(), want, rtol=0.05, atol=0.02 * want.abs().max())


@pytest.mark.parametrize("swiglu", [False, True])
def test_several_inputs_have_the_bits_that_each_has_alone(swiglu, monkeypatch):
    product = PackedLinear([small(nvfp4(72, H, seed=1)), small(nvfp4(72, H, seed=2))], swiglu)
    xs = [torch.randn(rows, H, generator=torch.Generator().manual_seed(rows)).bfloat16() for rows in (20, 7, 20)]
    expanded = []
    monkeypatch.setattr(linear, "expand", lambda *given: (expanded.append(given[1]), expand(*given)))
    for size in (product.scratch_size, 4 * 16 * H):
        scratch = torch.full((size,), float("nan")).bfloat16()
        alone = [product.bulk(x, scratch) for x in xs]
        expanded.clear()
        together = product.bulk_each(xs, scratch)
        assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
        # once for all of them
        assert [tile for tiles in expanded for tile in range(tiles.start, tiles.stop)] == list(range(10))


@pytest.mark.parametrize("heights", [(72, 13), (40, 4, 5), (3,)], ids=str)
def test_bulk_of_a_product_of_several_formats_is_one_matrix(heights):
    parts = [small(nvfp4(heights[0], H, seed=1)), *(torch.randn(height, H).bfloat16() for height in heights[1:])]
    product = PackedLinear(parts)
    x = torch.randn(20, H, generator=torch.Generator().manual_seed(4)).bfloat16()
    want = torch.cat([x.double() @ values(part).double().T for part in parts], -1)
    for size in (product.scratch_size, 2 * 16 * H):
        got = product.bulk(x, torch.full((size,), float("nan")).bfloat16())
        assert got.stride(0) % 8 == 0
        torch.testing.assert_close(got.double(), want, rtol=0.05, atol=0.02 * want.abs().max())


def test_combine_reference_adds_in_rank_order_and_norms():
    parts, x = torch.randn(3, TOP_K + 1, H).bfloat16(), torch.randn(4, H)
    _, chosen, _, gate = inputs(3)
    scale, out, before = torch.rand(H), torch.empty(3, H).bfloat16(), x.clone()
    combine_reference(parts, chosen, gate, x, scale, 1e-6, out)
    want = before[:3] + (parts.float() * torch.cat((chosen, gate[:, None]), 1)[:, :, None]).sum(1)
    torch.testing.assert_close(x[:3], want)
    assert torch.equal(x[3], before[3])
    assert torch.equal(out, rms_norm(x[:3], scale, 1e-6, torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda routed, shared: (routed[:1], shared), "want at least 2 experts, got 1"),
        (lambda routed, shared: ([*routed, expert("bf16", 0)], shared), "expert 6: want the shape and format"),
        (lambda routed, shared: ([*routed, expert("nvfp4", 0, 32)], shared), "expert 6: want the shape and format"),
        (
            lambda routed, shared: (routed, ExpertWeights(shared.gate, shared.up, shared.gate)),
            r"shared expert: down: want \[256, 48\], got \[48, 256\]",
        ),
        (
            lambda routed, shared: (routed, ExpertWeights(shared.gate, values(shared.up).bfloat16(), shared.down)),
            "shared expert: want gate and up of one format",
        ),
    ],
)
def test_names_the_expert_that_does_not_fit(change, error):
    routed, shared = change([expert("nvfp4", number) for number in range(E)], expert("nvfp4", 99))
    with pytest.raises(ValueError, match=error):
        GroupedExperts(routed, shared, TOP_K)


def test_lists_in_the_interpreter():
    run_interpreted(__file__, "interpret_experts.py")
