"""The HTTP side of the engine process: starts it, submits requests, hands out what it reports.

Everything runs on one event loop; no torch. Every accepted request ends in exactly one output with a
`finish_reason`: the engine's own, the receiver's (a stop string), or "error" when the engine has gone. `restart` puts a
new process in a failed one's place; it gets new requests only. After `abort` nothing more is delivered.

The socket's end and the child's exit are events. An engine that is there and does nothing is found by asking: it
answers a ping when it is idle, and between its steps. One that has not answered for STALLED_SECONDS takes no requests
until it speaks again; after `timeout` it is killed, and has failed like one that died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from pilotfish.engine.guard import tell
from pilotfish.engine.link.messages import (
    MAX_MESSAGE_BYTES,
    Abort,
    Fatal,
    Ping,
    Ready,
    RequestOutput,
    Shutdown,
    StepReport,
    Submit,
    ToEngine,
    decode_from_engine,
    frame,
)
from pilotfish.engine.link.process import DEFAULT_CORE

if TYPE_CHECKING:
    from pilotfish.engine.options import EngineOptions

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 5.0
"""A failed engine that has not exited by then is killed."""

PING_SECONDS = 1.0
"""The time between two questions, the first of which has been answered."""
STALLED_SECONDS = 20.0
"""The time without an answer after which the engine takes no requests: a slow step takes a second."""
STACKS_SECONDS = 1.0
"""The time for an engine that hangs to write where, before it is killed."""
UNDEAD_SECONDS = 60.0
"""The time after which a killed process is given up that waits in the kernel, most likely for its device."""

ENGINE_FAILED = "engine failed"
"""Begins the error of requests that were open when it did; the part follows, and the reason."""

State = Literal["loading", "ready", "failed", "restarting", "closed"]
"""Restarting is loading after a failure, which stays known until the engine is ready again."""

Receive = Callable[[RequestOutput], RequestOutput]
"""Gets every output of one request, in order, and returns it as it counts: trimmed, and with a finish_reason of
its own when the receiver ends the request (the engine is then told to stop). Must not block."""


class EngineUnavailable(Exception):
    """The engine is loading, has failed or is closed; `part` says which part of it."""

    def __init__(self, part: str, message: str) -> None:
        super().__init__(message)
        self.part = part


class Failure(msgspec.Struct, frozen=True):
    """Why the engine cannot serve: load, prefill, round or protocol (its own word), process (it died), or hang (it does
    not answer). `permanent`: the same start would fail again."""

    part: str
    message: str
    permanent: bool = False


class EngineClient:
    """Owns the engine process. `start`, then `wait_ready`; `close` ends it.

    `timeout`: seconds without an answer after which a loaded engine is killed; longer than any step may take.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        core: str = DEFAULT_CORE,
        on_report: Callable[[StepReport], None] | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float = math.inf,
    ) -> None:
        self._options = options
        self._core = core
        self._on_report = on_report
        self._environment = dict(environment) if environment is not None else None
        self._open: dict[str, Receive] = {}
        self._leaving: dict[str, list[Callable[[], None]]] = {}
        self._folder: str | None = None
        self._listener: asyncio.Server | None = None
        self._connection: _Connection | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._ended = asyncio.Event()
        self._timeout = timeout
        self._asking: asyncio.Task[None] | None = None
        self._silence: float | None = None
        self.state: State = "loading"
        self.failure: Failure | None = None

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def _alive(self) -> bool:
        return self.state in ("loading", "restarting", "ready")

    @property
    def ready(self) -> Ready | None:
        """What the engine said when it came up, kept after its end; None while another one loads."""
        future = self._ready
        return future.result() if future and future.done() and not future.exception() else None

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_leaving(self) -> int:
        """How many requests were aborted here and have not yet ended in the engine."""
        return len(self._leaving)

    @property
    def seconds_silent(self) -> float:
        """How long the engine has owed an answer."""
        return self._silence or 0.0

    @property
    def stalled(self) -> bool:
        """Loaded, and silent for longer than it should be."""
        return self.state == "ready" and self.seconds_silent > STALLED_SECONDS

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts the process and returns; loading goes on."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._folder = _private_folder()
        path = str(Path(self._folder, "engine.sock"))
        self._listener = await loop.create_unix_server(lambda: _Connection(self), path)
        # -P: the working folder stays off the module path, or its folders could shadow installed packages
        command = ["-P", "-m", "pilotfish.engine.link.process", "--socket", path, "--core", self._core]
        command += ["--options", msgspec.json.encode(self._options).decode()]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdin=asyncio.subprocess.DEVNULL, env=self._environment
        )
        self._watcher = loop.create_task(self._watch(self._process))

    async def wait_ready(self) -> Ready:
        """Raises EngineUnavailable if the engine fails to load."""
        assert self._ready is not None, "start first"
        return await asyncio.shield(self._ready)

    async def wait_ended(self) -> None:
        """Waits until the engine has failed or is closed."""
        await self._ended.wait()

    async def restart(self) -> None:
        """Starts another process once the failed one is gone, and returns; loading goes on.

        Raises EngineUnavailable if the failed one does not go.
        """
        assert self.state == "failed", f"want a failed engine, got {self.state}"
        if not await self._process_ended(UNDEAD_SECONDS):
            # it may hold the device's memory: nothing is started beside it
            message = f"the engine process {self.pid} was killed and does not end"
            logger.error(message)
            raise EngineUnavailable("process", message)
        self._close_socket()
        self._connection = None
        self._ended.clear()
        self.state = "restarting"
        try:
            await self.start()
        except OSError as error:
            self._fail(Failure("process", f"the engine process cannot be started: {error}"))

    async def close(self, timeout: float = 10.0) -> None:
        """Ends open requests as aborted and the process within `timeout`, then by force. May be called twice."""
        # while it loads nothing can be asked of it
        polite = self.state not in ("loading", "restarting")
        if self._alive:
            self.state = "closed"
            self._ended.set()
        if self._asking:
            self._asking.cancel()
            self.abort_all()
        self._settle_ready(EngineUnavailable("process", "the engine is closed"))
        self._send(Shutdown())
        if self._process and self._watcher:
            await self._process_ended(timeout if polite else 0)
            _kill(self._process)
            if not await self._process_ended(LAST_WORDS_SECONDS):
                logger.error("the engine process %s was killed and does not end", self.pid)
        self._close_socket()

    async def _process_ended(self, timeout: float) -> bool:
        """Whether the process is gone, within so long."""
        if self._watcher is None:
            return True
        done, _ = await asyncio.wait({self._watcher}, timeout=timeout)
        return bool(done)

    def _close_socket(self) -> None:
        if self._connection:
            self._connection.close()
        self._close_listener()

    def _close_listener(self) -> None:
        """Removes the socket's path: there is one connection, and nothing is left behind even if this process is
        killed."""
        if self._listener:
            self._listener.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if self._connection:
            # its last words may still lie in the socket
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._connection.lost.wait(), 1)
        self._fail(Failure("process", f"the engine process {_describe_exit(code)}"))
        if self.failure and self.failure.part == "process":
            self.failure = Failure("process", f"the engine process {_describe_exit(code)}")

    def _fail(self, failure: Failure) -> None:
        """The first reason stands; every open request ends with it."""
        if not self._alive:
            return
        self.state, self.failure, self._silence = "failed", failure, None
        self._ended.set()
        logger.error("engine failed (%s): %s", failure.part, failure.message)
        self._settle_ready(EngineUnavailable(failure.part, failure.message))
        self._end_all("error", f"{ENGINE_FAILED} ({failure.part}): {failure.message}")
        patience = STACKS_SECONDS if failure.part == "hang" else LAST_WORDS_SECONDS
        asyncio.get_running_loop().call_later(patience, _kill, self._process)

    async def _ask(self) -> None:
        """Asks the engine, as long as it serves, whether it still does."""
        while self.state == "ready":
            if self._silence is None:
                self._silence = 0.0
                self._send(Ping())
            began = time.monotonic()
            await asyncio.sleep(PING_SECONDS)
            if self._silence is not None:
                # time for which this process itself was held up is not the engine's
                self._on_silence(self._silence + min(time.monotonic() - began, 2 * PING_SECONDS))

    def _on_silence(self, seconds: float) -> None:
        was_stalled, self._silence = self.stalled, seconds
        if self.stalled and not was_stalled:
            logger.warning("the engine has not answered for %.0f s: no requests are taken until it does", seconds)
        if seconds >= self._timeout and self.state == "ready":
            self._fail(Failure("hang", f"the engine has not answered for {seconds:.0f} s"))
            if self._process and self._process.returncode is None:
                self._process.send_signal(signal.SIGUSR1)

    def _heard(self) -> None:
        """The engine has spoken."""
        if self.stalled:
            logger.warning("the engine answers again, after %.0f s", self.seconds_silent)
        self._silence = None

    def _settle_ready(self, error: EngineUnavailable) -> None:
        if self._ready and not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # whether anyone waits for it or not, it counts as seen

    def _end_all(self, reason: Literal["abort", "error"], message: str) -> None:
        for request_id, receive in list(self._open.items()):
            self._deliver(RequestOutput(request_id=request_id, finish_reason=reason, error=message), receive)
        for request_id in list(self._leaving):
            self._gone(request_id)

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, request: Submit, receive: Receive) -> None:
        """Queues a request. Raises EngineUnavailable; ValueError for an id in use or a message too large."""
        if self.state != "ready":
            part = self.failure.part if self.failure else "process"
            raise EngineUnavailable(part, self.failure.message if self.failure else f"the engine is {self.state}")
        if request.request_id in self._open:
            raise ValueError(f"want a new request id, got {request.request_id!r} twice")
        self._send(request)
        self._open[request.request_id] = receive

    def abort(self, request_id: str) -> None:
        """Frees the sequence within one round; unknown and finished ids are fine. See when_gone."""
        if self._open.pop(request_id, None) is not None:
            self._leaving[request_id] = []
            self._send(Abort(request_id))

    def when_gone(self, request_id: str, call: Callable[[], None]) -> None:
        """Calls once the engine has nothing more of a request that has ended here: at once, or, after an abort, when it
        says so or has itself gone."""
        if request_id in self._leaving:
            self._leaving[request_id].append(call)
        else:
            call()

    def _gone(self, request_id: str) -> None:
        for call in self._leaving.pop(request_id, ()):
            call()

    def abort_all(self) -> None:
        """Tells those who wait for open requests that the server ends; the engine itself goes on until `close`."""
        self._end_all("abort", "the server is shutting down")

    def _send(self, message: ToEngine) -> None:
        if self._connection:
            self._connection.write(frame(message))

    # -- what the connection calls -------------------------------------------------------------------------------

    def _connected(self, connection: _Connection) -> None:
        if self._connection is not None:
            connection.close()
            return
        self._connection = connection
        self._close_listener()

    def _disconnected(self, connection: _Connection) -> None:
        if connection is self._connection:
            self._fail(Failure("process", "the engine process closed its socket"))

    def _received(self, body: bytes) -> None:
        try:
            message = decode_from_engine(body)
        except (msgspec.DecodeError, ValueError) as error:
            self._fail(Failure("protocol", f"cannot read a message from the engine: {error}"))
            return
        self._heard()
        if isinstance(message, StepReport):
            self._dispatch(message)
        elif isinstance(message, Fatal):
            self._fail(Failure(message.part, message.message, message.permanent))
        elif isinstance(message, Ready):
            self._on_ready(message)

    def _on_ready(self, ready: Ready) -> None:
        if self.state in ("loading", "restarting") and self._ready and not self._ready.done():
            self.state, self.failure = "ready", None
            self._ready.set_result(ready)
            if self._asking:
                # of the engine before it
                self._asking.cancel()
            self._asking = asyncio.get_running_loop().create_task(self._ask())

    def _dispatch(self, report: StepReport) -> None:
        """Outputs of requests that have ended here are over-produced: neither delivered nor reported."""
        counted = []
        for output in report.outputs:
            receive = self._open.get(output.request_id)
            if receive is not None:
                counted.append(self._deliver(output, receive))
            elif output.finish_reason is not None:
                self._gone(output.request_id)
        if self._on_report:
            self._on_report(StepReport(outputs=counted, stats=report.stats))

    def _deliver(self, output: RequestOutput, receive: Receive) -> RequestOutput:
        try:
            counted = receive(output)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            counted = RequestOutput(
                request_id=output.request_id, finish_reason="error", error=tell(error, output.request_id)
            )
            # whoever waits for it must hear of the end; what it holds may be beyond that
            with contextlib.suppress(Exception):
                receive(counted)
        if output.finish_reason is not None:
            self._open.pop(output.request_id, None)
        elif counted.finish_reason is not None:
            self._open.pop(output.request_id, None)
            self._send(Abort(output.request_id))
        return counted


class _Connection(asyncio.Protocol):
    """Cuts the byte stream into messages."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._client._connected(self)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= 4:
            size = int.from_bytes(buffer[start : start + 4], "big")
            if size > MAX_MESSAGE_BYTES:
                self._client._fail(Failure("protocol", f"message of {size} bytes, want at most {MAX_MESSAGE_BYTES}"))
                self.close()
                return
            if len(buffer) - start - 4 < size:
                break
            body = bytes(buffer[start + 4 : start + 4 + size])
            start += 4 + size
            self._client._received(body)
        del buffer[:start]

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()
        self._client._disconnected(self)

    def write(self, data: bytes) -> None:
        if self._transport and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        if self._transport:
            self._transport.close()


def _kill(process: asyncio.subprocess.Process | None) -> None:
    if process and process.returncode is None:
        process.kill()


def _private_folder() -> str:
    """A folder only this user can enter, with a path short enough for a socket address (108 bytes)."""
    parent = None if len(os.fsencode(tempfile.gettempdir())) < 64 else "/tmp"
    return tempfile.mkdtemp(prefix="pilotfish-", dir=parent)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
