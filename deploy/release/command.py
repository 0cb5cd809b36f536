"""`pilotfish release`: replace the running version, with gates, and back by itself if one fails.

    pilotfish release 2026-12-01                  # the new one beside the old one, then the switch
    pilotfish release 2026-12-01 --instead        # where the GPU holds one of them
    pilotfish release 2026-12-01 -- --k 5         # flags of `pilotfish gate`
    pilotfish release                             # what runs, and the last releases

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
from pilotfish.deploy.release.managers import Manager, ManagerError, Processes, Systemd
from pilotfish.deploy.release.relay import HAProxy, NoRelay, Relay, RelayError
from pilotfish.deploy.release.release import Record, Release, Settings
from pilotfish.deploy.release.slots import Layout, LayoutError, Slot
from pilotfish.engine.parser import Parser

STATUS = {"released": 0, "rolled back": 1, "down": 3}
NUM_SHOWN = 5
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class UsageError(Exception):
    """Nothing was touched; the message says what is wanted."""


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    layout = Layout(args.root, args.config)
    manager: Manager = Systemd() if args.manager == "systemd" else Processes(layout)
    relay: Relay = NoRelay() if args.relay == "none" else HAProxy(args.haproxy_socket, args.haproxy_backend)
    try:
        if args.version is None:
            _show(layout, manager)
            return 0
        with _one_at_a_time(layout.root):
            return _release(args, layout, manager, relay)
    except (UsageError, LayoutError, ManagerError, RelayError) as error:
        print(f"pilotfish release: {error}", file=sys.stderr)
        return 2


def _release(args: argparse.Namespace, layout: Layout, manager: Manager, relay: Relay) -> int:
    layout.check_version(args.version)
    slots = layout.slots()
    old, new = choose(slots, [slot.name for slot in slots if manager.is_up(slot)], args.replace, args.into)
    relay.check([slot for slot in (old, new) if slot])
    settings = Settings(
        gate=shlex.split(args.gate) if args.gate else [str(layout.executable(args.version)), "gate"],
        gate_flags=args.gate_flags,
        start=args.start_timeout,
        gates=args.gate_timeout,
        steady=args.steady,
        drain=args.drain_timeout,
    )
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    release = Release(layout, manager, relay, settings, _tell)
    record = release.run(args.version, new, old, instead=args.instead)
    _write(layout.root / "releases.jsonl", record)
    _tell(_summary(record))
    return STATUS[record.outcome]


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


def _show(layout: Layout, manager: Manager) -> None:
    for slot in layout.slots():
        state = "runs" if manager.is_up(slot) else "stopped"
        print(f"{slot.name:12} port {slot.port:<6} {state:8} {layout.version_of(slot) or '-'}")
    file = layout.root / "releases.jsonl"
    lines = file.read_bytes().splitlines() if file.exists() else []
    for line in lines[-NUM_SHOWN:]:
        record = msgspec.json.decode(line, type=Record)
        print(f"{record.when}  {_summary(record)}")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (value := float(text)) >= 0:
            return value
    raise argparse.ArgumentTypeError(f"want at least 0 seconds, got {text}")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="pilotfish release", description=__doc__)
    parser.add_argument("version", nargs="?", metavar="VERSION", help="a folder of ROOT/versions (none: what runs)")
    parser.add_argument("--instead", action="store_true", help="stop the old version first")
    parser.add_argument("--replace", metavar="SLOT", help="the slot whose version is replaced, if several run")
    parser.add_argument("--into", metavar="SLOT", help="the slot for the new version (default: the first free one)")
    parser.add_argument(
        "--root", type=Path, default=Path("/opt/pilotfish"), metavar="PATH", help="of versions and slots: %(default)s"
    )
    parser.add_argument(
        "--config", type=Path, default=Path("/etc/pilotfish"), metavar="PATH", help="of SLOT.env: %(default)s"
    )
    parser.add_argument("--manager", choices=("systemd", "processes"), default="systemd", help="who runs the servers")
    parser.add_argument("--relay", choices=("haproxy", "none"), default="haproxy", help="what stands before them")
    parser.add_argument("--haproxy-socket", type=Path, default=Path("/run/haproxy/admin.sock"), metavar="PATH")
    parser.add_argument("--haproxy-backend", default="servers", metavar="NAME")
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
    return args
