"""Root-mean-square norms. Sums in fp32, one row at a time, so a row's bits do not depend on its neighbours."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) * scale over the last axis, computed in fp32, returned in `dtype`.

    scale: fp32, the *effective* factor: 1 + w for the family's ordinary norms, w for the gated one. It may have leading
    axes of its own, which broadcast.
    """
    weight = scale if scale.dim() == 1 else None
    normed = F.rms_norm(x.float(), (x.shape[-1],), weight, eps)
    return (normed if scale.dim() == 1 else normed * scale).to(dtype)


def l2_norm(x: torch.Tensor, factor: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x * rsqrt(sum(x^2) + eps) * factor over the last axis, fp32 in and out; factor broadcasts."""
    width = x.shape[-1]
    # the library norms by the mean: scale what goes into it, and out of it, by the width
    return F.rms_norm(x, (width,), None, eps / width) * (factor * width**-0.5)
