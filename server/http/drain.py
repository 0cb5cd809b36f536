"""The end of a server: work is refused, and what looks at the server is answered until it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from pilotfish.server.errors import Unavailable

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Drain:
    """`begun`: no more work is taken. Work is what a POST asks for."""

    def __init__(self) -> None:
        self.begun = False
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        self.begun = True

    async def wait(self, seconds: float) -> bool:
        """Whether all work has ended, within so long."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def middleware(self) -> Callable:
        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.method != hdrs.METH_POST:
                return await handler(request)
            if self.begun:
                raise Unavailable("The server is shutting down.", code="shutting_down", retry_after=5)
            self._num_running += 1
            self._idle.clear()
            try:
                return await handler(request)
            finally:
                self._num_running -= 1
                if not self._num_running:
                    self._idle.set()

        return middleware

    async def close_connections(self, request: web.Request, response: web.StreamResponse) -> None:
        """Ends kept connections, by `on_response_prepare`: a relay that keeps a connection open would send what is new
        to it."""
        if self.begun:
            response.force_close()
            response.headers[hdrs.CONNECTION] = "close"


DRAIN: web.AppKey[Drain] = web.AppKey("drain", Drain)
