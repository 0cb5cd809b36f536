"""The procedure: start the new version, judge it, switch to it, and go back when anything is not as it should be.

Beside: the old version serves until the new one has passed every gate, and stands by while the new one is watched.
Instead: where memory holds one of them, the old one is stopped first, and started again if the new one fails.
The new one gets a slot of its own in both, so that whatever interrupts a release, a reboot starts the old version.
"""

from __future__ import annotations

import datetime
import http.client
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pilotfish.deploy.ports import is_taken
from pilotfish.deploy.release import probe
from pilotfish.deploy.release.journal import BACK, GATES, IN_SERVICE, RETIRING, SWITCHING, Journal, Underway
from pilotfish.deploy.release.managers import Manager, ManagerError
from pilotfish.deploy.release.relay import Relay, RelayError
from pilotfish.deploy.release.slots import Slot, SlotLayout
from pilotfish.deploy.sweep.target import last_words

KEY = "PILOTFISH_API_KEY"
LOOK_SECONDS = 0.25
ENDING_SECONDS = 1.0
"""From when a process no longer answers until it is known to have ended, at most."""
QUIET_LOOKS = 3
"""A server is idle when so many looks in a row find it so: a request may be on its way."""
UNREACHABLE = (OSError, http.client.HTTPException)


class Condition(msgspec.Struct, frozen=True):
    """One condition: the release's own, or one that the gate command reports."""

    name: str
    passed: bool
    wanted: str
    came: str
    seconds: float = 0.0


class GateFile(msgspec.Struct, frozen=True):
    """What the gate command writes."""

    passed: bool
    gates: list[Condition]


class Record(msgspec.Struct, kw_only=True):
    """A line of releases.jsonl. `outcome` is released, rolled back, or down: nothing serves, somebody must come."""

    when: str
    version: str
    slot: str
    old_version: str | None
    old_slot: str | None
    instead: bool
    outcome: str = "down"
    failed: list[str] = []
    seconds: float = 0.0
    gates: list[Condition] = []
    notes: list[str] = []


class ReleaseSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`gate` is run as `GATE URL --json FILE GATE_FLAGS`. The others are seconds."""

    gate: Sequence[str]
    gate_flags: Sequence[str] = ()
    start: float
    gates: float
    steady: float
    drain: float


class GateFailed(Exception):
    """The message is what came in place of what was wanted."""


class Release:
    """One release. `tell` shows a person how far it is."""

    def __init__(
        self,
        layout: SlotLayout,
        manager: Manager,
        relay: Relay,
        settings: ReleaseSettings,
        tell: Callable[[str], None],
        journal: Journal,
    ) -> None:
        self._layout = layout
        self._journal = journal
        self._manager = manager
        self._relay = relay
        self._settings = settings
        self._tell = tell

    def run(self, version: str, new: Slot, old: Slot | None, *, instead: bool) -> Record:
        """Returns whatever goes wrong, an interruption included."""
        self._record = Record(
            when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            version=version,
            slot=new.name,
            old_version=self._layout.version_of(old) if old else None,
            old_slot=old.name if old else None,
            instead=instead,
        )
        began = time.monotonic()
        try:
            self._bring_up(version, new, old if instead else None)
            self._switch(new, None if instead else old)
        except GateFailed:
            self._roll_back(new, old)
        except (Exception, KeyboardInterrupt) as error:
            # whatever it is, a manager, the relay, a signal or a fault of this program: going back is the answer
            self._add(Condition("release", False, "no error", f"{type(error).__name__}: {error}"))
            self._roll_back(new, old)
        else:
            self._record.outcome = "released"
            if old is not None and not instead:
                self._attempt(lambda: self._journal.step(RETIRING))
                self._attempt(lambda: self._retire(old))
        return self._ended(began)

    def recover(self, left: Underway, new: Slot, old: Slot | None) -> Record:
        """Brings to an end what was cut off: on, where only the old version was still to be stopped, else back."""
        self._record = Record(
            when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            version=left.version,
            slot=left.slot,
            old_version=left.old_version,
            old_slot=left.old_slot,
            instead=left.instead,
        )
        began = time.monotonic()
        if left.step == RETIRING and self._manager.is_up(new):
            self._record.outcome = "released"
            self._attempt(lambda: self._relay.admit(new))
            if old is not None and self._manager.is_up(old):
                self._attempt(lambda: self._relay.withhold(old))
                self._attempt(lambda: self._retire(old))
        else:
            self._add(Condition("release", False, "an end", f"cut off at: {left.step}"))
            self._roll_back(new, old)
        return self._ended(began)

    def _ended(self, began: float) -> Record:
        self._record.failed = [gate.name for gate in self._record.gates if not gate.passed]
        self._record.seconds = round(time.monotonic() - began, 3)
        return self._record

    # -- forward -------------------------------------------------------------------------------------------------

    def _bring_up(self, version: str, new: Slot, old: Slot | None) -> None:
        """`old` is what must go first."""
        self._relay.withhold(new)
        self._layout.link(new, version)
        if old is not None:
            self._relay.withhold(old)
            self._drain(old)
            # nobody is to be called for what is meant to be down
            self._watch_over(None)
            self._manager.stop(old)
        self._check("port", f"port {new.port} free", lambda: self._port(new))
        self._tell(f"starting {version} in slot {new.name}, port {new.port}")
        self._check(
            "start", f"ready within {self._settings.start:g} s", lambda: self._start(new, alone=old is not None)
        )
        ready = time.monotonic()
        self._run_gates(new)
        steady = self._settings.steady
        self._check("steady", f"up for {steady:g} s after it was ready", lambda: self._watch(new, ready + steady))

    def _switch(self, new: Slot, old: Slot | None) -> None:
        """`old` is what stands by."""
        self._journal.step(SWITCHING)
        self._relay.admit(new)
        if old is not None:
            self._relay.withhold(old)
        self._watch_over(new)
        self._journal.step(IN_SERVICE)
        self._tell(f"slot {new.name} gets the requests")
        steady = self._settings.steady
        until = time.monotonic() + steady
        self._check("in service", f"up for {steady:g} s with requests", lambda: self._watch(new, until))
        self._manager.at_boot(new, True)
        if self._record.old_slot is not None:
            self._manager.at_boot(self._slot(self._record.old_slot), False)

    def _slot(self, name: str) -> Slot:
        return next(slot for slot in self._layout.slots() if slot.name == name)

    def _watch_over(self, slot: Slot | None) -> None:
        """What Prometheus scrapes: this slot, and those that the release has nothing to do with."""
        ours = (self._record.slot, self._record.old_slot)
        others = [one for one in self._layout.slots() if one.name not in ours and self._manager.is_up(one)]
        self._layout.write_targets([*others, *([slot] if slot else [])])

    def _retire(self, slot: Slot) -> None:
        self._drain(slot)
        self._manager.stop(slot)

    def _drain(self, slot: Slot) -> None:
        """Waits for the slot's requests to end, as long as they may take."""
        self._tell(f"slot {slot.name} drains")
        deadline = time.monotonic() + self._settings.drain
        looks = 0
        while looks < QUIET_LOOKS and self._manager.is_up(slot):
            busy = self._num_requests(slot)
            if busy and time.monotonic() > deadline:
                self._note(f"slot {slot.name} still has {busy:g} requests after {self._settings.drain:g} s")
                return
            looks = 0 if busy else looks + 1
            time.sleep(LOOK_SECONDS)

    def _num_requests(self, slot: Slot) -> float:
        try:
            gauges = probe.gauges(slot.url)
        except UNREACHABLE:
            # it cannot be asked: stopping it is what ends that
            return 0
        return sum(gauges.get(name, 0) for name in probe.BUSY)

    # -- conditions ----------------------------------------------------------------------------------------------

    def _check(self, name: str, wanted: str, condition: Callable[[], str]) -> None:
        began = time.monotonic()
        try:
            came, passed = condition(), True
        except GateFailed as error:
            came, passed = str(error), False
        self._add(Condition(name, passed, wanted, came, round(time.monotonic() - began, 3)))
        if not passed:
            raise GateFailed(came)

    def _port(self, slot: Slot) -> str:
        if is_taken(slot.port):
            raise GateFailed("another process listens there")
        return "free"

    def _start(self, slot: Slot, *, alone: bool) -> str:
        try:
            self._manager.start(slot)
        except ManagerError as error:
            raise GateFailed(f"{error}; its log: {self._manager.last_words(slot)}") from error
        if alone:
            self._watch_over(slot)
        return self._wait_ready(slot)

    def _wait_ready(self, slot: Slot) -> str:
        began = time.monotonic()
        while (reason := probe.readiness(slot.url)) is not None:
            self._must_be_up(slot)
            if time.monotonic() - began > self._settings.start:
                raise GateFailed(reason)
            time.sleep(LOOK_SECONDS)
        self._must_be_up(slot)
        return f"ready after {time.monotonic() - began:.1f} s"

    def _watch(self, slot: Slot, until: float) -> str:
        while True:
            self._must_be_up(slot)
            if (reason := probe.readiness(slot.url)) is not None:
                raise self._why_silent(slot, reason)
            if restarts := self._num_restarts(slot):
                raise GateFailed(f"its engine failed and was started again, {restarts:g} times")
            if time.monotonic() >= until:
                return "up, ready, its engine never restarted"
            time.sleep(LOOK_SECONDS)

    def _num_restarts(self, slot: Slot) -> float:
        try:
            return probe.gauges(slot.url).get(probe.RESTARTS, 0)
        except UNREACHABLE as error:
            raise self._why_silent(slot, f"/metrics: {error}") from error

    def _why_silent(self, slot: Slot, reason: str) -> GateFailed:
        """Why it no longer answers: that it ended, or else `reason`. A process's connections are closed before its end
        is known."""
        until = time.monotonic() + ENDING_SECONDS
        while self._manager.is_up(slot):
            if time.monotonic() > until:
                return GateFailed(reason)
            time.sleep(LOOK_SECONDS)
        return self._that_it_ended(slot)

    def _that_it_ended(self, slot: Slot) -> GateFailed:
        return GateFailed(f"it ended: {self._manager.last_words(slot)}")

    def _must_be_up(self, slot: Slot) -> None:
        if not self._manager.is_up(slot):
            raise self._that_it_ended(slot)

    def _run_gates(self, slot: Slot) -> None:
        """Those of the command, each by its own name. A server that ended meanwhile is the reason for the others."""
        self._journal.step(GATES)
        self._tell("gates")
        report = self._ask_gates(slot)
        if not self._manager.is_up(slot):
            self._add(
                Condition("up", False, "runs while the gates look", f"it ended: {self._manager.last_words(slot)}")
            )
        for gate in report.gates:
            # those that passed have been seen in the command's own table
            self._add(gate, tell=not gate.passed)
        if not report.passed and all(gate.passed for gate in report.gates):
            self._add(Condition("gates", False, "passed", "the gate command says no, without a gate that failed"))
        if failed := [gate.name for gate in self._record.gates if not gate.passed]:
            raise GateFailed(", ".join(failed))

    def _ask_gates(self, slot: Slot) -> GateFile:
        key = self._key(slot)
        environment = os.environ | ({KEY: key} if key else {})
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "gates.json")
            command = [*self._settings.gate, slot.url, "--json", str(file), *self._settings.gate_flags]
            try:
                status, said = self._run(command, environment)
                report = msgspec.json.decode(file.read_bytes(), type=GateFile)
            except OSError as error:
                came = f"none: {error if error.filename != str(file) else last_words(said)}"
            except msgspec.DecodeError as error:
                came = f"another file: {error}"
            else:
                if status == 0 or not report.passed:
                    return report
                came = f"one that passed, and exit status {status}"
        return GateFile(False, [Condition("gates", False, "a report of the gate command", came)])

    def _run(self, command: list[str], environment: dict[str, str]) -> tuple[int, str]:
        """The command's exit status and what it said, which is also told as it comes. Past its time it is killed."""
        pipes: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        said = ""
        # a session of its own, so that what it has started goes with it
        with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
            timer = threading.Timer(self._settings.gates, os.killpg, (process.pid, signal.SIGKILL))
            timer.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    said += line
                    self._tell("  " + line.rstrip())
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
            finally:
                timed_out = not timer.is_alive()
                timer.cancel()
        return process.returncode, f"pilotfish: nothing within {self._settings.gates:g} s" if timed_out else said

    # -- back ----------------------------------------------------------------------------------------------------

    def _roll_back(self, new: Slot, old: Slot | None) -> None:
        """Every step is tried whatever became of the one before: what counts is whether the old version answers."""
        self._tell("rolling back")
        self._attempt(lambda: self._journal.step(BACK))
        stands_by = old is not None and self._manager.is_up(old)
        if old is not None and stands_by:
            self._attempt(lambda: self._relay.admit(old))
        self._attempt(lambda: self._relay.withhold(new))
        # one that is not ready will end no request: it is not waited for
        serves = self._manager.is_up(new) and probe.readiness(new.url) is None
        self._attempt(lambda: self._retire(new) if serves else self._manager.stop(new))
        self._attempt(lambda: self._manager.at_boot(new, False))
        if old is None:
            return
        self._attempt(lambda: self._watch_over(old))
        if not stands_by:
            self._attempt(lambda: self._manager.start(old))
        self._attempt(lambda: self._manager.at_boot(old, True))
        if self._attempt(
            lambda: self._check("old version", "answers again", lambda: self._answers(old, admit=not stands_by))
        ):
            self._record.outcome = "rolled back"

    def _answers(self, old: Slot, *, admit: bool) -> str:
        self._wait_ready(old)
        try:
            if admit:
                self._relay.admit(old)
            return probe.answer(old.url, self._key(old))
        except (RelayError, *UNREACHABLE) as error:
            raise GateFailed(str(error)) from error

    def _key(self, slot: Slot) -> str | None:
        return self._layout.environment(slot).get(KEY) or os.environ.get(KEY)

    def _attempt(self, step: Callable[[], None]) -> bool:
        try:
            step()
        except GateFailed:
            # it has been told
            return False
        except (Exception, KeyboardInterrupt) as error:
            self._note(f"{type(error).__name__}: {error}")
            return False
        return True

    def _note(self, text: str) -> None:
        self._record.notes.append(text)
        self._tell(text)

    def _add(self, gate: Condition, *, tell: bool = True) -> None:
        self._record.gates.append(gate)
        if tell:
            self._tell(f"{'pass' if gate.passed else 'FAIL'}  {gate.name}: " + _outcome(gate))


def _outcome(gate: Condition) -> str:
    return gate.came if gate.passed else f"want {gate.wanted}, got {gate.came}"
