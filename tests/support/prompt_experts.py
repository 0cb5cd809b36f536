"""Experts over a prompt: their kernels against the experts one by one, and against a round's products. Imported where
there is a device, and where the PTX on the CPU takes its place."""

from dataclasses import replace

import pytest
import torch

from pilotfish.kernels.cuda import linear, moe_prompt
from pilotfish.kernels.cuda.launch_shapes import LaunchShape
from pilotfish.kernels.cuda.moe import ExpertWeights, GroupedExperts
from tests.unit.kernels.cuda.test_experts import by_hand, expert, small
from tests.unit.kernels.cuda.test_packing import nvfp4


def of_sizes(num_experts, top_k, width, kind="nvfp4"):
    shared = expert(kind, 99, width)
    routed = [expert(kind, number, width) for number in range(num_experts)]
    return GroupedExperts(routed, shared, top_k), [*routed, shared]


def deep(num_experts, top_k, hidden, width):
    """Experts with many units of K."""

    def weights(seed):
        shapes = ((width, hidden), (width, hidden), (hidden, width))
        return ExpertWeights(*(small(nvfp4(*shape, seed=seed * 3 + i)) for i, shape in enumerate(shapes)))

    return GroupedExperts([weights(number) for number in range(num_experts)], weights(99), top_k)


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
    ids=(
        "a row",
        "columns that are no whole units",
        "rows of each expert",
        "more rows than an expert's first program takes",
    ),
)
def test_it_is_each_rows_experts_in_rank_order(kind, rows, num_experts, top_k, width, few, device):
    packed, plain = of_sizes(num_experts, top_k, width, kind)
    assert moe_prompt.takes(packed)
    weights, ids, gate = chosen_by(rows, num_experts, top_k, few)
    x = torch.randn(rows, packed.hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    outputs = torch.stack([by_hand(x, each) for each in plain])
    want = outputs[-1] * gate[:, None]
    for rank in range(top_k):
        want += outputs[ids[:, rank].long(), torch.arange(rows)] * weights[:, rank : rank + 1]
    moved = (t.to(device) for t in (x, weights, ids, gate))
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


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def in_natural_order(arranged):
    """Columns of a half unit by lane, as they are, of its words in the fragments' order: two numbers of each lane."""
    place = torch.arange(arranged.shape[-1]) // 2
    word = place // 32 * 32 + place % 4 * 8 + place % 32 // 4
    return arranged[..., (2 * word + torch.arange(len(word)) % 2).argsort().to(arranged.device)]


def by_a_round(part, number, num_experts, x, columns, swiglu):
    """An expert's product by the kernel of a round, all of K in one share: one warp adds unit by unit."""
    tiles, span = part.num_tiles // (num_experts + 1), 2 if swiglu else 1
    starts = torch.arange(tiles, dtype=torch.int32) // span * 16
    place = torch.stack((starts, (columns - starts).clamp(max=16)), 1).to(x.device)
    own = slice(number * tiles, (number + 1) * tiles)
    part = replace(part, data=part.data[own].contiguous(), number=part.number[own].contiguous(), place=place)
    out = torch.full((len(x), columns), float("nan"), dtype=x.dtype, device=x.device)
    linear.launch(part, x, out, LaunchShape(1, span, 1, 1, 0), swiglu, False)
    return out


def test_its_bits_are_those_of_a_rounds_products(device):
    """The warp group's instruction adds what mma.m16n8k16 adds, in the same steps of K."""
    num_experts, rows, width = 3, 70, 144
    packed = on_device(of_sizes(num_experts, 1, width, "modelopt")[0], device)
    (group,) = packed.groups
    # 61 rows of one expert, 9 of another, none of the third
    ids = (torch.arange(rows) % 8 // 7).int()[:, None].to(device)
    x = torch.randn(rows, packed.hidden, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    lists, arranged = moe_prompt.prepare(packed, x, ids)
    assert same_bits(in_natural_order(arranged), x)
    inner = moe_prompt.products(packed, group.gate_up, arranged, lists, width, down=False)
    out = moe_prompt.products(packed, group.down, inner, lists, packed.hidden, down=True)
    inner = in_natural_order(inner)
    assert not inner[..., width:].any()
    for number, rank in ((0, 0), (1, 0), (num_experts, 1)):
        own = (ids[:, 0] == number).nonzero()[:, 0] if rank == 0 else torch.arange(rows, device=device)
        got = inner[own, rank, :width].contiguous()
        want = by_a_round(group.gate_up, number, num_experts, x[own].contiguous(), width, True)
        assert same_bits(got, want), number
        want = by_a_round(group.down, number, num_experts, got, packed.hidden, False)
        assert same_bits(out[own, rank], want), number


def test_a_row_s_bits_depend_on_no_other(device):
    """Alone and among others, of few and of many, and beside rows that are no numbers."""
    num_experts, top_k, rows = 3, 2, 120
    packed = on_device(of_sizes(num_experts, top_k, 48)[0], device)
    ids = chosen_by(rows, num_experts, top_k, False)[1].to(device)
    x = torch.randn(rows, packed.hidden, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    whole = moe_prompt.parts(packed, x, ids)
    for row in (0, 95, 119):
        alone = moe_prompt.parts(packed, x[row : row + 1].contiguous(), ids[row : row + 1].contiguous())
        assert same_bits(alone[0], whole[row]), row
    others = torch.full_like(x, float("nan"))
    others[77] = x[77]
    assert same_bits(moe_prompt.parts(packed, others, ids)[77], whole[77])


def test_a_warp_s_own_products_give_the_same_bits(device, monkeypatch):
    """Where there are none of a warp group, as on devices of another compute capability than 9."""
    packed = on_device(of_sizes(3, 2, 48)[0], device)
    ids = chosen_by(50, 3, 2, False)[1].to(device)
    x = torch.randn(50, packed.hidden, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    want = moe_prompt.parts(packed, x, ids)
    monkeypatch.setattr(moe_prompt, "has_group_products", lambda device: False)
    assert same_bits(moe_prompt.parts(packed, x, ids), want)
