"""`pilotfish release`: replace the running version, with gates, and back by itself if one fails.

    pilotfish release 2026-12-01                  # the new one beside the old one, then the switch
    pilotfish release 2026-12-01 --instead        # where the GPU holds one of them
    pilotfish release 2026-12-01 -- --k 5         # flags of `pilotfish gate`
    pilotfish release                             # what runs, and the last releases
    pilotfish release --recover                   # after one that was killed: back to the version before it

A version is a folder /opt/pilotfish/versions/NAME; docs/operations.md, "Releases", says how to make one. Exit status:
0 released, 1 the old version serves again, 3 nothing serves, 2 nothing was touched.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from pilotfish.deploy.arguments import split_flags
from pilotfish.deploy.release.journal import GATES, RETIRING, STARTING, Journal, Underway
from pilotfish.deploy.release.managers import Manager, ManagerError, Processes, Systemd
from pilotfish.deploy.release.relay import HAProxy, NoRelay, Relay, RelayError
from pilotfish.deploy.release.release import Record, Release, ReleaseSettings
from pilotfish.deploy.release.slots import Slot, SlotLayout, SlotLayoutError
from pilotfish.engine.command_line.parser import Parser

STATUS = {"released": 0, "rolled back": 1, "down": 3}
NUM_SHOWN = 5
SERVES, STOPPED = "runs and gets the requests", "stopped"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class UsageError(Exception):
    """Nothing was touched; the message says what is wanted."""


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    layout = SlotLayout(args.root, args.config)
    manager: Manager = Systemd() if args.manager == "systemd" else Processes(layout)
    relay: Relay = NoRelay() if args.relay == "none" else HAProxy(args.haproxy_socket, args.haproxy_backend)
    try:
        if args.version is None and not args.recover:
            _show(layout, manager, relay)
            return 0
        with _one_at_a_time(layout.root):
            return (_recover if args.recover else _release)(args, layout, manager, relay)
    except (UsageError, SlotLayoutError, ManagerError, RelayError) as error:
        print(f"pilotfish release: {error}", file=sys.stderr)
        return 2


def _release(args: argparse.Namespace, layout: SlotLayout, manager: Manager, relay: Relay) -> int:
    journal = Journal(layout.root)
    if (left := _left(journal)) is not None:
        raise UsageError("\n  ".join(_explained(left, layout, manager, relay)))
    layout.check_version(args.version)
    slots = layout.slots()
    old, new = choose(slots, [slot.name for slot in slots if manager.is_up(slot)], args.replace, args.into)
    relay.check([slot for slot in (old, new) if slot])
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    release = Release(layout, manager, relay, _settings(args, layout, args.version), _tell, journal)
    _begin(journal, args, layout, new, old)
    return _told(release.run(args.version, new, old, instead=args.instead), layout, journal)


def _recover(args: argparse.Namespace, layout: SlotLayout, manager: Manager, relay: Relay) -> int:
    """Ends a release that was cut off."""
    journal = Journal(layout.root)
    if (left := _left(journal)) is None:
        raise UsageError("no release was cut off: there is nothing to recover")
    by_name = {slot.name: slot for slot in layout.slots()}
    if missing := [name for name in (left.slot, left.old_slot) if name is not None and name not in by_name]:
        raise UsageError(f"{left.title}: no slot {', '.join(missing)} any more")
    new, old = by_name[left.slot], by_name[left.old_slot] if left.old_slot else None
    relay.check([slot for slot in (old, new) if slot])
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    release = Release(layout, manager, relay, _settings(args, layout, left.version), _tell, journal)
    return _told(release.recover(left, new, old), layout, journal)


def _left(journal: Journal) -> Underway | None:
    """What a release that was killed has left. Raises UsageError for a journal that cannot be read."""
    try:
        return journal.read()
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{journal.file}: {error}; remove it if no release was cut off") from error


def _explained(left: Underway, layout: SlotLayout, manager: Manager, relay: Relay) -> list[str]:
    """What was cut off, what serves now, and how to go on."""
    serving, others = [], []
    for slot in layout.slots():
        version, state = layout.version_of(slot), _state(slot, manager, relay)
        if state == SERVES:
            serving.append(f"{version} serves, in slot {slot.name}")
        elif slot.name in (left.slot, left.old_slot):
            others.append(f"{version}, in slot {slot.name}, {'is ' if state == STOPPED else ''}{state}")
    judged = f"{left.version} was not passed by its gates" if left.step in (STARTING, GATES) else ""
    goal = f"{left.old_version} serves again" if left.old_slot else "nothing of it runs"
    if left.step == RETIRING:
        goal = f"{left.version} serves alone"
    return [
        f"{left.title}, was cut off at: {left.step}",
        "; ".join(filter(None, [", ".join(serving) or "NOTHING SERVES", *others, judged])),
        f"`pilotfish release --recover` cleans up, so that {goal}; then release again",
    ]


def _state(slot: Slot, manager: Manager, relay: Relay) -> str:
    if not manager.is_up(slot):
        return STOPPED
    try:
        return SERVES if relay.admitted(slot) else "runs and gets no requests"
    except RelayError as error:
        return f"runs ({error})"


def _begin(journal: Journal, args: argparse.Namespace, layout: SlotLayout, new: Slot, old: Slot | None) -> None:
    """Raises UsageError where it cannot be written down."""
    underway = Underway(
        when=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        version=args.version,
        slot=new.name,
        old_version=layout.version_of(old) if old else None,
        old_slot=old.name if old else None,
        instead=args.instead,
    )
    try:
        journal.begin(underway)
    except OSError as error:
        raise UsageError(f"{journal.file}: {error.strerror or error}") from error


def _told(record: Record, layout: SlotLayout, journal: Journal) -> int:
    """The exit status of what is over, which is written down."""
    file = layout.root / "releases.jsonl"
    try:
        _write(file, record)
        journal.end()
    except OSError as error:
        _tell(f"{error.filename or file}: {error.strerror or error}: the release is over, and not written down")
    _tell(_summary(record))
    return STATUS[record.outcome]


def _settings(args: argparse.Namespace, layout: SlotLayout, version: str) -> ReleaseSettings:
    return ReleaseSettings(
        gate=shlex.split(args.gate) if args.gate else [str(layout.executable(version)), "gate"],
        gate_flags=args.gate_flags,
        start=args.start_timeout,
        gates=args.gate_timeout,
        steady=args.steady,
        drain=args.drain_timeout,
    )


def _tell(text: str) -> None:
    """A terminal that has gone does not stop the way back."""
    with contextlib.suppress(OSError):
        print(time.strftime("%H:%M:%S"), text, flush=True)


def choose(slots: Sequence[Slot], running: Sequence[str], replace: str | None, into: str | None) -> tuple:
    """The slot that is replaced (None if none runs) and the one that the new version gets. Raises UsageError."""
    by_name = {slot.name: slot for slot in slots}
    for name in (replace, into):
        if name is not None and name not in by_name:
            raise UsageError(f"no slot {name}: there are {', '.join(by_name)}")
    if replace is None and len(running) > 1:
        raise UsageError(f"slots {', '.join(running)} run: say which one to --replace")
    old = replace or next(iter(running), None)
    if old is not None and old not in running:
        raise UsageError(f"slot {old} does not run")
    free = [name for name in by_name if name not in running]
    if into is not None and into not in free:
        raise UsageError(f"slot {into} runs: want one that is free to start the new version in")
    if not free:
        raise UsageError(f"every slot runs ({', '.join(running)}): add a file for another one, see docs/operations.md")
    return (by_name[old] if old else None), by_name[into or free[0]]


@contextlib.contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Raises UsageError while another release runs."""
    file = root / ".release.lock"
    try:
        handle = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise UsageError(f"want a folder to write to: {error} (--root says where)") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UsageError("another release is running") from None
    try:
        yield
    finally:
        os.close(handle)


