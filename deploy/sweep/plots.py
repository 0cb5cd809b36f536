"""A sweep's pictures. matplotlib is an extra (pip install 'pilotfish[plots]'); without it a sweep has tables only."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pilotfish.deploy.sweep.recommend import acceptance, long_figures, pick, rate_at, single_rate
from pilotfish.deploy.sweep.records import Cell, SweepSettings

SIZE = (12, 3.6)


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(cells: Sequence[Cell], settings: SweepSettings, max_num_seqs: int | None, out: Path) -> list[str]:
    """Writes the pictures beside the report and returns their names. `max_num_seqs` picks the cells that lines show."""
    import matplotlib

    matplotlib.use("Agg")
    good = [cell for cell in cells if cell.error is None]
    column = [cell for cell in good if cell.max_num_seqs == max_num_seqs]
    if not column:
        return []
    names = [_speed(good, column, settings, out), _single(column, settings, out)]
    if any(len(long_figures(cell)) > 1 for cell in column):
        names.append(_context(column, out))
    return names


def _speed(cells: Sequence[Cell], column: Sequence[Cell], settings: SweepSettings, out: Path) -> str:
    """Tokens/s by requests at once, and the matrix at the most of them."""
    figure, (left, right) = _figure(2)
    counts = (1, *settings.concurrency)
    for cell in column:
        points = [(count, rate) for count in counts if (rate := rate_at(cell, count))]
        left.plot(*zip(*points, strict=True), marker="o", label=f"k = {cell.k}")
    left.set_xticks(counts)
    _label(left, f"Tokens/s together, --max-num-seqs {column[0].max_num_seqs}", "requests at once", "tokens/s")
    left.legend(fontsize=8)
    _matrix(right, cells, counts[-1])
    return _save(figure, out, "sweep-speed.png")


def _matrix(axes: Any, cells: Sequence[Cell], count: int) -> None:
    ks = sorted({cell.k or 0 for cell in cells})
    sizes = sorted({cell.max_num_seqs or 0 for cell in cells})
    rates = {(cell.k or 0, cell.max_num_seqs or 0): rate_at(cell, count) for cell in cells}
    values = [[rates.get((k, size)) or float("nan") for size in sizes] for k in ks]
    axes.imshow(values, cmap="YlGn", aspect="auto", vmin=0)
    most = max((rate for rate in rates.values() if rate), default=0.0)
    for row, k in enumerate(ks):
        for place, size in enumerate(sizes):
            rate = rates.get((k, size))
            colour = "white" if rate and rate > 0.6 * most else "black"
            shown = f"{rate:.0f}" if rate else "-"
            axes.text(place, row, shown, ha="center", va="center", fontsize=9, color=colour)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_yticks(range(len(ks)), [str(k) for k in ks])
    axes.set_title(f"Tokens/s with {count} at once", fontsize=10, loc="left")
    axes.set_xlabel("--max-num-seqs", fontsize=8)
    axes.set_ylabel("k", fontsize=8)


def _single(cells: Sequence[Cell], settings: SweepSettings, out: Path) -> str:
    figure, (left, right) = _figure(2)
    for domain in settings.domains:
        rates = [(cell.k or 0, rate) for cell in cells if (rate := single_rate(cell, domain=domain))]
        lengths = [(cell.k or 0, acceptance(cell, domain) or 1.0) for cell in cells if pick(cell, "single")]
        if rates:
            left.plot(*zip(*rates, strict=True), marker="o", label=domain)
            right.plot(*zip(*lengths, strict=True), marker="o", label=domain)
    ks = [cell.k or 0 for cell in cells]
    right.plot(ks, [k + 1 for k in ks], ls="--", color="grey", label="ceiling, k + 1")
    plain = next((single_rate(cell) for cell in cells if cell.k == 0), None)
    if plain and max(ks) > 0:
        # rates are tokens a round over its time, so time over that at k = 0 is length over speed-up
        even = [(acceptance(cell) or 1.0) * plain / (single_rate(cell) or plain) for cell in cells]
        right.plot(ks, even, ls=":", color="black", label="break-even, measured")
    _label(left, "One stream", "k", "tokens/s")
    _label(right, "Acceptance length", "k", "tokens a round")
    for axes in (left, right):
        axes.set_xticks(ks)
        axes.legend(fontsize=8)
    return _save(figure, out, "sweep-domains.png")


def _context(cells: Sequence[Cell], out: Path) -> str:
    figure, (left, right) = _figure(2)
    for cell in cells:
        if figures := long_figures(cell):
            rates, seconds = zip(*figures.values(), strict=True)
            left.plot(list(figures), rates, marker="o", label=f"k = {cell.k}")
            right.plot(list(figures), seconds, marker="o", label=f"k = {cell.k}")
    _label(left, "One stream after a long prompt", "prompt tokens", "tokens/s")
    _label(right, "Time to first token", "prompt tokens", "seconds")
    for axes in (left, right):
        axes.legend(fontsize=8)
    return _save(figure, out, "sweep-context.png")


def _figure(count: int) -> tuple[Any, Any]:
    from matplotlib import pyplot

    return pyplot.subplots(1, count, figsize=SIZE, layout="constrained", dpi=80)


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=8)


def _save(figure: Any, out: Path, name: str) -> str:
    from matplotlib import pyplot

    figure.savefig(out / name)
    pyplot.close(figure)
    return name
