"""A real server for tests: the real application and runner, the real engine process with a scripted core."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotfish.engine.options import EngineOptions
from pilotfish.server.handlers import SERVICE, Service
from pilotfish.server.http.app import ServerOptions, make_app, make_runner
from pilotfish.server.http.connections import MAX_CONNECTIONS, Connection, ConnectionServer, TcpSite
from pilotfish.server.model_files import load_model_files

PATIENCE = 120.0
"""Seconds that anything may take that a test waits for, on a slow machine that does other work as well. No test asserts
that something was quick: what must not wait is told from what waits by how it ends."""
SUPPORT = Path(__file__).parent
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
    "PYTHONDONTWRITEBYTECODE": "1",
}


def script(text: str = "", **commands: Any) -> str:
    """A prompt that tells the scripted core what to do."""
    return f"{text}@{json.dumps(commands, ensure_ascii=False)}@"


def let_go(file: Path) -> None:
    """All sequences whose script names the file to `go` by go on without delay."""
    file.write_bytes(bytes(10_000))


def whole_lines(file: Path) -> list[dict]:
    """The JSON lines of a file that is being written to."""
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


@dataclass
class Server:
    url: str
    service: Service
    folder: Path

    @property
    def v1(self) -> str:
        return self.url + "/v1"

    def transcript(self) -> list[dict]:
        return whole_lines(self.folder / "transcript.jsonl")


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    *,
    wait: bool = True,
    core: str = "scripted_core:make_core",
    engine: dict | None = None,
    files: dict | None = None,
    max_connections: int = MAX_CONNECTIONS,
    **options: Any,
) -> AsyncIterator[Server]:
    app = make_app(
        ServerOptions(
            **{"served_names": ("scripted", "alias"), "core": core, "engine_environment": ENVIRONMENT, **options}
        ),
        EngineOptions(model=str(folder), **(engine or {})),
        load_model_files(folder, **(files or {})),
    )
    runner = make_runner(app, shutdown_seconds=1.0, max_connections=max_connections)
    await runner.setup()
    transports = _noted(runner.server)
    try:
        await TcpSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        if wait:
            await app[SERVICE].client.wait_ready()
        yield Server(f"http://{host}:{port}", app[SERVICE], folder)
    finally:
        await runner.cleanup()
        # what a client did not take is given up: no connection outlasts the loop
        for transport in transports:
            transport.abort()
        await asyncio.sleep(0)


def _noted(server: ConnectionServer) -> list[asyncio.Transport]:
    """The transport of each connection from now on."""
    transports: list[asyncio.Transport] = []
    opened = server.opened

    def note(connection: Connection) -> None:
        transports.append(connection.transport)
        opened(connection)

    server.opened = note
    return transports


@contextlib.contextmanager
def serving_in_thread(folder: Path, **options: Any) -> Iterator[Server]:
    """For synchronous clients: the loop runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    context = serving(folder, **options)
    try:
        server = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(PATIENCE)
        try:
            yield server
        finally:
            asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(PATIENCE)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        loop.close()
