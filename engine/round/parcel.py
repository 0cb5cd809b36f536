"""Small arrays of the host sent to the device together, in one copy that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}
ALIGNMENT = 16
"""Bytes; where each group begins in the block."""

Group = tuple[Sequence[Sequence[float]], torch.dtype]
"""Lists of numbers of one dtype."""


def send(*groups: Group, device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    """Each group's lists on the device, in stream order; views of one block.

    On a GPU the block is pinned memory of torch's own pool, which gives it to nobody before the copy has ended.
    """
    arrays = [np.array([*chain.from_iterable(group)], dtype=NUMPY[dtype]) for group, dtype in groups]
    starts, total = [], 0
    for array in arrays:
        starts.append(total)
        total += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    block = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    written = block.numpy()
    for array, start in zip(arrays, starts, strict=True):
        written[start : start + array.nbytes] = array.view(np.uint8)
    sent = block.to(device, non_blocking=True)
    return [
        sent[start : start + array.nbytes].view(dtype).split([len(numbers) for numbers in group])
        for (group, dtype), array, start in zip(groups, arrays, starts, strict=True)
    ]


def columns(count: int, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros [count, length], each row contiguous and aligned as if it were a tensor of its own, so that one strided
    copy writes the same place of all rows."""
    padded = -(-length * dtype.itemsize // 64) * 64 // dtype.itemsize
    return torch.zeros((count, padded), dtype=dtype, device=device)[:, :length]
