"""Refusals at a bounded rate for each key: who asks again and again waits for the answer, and nobody else does.

A refusal costs the event loop a fraction of a millisecond, and a client that does not heed Retry-After can ask for
thousands a second, on the loop that writes everybody's streams. So each key has REFUSALS_PER_SECOND; beyond
REFUSALS_AT_ONCE of them an answer is held back until its turn. What waits is a connection, its request unread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Container

from aiohttp import web

REFUSALS_PER_SECOND = 25
REFUSALS_AT_ONCE = 32
"""So many come at once: a relay that tries the next server hears at once that this one is full."""
MOST_SECONDS = 5.0
"""The longest time that an answer is held back: below the patience of clients."""


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pace:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # by label, when its last refusal is due: at an even rate, those at once subtracted
        self._due: dict[str, float] = {}

    def delay(self, label: str) -> float:
        """Counts this refusal of the key: the seconds that it has to wait, 0 for most."""
        self.count(label)
        return self.seconds(label)

    def count(self, label: str) -> None:
        now = self._clock()
        earliest = now - REFUSALS_AT_ONCE / REFUSALS_PER_SECOND
        due = max(self._due.get(label, earliest), earliest) + 1 / REFUSALS_PER_SECOND
        self._due[label] = min(due, now + MOST_SECONDS)

    def seconds(self, label: str) -> float:
        """The seconds until what was counted last is due, 0 for most."""
        due = self._due.get(label)
        return 0.0 if due is None else max(0.0, due - self._clock())

    def middleware(self, label: Callable[[], str], exempt: Container[str]) -> Callable:
        """`label` is the key of the request at hand. Probes, the paths that are `exempt`, never wait for others'
        refusals."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            response = await handler(request)
            # out of the handler: nothing of the request but its connection is kept meanwhile
            if response.status >= 400 and request.path not in exempt and (seconds := self.delay(label())):
                await asyncio.sleep(seconds)
            return response

        return middleware
