"""Memory that all packed weights of a model share, one product at a time."""

from __future__ import annotations

from typing import ClassVar

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


class PartialSums:
    """What the programs that share K leave of a row-parallel product for the one that comes last: fp32 sums, and for
    each of the others a counter of arrivals, 0 between launches. One for a device, whose launches follow each other."""

    _of_device: ClassVar[dict[torch.device, PartialSums]] = {}

    def __init__(self, device: torch.device):
        self.memory = torch.empty(0, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(0, dtype=torch.int32, device=device)
        self._outgrown: list[tuple[torch.Tensor, torch.Tensor]] = []

    @classmethod
    def of(cls, device: torch.device) -> PartialSums:
        return cls._of_device.setdefault(device, cls(device))

    def reserve(self, num_tiles: int, segments: int, rows: int) -> None:
        """Makes room for a product of some tiles of weights."""
        size, counters = segments * num_tiles * 16 * rows, -(-rows // 8) * num_tiles
        if size > self.memory.numel() or counters > self.arrivals.numel():
            # a captured graph may hold what was outgrown
            self._outgrown.append((self.memory, self.arrivals))
            device = self.memory.device
            self.memory = torch.empty(max(size, self.memory.numel()), dtype=torch.float32, device=device)
            counters = max(counters, self.arrivals.numel())
            self.arrivals = torch.zeros(counters, dtype=torch.int32, device=device)
