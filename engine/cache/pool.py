"""Who owns which page or slot. Numbers only: the memory itself lives elsewhere, and this file imports no torch."""

from __future__ import annotations

from collections.abc import Hashable


class Pool:
    """`total` numbered items, handed out whole and taken back whole. Item 0 is the null item: padding rows may write
    there, no owner ever gets it."""

    def __init__(self, name: str, total: int):
        if total < 2:
            raise ValueError(f"{name}: want at least 2 (one is the null item), got {total}")
        self.name, self.total = name, total
        self._free = list(range(total - 1, 0, -1))
        self._owned: dict[Hashable, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free)

    @property
    def capacity(self) -> int:
        """Items that can be owned at once."""
        return self.total - 1

    def take(self, owner: Hashable, count: int) -> list[int]:
        """`count` free items for an owner that has none; the caller has looked at `num_free`."""
        assert owner not in self._owned, f"{self.name}: {owner} owns items already"
        assert 0 < count <= len(self._free), f"{self.name}: want {count} free, have {len(self._free)}"
        items = [self._free.pop() for _ in range(count)]
        self._owned[owner] = items
        return list(items)

    def give_back(self, owner: Hashable) -> None:
        """All of an owner's items."""
        self._free.extend(reversed(self._owned.pop(owner)))

    def check(self) -> None:
        """Every item but the null one is free or has one owner."""
        seen = sorted(self._free + [item for items in self._owned.values() for item in items])
        assert seen == list(range(1, self.total)), f"{self.name}: items lost or owned twice: {seen}"
