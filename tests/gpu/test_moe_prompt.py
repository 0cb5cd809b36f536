"""Experts over a prompt on a GPU: what they give, that it is the same twice, and that a long prompt's are a short
one's."""

from __future__ import annotations

import pytest
import torch

from pilotfish.kernels.cuda import moe_prompt
from tests.support.prompt_experts import *  # noqa: F403
from tests.support.prompt_experts import chosen_by, deep, of_sizes, on_device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def device():
    return "cuda"


@pytest.mark.parametrize("few", (False, True))
def test_a_row_s_bits_do_not_depend_on_the_others(few):
    packed = on_device(of_sizes(6, 2, 48)[0], "cuda")
    weights, ids, gate = (t.cuda() for t in chosen_by(700, 6, 2, few))
    x = torch.randn(700, packed.hidden, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    whole = moe_prompt.experts(packed, x, weights, ids, gate)
    assert torch.equal(whole, moe_prompt.experts(packed, x, weights, ids, gate))
    own = (t[570:].contiguous() for t in (x, weights, ids, gate))
    assert torch.equal(whole[570:], moe_prompt.experts(packed, *own))


def test_bits_are_the_same_in_every_replay():
    """Copies, unpacking and products go on at once in slots that are used again and again: what one does too early
    would change some replay. Of the 35B-A3B's depth, 16 units, with experts of one row, some tens and hundreds."""
    width, num_experts = 512, 8
    generator = torch.Generator().manual_seed(2)
    packed = on_device(deep(num_experts, 2, 2048, width), "cuda")
    ids = torch.stack(((torch.rand(700, generator=generator) ** 4 * 4).int(), 4 + torch.arange(700) % 128 // 42), 1)
    x = torch.randn(700, 2048, generator=generator).bfloat16().cuda()
    ids = ids.int().cuda()
    want = moe_prompt.parts(packed, x, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = moe_prompt.parts(packed, x, ids)
    for replay in range(200):
        graph.replay()
        assert torch.equal(got, want), replay
    few = x[:40].contiguous(), ids[:40].contiguous()
    assert torch.equal(moe_prompt.parts(packed, *few), want[:40])


def test_it_agrees_with_expanded_weights():
    packed = on_device(of_sizes(12, 4, 96)[0], "cuda")
    weights, ids, gate = (t.cuda() for t in chosen_by(500, 12, 4, False))
    x = torch.randn(500, packed.hidden, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    scratch = torch.empty(packed.scratch_size, dtype=torch.bfloat16, device="cuda")
    want = packed.bulk(x, weights, ids, gate, scratch)
    got = moe_prompt.experts(packed, x, weights, ids, gate)
    # there products and SwiGLU are rounded to bf16 once more
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.02 * want.abs().max().item())