def _interrupt(number: int, frame: object) -> None:
    """The first signal rolls back; nothing may interrupt that."""
    for one in SIGNALS:
        # not SIG_IGN, which servers that are started would inherit
        signal.signal(one, lambda *_: None)
    raise KeyboardInterrupt(signal.Signals(number).name)


def _write(file: Path, record: Record) -> None:
    with file.open("ab") as output:
        output.write(msgspec.json.encode(record) + b"\n")
        output.flush()
        os.fsync(output.fileno())


def _summary(record: Record) -> str:
    text = f"{record.version}: {record.outcome}"
    if record.outcome == "rolled back":
        text += f", {record.old_version} serves in slot {record.old_slot}"
    if record.failed:
        text += f". Failed: {', '.join(record.failed)}"
    return text


def _show(layout: SlotLayout, manager: Manager, relay: Relay) -> None:
    for slot in layout.slots():
        state = _state(slot, manager, relay)
        word, _, more = state.partition(" ")
        print(f"{slot.name:12} port {slot.port:<6} {word:8} {layout.version_of(slot) or '-'} {more}".rstrip())
    _show_underway(layout, manager, relay)
    file = layout.root / "releases.jsonl"
    lines = file.read_bytes().splitlines() if file.exists() else []
    for line in lines[-NUM_SHOWN:]:
        record = msgspec.json.decode(line, type=Record)
        print(f"{record.when}  {_summary(record)}")


