"""Root-mean-square norms. Sums in fp32, one row at a time, so a row's bits do not depend on its neighbours."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) * scale over the last axis, computed in fp32, returned in `dtype`.

    scale: fp32, the *effective* factor: 1 + w for the family's ordinary norms, w for the gated one.
    """
    x = x.float()
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
    return (x * inverse).mul_(scale).to(dtype)


def l2_norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x * rsqrt(sum(x^2) + eps) over the last axis, fp32 in and out."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True).add_(eps))
