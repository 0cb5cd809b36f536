"""The engine process: reads messages from a Unix socket, steps the core, writes reports.

Its life is tied to the HTTP process: when the socket closes, whatever the reason, it exits at once, also while it
loads or computes. SIGINT, SIGTERM and SIGHUP are ignored: a terminal's Ctrl-C or end and a service manager's stop
reach both processes, and the HTTP process decides when requests have drained and sends `Shutdown`. SIGUSR1 writes the
stacks of all threads to stderr.

Started as `python -m pilotfish.engine.link.process --socket PATH --core MODULE:FACTORY --options JSON`, where FACTORY
takes `EngineOptions` and returns an `EngineCore`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import msgspec

from pilotfish.engine.errors import BusyError, PilotfishError
from pilotfish.engine.guard import reason, sendable
from pilotfish.engine.link.messages import (
    MAX_MESSAGE_BYTES,
    Abort,
    Fatal,
    FromEngine,
    Ping,
    Pong,
    Shutdown,
    Submit,
    ToEngine,
    decode_to_engine,
    frame,
)

if TYPE_CHECKING:
    from pilotfish.engine.link.core import EngineCore

DEFAULT_CORE = "pilotfish.engine.start:make_core"
SEND_BUFFER_BYTES = 4 << 20
PR_SET_PDEATHSIG = 1

Inbox = queue.SimpleQueue[ToEngine | Fatal]


class Channel:
    """The socket to the HTTP process, written by the main thread and read by one other."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._socket.connect(path)

    def send(self, message: FromEngine) -> None:
        try:
            self._socket.sendall(frame(message))
        except OSError:
            _exit_now()

    def read_into(self, inbox: Inbox) -> None:
        """Reader thread: forwards every message; the end of the stream ends the process."""
        try:
            with self._socket.makefile("rb") as stream:
                while (body := _read_frame(stream)) is not None:
                    inbox.put(decode_to_engine(body))
        except (msgspec.DecodeError, ValueError) as error:
            inbox.put(Fatal("protocol", f"cannot read a message from the HTTP process: {error}"))
        except OSError:
            _exit_now()
        else:
            _exit_now()


def _read_frame(stream) -> bytes | None:
    """The next message's bytes, or None at the end of the stream. Raises ValueError on an absurd length."""
    header = stream.read(4)
    if len(header) < 4:
        return None
    size = int.from_bytes(header, "big")
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {size} bytes, want at most {MAX_MESSAGE_BYTES}")
    body = stream.read(size)
    return body if len(body) == size else None


def _exit_now() -> NoReturn:
    """No clean-up may delay the end: a step may be running in another thread."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(1)


def run_engine(socket_path: str, make_core: Callable[[], EngineCore]) -> int:
    """Connects, loads, then serves until `Shutdown`; the exit status: 0, or 1 after `Fatal`."""
    channel = Channel(socket_path)
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=channel.read_into, args=(inbox,), name="socket-reader", daemon=True).start()
    try:
        core = make_core()
    except BaseException as error:
        return _report_fatal(channel, "load", error)
    # what loading made lives as long as the process: a collection that walks it would stall rounds
    gc.collect()
    gc.freeze()
    channel.send(core.ready)
    try:
        return _serve(core, inbox, channel)
    except BaseException as error:
        return _report_fatal(channel, getattr(error, "part", "round"), error)


def _report_fatal(channel: Channel, part: str, error: BaseException) -> int:
    if part == "load" and isinstance(error, PilotfishError):
        # a file or an option is wrong, not our code
        channel.send(Fatal(part, sendable(str(error)), permanent=not isinstance(error, BusyError)))
        return 1
    traceback.print_exception(error)
    # a package that is missing or broken does not mend itself
    permanent = part == "load" and isinstance(error, ImportError)
    channel.send(Fatal(part, reason(error), permanent))
    return 1


def _serve(core: EngineCore, inbox: Inbox, channel: Channel) -> int:
    """Blocks on the inbox while there is no work, else drains it between steps."""
    while True:
        for message in _messages(inbox, block=not core.has_work()):
            if isinstance(message, Submit):
                core.submit(message)
            elif isinstance(message, Abort):
                core.abort(message.request_id)
            elif isinstance(message, Ping):
                channel.send(Pong())
            elif isinstance(message, Shutdown):
                return 0
            else:
                channel.send(message)
                return 1
        report = core.step()
        if report is not None:
            channel.send(report)


def _messages(inbox: Inbox, block: bool) -> list[ToEngine | Fatal]:
    messages = [inbox.get()] if block else []
    with contextlib.suppress(queue.Empty):
        while True:
            messages.append(inbox.get_nowait())
    return messages


def _tie_to_parent() -> None:
    """The kernel kills this process with the thread that started it (Linux); elsewhere the socket alone tells."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def load_factory(name: str) -> Callable:
    """`package.module:function` -> the function."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def main(argv: list[str] | None = None) -> int:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    # where it hangs: the HTTP process asks before it kills
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _tie_to_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    parser = argparse.ArgumentParser(prog="pilotfish.engine.link.process")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--core", default=DEFAULT_CORE)
    parser.add_argument("--options", required=True, help="EngineOptions as JSON")
    args = parser.parse_args(argv)

    def make_core() -> EngineCore:
        from pilotfish.engine.options import EngineOptions

        return load_factory(args.core)(msgspec.json.decode(args.options, type=EngineOptions))

    return run_engine(args.socket, make_core)


if __name__ == "__main__":
    sys.exit(main())
