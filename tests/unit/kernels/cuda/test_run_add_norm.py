"""Residual sum and norm, run by its PTX: it is written in Gluon, which Triton's interpreter does not run."""

import pytest
import torch

from tests.support.ptx import running
from tests.support.small_operators import test_add_norm, test_add_norm_writes_tiled_rows  # noqa: F401


@pytest.fixture
def device():
    with running():
        yield "cpu"


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def dtype(request):
    return request.param
