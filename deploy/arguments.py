"""What several commands read and print alike."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before and after `--`."""
    given = list(argv)
    at = given.index("--") if "--" in given else len(given)
    return given[:at], given[at + 1 :]


def add_endpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Which model to ask, with which key."""
    parser.add_argument("--served-model", metavar="NAME", help="which of the server's models (default: its first)")
    key = os.environ.get("PILOTFISH_API_KEY")
    parser.add_argument("--api-key", default=key, metavar="KEY", help="default: $PILOTFISH_API_KEY")


def is_address(parser: argparse.ArgumentParser, target: str) -> bool:
    """Whether a server is meant, not a checkpoint. `host:8000` alone is neither, and ends the program with a word."""
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", target) and not Path(target).exists():
        parser.error(f"want the address of a server with its scheme, http://{target}, or a checkpoint")
    return target.startswith(("http://", "https://"))


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        if unknown := [word for word in words(text) if word not in known]:
            raise argparse.ArgumentTypeError(f"want some of {','.join(known)}, got {','.join(unknown)}")
        return words(text)

    return read


def numbers(least: int, most: int | None = None) -> Callable[[str], list[int]]:
    """Sorted, each once."""

    def read(text: str) -> list[int]:
        found = words(text)
        values = sorted({int(word) for word in found if word.isdecimal()})
        if not found or len(set(found)) != len(values) or values[0] < least or (most and values[-1] > most):
            bounds = f"of at least {least}" if most is None else f"in {least}..{most}"
            raise argparse.ArgumentTypeError(f"want numbers {bounds}, got {text}")
        return values

    return read


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns: the first to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        padded = (word.rjust(width) for word, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *padded]))
    return "\n".join(lines)
