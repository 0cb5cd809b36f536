"""Who owns which page or slot. Numbers only: the memory itself lives elsewhere, and this file imports no torch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import zip_longest


class Pool:
    """`total` numbered items. Item 0 is the null item: padding rows may write there, no owner ever gets it.

    An item may have several users, who must not write it then, and beside them one keeper, who would give it up: an
    item that its keeper alone holds is idle. It is free once nobody holds it.
    """

    def __init__(self, name: str, total: int):
        if total < 2:
            raise ValueError(f"{name}: want at least 2 (one is the null item), got {total}")
        self.name, self.total, self.num_idle = name, total, 0
        self._free = list(range(total - 1, 0, -1))
        self._used: dict[Hashable, list[int]] = {}
        self._kept: dict[Hashable, list[int]] = {}
        self._num_users = [0] * total
        self._is_kept = bytearray(total)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Items that have a user."""
        return self.capacity - len(self._free) - self.num_idle

    @property
    def capacity(self) -> int:
        """Items that can be owned at once."""
        return self.total - 1

    def take(self, user: Hashable, count: int, shared: Sequence[int] = ()) -> list[int]:
        """For a user that has none: the `shared` items, which others hold, then `count` free ones; the caller has
        looked at `num_free`."""
        assert user not in self._used, f"{self.name}: {user} owns items already"
        for item in shared:
            self._add_user(item)
        self._used[user] = [*shared]
        return self.add(user, count)

    def add(self, user: Hashable, count: int) -> list[int]:
        """`count` free items more, behind those that a user has; all that it has then."""
        assert 0 <= count <= len(self._free), f"{self.name}: want {count} free, have {len(self._free)}"
        items = [self._free.pop() for _ in range(count)]
        for item in items:
            self._num_users[item] = 1
        self._used[user] = [*self._used[user], *items]
        return list(self._used[user])

    def exchange(self, user: Hashable, shared: Sequence[int]) -> list[int]:
        """Puts `shared` items, which others hold, in place of a user's first ones, as many as it has of them, and gives
        those back; all that it has then."""
        before = self._used[user]
        for old, new in zip_longest(before[: len(shared)], shared):
            if old != new:
                self._add_user(new)
                if old is not None:
                    self._drop_user(old)
        self._used[user] = [*shared, *before[len(shared) :]]
        return list(self._used[user])

    def give_back(self, user: Hashable) -> None:
        """All of a user's items."""
        for item in reversed(self._used.pop(user)):
            self._drop_user(item)

    def keep(self, keeper: Hashable, items: list[int]) -> None:
        """A keeper for items that have users and no keeper; it has no others."""
        assert keeper not in self._kept, f"{self.name}: {keeper} keeps items already"
        for item in items:
            assert self._num_users[item] and not self._is_kept[item], f"{self.name}: {item} has no user, or a keeper"
            self._is_kept[item] = True
        self._kept[keeper] = list(items)

    def give_up(self, keeper: Hashable) -> None:
        """All that a keeper has: what nobody uses is free again."""
        for item in reversed(self._kept.pop(keeper)):
            self._is_kept[item] = False
            if not self._num_users[item]:
                self.num_idle -= 1
                self._free.append(item)

    def is_idle(self, item: int) -> bool:
        """Whether nobody but its keeper holds it."""
        return bool(self._is_kept[item]) and not self._num_users[item]

    def kept_by(self, keeper: Hashable) -> list[int]:
        """What a keeper has; [] for a stranger."""
        return self._kept.get(keeper, [])

    @property
    def num_keepers(self) -> int:
        return len(self._kept)

    def _add_user(self, item: int) -> None:
        assert self._num_users[item] or self._is_kept[item], f"{self.name}: {item} is free, nobody can share it"
        self.num_idle -= not self._num_users[item]
        self._num_users[item] += 1

    def _drop_user(self, item: int) -> None:
        self._num_users[item] -= 1
        if self._num_users[item]:
            return
        if self._is_kept[item]:
            self.num_idle += 1
        else:
            self._free.append(item)

    def check(self) -> None:
        """Every item but the null one is free or has owners, who are counted; no owner has one twice."""
        users, kept = [0] * self.total, [0] * self.total
        for counts, owners in ((users, self._used), (kept, self._kept)):
            for owner, items in owners.items():
                assert len(set(items)) == len(items), f"{self.name}: {owner} owns one twice: {items}"
                for item in items:
                    counts[item] += 1
        assert users == self._num_users, f"{self.name}: users miscounted"
        assert kept == list(self._is_kept), f"{self.name}: keepers miscounted"
        unowned = [item for item in range(1, self.total) if not users[item] and not kept[item]]
        assert sorted(self._free) == unowned and not users[0] and not kept[0], (
            f"{self.name}: items lost or owned twice: free {sorted(self._free)}, without an owner {unowned}"
        )
        idle = sum(kept[item] and not users[item] for item in range(self.total))
        assert self.num_idle == idle, f"{self.name}: {self.num_idle} idle items counted, {idle} found"
