"""`project_prompt` and `attend_prompt` in Triton's interpreter, which is right for fp32 (not for bf16, nor when it
rounds to FP8)."""

import numpy as np
import pytest
import torch

from tests.support.prompt_attention import *  # noqa: F403

# overflow and NaN are as silent on a GPU
np.seterr(all="ignore")


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture
def dtype():
    return torch.float32


@pytest.fixture
def cache_dtype():
    return None
