"""Attention windows on the device, at the sizes of served models and of the demo, over short and long contexts."""

import pytest
import torch

from pilotfish.kernels.attention import PAGE
from pilotfish.kernels.cuda.attention import CHUNK, attention_window
from tests.support.attention_windows import *  # noqa: F403
from tests.support.attention_windows import EPS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def device():
    return "cuda"


@pytest.fixture(params=[(16, 2, 256, 64), (24, 4, 256, 64), (6, 2, 64, 16)], ids=str)
def sizes(request):
    return request.param


# the windows cross a page's, a unit's and a chunk's end, and that of the contexts whose chunks are few; with the last
# list chunks are items, not units
@pytest.fixture(
    params=[[PAGE - 2, 2 * PAGE - 1, 5], [8 * CHUNK - 2, 127, 1], [3 * CHUNK - 2, 48 * CHUNK - 3, 700]], ids=str
)
def lengths(request):
    return request.param


def test_dependent_launches_change_no_bit(make):
    plain, dependent = make(), make()
    for number in range(20):
        width = number % 9 + 1
        rows = plain.rows(3 * width, number)
        assert torch.equal(dependent.step(rows, [1, 2, 3], width, pdl=True), plain.step(rows, [1, 2, 3], width))


@pytest.mark.parametrize("settled", (False, True))
def test_replays_have_the_bits_of_a_launch(make, device, settled):
    """A graph of many windows in a chain, replayed back to back: where one kernel saw another's memory too early or
    too late, it would be here."""
    layer, width, slots = make(), 4, [1, 2, 3]
    rows = layer.rows(len(slots) * width, 21).to(device)
    wanted = layer.step(rows, slots, width)
    plan, scratch = layer.plan(slots, width), layer.scratch(len(slots))
    outs = torch.full((12, len(rows), layer.heads * layer.dim), float("nan"), dtype=layer.dtype, device=device)
    places = torch.tensor(slots, dtype=torch.int32, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            attention_window(
                rows, places, plan, layer.tables, *layer.caches, layer.qk_norm, EPS, width, scratch, out,
                k_scale=layer.scales[0], v_scale=layer.scales[1], settled=settled, pdl=True,
            )  # fmt: skip
    for _ in range(30):
        for buffer in (outs, scratch.partial, scratch.stats):
            buffer.fill_(float("nan"))
        for _ in range(3):
            graph.replay()
        assert all(torch.equal(out, wanted) for out in outs.cpu())
