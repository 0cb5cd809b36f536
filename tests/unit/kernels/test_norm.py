"""Norms: against float64, and a row's bits whatever stands beside it."""

from __future__ import annotations

import pytest
import torch

from pilotfish.kernels.norm import l2_norm, rms_norm


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", (1, 7, 64, 257))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_rms_norm_matches_float64(width, dtype):
    x, scale = draw(5, width).to(dtype), 1 + draw(width, seed=1)
    wide = x.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale.double()
    torch.testing.assert_close(rms_norm(x, scale, 1e-6, torch.float32).double(), wanted, rtol=1e-6, atol=1e-6)


def test_rms_norm_is_computed_in_fp32_and_rounded_once():
    x, scale = draw(3, 64).bfloat16(), draw(64, seed=1)
    assert torch.equal(
        rms_norm(x, scale, 1e-6, torch.bfloat16), rms_norm(x.float(), scale, 1e-6, torch.float32).bfloat16()
    )


def test_rms_norm_leaves_its_input():
    x = draw(3, 8)
    before = x.clone()
    rms_norm(x, torch.ones(8), 1e-6, torch.float32)
    assert torch.equal(x, before)


@pytest.mark.parametrize("scale", (1e-20, 0.0, 1e15))
def test_extreme_rows_stay_finite(scale):
    assert rms_norm(draw(2, 64) * scale, torch.ones(64), 1e-6, torch.float32).isfinite().all()


def test_rms_norm_takes_a_scale_for_each_head():
    x, scale = draw(5, 3, 32), 1 + draw(3, 32, seed=1)
    together = rms_norm(x, scale, 1e-6, torch.float32)
    for head in range(3):
        # another operation order than with one scale for all
        torch.testing.assert_close(together[:, head], rms_norm(x[:, head], scale[head], 1e-6, torch.float32))


@pytest.mark.parametrize("width", (1, 16, 33))
def test_l2_norm_matches_float64(width):
    x, factor = draw(4, 2, 3, width), torch.tensor([0.25, 1.0])[:, None, None]
    wanted = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() * factor
    torch.testing.assert_close(l2_norm(x, factor).double(), wanted, rtol=1e-6, atol=1e-6)


def test_l2_norm_of_a_zero_row_is_zero():
    assert torch.equal(l2_norm(torch.zeros(2, 16), torch.ones(1)), torch.zeros(2, 16))


@pytest.mark.parametrize("width", (16, 33, 64, 5120))
def test_a_row_keeps_its_bits_beside_any_others(width):
    x, scale, factor = draw(36, 2, width), draw(width, seed=1), torch.tensor([0.25, 1.0])[:, None]
    x[1::3] = float("nan")
    norms = (
        lambda rows: rms_norm(rows, scale, 1e-6, torch.float32),
        lambda rows: rms_norm(rows, scale.expand(2, -1), 1e-6, torch.float32),
        lambda rows: l2_norm(rows, factor),
    )
    for norm in norms:
        together = norm(x)
        for row in range(0, 36, 3):
            assert torch.equal(norm(x[row : row + 1])[0], together[row])
