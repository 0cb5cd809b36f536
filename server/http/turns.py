"""Requests begin in turns: a few in each pass of the event loop, and between two passes it serves all streams.

To plan and submit a request takes about a millisecond, and many come at once: in one pass they would hold up every
stream for the sum of it. Keys take turns, each in its order. Work that its client has left costs as much, and no answer
can be held back for it, as `Pace` does for refusals: a key that leaves more than that pace allows begins nothing new
until its turn. Who leaves while he still waits has cost little, and does not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from pilotfish.server.http.pace import Pace

BEGUN_IN_A_PASS = 4
BEGUN: web.RequestKey[bool] = web.RequestKey("begun", bool)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Turns:
    """`left` counts what was begun and left by its client."""

    def __init__(self, left: Pace | None = None) -> None:
        self.left = left or Pace()
        # a dict as a queue from which those who go are taken at once
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}
        self._room = BEGUN_IN_A_PASS
        self._next: asyncio.Handle | None = None

    async def begin(self, request: web.Request, label: str) -> None:
        """Waits until work of this key may begin; from then on it counts if it is left."""
        await self.take(label)
        request[BEGUN] = True

    async def take(self, label: str) -> None:
        if self._room and label not in self._waiting and not self.left.seconds(label):
            self._room -= 1
            if not self._room:
                self._come_again(0.0)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(label, {})[turn] = None
        self._come_again(self._patience())
        try:
            await turn
        finally:
            queue = self._waiting.get(label, {})
            queue.pop(turn, None)
            if not queue:
                self._waiting.pop(label, None)

    def _pass(self) -> None:
        """Makes room for as many as may begin in a pass, and gives it to those who wait."""
        self._next, self._room = None, BEGUN_IN_A_PASS
        while self._room and (label := next((one for one in self._waiting if not self.left.seconds(one)), None)):
            # to the end of the line, where the key waits for its next turn
            queue = self._waiting.pop(label)
            turn = next(iter(queue))
            del queue[turn]
            if queue:
                self._waiting[label] = queue
            if not turn.done():
                turn.set_result(None)
                self._room -= 1
        if not self._room:
            self._come_again(0.0)
        elif self._waiting:
            self._come_again(self._patience())

    def _patience(self) -> float:
        return min(map(self.left.seconds, self._waiting))

    def _come_again(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(self._next, asyncio.TimerHandle) and self._next.when() > loop.time() + seconds:
            self._next.cancel()
            self._next = None
        if self._next is None:
            self._next = loop.call_later(seconds, self._pass) if seconds else loop.call_soon(self._pass)

    def middleware(self, label: Callable[[], str]) -> Callable:
        """Work has its turn in its handler, once its body has come. All else has it here, in a line of its own: probes
        do not wait for what others have left."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.method != hdrs.METH_POST:
                await self.take(f"{label()}, looking")
                return await handler(request)
            try:
                return await handler(request)
            finally:
                # its client is gone, whether the handler was cancelled for it or has seen it itself
                if request.transport is None and BEGUN in request:
                    self.left.count(label())

        return middleware
