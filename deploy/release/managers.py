"""Who starts and stops servers: systemd, or plain processes where there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Protocol

from pilotfish.deploy.release.slots import Slot, SlotLayout
from pilotfish.deploy.sweep.target import last_words

UNIT = "pilotfish@{}.service"
LOG_LINES = 200
KILL_SECONDS = 90.0
"""A server drains within its --shutdown-timeout; the unit's TimeoutStopSec bounds it under systemd."""


class ManagerError(Exception):
    """A server could not be started or stopped; the message has the manager's words."""


class Manager(Protocol):
    def start(self, slot: Slot) -> None:
        """Begins to start; the server answers later, or ends. Raises ManagerError."""

    def stop(self, slot: Slot) -> None:
        """SIGTERM, and waits until the server has gone. Nothing to do for one that does not run."""

    def is_up(self, slot: Slot) -> bool:
        """Whether the slot's process runs, and is the one that was started."""

    def last_words(self, slot: Slot) -> str:
        """What it said about its end."""

    def at_boot(self, slot: Slot, wanted: bool) -> None:
        """Whether a reboot of the machine starts it."""


class Systemd:
    """Units of the template pilotfish@.service."""

    def __init__(self) -> None:
        self._started: dict[str, int] = {}

    def start(self, slot: Slot) -> None:
        self._started[slot.name] = int(time.time())
        # earlier failures would count against this start
        self._run("reset-failed", slot, check=False)
        self._run("start", slot)

    def stop(self, slot: Slot) -> None:
        self._run("stop", slot)
        # it was stopped on purpose: no failed unit is to be found by who looks for them
        self._run("reset-failed", slot, check=False)

    def is_up(self, slot: Slot) -> bool:
        """One that waits to be started again is not."""
        return self._run("is-active", slot, check=False) == "active"

    def last_words(self, slot: Slot) -> str:
        """The log's last lines of this start, and systemd's word for the end: exit-code, signal, oom-kill."""
        command = [
            "journalctl",
            "--no-pager",
            "--output=cat",
            f"--lines={LOG_LINES}",
            f"--unit={UNIT.format(slot.name)}",
        ]
        command.append(f"--since=@{self._started.get(slot.name, 0)}")
        result = self._run("show --property=Result --value", slot, check=False)
        return f"{last_words(_output(command, check=False))} ({result})"

    def at_boot(self, slot: Slot, wanted: bool) -> None:
        self._run("enable" if wanted else "disable", slot)

    def _run(self, verb: str, slot: Slot, *, check: bool = True) -> str:
        return _output(["systemctl", *verb.split(), UNIT.format(slot.name)], check=check)


def _output(command: list[str], *, check: bool) -> str:
    try:
        # a session of its own: Ctrl-C is for the release, which may be on its way back
        done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    except OSError as error:
        raise ManagerError(f"{command[0]}: {error}") from error
    if check and done.returncode != 0:
        raise ManagerError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()


class Processes:
    """Processes that outlive the release, their ids and logs in ROOT/run. A reboot starts none."""

    def __init__(self, layout: SlotLayout) -> None:
        self._layout = layout
        self._folder = layout.root / "run"

    def start(self, slot: Slot) -> None:
        self._folder.mkdir(exist_ok=True)
        environment = {**os.environ, **self._layout.environment(slot)}
        with self._log(slot).open("wb") as log:
            try:
                process = subprocess.Popen(
                    self._layout.command(slot), stdout=log, stderr=log, env=environment, start_new_session=True
                )
            except OSError as error:
                raise ManagerError(f"slot {slot.name}: {error}") from error
        half = self._pid(slot).with_suffix(".new")
        half.write_text(f"{process.pid} {_started(process.pid)}\n")
        half.replace(self._pid(slot))

    def stop(self, slot: Slot) -> None:
        # SIGTERM once: a second one would end its requests
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not self.is_up(slot):
                return
            os.kill(self._read(slot)[0], number)
            deadline = time.monotonic() + KILL_SECONDS
            while self.is_up(slot) and time.monotonic() < deadline:
                time.sleep(0.1)

    def is_up(self, slot: Slot) -> bool:
        pid, started = self._read(slot)
        return started != "" and _started(pid) == started

    def last_words(self, slot: Slot) -> str:
        return last_words(self._log(slot).read_text(errors="replace"))

    def at_boot(self, slot: Slot, wanted: bool) -> None:
        pass

    def _pid(self, slot: Slot) -> Path:
        return self._folder / f"{slot.name}.pid"

    def _log(self, slot: Slot) -> Path:
        return self._folder / f"{slot.name}.log"

    def _read(self, slot: Slot) -> tuple[int, str]:
        """The process id and when it was started, by which another process of that id is told apart."""
        try:
            pid, _, started = self._pid(slot).read_text().strip().partition(" ")
        except FileNotFoundError:
            return 0, ""
        return int(pid), started


def _started(pid: int) -> str:
    """When a process was started, in the kernel's ticks; "" for none, and for one that has ended and is not reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
