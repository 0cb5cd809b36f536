"""`gdn_window` in Triton's interpreter, which is right for fp32 (not for bf16)."""

import numpy as np
import pytest
import torch

from tests.support.delta_windows import *  # noqa: F403

# overflow and NaN are as silent on a GPU
np.seterr(all="ignore")


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture
def dtype():
    return torch.float32


@pytest.fixture
def sizes(request):
    """Heads that share a key and two tiles of columns where values are compared; else as little as can be."""
    return (2, 4, 32, 64) if request.node.name.startswith("test_matches") else (1, 1, 32, 32)


@pytest.fixture
def rounds():
    return [([1, 2], 4, [0, 0, 0, 0, 0]), ([2, 1], 1, [0, 4, 2, 0, 0])]


@pytest.fixture
def windows():
    return [(3, 1), (4, 3), (1, 1)]
