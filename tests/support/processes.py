"""Real `pilotfish serve` processes with the scripted core, and a relay in front of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import ENVIRONMENT, PATIENCE, script, whole_lines

from pilotfish.deploy.ports import free_port

SERVE = [sys.executable, "-m", "pilotfish.server.cli", "serve"]


@dataclass
class Backend:
    """One server process; `name` is the model name that its answers carry when none was asked for."""

    process: subprocess.Popen[str]
    folder: Path
    name: str
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def generated(self) -> int:
        """Tokens that its engine has generated so far."""
        steps = whole_lines(self.folder / "transcript.jsonl")
        return sum(len(output.get("token_ids", ())) for step in steps for output in step["outputs"])


def until(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> None:
    """Waits for what becomes true; an OSError counts as not yet."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if condition():
                return
        time.sleep(0.02)
    raise AssertionError(f"not within {patience} s: {what}")


def status(url: str) -> int:
    """Raises OSError when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as response:
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def ask(url: str, *, stream: bool = False, **commands: Any) -> http.client.HTTPResponse:
    """A completion. Raises HTTPError for a refusal."""
    body = {"prompt": script(**commands), "max_tokens": 3000, "stream": stream}
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url + "/v1/completions", data, kind), timeout=PATIENCE)


def events(response: http.client.HTTPResponse) -> Iterator[dict]:
    """The events of a stream one by one, as they arrive; [DONE] and comments left out."""
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


@contextlib.contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def backend(folder: Path, name: str, *flags: str) -> Iterator[Backend]:
    port = free_port()
    command = [*SERVE, str(folder), "--port", str(port), "--core", "scripted_core:make_core"]
    command += ["--served-model-name", name, "--shutdown-timeout", str(PATIENCE), *flags]
    with folder.joinpath("log").open("w") as log, running(command, env=ENVIRONMENT, stderr=log) as process:
        started = Backend(process, folder, name, port)
        until(lambda: status(started.url + "/ready") == 200, "a server is ready")
        yield started
