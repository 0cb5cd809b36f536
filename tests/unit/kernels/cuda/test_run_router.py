"""The router with the norm before it in one launch, as compiled for a GPU and run on the CPU by its PTX
(tests/support/ptx.py): the bits of the three launches that it stands for."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from pilotfish.kernels.cuda import norm, router
from pilotfish.kernels.cuda.linear import PackedLinear
from tests.support.compiled import Code, compiling
from tests.support.kernel_references import add_norm_reference
from tests.support.ptx import running
from tests.support.routing import ARGUMENTS, by_one_launch, by_three, make_case, same_bits

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("hidden", "experts", "top_k", "rows"),
    [
        (2048, 256, 8, 1),
        (2048, 256, 8, 6),
        (1024, 77, 3, 4),  # a share a warp; columns of experts that no power of two ends
        (4096, 24, 10, 3),  # two shares of two units a warp; two rows normed at a time
        (384, 8, 2, 9),  # one share of three units, one warp; rows of two programs
        (256, 16, 16, 32),
    ],
)
def test_bits_are_those_of_three_launches(hidden, experts, top_k, rows):
    case = make_case(hidden, experts, rows)
    with running() as names:
        want = by_three(case, top_k)
        got = by_one_launch(case, top_k)
    assert names == ["_add_norm_kernel", "_rows_kernel", "_route_kernel", "_add_norm_route_kernel"]
    for name, mine, theirs in zip(ARGUMENTS, got, want, strict=True):
        assert same_bits(mine, theirs), name
    # and what those are held to is not all there is
    x, h = case.x.clone(), torch.empty_like(case.delta)
    add_norm_reference(x, case.delta, case.scale, 1e-6, h)
    logits = h.double() @ case.matrix.double().T
    assert torch.equal(got[3].long(), logits[:, :-1].topk(top_k).indices)


def test_nothing_of_a_row_reaches_another():
    case = make_case(1024, 16, 9)
    with running():
        want = by_one_launch(case, 4)
        case.x[3], case.delta[8] = float("nan"), float("inf")
        got = by_one_launch(case, 4)
    others = [row for row in range(9) if row not in (3, 8)]
    for name, mine, before in zip(ARGUMENTS, got, want, strict=True):
        assert same_bits(mine[others], before[others]), name
    assert got[4][3].isnan() and got[2][3].isnan().all() and len(set(got[3][3].tolist())) == 4


def test_logits_that_are_no_numbers_arrive():
    """Whatever bits a NaN has: none is taken for a logit that is not there yet."""
    case = make_case(256, 8, 2)
    case.matrix[:] = torch.full((1,), -1, dtype=torch.int16).view(torch.bfloat16)
    with running():
        ids = by_one_launch(case, 2)[3]
    assert ids.tolist() == [[0, 1], [0, 1]]


def test_only_rows_of_the_outputs_are_touched():
    case, scratch = make_case(256, 8, 5), router.RouterScratch.make(20, CPU)
    x, h = case.x.clone(), torch.full_like(case.delta, -7.0)
    weights, ids, gate = torch.full((3, 2), -7.0), torch.full((3, 2), -7, dtype=torch.int32), torch.full((3,), -7.0)
    with running():
        router.add_norm_route(x, case.delta, case.scale, 1e-6, case.packed, h, weights, ids, gate, scratch)
        alone = by_one_launch(case.rows(3), 2)
    assert same_bits(x[3:], case.x[3:]) and (h[3:] == -7).all()
    assert (ids >= 0).all() and (scratch.arrived == router.EMPTY.value).all()
    for mine, theirs in zip((x[:3], h[:3], weights, ids, gate), alone, strict=True):
        assert same_bits(mine, theirs)


@pytest.mark.parametrize(
    ("shape", "rows", "taken"),
    [
        ((257, 2048), 1, True),
        ((257, 2048), 32, True),
        ((257, 2048), 33, False),
        ((513, 4096), 8, True),
        ((257, 3072), 1, False),  # shares of three units
        ((9, 384), 1, True),
        ((9, 128), 1, False),
    ],
)
def test_which_form_runs_follows_from_shape_and_rows(shape, rows, taken):
    assert router.takes(PackedLinear([torch.zeros(shape).bfloat16()]), rows) == taken


@pytest.mark.parametrize("hidden", [384, 2048])
def test_the_norm_s_root_is_taken_of_the_same_arithmetic(hidden):
    """What the PTX leaves to the assembler: mean and eps are one rounding in both forms, or two in both."""
    case = make_case(hidden, 8, 2)
    with compiling() as kernels:
        by_three(case, 2)
        by_one_launch(case, 2)
    found = []
    for kernel in (kernels[0], kernels[-1]):
        text = Code(kernel).text
        roots = set(re.findall(r"MUFU\.RSQ R\d+, (R\d+)", text))
        ops = {
            re.sub(r"\bR\d+(\.reuse)?", "R", line)
            for line in re.findall(r"((?:FFMA|FADD|FMUL) R\d+, .*?) ;", text)
            if re.split(r"[ ,]+", line)[1] in roots and re.search(r"0\.0\d+", line)
        }
        found.append(ops)
    assert found[0] == found[1] and len(found[0]) == 1, found
    assert norm.num_warps(hidden) == max(1, hidden // 512)
