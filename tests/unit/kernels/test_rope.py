"""Rotary positions: against the direct formula, at zero, in the middle and far out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pilotfish.kernels.rope import apply_rope, inverse_frequencies, rope_angles

POSITIONS = (0, 1, 255, 256, 4095, 32767, 262143)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rotary_dim", "theta"), ((8, 1e7), (64, 1e4), (2, 1e6)))
def test_frequencies_match_the_formula(rotary_dim, theta):
    wanted = [theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]
    assert inverse_frequencies(rotary_dim, theta).tolist() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("position", POSITIONS)
def test_rotation_matches_the_formula(position):
    heads, dim, rotary = 3, 32, 8
    x = draw(1, heads, dim)
    inv_freq = inverse_frequencies(rotary, 1e7)
    output = apply_rope(x, *rope_angles(torch.tensor([position]), inv_freq))[0]
    half = rotary // 2
    for head in range(heads):
        row = x[0, head].tolist()
        wanted = list(row)
        for j in range(half):
            # the angle is an fp32 product, as in transformers; its sine and cosine are then exact to rounding
            angle = float(np.float32(position) * np.float32(inv_freq[j]))
            wanted[j] = row[j] * math.cos(angle) - row[j + half] * math.sin(angle)
            wanted[j + half] = row[j + half] * math.cos(angle) + row[j] * math.sin(angle)
        assert output[head].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_position_zero_changes_nothing():
    x = draw(2, 3, 32)
    assert torch.equal(apply_rope(x, *rope_angles(torch.zeros(2), inverse_frequencies(8, 1e7))), x)


def test_dimensions_past_the_rotary_ones_pass():
    x = draw(1, 3, 32)
    output = apply_rope(x, *rope_angles(torch.tensor([77]), inverse_frequencies(8, 1e7)))
    assert torch.equal(output[..., 8:], x[..., 8:])
    assert not torch.equal(output[..., :8], x[..., :8])


def test_scores_depend_on_the_distance_alone():
    q, k = draw(1, 1, 16), draw(1, 1, 16, seed=1)
    inv_freq = inverse_frequencies(16, 1e4)

    def score(position, distance):
        pair = (apply_rope(x, *rope_angles(torch.tensor([p]), inv_freq)) for x, p in ((q, position), (k, distance)))
        return float((next(pair) * next(pair)).sum())

    assert score(40, 33) == pytest.approx(score(7, 0), rel=1e-4, abs=1e-5)


def test_a_row_keeps_its_bits_beside_any_others():
    inv_freq = inverse_frequencies(64, 1e7)
    positions = torch.arange(48) * 37
    cos, sin = rope_angles(positions, inv_freq)
    x = draw(48, 3, 128)
    together = apply_rope(x, cos, sin)
    for row in range(48):
        padded = torch.zeros(16, dtype=torch.int64)
        padded[0] = positions[row]
        alone = rope_angles(padded, inv_freq)
        assert torch.equal(apply_rope(x[row : row + 1], alone[0][:1], alone[1][:1])[0], together[row])
