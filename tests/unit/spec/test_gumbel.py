"""Keyed noise: the numbers themselves, their independence of everything but the key, and their distribution."""

from __future__ import annotations

import math

import pytest
import torch

from pilotfish.spec.gumbel import gumbel_noise

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
KEYS = ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 3, 255), ((1 << 63) - 1, 0, 262143), (-(1 << 63), 7, 1))


def mix(x):
    """SplitMix64's output function on unsigned 64-bit integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def reference(seed, choice, position, token):
    key = mix((seed + GOLDEN) & MASK)
    key = mix((key + choice * GOLDEN) & MASK)
    key = mix((key + position * GOLDEN) & MASK)
    bits = mix((key + (token + 1) * GOLDEN) & MASK) >> 41
    # the product is rounded to fp32 before the logarithms, and so is the inner logarithm
    uniform = (bits + 0.5) * 2.0**-23
    return -math.log(-math.log(uniform))


def noise(*keys, vocab=50):
    return gumbel_noise(*(torch.tensor(column) for column in zip(*keys, strict=True)), vocab)


@pytest.mark.parametrize("key", KEYS)
def test_matches_splitmix64(key):
    wanted = [reference(*key, token) for token in range(50)]
    # near u = 1, -log(u) has few bits: fp32 spacing of u is 2^-24 there
    assert noise(key)[0].tolist() == pytest.approx(wanted, rel=2e-5, abs=2e-6)


def test_the_generator_is_the_published_one():
    # the first output of SplitMix64 with state 0, from its authors' test vectors
    assert mix(GOLDEN) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("vocab", (1, 7, 33, 320, 1009))
def test_a_row_keeps_its_bits_beside_any_others(vocab):
    together = noise(*KEYS, vocab=vocab)
    for row, key in enumerate(KEYS):
        assert torch.equal(noise(key, vocab=vocab)[0], together[row])


@pytest.mark.parametrize("vocab", (1, 31, 320, 1008))
def test_a_smaller_vocabulary_reads_the_same_numbers(vocab):
    assert torch.equal(noise(*KEYS, vocab=vocab), noise(*KEYS, vocab=1009)[:, :vocab])


@pytest.mark.parametrize("part", range(3))
def test_every_part_of_the_key_changes_the_noise(part):
    key = [11, 2, 40]
    other = list(key)
    other[part] += 1
    assert not (noise(key) == noise(other)).any()


def test_parts_of_the_key_do_not_stand_for_one_another():
    rows = noise((1, 2, 3), (1, 3, 2), (2, 1, 3), (3, 2, 1), (0, 0, 6), (6, 0, 0))
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)


def sample():
    """262 144 values over seeds, positions and tokens."""
    keys = [(seed, 0, position) for seed in range(64) for position in range(64)]
    return noise(*keys, vocab=64).double()


def test_moments_are_a_standard_gumbel_s():
    values = sample()
    count = values.numel()
    deviation = math.pi / math.sqrt(6)
    assert float(values.mean()) == pytest.approx(0.5772156649, abs=5 * deviation / math.sqrt(count))
    # the variance's own standard error, the Gumbel's kurtosis being 5.4
    assert float(values.var()) == pytest.approx(deviation**2, abs=5 * deviation**2 * math.sqrt(4.4 / count))


@pytest.mark.parametrize("axis", ("all", "tokens", "positions", "seeds"))
def test_the_distribution_passes_kolmogorov_smirnov(axis):
    values = sample().view(64, 64, 64)
    chosen = {"all": values, "tokens": values[3, 5], "positions": values[3, :, 5], "seeds": values[:, 3, 5]}[axis]
    ordered = (-(-chosen.flatten()).exp()).exp().sort().values
    count = ordered.numel()
    ranks = torch.arange(count, dtype=torch.float64)
    distance = max(float((ordered - ranks / count).max()), float(((ranks + 1) / count - ordered).max()))
    # 1.95 / sqrt(n): one in a thousand seeds would fail
    assert distance < 1.95 / math.sqrt(count)


def test_neighbours_are_uncorrelated():
    values = sample().view(64, 64, 64)
    values = (values - values.mean()) / values.std()
    pairs = ((values[1:], values[:-1]), (values[:, 1:], values[:, :-1]), (values[..., 1:], values[..., :-1]))
    for one, other in pairs:
        assert abs(float((one * other).mean())) < 5 / math.sqrt(one.numel())


def test_values_are_finite_and_bounded():
    values = sample()
    assert values.isfinite().all()
    assert values.max() < 16.7
    assert values.min() > -2.9


def unmix(x):
    """The inverse of mix, whose every step can be undone."""

    def unshift(x, bits):
        return x ^ (x >> bits) ^ (x >> 2 * bits)

    x = (unshift(x, 31) * pow(0x94D049BB133111EB, -1, 1 << 64)) & MASK
    x = (unshift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64)) & MASK
    return unshift(x, 30)


@pytest.mark.parametrize(
    "bits, wanted", [(MASK, -math.log(-math.log1p(-(2.0**-24)))), (0, -math.log(24 * math.log(2)))]
)
def test_the_extreme_draws_are_finite(bits, wanted):
    # the position whose first token draws these bits, of a request with seed 0 and choice 0
    key = unmix((unmix(bits) - GOLDEN) & MASK)
    position = ((key - mix(mix(GOLDEN))) * pow(GOLDEN, -1, 1 << 64)) & MASK
    drawn = noise((0, 0, position - (1 << 64) if position >> 63 else position), vocab=1)
    assert float(drawn) == pytest.approx(wanted, rel=1e-6)
