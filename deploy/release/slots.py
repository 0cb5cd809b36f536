"""What lies where: versions, and the slots in which servers run.

    /opt/pilotfish/versions/NAME/bin/pilotfish      the command of a version, mostly in a virtual environment
    /opt/pilotfish/versions/NAME/environment        PILOTFISH_MODEL, PILOTFISH_FLAGS: a version is code, model and flags
    /opt/pilotfish/slots/SLOT                       a link to the version that runs, or last ran, in the slot
    /opt/pilotfish/targets.json                     what Prometheus is to scrape
    /etc/pilotfish/SLOT.env                         PILOTFISH_PORT, keys, which GPU: what stays when versions change

The systemd unit pilotfish@SLOT reads these files too.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import msgspec

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
PORT, MODEL, FLAGS = "PILOTFISH_PORT", "PILOTFISH_MODEL", "PILOTFISH_FLAGS"


class SlotLayoutError(Exception):
    """A file or folder is not as wanted; the message names it."""


class Slot(msgspec.Struct, frozen=True):
    name: str
    environment: dict[str, str]

    @property
    def port(self) -> int:
        return int(self.environment[PORT])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class SlotLayout:
    def __init__(self, root: Path, config: Path) -> None:
        self.root = root
        self.config = config

    def slots(self) -> list[Slot]:
        """All slots, by name. Raises SlotLayoutError."""
        found = []
        for file in sorted(self.config.glob("*.env")):
            environment = read_environment(file)
            if not environment.get(PORT, "").isdigit():
                raise SlotLayoutError(f"{file}: want {PORT}=NUMBER, got {environment.get(PORT)!r}")
            if not NAME.fullmatch(file.stem):
                raise SlotLayoutError(f"{file}: want a name of letters, digits, '.', '_' and '-'")
            found.append(Slot(file.stem, environment))
        if not found:
            raise SlotLayoutError(f"no slot: want a file NAME.env with {PORT}=NUMBER in {self.config}")
        return found

    def check_version(self, version: str) -> None:
        """Raises SlotLayoutError unless the version can be started as far as its files tell."""
        if not NAME.fullmatch(version):
            raise SlotLayoutError(f"want the name of a folder in {self.root / 'versions'}, got {version!r}")
        command = self.executable(version)
        if not os.access(command, os.X_OK):
            raise SlotLayoutError(f"version {version}: {command} is no command")
        file = self.root / "versions" / version / "environment"
        if not read_environment(file).get(MODEL):
            raise SlotLayoutError(f"{file}: want {MODEL}=PATH")

    def executable(self, version: str) -> Path:
        return self.root / "versions" / version / "bin" / "pilotfish"

    def version_of(self, slot: Slot) -> str | None:
        """What runs, or last ran, in the slot."""
        try:
            return os.path.basename(os.readlink(self._link(slot)))
        except FileNotFoundError:
            return None

    def link(self, slot: Slot, version: str) -> None:
        """The slot runs that version when it is started next."""
        link = self._link(slot)
        link.parent.mkdir(parents=True, exist_ok=True)
        half = link.with_name(f".{slot.name}.new")
        half.unlink(missing_ok=True)
        half.symlink_to(Path("..") / "versions" / version)
        half.replace(link)

    def write_targets(self, slots: Iterable[Slot]) -> None:
        """Writes the file that Prometheus's file_sd_configs reads."""
        file = self.root / "targets.json"
        half = file.with_suffix(".new")
        half.write_bytes(msgspec.json.encode([{"targets": [f"127.0.0.1:{slot.port}" for slot in slots]}]) + b"\n")
        half.replace(file)

    def command(self, slot: Slot) -> list[str]:
        """What the unit's ExecStart does, for managers other than systemd."""
        environment = self.environment(slot)
        flags = shlex.split(environment.get(FLAGS, ""))
        executable = str(self._link(slot) / "bin" / "pilotfish")
        return [executable, "serve", environment[MODEL], *flags, "--port", str(slot.port), "--log-requests"]

    def environment(self, slot: Slot) -> dict[str, str]:
        """The version's variables and the slot's, which win."""
        return read_environment(self._link(slot) / "environment") | slot.environment

    def _link(self, slot: Slot) -> Path:
        return self.root / "slots" / slot.name


def read_environment(file: Path) -> dict[str, str]:
    """A systemd environment file of NAME=VALUE lines, a value quoted or not. Raises SlotLayoutError."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SlotLayoutError(f"{file} cannot be read: {error}") from error
    values = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line[0] in "#;":
            continue
        name, separator, value = line.partition("=")
        if not separator or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise SlotLayoutError(f"{file}, line {number}: want NAME=VALUE, got {line!r}")
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        values[name] = value[1:-1] if quoted else value
    return values
