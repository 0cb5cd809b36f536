"""The router, run by its PTX: it is written in Gluon, which Triton's interpreter does not run. And what the experts'
programs of few rows choose by themselves: its bits."""

import pytest
import torch

from pilotfish.kernels.cuda import moe, router
from pilotfish.kernels.cuda.moe import ExpertScratch, GroupedExperts
from tests.support.ptx import running
from tests.support.routed import outputs
from tests.support.small_operators import (  # noqa: F401
    test_route,
    test_route_names_different_experts_whatever_the_logits,
)
from tests.unit.kernels.cuda.test_experts import H, expert

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def device():
    with running():
        yield "cpu"


def hard_logits(num_experts: int) -> torch.Tensor:
    """Ties, with zeros of both signs and without; NaN of both signs; fewer finite ones than are chosen."""
    logits = torch.randn(4, num_experts + 1, generator=torch.Generator().manual_seed(num_experts)) * 2
    logits[1] = (logits[1] * 2).round() / 2
    logits[2, num_experts // 2], logits[2, num_experts // 3] = NAN, -torch.tensor(NAN)
    logits[3, 1:num_experts] = -INF
    return logits


def bits(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [tensor.view(torch.int32) for tensor in tensors]


@pytest.mark.parametrize(
    ("num_experts", "top_k"),
    [(256, 8), (203, 8), (512, 10), (3, 3)],
    ids=["as the 35B-A3B", "dropped experts", "as the 397B-A17B", "all of them"],
)
def test_experts_choose_what_the_router_does(num_experts, top_k):
    """Rows alone and beside others; fp32 logits, and bf16 ones that stand apart as prompts have them."""
    packed = GroupedExperts([expert("bf16", 1, 16)] * num_experts, expert("bf16", 2, 16), top_k)
    x = torch.randn(4, H, generator=torch.Generator().manual_seed(1)).bfloat16()
    scratch = ExpertScratch.make(4, top_k, num_experts, packed.width, H, x.device)
    logits = hard_logits(num_experts)
    apart = torch.full((4, num_experts + 9), NAN).bfloat16()
    apart[:, : num_experts + 1] = logits

    for given in (logits, apart):
        want, parts = outputs(4, top_k, "cpu"), []
        with running() as names:
            router.route(given, num_experts, *want)
            for rows in (slice(4), slice(1), slice(1, 2), slice(2, 3), slice(3, 4)):
                got = outputs(rows.stop - (rows.start or 0), top_k, "cpu")
                parts.append(packed.rows(x[rows].contiguous(), given[rows], *got, scratch, True).clone())
                assert all(map(torch.equal, bits(got), bits(tuple(tensor[rows] for tensor in want))))
                if given is apart:
                    break
        assert names.count("_route_kernel") == 1 and moe.CHOICE_ROWS >= 4
        if given is logits:
            assert torch.equal(parts[0].view(torch.int16), torch.cat(parts[1:]).view(torch.int16))
    assert want[0][2].isnan().all() and want[0][[0, 1, 3]].isfinite().all()
    assert all(len(set(row)) == top_k and set(row) <= set(range(num_experts)) for row in want[1].tolist())


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("shared", [("nvfp4", 16), ("bf16", 32)], ids=["one group", "the shared expert apart"])
def test_who_chooses_decides_no_bits(monkeypatch, rows, shared):
    packed = GroupedExperts([expert("nvfp4", number, 16) for number in range(5)], expert(shared[0], 9, shared[1]), 2)
    generator = torch.Generator().manual_seed(rows)
    x, logits = torch.randn(rows, H, generator=generator).bfloat16(), torch.randn(rows, 6, generator=generator)
    found = []
    for most in (0, moe.FAST_ROWS, moe.CHOICE_ROWS):
        monkeypatch.setattr(moe, "CHOICE_ROWS", most)
        scratch, got = ExpertScratch.make(rows, 2, 5, packed.width, H, x.device), outputs(rows, 2, "cpu")
        scratch.inner.fill_(NAN)
        with running() as names:
            parts = packed.rows(x, logits, *got, scratch, True)
        assert names == ["_route_kernel"] * (rows > most) + ["experts_kernel"] * 2 * len(packed.groups)
        assert parts.isfinite().all()
        found.append([parts.view(torch.int16), *bits(got)])
    assert all(map(torch.equal, found[0], found[1])) and all(map(torch.equal, found[0], found[2]))
