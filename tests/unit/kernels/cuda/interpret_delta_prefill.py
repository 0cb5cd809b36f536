"""`gdn_prompt` in Triton's interpreter, which is right for fp32 (not for bf16)."""

import numpy as np
import pytest
import torch

from tests.support import delta_prompts
from tests.support.delta_prompts import *  # noqa: F403

# overflow and NaN are as silent on a GPU
np.seterr(all="ignore")


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture
def dtype():
    return torch.float32


@pytest.fixture
def sizes():
    return (2, 4, 32, 64)


@pytest.fixture
def rule():
    return delta_prompts.stand_in
