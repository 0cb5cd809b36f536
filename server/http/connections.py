"""Connections: a deadline and a size for the head of a request, a cap that leaves room for those with keys.

aiohttp's own protocol, with what it leaves open. A connection waits, for a request or the rest of its head, or it is
busy with one. One that waits has a deadline, and is the first to go where there are too many: those that never showed a
key first, the longest wait first. Busy ones are never cut; their bodies have a deadline of their own.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from pilotfish.server.errors import from_status

JSON = "application/json"
HEAD_SECONDS = 20.0
"""The time for the first request's head, from the connection on."""
IDLE_SECONDS = 75.0
"""The time between two requests, the second's head included: longer than relays keep connections to a server (60 s)."""
MAX_HEAD_BYTES = 65536
"""Bytes that wait for the end of a head; the parser bounds each line (8190) and their number (128)."""
LINGERING_SECONDS = 5.0
"""The time for the rest of a body that was refused, so that the client reads why."""
MAX_CONNECTIONS = 4096
RESERVED_FILES = 128
"""Descriptors that connections leave for all else: the engine's socket, the key file, libraries."""
BACKLOG = 1024
"""Connections that wait to be accepted: a burst of clients meets our queue and its 503, not the kernel's."""
ACCEPTED_AT_ONCE = 4
"""Connections that are accepted at once; then running streams have their turn."""
HANDSHAKE_SECONDS = 10.0


class Connection(RequestHandler):
    """One client's. `known`: a request on it had a key, or keys are not wanted."""

    __slots__ = ("_num_head_bytes", "known")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0
        self.known = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server().opened(self)
        if self._keepalive_handle is not None:
            self._keepalive_handle.cancel()
        self._next_keepalive_close_time = self._loop.time() + HEAD_SECONDS
        self._keepalive_handle = self._loop.call_at(self._next_keepalive_close_time, self._process_keepalive)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._manager is not None:
            self._server().closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._waiter is None or self._waiter.done():
            # a head has come whole, and this is of a body
            self._num_head_bytes = 0
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and self.transport is not None:
            self.transport.write(_head_too_large())
            self.force_close()

    async def _handle_request(self, *args: Any) -> tuple[web.StreamResponse, bool]:
        if self._manager is not None:
            self._server().busy(self)
        try:
            return await super()._handle_request(*args)
        finally:
            if self._manager is not None:
                self._server().waits(self)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What is no HTTP, and what goes wrong outside of the middlewares, is answered in JSON as well."""
        plain = super().handle_error(request, status, exc, message)
        shown = " ".join((message or "").split()) if status < 500 else "Internal error."
        answer = web.Response(body=from_status(status, shown).body(), status=plain.status, content_type=JSON)
        answer.force_close()
        return answer

    def _server(self) -> ConnectionServer:
        assert isinstance(self._manager, ConnectionServer)
        return self._manager


def note_known(request: web.Request) -> None:
    """The client of this request has shown what is wanted of it."""
    if isinstance(request.protocol, Connection):
        request.protocol.known = True


class ConnectionServer(web.Server):
    """aiohttp's, which makes our connections and keeps at most `most` of them."""

    def __init__(self, *args: Any, most: int, on_refused: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most, self._on_refused = most, on_refused
        # in the order in which they began to wait
        self._strangers: dict[Connection, None] = {}
        self._idle: dict[Connection, None] = {}
        self._num_open = 0

    def __call__(self) -> RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)

    def opened(self, connection: Connection) -> None:
        self._num_open += 1
        self.waits(connection)
        if self._num_open > self._most:
            # the new one itself where nobody else waits
            self.make_room(1)

    def make_room(self, count: int) -> None:
        """Closes so many of those that wait."""
        for _ in range(min(count, len(self._strangers) + len(self._idle))):
            first = next(iter(self._strangers or self._idle))
            # it is gone when the loop comes to it: the next one must be another
            self.busy(first)
            self._on_refused()
            first.force_close()

    def closed(self, connection: Connection) -> None:
        self._num_open -= 1
        self.busy(connection)

    def busy(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)

    def waits(self, connection: Connection) -> None:
        (self._idle if connection.known else self._strangers)[connection] = None


class Runner(web.AppRunner):
    """A runner that cancels a handler when its client goes: aiohttp's default lets it run on."""

    def __init__(
        self, app: web.Application, *, shutdown_seconds: float, most: int, on_refused: Callable[[], None]
    ) -> None:
        super().__init__(
            app,
            handler_cancellation=True,
            auto_decompress=False,
            shutdown_timeout=shutdown_seconds,
            access_log=None,
            keepalive_timeout=IDLE_SECONDS,
            lingering_time=LINGERING_SECONDS,
        )
        self._most, self._on_refused = most, on_refused

    async def _make_server(self) -> web.Server:
        made, loop = await super()._make_server(), asyncio.get_running_loop()
        server = ConnectionServer(
            made.request_handler,
            most=self._most,
            on_refused=self._on_refused,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=loop,
            **made._kwargs,
        )
        before = loop.get_exception_handler()

        def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            error = context.get("exception")
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                # others took the files that were reserved: those who wait for nothing give theirs
                server.make_room(1)
            if before is not None:
                before(loop, context)
            else:
                loop.default_exception_handler(context)

        loop.set_exception_handler(on_error)
        return server


class TcpSite(web.TCPSite):
    """aiohttp's, with short handshakes, and few connections accepted at once from a long queue."""

    async def start(self) -> None:
        await web.BaseSite.start(self)
        assert self._runner.server is not None
        server = await asyncio.get_running_loop().create_server(
            self._runner.server,
            self._host,
            self._port,
            ssl=self._ssl_context,
            backlog=ACCEPTED_AT_ONCE,
            ssl_handshake_timeout=HANDSHAKE_SECONDS if self._ssl_context else None,
        )
        _lengthen_queues(server)
        self._server, self._bound_port = server, server.sockets[0].getsockname()[1]


class UnixSite(web.UnixSite):
    """The same at a path."""

    async def start(self) -> None:
        await web.BaseSite.start(self)
        assert self._runner.server is not None
        server = await asyncio.get_running_loop().create_unix_server(
            self._runner.server,
            self._path,
            ssl=self._ssl_context,
            backlog=ACCEPTED_AT_ONCE,
            ssl_handshake_timeout=HANDSHAKE_SECONDS if self._ssl_context else None,
        )
        _lengthen_queues(server)
        self._server = server


def _lengthen_queues(server: asyncio.Server) -> None:
    """asyncio has one number for how many wait and how many are accepted at once."""
    for listening in server.sockets:
        with socket.socket(fileno=os.dup(listening.fileno())) as same:
            same.listen(BACKLOG)


def room_for_connections(wanted: int = MAX_CONNECTIONS) -> int:
    """How many connections the process may have, after its limit of open files was raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - RESERVED_FILES))


def _head_too_large() -> bytes:
    body = from_status(431, f"Want a head of at most {MAX_HEAD_BYTES} bytes.").body()
    head = f"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body
