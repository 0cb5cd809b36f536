"""Memory for one expanded layer at a time, shared by all packed weights of a model."""

from __future__ import annotations

import torch


class BulkScratch:
    """Memory as large as the largest that asked."""

    def __init__(self, device: torch.device):
        self._memory = torch.empty(0, dtype=torch.bfloat16, device=device)

    def reserve(self, size: int) -> None:
        """Makes room for `size` numbers."""
        if size > self._memory.numel():
            self._memory = torch.empty(size, dtype=torch.bfloat16, device=self._memory.device)

    @property
    def memory(self) -> torch.Tensor:
        return self._memory

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes
