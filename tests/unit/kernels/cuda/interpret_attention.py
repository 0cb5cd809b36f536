"""`plan_rows` in Triton's interpreter. The other kernels are run by their PTX: test_run_attention.py."""

import pytest

from pilotfish.kernels.attention import PAGE
from tests.support import attention_windows

test_plan_matches_the_reference = attention_windows.test_plan_matches_the_reference
dtype, make = attention_windows.dtype, attention_windows.make


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture
def cache_dtype(dtype):
    return dtype


@pytest.fixture
def sizes():
    return (2, 1, 32, 8)


@pytest.fixture
def lengths():
    return [PAGE - 2, 2 * PAGE - 1, 5]
