"""`attention_window` in Triton's interpreter, which is right for fp32 (not for bf16, nor for NaN in FP8)."""

import numpy as np
import pytest
import torch

from pilotfish.kernels.attention import PAGE
from pilotfish.kernels.cuda import attention
from tests.support.attention_windows import *  # noqa: F403

del test_what_an_fp8_page_cannot_hold_saturates, test_a_key_that_is_no_number_stays_none_in_fp8  # noqa: F821

# overflow and NaN are as silent on a GPU
np.seterr(all="ignore")
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN")


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture
def dtype():
    return torch.float32


@pytest.fixture
def cache_dtype():
    return torch.float32


@pytest.fixture
def sizes():
    return (2, 1, 32, 8)


@pytest.fixture
def lengths():
    return [PAGE - 2, 2 * PAGE - 1, 5]


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch):
    """The interpreter pays by operation: two units a chunk, and two tiles for six rows of two heads."""
    monkeypatch.setattr(attention, "UNIT", PAGE // 2)
    monkeypatch.setattr(attention, "CHUNK", PAGE)
    monkeypatch.setattr(attention, "MERGED", 2)
    monkeypatch.setattr(attention, "TILE", 8)
