"""The short convolution: against a direct formula, and row by row the bits of a window."""

from __future__ import annotations

import math

import pytest
import torch

from pilotfish.kernels.conv import causal_conv


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("taps", (2, 4))
def test_matches_the_formula(taps, dtype):
    batch, width, channels = 2, 5, 7
    inputs, weight = draw(batch, width + taps - 1, channels).to(dtype), draw(taps, channels, seed=1)
    output = causal_conv(inputs, weight)
    assert output.shape == (batch, width, channels)
    for b in range(batch):
        for t in range(width):
            for c in range(channels):
                total = sum(float(weight[j, c]) * float(inputs[b, t + j, c]) for j in range(taps))
                # fp32 sums of a few terms
                assert float(output[b, t, c]) == pytest.approx(total / (1 + math.exp(-total)), rel=2e-6, abs=1e-6)


@pytest.mark.parametrize("channels", (7, 33, 48, 96, 100, 10240))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_window_has_the_bits_of_its_rows_one_at_a_time(channels, dtype):
    inputs, weight = draw(1, 12, channels).to(dtype), draw(4, channels, seed=1)
    alone = torch.cat([causal_conv(inputs[:, t : t + 4], weight) for t in range(9)], dim=1)
    for width in range(1, 10):
        assert torch.equal(causal_conv(inputs[:, : width + 3], weight), alone[:, :width]), width


@pytest.mark.parametrize("channels", (33, 96))
def test_sequences_of_a_batch_have_the_bits_they_have_alone(channels):
    inputs, weight = draw(4, 8, channels), draw(4, channels, seed=1)
    together = causal_conv(inputs, weight)
    for b in range(4):
        assert torch.equal(causal_conv(inputs[b : b + 1], weight)[0], together[b])


def test_a_row_does_not_see_later_inputs():
    inputs, weight = draw(1, 8, 96), draw(4, 96, seed=1)
    wanted = causal_conv(inputs, weight)
    inputs[:, 5:] = float("nan")
    assert torch.equal(causal_conv(inputs, weight)[:, :2], wanted[:, :2])
