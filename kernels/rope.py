"""Partial rotary embedding, NeoX pairs (j, j + rotary_dim / 2) inside the first rotary_dim dimensions.

R = rows, h = heads, D = head width. Text positions only: the family's interleaved mRoPE is then plain RoPE.
"""

from __future__ import annotations

import torch


def inverse_frequencies(
    rotary_dim: int,
    theta: float,
    device: torch.device | str = "cpu",
    ramp: tuple[float, float, float] | None = None,
) -> torch.Tensor:
    """theta^(-2i / rotary_dim), fp32 [rotary_dim / 2].

    ramp (factor, low, high): YaRN's, arXiv:2309.00071: pair i is slowed by the factor to the share (i - low) /
    (high - low), within 0 .. 1.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    periods = theta**exponents
    if ramp is None:
        return 1.0 / periods
    factor, low, high = ramp
    share = ((torch.arange(rotary_dim // 2, dtype=torch.float32, device=device) - low) / (high - low)).clamp(0, 1)
    return share / (factor * periods) + (1.0 - share) / periods


def rope_angles(positions_R: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 [R, 1, rotary_dim / 2]."""
    angles = positions_R.to(torch.float32)[:, None, None] * inv_freq
    return angles.cos(), angles.sin()


def apply_rope(x_RhD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first 2 * cos.shape[-1] dimensions of every head; the others pass. fp32 in and out."""
    half = cos.shape[-1]
    first, second, rest = x_RhD[..., :half], x_RhD[..., half : 2 * half], x_RhD[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
