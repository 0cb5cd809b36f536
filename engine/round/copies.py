"""Copies of small arrays between host and device that nobody waits for: from and to pinned memory, with events that say
when it is free."""

from __future__ import annotations

from collections.abc import Sequence

import torch

ALIGNMENT = 16
"""Bytes; where each array begins in the block."""


def send_together(arrays: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The arrays (on the host, contiguous, of any dtypes) on the device, in stream order; views of one block.

    On a GPU the block is pinned memory of torch's own pool, which gives it to nobody before the copy has ended.
    """
    starts, total = [], 0
    for array in arrays:
        starts.append(total)
        total += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    block = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for array, start in zip(arrays, starts, strict=True):
        block[start : start + array.nbytes].view(array.dtype).copy_(array.flatten())
    sent = block.to(device, non_blocking=True)
    return [
        sent[start : start + array.nbytes].view(array.dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


def aligned_columns(count: int, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros [count, length], each row contiguous and aligned as if it were a tensor of its own, so that one strided
    copy writes the same place of all rows."""
    padded = -(-length * dtype.itemsize // 64) * 64 // dtype.itemsize
    return torch.zeros((count, padded), dtype=dtype, device=device)[:, :length]


class PinnedRing:
    """`count` pinned host buffers used in turn; one is written again only after its last copy has ended."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, count: int = 4):
        self.on_gpu = device.type == "cuda"
        self._buffers = [torch.zeros(shape, dtype=dtype, pin_memory=self.on_gpu) for _ in range(count)]
        self._events: list[torch.cuda.Event | None] = [None] * count
        self._next = 0

    def _take(self) -> tuple[int, torch.Tensor]:
        index, self._next = self._next, (self._next + 1) % len(self._buffers)
        event = self._events[index]
        if event is not None:
            event.synchronize()
        return index, self._buffers[index]

    def _mark(self, index: int) -> None:
        if self.on_gpu:
            event = torch.cuda.Event()
            event.record()
            self._events[index] = event

    def send(self, values: list[int], target: torch.Tensor) -> None:
        """Copies the values to the front of a device tensor of this ring's dtype, in stream order."""
        index, buffer = self._take()
        buffer[: len(values)] = torch.tensor(values, dtype=buffer.dtype)
        target[: len(values)].copy_(buffer[: len(values)], non_blocking=True)
        self._mark(index)

    def fetch(self, source: torch.Tensor) -> HostCopy:
        """Starts the copy of a device tensor to the host."""
        index, buffer = self._take()
        part = buffer[: source.shape[0]]
        part.copy_(source, non_blocking=True)
        self._mark(index)
        return HostCopy(part, self._events[index])


class HostCopy:
    """A copy on its way to the host."""

    def __init__(self, buffer: torch.Tensor, event: torch.cuda.Event | None):
        self._buffer, self._event = buffer, event

    def read(self) -> torch.Tensor:
        """The values, once they have come; to be used before as many later copies as the ring has buffers."""
        if self._event is not None:
            self._event.synchronize()
        return self._buffer


class Placement:
    """Puts slots and page tables where the round's operators read them."""

    def __init__(self, slots: torch.Tensor, tables: torch.Tensor):
        self.slots, self.tables = slots, tables
        self._slot_ring = PinnedRing((len(slots),), slots.dtype, slots.device)
        self._table_ring = PinnedRing((tables.shape[1],), tables.dtype, tables.device)
        self._known: dict[int, list[int]] = {}

    def place(self, slots: list[int], tables: list[list[int]], size: int) -> None:
        """A batch, filled up to `size` with the null slot."""
        for slot, pages in zip(slots, tables, strict=True):
            # a list of pages is made for each sequence anew
            if self._known.get(slot) is not pages:
                self._table_ring.send(pages + [0] * (self.tables.shape[1] - len(pages)), self.tables[slot])
                self._known[slot] = pages
        self._slot_ring.send(slots + [0] * (size - len(slots)), self.slots)
