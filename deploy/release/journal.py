"""A release that is under way, on disk: what a killed one has left can be told from it, and brought to an end."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

STARTING, GATES, SWITCHING, IN_SERVICE, RETIRING, BACK = (
    "start of the new version",
    "gates",
    "switch",
    "watch in service",
    "end of the old version",
    "way back",
)


class Underway(msgspec.Struct, kw_only=True):
    """What is replaced by what, and the step that was begun last."""

    when: str
    version: str
    slot: str
    old_version: str | None
    old_slot: str | None
    instead: bool
    step: str = STARTING

    @property
    def title(self) -> str:
        return f"the release of {self.version} into slot {self.slot}, begun {self.when}"


class Journal:
    """ROOT/release.json, which is there from before the first step of a release until after its last."""

    def __init__(self, root: Path) -> None:
        self.file = root / "release.json"
        self._underway: Underway | None = None

    def read(self) -> Underway | None:
        """What is, or was left, under way. Raises OSError, or msgspec.DecodeError for another file."""
        try:
            return msgspec.json.decode(self.file.read_bytes(), type=Underway)
        except FileNotFoundError:
            return None

    def begin(self, underway: Underway) -> None:
        """Raises OSError; nothing was touched then."""
        self._underway = underway
        self._write()

    def step(self, name: str) -> None:
        if self._underway is not None:
            self._underway.step = name
            self._write()

    def end(self) -> None:
        self._underway = None
        self.file.unlink(missing_ok=True)

    def _write(self) -> None:
        half = self.file.with_suffix(".new")
        with half.open("wb") as file:
            file.write(msgspec.json.encode(self._underway) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        half.replace(self.file)
