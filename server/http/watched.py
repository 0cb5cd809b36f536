"""Files that are read again when they change."""

from __future__ import annotations

from pathlib import Path


def version_of(file: Path) -> tuple[int, ...]:
    """Changes with the file; empty while there is none."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino
