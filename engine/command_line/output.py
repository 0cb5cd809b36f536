"""Where a command writes: looked at before hours of work, so that what cannot be written is told at once, in one line.

A probe writes a block beside, or behind, what is there and takes it away again: permissions, read-only file systems,
quotas and full disks show in no other way.
"""

from __future__ import annotations

import os
from pathlib import Path

from pilotfish.engine.errors import OptionError

PROBE = bytes(4096)


def check_file(path: Path | None, what: str) -> None:
    """Raises OptionError unless a file can be written there; one that is there keeps its bytes. None is no file.

    `what` names it in messages, mostly the flag.
    """
    if path is None:
        return
    try:
        if path.is_dir():
            raise OptionError(f"{what} {path}: is a folder; want a file")
        if path.exists():
            _extend(path)
        else:
            _create_in(path.parent, what, path)
    except OSError as error:
        raise _failed(path, what, error) from error


def check_folder(path: Path | None, what: str) -> None:
    """Raises OptionError unless files can be written into the folder, or it can be made. None is no folder."""
    if path is None:
        return
    try:
        if path.exists() and not path.is_dir():
            raise OptionError(f"{what} {path}: is a file; want a folder")
        there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        if not there.is_dir():
            raise OptionError(f"{what} {path}: {there} is a file; want a folder")
        _create_in(there, what, path)
    except OSError as error:
        raise _failed(path, what, error) from error


def write_file(path: Path, text: str, what: str) -> None:
    """Raises OptionError where it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _failed(path, what, error) from error


def _extend(path: Path) -> None:
    """Pipes and devices are only opened."""
    if not path.is_file():
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        return
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        try:
            file.write(PROBE)
            file.flush()
            os.fsync(file.fileno())
        finally:
            file.truncate(size)


def _create_in(folder: Path, what: str, path: Path) -> None:
    if not folder.exists():
        raise OptionError(f"{what} {path}: there is no folder {folder}")
    if not folder.is_dir():
        raise OptionError(f"{what} {path}: {folder} is a file; want a folder")
    probe = folder / f".pilotfish-{os.getpid()}.probe"
    try:
        with probe.open("xb") as file:
            file.write(PROBE)
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)


def _failed(path: Path, what: str, error: OSError) -> OptionError:
    return OptionError(f"{what} {path}: cannot be written: {error.strerror or error}")
