"""Streams with news are woken a few at a time, and the event loop looks for what the engine has written in between.

Writing to 64 streams takes longer than a round may. Woken all at once, the last of them would write what was new before
the first did; woken in groups, each writes what is there when its turn comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice

AT_ONCE = 16
"""Of 8, 16, 32 and all the best at 64 streams, if by little (docs/benchmarks.md)."""


class Waker:
    """Of one event loop."""

    def __init__(self) -> None:
        # a dict, not a set, for it keeps their order
        self._waiting: dict[Callable[[], None], None] = {}
        self._scheduled = False

    def add(self, wake: Callable[[], None]) -> None:
        """Calls `wake` when its turn has come: once, however often it is added before."""
        self._waiting[wake] = None
        if not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        asyncio.get_running_loop().call_soon(self._wake_group)
        self._scheduled = True

    def _wake_group(self) -> None:
        self._scheduled = False
        for wake in list(islice(self._waiting, AT_ONCE)):
            del self._waiting[wake]
            wake()
        if self._waiting and not self._scheduled:
            self._schedule()
