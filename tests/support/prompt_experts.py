"""Experts over a prompt: their kernels against the experts one by one. Imported where there is a device, and where
Triton's interpreter takes its place."""

import pytest
import torch

from pilotfish.kernels.cuda import moe_prompt
from pilotfish.kernels.cuda.moe import GroupedExperts
from tests.unit.kernels.cuda.test_experts import by_hand, expert


def of_sizes(num_experts, top_k, width, kind="nvfp4"):
    shared = expert(kind, 99, width)
    routed = [expert(kind, number, width) for number in range(num_experts)]
    return GroupedExperts(routed, shared, top_k), [*routed, shared]


def chosen_by(rows, num_experts, top_k, few):
    """Experts of each row; `few`: as many rows as can take the first ones."""
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, num_experts, generator=generator)
    if few:
        logits[:, :top_k] += 8
    values, ids = logits.topk(top_k, -1)
    return values.softmax(-1), ids.int(), torch.rand(rows, generator=generator)


@pytest.mark.parametrize(
    ("kind", "rows", "num_experts", "top_k", "width", "few"),
    [
        ("nvfp4", 1, 6, 2, 48, False),
        ("nvfp4", 40, 6, 2, 144, False),
        ("modelopt", 150, 3, 3, 48, False),
        ("nvfp4", 600, 8, 2, 16, True),
    ],
    ids=("a row", "columns of two programs", "rows of each expert", "more rows than all programs of an expert take"),
)
def test_it_is_each_rows_experts_in_rank_order(kind, rows, num_experts, top_k, width, few, device, dtype):
    packed, plain = of_sizes(num_experts, top_k, width, kind)
    assert moe_prompt.takes(packed)
    weights, ids, gate = chosen_by(rows, num_experts, top_k, few)
    x = torch.randn(rows, packed.hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    outputs = torch.stack([by_hand(x, each) for each in plain])
    want = outputs[-1] * gate[:, None]
    for rank in range(top_k):
        want += outputs[ids[:, rank].long(), torch.arange(rows)] * weights[:, rank : rank + 1]
    moved = (t.to(device) for t in (x.to(dtype), weights, ids, gate))
    got = moe_prompt.experts(on_device(packed, device), *moved).cpu()
    # by_hand rounds the inner row to bf16
    torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.01 * want.abs().max())


def on_device(packed, device):
    for group in packed.groups:
        for part in (group.gate_up, group.down):
            for name in ("data", "place", "number"):
                object.__setattr__(part, name, getattr(part, name).to(device))
    return packed


def test_experts_of_another_format_or_a_shared_one_of_another_size_are_not_taken(device):
    assert not moe_prompt.takes(of_sizes(3, 2, 48, "bf16")[0])
    routed = [expert("nvfp4", number) for number in range(3)]
    assert not moe_prompt.takes(GroupedExperts(routed, expert("nvfp4", 9, 80), 2))
