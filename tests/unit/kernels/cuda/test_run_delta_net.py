"""`gdn_window` compiled for a GPU and run on the CPU by its PTX, which also knows bf16."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.support import delta_windows
from tests.support.delta_windows import *  # noqa: F403
from tests.support.ptx import running

del test_matches_the_reference  # noqa: F821


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture(params=(torch.float32, torch.bfloat16), ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def sizes():
    return (1, 1, 32, 32)


@pytest.fixture
def rounds():
    return [([1, 2], 4, [0, 0, 0, 0, 0]), ([2, 1], 1, [0, 4, 2, 0, 0])]


@pytest.fixture
def windows():
    return [(6, 5), (4, 3), (1, 1)]


@pytest.mark.parametrize(
    "sizes", ((2, 4, 32, 64), (1, 1, 16, 16), (1, 2, 64, 64), (1, 1, 128, 128), (1, 1, 256, 32)), ids=str
)
@pytest.mark.parametrize("most_pending", (0, 4))
def test_matches_the_reference_at_all_widths(device, dtype, sizes, rounds, most_pending):
    """Heads that share a key, tiles of columns, and every number of parts of the state."""
    delta_windows.test_matches_the_reference(device, dtype, sizes, rounds, most_pending)


@pytest.fixture(autouse=True)
def on_the_cpu():
    with running() as launched:
        yield
    assert set(launched) == {"_steps_kernel", "_finish_kernel"}
