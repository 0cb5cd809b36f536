"""A sweep's Markdown: what to serve first, then the tables it rests on."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from pilotfish.deploy.sweep.recommend import Recommendation, acceptance, long_figures, pick, rate_at, single_rate
from pilotfish.deploy.sweep.records import Cell, SweepSettings

Row = Sequence[object]


def markdown(
    cells: Sequence[Cell],
    settings: SweepSettings,
    advice: Recommendation | None,
    frame: Mapping[str, str],
    pictures: Sequence[str] = (),
) -> str:
    good = [cell for cell in cells if cell.error is None]
    parts = [f"# Sweep of {settings.url or settings.model}", _frame(settings, frame), *_advice(advice)]
    parts += [f"![{name}]({name})" for name in pictures]
    if good:
        shown = advice.cell.max_num_seqs if advice else good[-1].max_num_seqs
        column = [cell for cell in good if cell.max_num_seqs == shown]
        parts += [*_aggregate(good, settings), *_single(column, settings, shown), *_acceptance(column, settings, shown)]
        parts += [*_paths(column, shown), *_long(column, shown), *_starts(good)]
    notes = [f"- k = {_value(c.k)}, --max-num-seqs {_value(c.max_num_seqs)}: {note}" for c in cells for note in c.notes]
    if notes:
        parts += ["## Left out", "\n".join(notes)]
    failed = [cell for cell in cells if cell.error is not None]
    if failed:
        parts += ["## Cells that did not run", table(("k", "--max-num-seqs", "why"), map(_failure, failed))]
    return "\n\n".join(parts) + "\n"


def _frame(settings: SweepSettings, frame: Mapping[str, str]) -> str:
    lines = [f"{name}: {value}" for name, value in frame.items()]
    lines.append(
        f"single streams: {settings.single_tokens} tokens, {settings.passes} passes"
        + (", the first discarded" if settings.passes > 1 else "")
        + f"; at once: {settings.concurrent_tokens} tokens a request; temperature {settings.temperature:g}"
    )
    lines.append("tokens are those of `usage`; every cell is a fresh start of the server" if not settings.url else "")
    return "\n".join(f"- {line}" for line in lines if line)


def _advice(advice: Recommendation | None) -> list[str]:
    if advice is None:
        return ["**No recommendation: nothing was measured.**"]
    cell = advice.cell
    head = f"## Recommended: k = {_value(cell.k)}, --max-num-seqs {_value(cell.max_num_seqs)}"
    reasons = "\n".join(f"- {reason}" for reason in advice.reasons)
    return [head, *([f"```\n{advice.command}\n```"] if advice.command else []), reasons]


def _aggregate(cells: Sequence[Cell], settings: SweepSettings) -> list[str]:
    """k down, number of sequences across: tokens/s of all, and the slowest request."""
    parts: list[str] = []
    for count in settings.concurrency:

        def entry(cell: Cell, count: int = count) -> str:
            slowest = [one.slowest_seconds for one in pick(cell, "concurrent", concurrency=count)]
            return f"{rate_at(cell, count):.1f} ({statistics.median(slowest):.1f} s)" if slowest else ""

        parts += [f"## {count} requests at once: tokens/s together (slowest request)", _matrix(cells, entry)]
    return parts


def _matrix(cells: Sequence[Cell], entry: Callable[[Cell], str]) -> str:
    by_place = {(cell.k, cell.max_num_seqs): entry(cell) for cell in cells}
    columns = sorted({cell.max_num_seqs for cell in cells}, key=lambda value: value or 0)
    rows = sorted({cell.k for cell in cells}, key=lambda value: value or 0)
    head = ("k \\ --max-num-seqs", *(_value(column) for column in columns))
    return table(head, ([_value(k), *(by_place.get((k, column), "") for column in columns)] for k in rows))


def _single(cells: Sequence[Cell], settings: SweepSettings, shown: int | None) -> list[str]:
    names = settings.domains
    plain = next((cell for cell in cells if cell.k == 0), None)
    base = single_rate(plain) if plain else None

    def row(cell: Cell) -> Row:
        rate = single_rate(cell)
        speed = f"{rate / base:.2f}" if rate and base else ""
        return [_value(cell.k), *(_number(single_rate(cell, domain=name)) for name in names), _number(rate), speed]

    head = ("k", *names, "median", "over k = 0")
    return [f"## One stream: tokens/s by domain (--max-num-seqs {_value(shown)})", table(head, map(row, cells))]


def _acceptance(cells: Sequence[Cell], settings: SweepSettings, shown: int | None) -> list[str]:
    rows = [
        [
            _value(cell.k),
            *(_number(acceptance(cell, name), 2) for name in settings.domains),
            _number(acceptance(cell), 2),
        ]
        for cell in cells
        if acceptance(cell) is not None
    ]
    if not rows:
        return []
    head = ("k", *settings.domains, "all")
    return [f"## Acceptance length by domain (--max-num-seqs {_value(shown)})", table(head, rows)]


def _paths(cells: Sequence[Cell], shown: int | None) -> list[str]:
    """Only where there is something to compare."""
    kinds = sorted({(one.path, one.via) for cell in cells for one in cell.measurements if one.kind == "single"})
    if len(kinds) < 2:
        return []

    def row(cell: Cell) -> Row:
        entries = [_value(cell.k)]
        for path, via in kinds:
            ones = [m for m in cell.measurements if m.kind == "single" and (m.path, m.via) == (path, via)]
            rates, firsts = [m.tokens_per_second for m in ones], [m.first_token_seconds for m in ones]
            entries.append(f"{statistics.median(rates):.1f} ({1e3 * statistics.median(firsts):.0f} ms)" if ones else "")
        return entries

    head = ("k", *(path if via == "direct" else f"{path} through the relay" for path, via in kinds))
    return [
        f"## By path: tokens/s of one stream (first token) (--max-num-seqs {_value(shown)})",
        table(head, map(row, cells)),
    ]


def _long(cells: Sequence[Cell], shown: int | None) -> list[str]:
    contexts = sorted({one.context for cell in cells for one in pick(cell, "long")})
    if not contexts:
        return []

    def row(cell: Cell) -> Row:
        return [_value(cell.k), *(_after(long_figures(cell).get(context)) for context in contexts)]

    head = ("k", *(f"{context} tokens" for context in contexts))
    title = f"## Long context: tokens/s after it (time to first token) (--max-num-seqs {_value(shown)})"
    return [title, table(head, map(row, cells))]


def _after(figures: tuple[float, float] | None) -> str:
    return f"{figures[0]:.1f} ({figures[1]:.2f} s)" if figures else ""


def _starts(cells: Sequence[Cell]) -> list[str]:
    head = ("k", "--max-num-seqs", "seconds to ready", "limit that set the cap", "processor in use by others before")
    return ["## Starts", table(head, map(_start, cells))]


def _start(cell: Cell) -> Row:
    busy = "" if cell.busy_before is None else f"{cell.busy_before:.0%}"
    return [_value(cell.k), _value(cell.max_num_seqs), f"{cell.start_seconds:.1f}", cell.binding_limit or "", busy]


def _failure(cell: Cell) -> Row:
    return [_value(cell.k), _value(cell.max_num_seqs), (cell.error or "").replace("|", "\\|").replace("\n", " ")]


def table(head: Sequence[str], rows: Iterable[Row]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines)


def _number(value: float | None, decimals: int = 1) -> str:
    return "" if value is None else f"{value:.{decimals}f}"


def _value(value: int | None) -> str:
    return "not told" if value is None else str(value)
