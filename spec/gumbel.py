"""Keyed Gumbel noise: a pure function of (seed, choice, position, token id), never drawn in sequence.

SplitMix64 (Steele, Lea, Flood 2014) as a counter-based generator: the row's key is a mix of seed, choice index and
absolute position; token i reads mix(key + i * golden). Trimmed vocabularies read the same numbers for the same ids.
R = rows, V = token ids.
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: int64 stands for uint64, whose product and sum wrap alike."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def gumbel_noise(
    seed_R: torch.Tensor, choice_R: torch.Tensor, position_R: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Standard Gumbel noise, fp32 [R, V]. The three keys are int64 [R].

    23 random bits a value, so that u and 1 - u are fp32 numbers; with one more, u would round to 1 and the noise be
    infinite. The largest is 16.6: a token less likely than 6e-8 is never drawn.
    """
    key = _mix(_mix(_mix(seed_R + _GOLDEN) + choice_R * _GOLDEN) + position_R * _GOLDEN)
    ids = torch.arange(1, vocab_size + 1, device=key.device) * _GOLDEN
    bits = _shift_right(_mix(key[:, None] + ids), 41)
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-23
    return uniform.log_().neg_().log_().neg_()
