"""The small operators in Triton's interpreter, which is right for fp32 and integers (not for bf16)."""

import numpy as np
import pytest
import torch

from tests.support.small_operators import *  # noqa: F403

# Gluon: test_run_add_norm.py, test_run_router.py
del test_add_norm, test_add_norm_writes_tiled_rows  # noqa: F821
del test_route, test_route_names_different_experts_whatever_the_logits  # noqa: F821

# of Triton 3.6, in loops whose end is known when they run
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
# overflow and NaN are as silent on a GPU
np.seterr(all="ignore")


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture
def dtype():
    return torch.float32
