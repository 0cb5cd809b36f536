"""The experts' lists in Triton's interpreter, which is right for integers."""

import pytest
import torch

from pilotfish.kernels.cuda import moe


@pytest.mark.parametrize(
    ("rows", "num_experts", "top_k"), [(9, 40, 4), (17, 8, 2), (40, 6, 3), (64, 5, 4), (128, 5, 4), (256, 5, 4)]
)
def test_lists_each_experts_pairs_in_order(rows, num_experts, top_k):
    generator = torch.Generator().manual_seed(rows)
    ids = torch.rand(rows, num_experts, generator=generator).topk(top_k, -1).indices.int()
    ids = torch.where(ids == 4, -1, ids)  # an expert that nobody chose
    group = 8 if rows <= 64 else 16
    size = moe.list_size(rows, top_k, num_experts)
    memory = torch.full((size + 3,), -7, dtype=torch.int32)
    moe.list_experts(ids, num_experts, memory)
    lists, number, items = memory.split(((num_experts + 1) * (rows + 1), 1, size + 2 - (num_experts + 1) * (rows + 1)))
    wanted_items = []
    for expert, row in enumerate(lists.view(num_experts + 1, rows + 1).tolist()):
        want = [r * (top_k + 1) + k for r in range(rows) for k in range(top_k) if ids[r, k] == expert]
        if expert == num_experts:  # the shared one
            want = [r * (top_k + 1) + top_k for r in range(rows)]
        assert row[0] == len(want) and row[1 : 1 + len(want)] == want
        assert row[1 + len(want) :] == [-7] * (rows - len(want))
        numbers = [len(want[first : first + group]) for first in range(0, len(want), group)]
        wanted_items += [(expert * 32 + which) * 32 + number for which, number in enumerate(numbers)]
    assert number.tolist() == [len(wanted_items)] and len(wanted_items) <= len(items) - 3
    assert items.tolist() == wanted_items + [-7] * (len(items) - len(wanted_items))
