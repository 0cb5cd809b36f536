"""Attention windows on the device, at the sizes of served models and of the demo, over short and long contexts."""

import pytest
import torch

from pilotfish.kernels.attention import PAGE
from pilotfish.kernels.cuda.attention import CHUNK
from tests.support.attention_windows import *  # noqa: F403

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


# the windows cross a page's, a unit's and a chunk's end; with the second list chunks are items, not units
@pytest.fixture(params=[[PAGE - 2, 2 * PAGE - 1, 5], [3 * CHUNK - 2, 48 * CHUNK - 3, 700]], ids=str)
def lengths(request):
    return request.param


def test_dependent_launches_change_no_bit(make):
    plain, dependent = make(), make()
    for number in range(20):
        width = number % 9 + 1
        rows = plain.rows(3 * width, number)
        assert torch.equal(dependent.step(rows, [1, 2, 3], width, pdl=True), plain.step(rows, [1, 2, 3], width))
