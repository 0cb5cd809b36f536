"""The experts' plain Triton kernels in the interpreter, which is right for fp32 and integers (not for bf16)."""

import pytest
import torch

from pilotfish.kernels.cuda import moe
from tests.support.kernel_references import combine_reference


@pytest.mark.parametrize(("rows", "num_experts", "top_k"), [(17, 8, 2), (40, 6, 3), (256, 5, 4)])
def test_lists_each_experts_pairs_in_order(rows, num_experts, top_k):
    generator = torch.Generator().manual_seed(rows)
    ids = torch.rand(rows, num_experts, generator=generator).topk(top_k, -1).indices.int()
    ids = torch.where(ids == 4, -1, ids)  # an expert that nobody chose
    group = 8 if rows <= 64 else 16
    num_items = num_experts + rows * top_k // group
    memory = torch.full((num_experts * (rows + 1) + num_items + 3,), -7, dtype=torch.int32)
    moe.list_experts(ids, num_experts, memory)
    lists, items, after = memory.split((num_experts * (rows + 1), num_items, 3))
    wanted_items = []
    for expert, row in enumerate(lists.view(num_experts, rows + 1).tolist()):
        want = [r * (top_k + 1) + k for r in range(rows) for k in range(top_k) if ids[r, k] == expert]
        assert row[0] == len(want) and row[1 : 1 + len(want)] == want
        assert row[1 + len(want) :] == [-7] * (rows - len(want))
        numbers = [len(want[first : first + group]) for first in range(0, len(want), group)]
        wanted_items += [(expert * 32 + which) * 32 + number for which, number in enumerate(numbers)]
    assert items.tolist() == wanted_items + [0] * (num_items - len(wanted_items))
    assert after.tolist() == [-7] * 3


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("hidden", [96, 256])
def test_combine(hidden, norm):
    generator = torch.Generator().manual_seed(hidden)
    parts = torch.randn(3, 4, hidden, generator=generator)
    weights, gate = torch.rand(3, 3, generator=generator), torch.rand(3, generator=generator)
    x = torch.randn(5, hidden, generator=generator)
    scale = torch.rand(hidden, generator=generator) if norm else None
    want, got = x.clone(), x.clone()
    outs = [torch.full((5, hidden), float("nan")) if norm else None for _ in range(2)]
    combine_reference(parts, weights, gate, want, scale, 1e-6, outs[0])
    moe.combine(parts, weights, gate, got, scale, 1e-6, outs[1])
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert torch.equal(got[3:], x[3:])
    if norm:
        torch.testing.assert_close(outs[1][:3], outs[0][:3], rtol=1e-5, atol=1e-5)
        assert outs[1][3:].isnan().all()
