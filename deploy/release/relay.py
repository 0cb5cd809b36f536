"""Which servers get requests from the relay in front of them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from pilotfish.deploy.release.slots import Slot

UP_SECONDS = 10.0
RUNNING = "2"
"""HAProxy's srv_op_state of a server that takes requests."""


class RelayError(Exception):
    """The relay did not do what it was told; the message has its words."""


class Relay(Protocol):
    def check(self, slots: Iterable[Slot]) -> None:
        """Raises RelayError unless the relay answers and knows them all."""

    def admit(self, slot: Slot) -> None:
        """Lets the slot have requests from now on. Raises RelayError."""

    def withhold(self, slot: Slot) -> None:
        """Keeps new requests from the slot; those that run go on. Raises RelayError."""

    def admitted(self, slot: Slot) -> bool:
        """Whether it gets requests if it is there to take them. Raises RelayError."""


class NoRelay:
    """Clients ask the servers' own port: whatever listens gets requests."""

    def check(self, slots: Iterable[Slot]) -> None:
        pass

    def admit(self, slot: Slot) -> None:
        pass

    def withhold(self, slot: Slot) -> None:
        pass

    def admitted(self, slot: Slot) -> bool:
        return True


class HAProxy:
    """Through HAProxy's socket, server by server, without a reload: its servers are named as the slots.

    A restart of HAProxy forgets it and asks each server's /ready: outside of a release only one of them runs.
    """

    def __init__(self, path: Path, backend: str) -> None:
        self._path = path
        self._backend = backend

    def check(self, slots: Iterable[Slot]) -> None:
        known = self._states()
        if missing := [slot.name for slot in slots if slot.name not in known]:
            raise RelayError(f"HAProxy's backend {self._backend} has no server {', '.join(missing)}: {sorted(known)}")

    def admit(self, slot: Slot) -> None:
        self._set(slot, "ready")
        deadline = time.monotonic() + UP_SECONDS
        while self._states()[slot.name] != RUNNING:
            if time.monotonic() > deadline:
                raise RelayError(f"HAProxy finds server {slot.name} not ready within {UP_SECONDS:g} s")
            time.sleep(0.1)

    def withhold(self, slot: Slot) -> None:
        self._set(slot, "maint")

    def admitted(self, slot: Slot) -> bool:
        return self._states().get(slot.name) == RUNNING

    def _set(self, slot: Slot, state: str) -> None:
        # silence means that it was done
        if answer := self._ask(f"set server {self._backend}/{slot.name} state {state}"):
            raise RelayError(f"HAProxy, server {slot.name}: {answer}")

    def _states(self) -> dict[str, str]:
        """srv_op_state by server."""
        lines = self._ask(f"show servers state {self._backend}").splitlines()
        header = next((line for line in lines if line.startswith("# ")), None)
        if header is None:
            raise RelayError(f"HAProxy, backend {self._backend}: {' '.join(lines) or 'no answer'}")
        columns = header.removeprefix("# ").split()
        rows = [dict(zip(columns, line.split(), strict=False)) for line in lines[lines.index(header) + 1 :] if line]
        return {row["srv_name"]: row["srv_op_state"] for row in rows}

    def _ask(self, command: str) -> str:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(UP_SECONDS)
                connection.connect(str(self._path))
                connection.sendall(command.encode() + b"\n")
                with connection.makefile() as answer:
                    return answer.read().strip()
        except OSError as error:
            raise RelayError(f"HAProxy's socket {self._path}: {error}") from error
