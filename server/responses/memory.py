"""Items of answers that clients may name instead of sending them back: `item_reference`, as Vercel's AI SDK does.

A memory, not a store: bounded, of this process, the eldest forgotten first. Each API key has its own.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

MAX_BYTES = 32 << 20
MAX_ITEM_BYTES = 1 << 20


class ItemMemory:
    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._items: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def keep(self, label: str, item_id: str, item: msgspec.Struct) -> None:
        text = msgspec.json.encode(item)
        if len(text) > MAX_ITEM_BYTES:
            return
        self._items[label, item_id] = text
        self._num_bytes += len(text)
        while self._num_bytes > self._max_bytes:
            _, forgotten = self._items.popitem(last=False)
            self._num_bytes -= len(forgotten)

    def recall(self, label: str, item_id: str) -> bytes | None:
        """The item's JSON, or None for one that is not known, or no longer."""
        text = self._items.get((label, item_id))
        if text is not None:
            self._items.move_to_end((label, item_id))
        return text
