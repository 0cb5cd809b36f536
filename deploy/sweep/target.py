"""A server of one's own: started fresh, its output in a file, ended with the block."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from pilotfish.deploy.ports import free_port, is_taken

START_SECONDS = 1800.0
"""A large checkpoint on a slow disk; a server that fails ends itself long before."""
STOP_SECONDS = 30.0


PR_SET_PDEATHSIG = 1


class StartError(Exception):
    """The server did not come up; the message is the last thing it said."""


class WrongCommand(StartError):
    """The server ended with status 2: its model or its flags are wrong, and will be at the next start."""


@contextlib.contextmanager
def started(
    model: str, flags: Sequence[str], log: Path, port: int | None = None, own_group: bool = False
) -> Iterator[str]:
    """The URL of a `pilotfish serve` that takes requests. `own_group`: the terminal's Ctrl-C does not reach it.
    Raises StartError."""
    if port is not None and is_taken(port):
        # whoever answers there would be taken for the server that could not start
        raise StartError(f"port {port} is taken: another process listens there")
    port = port or free_port()
    command = [sys.executable, "-m", "pilotfish.server.cli", "serve", model, "--port", str(port)]
    # what runs at once and at which k is measured by whoever starts it
    command += ["--no-cost-table", *flags]
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_parent,
            process_group=0 if own_group else None,
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(url, process, log)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _end_with_parent() -> None:
    """Even a killed sweep leaves no server behind that would hold the GPU."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            error = WrongCommand if process.returncode == 2 else StartError
            raise error(last_words(log.read_text(errors="replace")))
        with contextlib.suppress(OSError, http.client.HTTPException), urllib.request.urlopen(url + "/ready", timeout=5):
            return
        time.sleep(0.1)
    raise StartError(f"not ready after {START_SECONDS:g} s")


def last_words(log: str) -> str:
    """The line that says what was wrong: why the engine failed, else the last error, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line or line.startswith("pilotfish")]
    reasons = [line for line in errors if "engine failed (" in line]
    return (reasons or errors or lines or ["the server said nothing"])[-1][-300:]
