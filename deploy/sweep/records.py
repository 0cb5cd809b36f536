"""What a sweep writes down: settings, cells and measurements, as JSON a cell and one TSV over all."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

Kind = Literal["single", "concurrent", "long"]
MAX = "max"
"""A context as long as max_model_len allows."""


class SweepSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every cell of a sweep has in common. Cells measured under others cannot stand in one table."""

    model: str
    url: str | None = None
    relay: str | None = None
    server_flags: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    paths: tuple[str, ...] = ("completions", "chat")
    passes: int = 2
    single_tokens: int = 384
    concurrency: tuple[int, ...] = (2, 4, 8)
    concurrent_tokens: int = 256
    contexts: tuple[int | str, ...] = (3000, 12000, MAX)
    long_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = True


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One stream, or several at once. Tokens are those of `usage`.

    `tokens_per_second`: of one stream, tokens after the first over the time after the first; of several, all tokens
    over the time until the last one ended. `first_token_seconds` is the median, `slowest_seconds` the longest request.
    `drafts`, `drafted`, `accepted` are what the server's counters grew by; None where it shows none.
    """

    kind: Kind
    path: str
    via: str
    domain: str
    concurrency: int
    context: int
    completion_tokens: int
    seconds: float
    tokens_per_second: float
    first_token_seconds: float
    slowest_seconds: float
    number: int = 0
    drafts: int | None = None
    drafted: int | None = None
    accepted: int | None = None

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted over rounds that drafted; None without any."""
        return 1 + (self.accepted or 0) / self.drafts if self.drafts else None


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the server. None for a k or a number of sequences that an endpoint does not tell.

    `run` numbers repetitions of the whole matrix. `busy_before` is the share of the processor that others used just
    before the start: figures from a busy machine say little. `notes` say what was left out and why; `error` why
    nothing was measured.
    """

    k: int | None
    max_num_seqs: int | None
    run: int = 0
    busy_before: float | None = None
    start_seconds: float = 0.0
    max_model_len: int | None = None
    binding_limit: str | None = None
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()
    error: str | None = None

    @property
    def name(self) -> str:
        parts = (("k", self.k), ("mns", self.max_num_seqs), ("run", self.run or None))
        return "-".join(f"{label}{value}" for label, value in parts if value is not None) or "endpoint"


def merged(cells: Iterable[Cell]) -> list[Cell]:
    """One cell a place: the measurements of all its runs, the median start. An error only if no run went well."""
    places: dict[tuple[int | None, int | None], list[Cell]] = {}
    for cell in cells:
        places.setdefault((cell.k, cell.max_num_seqs), []).append(cell)
    return [_merge([run for run in runs if run.error is None] or runs[:1]) for runs in places.values()]


def _merge(runs: list[Cell]) -> Cell:
    shares = [run.busy_before for run in runs if run.busy_before is not None]
    return msgspec.structs.replace(
        runs[0],
        start_seconds=statistics.median(run.start_seconds for run in runs),
        busy_before=max(shares) if shares else None,
        measurements=tuple(one for run in runs for one in run.measurements),
        notes=tuple(dict.fromkeys(note for run in runs for note in run.notes)),
    )


class SettingsDiffer(Exception):
    """The folder holds cells of another sweep; the message names what differs."""


COLUMNS = ("k", "max_num_seqs", "run", *(name for name in Measurement.__struct_fields__), "acceptance_length")


class Folder:
    """A sweep's folder: settings.json, cells/NAME.json, and reports made from them. Written whole or not at all."""

    def __init__(self, path: Path, settings: SweepSettings) -> None:
        self.path = path
        known = path / "settings.json"
        if known.exists():
            _compare(msgspec.json.decode(known.read_bytes(), type=SweepSettings), settings)
        else:
            write(known, pretty(settings))

    def cells(self) -> list[Cell]:
        """What has been measured, by k and number of sequences."""
        found = [msgspec.json.decode(p.read_bytes(), type=Cell) for p in (self.path / "cells").glob("*.json")]
        return sorted(found, key=lambda cell: (cell.k or 0, cell.max_num_seqs or 0, cell.run))

    def done(self) -> set[str]:
        """Names of cells that need not be measured again; one that failed is."""
        return {cell.name for cell in self.cells() if cell.error is None}

    def replace(self, asked: Cell, measured: Cell) -> None:
        """An endpoint's cell gets its name from what it says of itself; an earlier failure had none."""
        if asked.name != measured.name:
            (self.path / "cells" / f"{asked.name}.json").unlink(missing_ok=True)
        self.add(measured)

    def add(self, cell: Cell) -> None:
        write(self.path / "cells" / f"{cell.name}.json", pretty(cell))


def _compare(old: SweepSettings, new: SweepSettings) -> None:
    names = [name for name in SweepSettings.__struct_fields__ if getattr(old, name) != getattr(new, name)]
    if names:
        shown = "; ".join(f"{name}: {getattr(old, name)!r} there, {getattr(new, name)!r} now" for name in names)
        raise SettingsDiffer(f"the folder holds another sweep ({shown}): give another --out")


def pretty(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n"


def write(path: Path, text: str) -> None:
    """Whoever reads the file sees all of it or the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def tsv(cells: Iterable[Cell]) -> str:
    """One line a measurement. Empty where a value is not known."""
    lines = ["\t".join(COLUMNS)]
    for cell in cells:
        for one in cell.measurements:
            values = [cell.k, cell.max_num_seqs, cell.run, *(getattr(one, name) for name in COLUMNS[3:])]
            lines.append("\t".join(_shown(value) for value in values))
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
