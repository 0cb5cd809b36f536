"""`moe_prompt.experts` in Triton's interpreter, which is right for fp32 (not for bf16) and knows no PTX: weights are
unpacked by plain arithmetic there."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from pilotfish.kernels.cuda import moe_prompt
from tests.support.prompt_experts import *  # noqa: F403

# overflow and NaN are as silent on a GPU
np.seterr(all="ignore")


@triton.jit
def _code(words, sign: tl.constexpr, two: tl.constexpr, one: tl.constexpr, half: tl.constexpr):
    """The number whose bits are these of a word (packing.NVFP4_BITS)."""
    exponent = (words >> two & 1) * 2 + (words >> one & 1)
    mantissa = (words >> half & 1).to(tl.float32)
    power = tl.where(exponent == 3, 4.0, tl.where(exponent == 2, 2.0, 1.0))
    value = tl.where(exponent == 0, mantissa * 0.5, (1.0 + mantissa * 0.5) * power)
    return tl.where((words >> sign & 1) == 1, -value, value)


_in_order = moe_prompt._in_order


@triton.jit
def _plain_pairs(words, scales):
    scale = (1.0 + (scales % 8).to(tl.float32) / 8) * tl.exp2((scales // 8 - 21).to(tl.float32))
    p0 = tl.join(_code(words, 15, 8, 7, 6), _code(words, 31, 24, 23, 22))
    p1 = tl.join(_code(words, 19, 12, 11, 10), _code(words, 3, 28, 27, 26))
    p2 = tl.join(_code(words, 9, 2, 1, 0), _code(words, 25, 18, 17, 16))
    p3 = tl.join(_code(words, 13, 14, 5, 4), _code(words, 29, 30, 21, 20))
    codes = tl.join(tl.join(p0, p2), tl.join(p1, p3)).permute(0, 1, 2, 4, 5, 3).reshape(words.shape[0], 4, 4, 8)
    return _in_order((codes * scale[:, :, :, None] / 256).reshape(words.shape[0], 128))


@pytest.fixture(autouse=True)
def plain_pairs(monkeypatch):
    monkeypatch.setattr(moe_prompt, "_pairs", _plain_pairs)


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture
def dtype():
    return torch.float32