def _show_underway(layout: SlotLayout, manager: Manager, relay: Relay) -> None:
    left = _left(Journal(layout.root))
    if left is None:
        return
    try:
        with _one_at_a_time(layout.root):
            print("\n".join(_explained(left, layout, manager, relay)))
    except UsageError:
        print(f"{left.title}, is at: {left.step}")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (value := float(text)) >= 0:
            return value
    raise argparse.ArgumentTypeError(f"want at least 0 seconds, got {text}")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="pilotfish release", description=__doc__)
    parser.add_argument("version", nargs="?", metavar="VERSION", help="a folder of ROOT/versions (none: what runs)")
    parser.add_argument("--recover", action="store_true", help="end a release that was killed, and go back")
    parser.add_argument("--instead", action="store_true", help="stop the old version first")
    parser.add_argument("--replace", metavar="SLOT", help="the slot whose version is replaced, if several run")
    parser.add_argument("--into", metavar="SLOT", help="the slot for the new version (default: the first free one)")
    parser.add_argument(
        "--root",
        type=Path,
        default=Path("/opt/pilotfish"),
        metavar="PATH",
        help="folder of versions and slots (default: %(default)s)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=Path("/etc/pilotfish"),
        metavar="PATH",
        help="folder of SLOT.env files (default: %(default)s)",
    )
    parser.add_argument(
        "--manager",
        choices=("systemd", "processes"),
        default="systemd",
        help="who runs the servers (default: %(default)s)",
    )
    parser.add_argument(
        "--relay", choices=("haproxy", "none"), default="haproxy", help="what stands before them (default: %(default)s)"
    )
    parser.add_argument(
        "--haproxy-socket",
        type=Path,
        default=Path("/run/haproxy/admin.sock"),
        metavar="PATH",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--haproxy-backend",
        default="servers",
        metavar="NAME",
        help="HAProxy's section with the slots (default: %(default)s)",
    )
    parser.add_argument(
        "--gate", metavar="COMMAND", help="run as COMMAND URL --json FILE (default: the new version's `pilotfish gate`)"
    )
    times = (
        ("--start-timeout", 1800, "for the new version to become ready"),
        ("--gate-timeout", 1800, "for the gate command"),
        ("--steady", 15, "for which it has to stay up before the switch, and after it, while the old one stands by"),
        ("--drain-timeout", 300, "for the requests of a server that is stopped"),
    )
    for name, default, text in times:
        parser.add_argument(
            name, type=_seconds, default=float(default), metavar="SECONDS", help=f"{text} (default: %(default)g)"
        )
    own, gate_flags = split_flags(argv)
    args = parser.parse_args(own)
    args.gate_flags = gate_flags
    if args.recover and args.version is not None:
        parser.error("--recover ends the release that was cut off: want no VERSION")
    return args
