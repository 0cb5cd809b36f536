"""Causal depthwise convolution of width J over the last J-1 cached inputs and the window's own, then SiLU.

B = sequences, W = window rows, C = channels. c_t = silu(sum_j w[:, j] * u_(t-J+1+j)), summed in the order of j.
"""

from __future__ import annotations

import torch

from pilotfish.kernels.activation import silu


def causal_conv(inputs_BTC: torch.Tensor, weight_JC: torch.Tensor) -> torch.Tensor:
    """fp32 [B, T-J+1, C] from inputs [B, T, C], the first J-1 of which are history.

    weight_JC: fp32 [J, C], tap J-1 multiplying the newest input.
    """
    taps = weight_JC.shape[0]
    width = inputs_BTC.shape[1] - taps + 1
    inputs = inputs_BTC.float()
    total = inputs[:, :width] * weight_JC[0]
    for tap in range(1, taps):
        total = torch.addcmul(total, inputs[:, tap : tap + width], weight_JC[tap])
    return silu(total)
