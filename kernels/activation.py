"""Activations whose bits, for an element, depend on that element alone.

torch's own sigmoid, silu and softplus compute what is left over at the end of each thread's share by another routine
than the rest, so an element's bits depend on where it lies: on the number of rows, and of threads. Here nothing is left
over: every call has a multiple of LANES elements, and few enough that torch gives them to one thread. A GPU computes
every element by one routine: there the call is made as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

LANES = 64
"""Elements of one step of the widest vector loop (two AVX-512 registers of bf16)."""
SHARE = 32768
"""The most elements that torch does not split between threads (its GRAIN_SIZE)."""


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), contiguous, in x's dtype."""
    return _elementwise(torch.sigmoid, x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), contiguous, in x's dtype."""
    return _elementwise(F.silu, x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), contiguous, in x's dtype."""
    return _elementwise(F.softplus, x)


def _elementwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    size = x.numel()
    if x.is_cuda:
        return function(x.contiguous())
    if size % LANES == 0 and size <= SHARE:
        return function(x.contiguous())
    padded = F.pad(x.reshape(-1), (0, -size % LANES))
    return torch.cat([function(part) for part in padded.split(SHARE)])[:size].view(x.shape)
