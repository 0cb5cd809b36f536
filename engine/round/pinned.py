"""Small arrays between host and device, without a wait: pinned memory, and events that say when it is free."""

from __future__ import annotations

import numpy as np
import torch


class PinnedRing:
    """`count` pinned host buffers used in turn; one is written again only after its last copy has ended. The host
    reads and writes them by numpy, whose small calls are cheaper than torch's."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, count: int = 4):
        self.on_gpu = device.type == "cuda"
        self._buffers = [torch.zeros(shape, dtype=dtype, pin_memory=self.on_gpu) for _ in range(count)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        # each says when the last copy to or from its buffer has ended
        self._events = [torch.cuda.Event() if self.on_gpu else None for _ in range(count)]
        self._next = 0

    def _take(self) -> tuple[int, torch.Tensor]:
        index, self._next = self._next, (self._next + 1) % len(self._buffers)
        event = self._events[index]
        if event is not None:
            event.synchronize()
        return index, self._buffers[index]

    def _mark(self, index: int) -> None:
        if (event := self._events[index]) is not None:
            event.record()

    def send(self, values: list[int], target: torch.Tensor) -> None:
        """Copies the values to the front of a device tensor of this ring's dtype, in stream order."""
        index, buffer = self._take()
        self._arrays[index][: len(values)] = values
        target[: len(values)].copy_(buffer[: len(values)], non_blocking=True)
        self._mark(index)

    def fetch(self, source: torch.Tensor) -> HostCopy:
        """Starts the copy of a device tensor of this ring's shape to the host."""
        index, buffer = self._take()
        buffer.copy_(source, non_blocking=True)
        self._mark(index)
        return HostCopy(self._arrays[index], self._events[index])


class HostCopy:
    """A copy on its way to the host."""

    def __init__(self, array: np.ndarray, event: torch.cuda.Event | None):
        self._array, self._event = array, event

    def read(self) -> np.ndarray:
        """The values, once they have come; to be used before as many later copies as the ring has buffers."""
        if self._event is not None:
            self._event.synchronize()
        return self._array


class Placement:
    """Puts slots and page tables where the round's operators read them."""

    def __init__(self, slots: torch.Tensor, tables: torch.Tensor):
        self.slots, self.tables = slots, tables
        self._slot_ring = PinnedRing((len(slots),), slots.dtype, slots.device)
        self._table_ring = PinnedRing((tables.shape[1],), tables.dtype, tables.device)
        self._known: dict[int, list[int]] = {}
        self._placed: list[int] = []

    def place(self, slots: list[int], tables: list[list[int]], size: int) -> None:
        """A batch, filled up to `size` with the null slot."""
        for slot, pages in zip(slots, tables, strict=True):
            # a list of pages is made for each sequence anew
            if self._known.get(slot) is not pages:
                self._table_ring.send(pages + [0] * (self.tables.shape[1] - len(pages)), self.tables[slot])
                self._known[slot] = pages
        self.place_slots(slots, size)

    def place_slots(self, slots: list[int], size: int) -> None:
        """A batch whose tables are known."""
        filled = slots + [0] * (size - len(slots))
        # mostly those of the round before
        if filled != self._placed:
            self._slot_ring.send(filled, self.slots)
            self._placed = filled
