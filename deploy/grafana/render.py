"""Draws every panel's query results from a Prometheus, one PNG a row. Ours, not Grafana's: a look at real data.

    python -m pilotfish.deploy.grafana.render --prometheus http://127.0.0.1:9090 --seconds 3600 --out pictures/

Needs matplotlib (pip install 'pilotfish[plots]').
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pilotfish.deploy.grafana.panels import ROWS, Panel, Query, Row
from pilotfish.deploy.grafana.queries import SPLITS
from pilotfish.deploy.prometheus.api import Prometheus, Series

POINTS = 200
COLUMNS = 24
COLOURS = ("#1f6f8b", "#e07a1f", "#3a8f4d", "#b03a5b", "#7a5ea8", "#8a6d3b", "#c2a500", "#5b6770")
UNITS = {"none": (1.0, ""), "percentunit": (100.0, " %"), "s": (1.0, " s"), "bytes": (1 / (1 << 20), " MiB")}


def render(prometheus: Prometheus, start: float, end: float, out: Path, window: str = "20s") -> list[Path]:
    """Writes out/NAME.png for each row and returns the paths."""
    out.mkdir(parents=True, exist_ok=True)
    return [_row(PanelReader(prometheus, start, end, window), row, out) for row in ROWS]


class PanelReader:
    """Query results over one time range, with Grafana's variables filled in."""

    def __init__(self, prometheus: Prometheus, start: float, end: float, window: str) -> None:
        self.prometheus, self.start, self.end, self.window = prometheus, start, end, window

    def _fill(self, expression: str) -> str:
        filled = expression.replace("$__rate_interval", self.window).replace("$instance", ".*")
        return filled.replace("$split", SPLITS[0])

    def series(self, query: Query) -> list[Series]:
        step = max(1.0, (self.end - self.start) / POINTS)
        return self.prometheus.over(self._fill(query.expression), self.start, self.end, step)

    def last(self, query: Query) -> list[Series]:
        return self.prometheus.instant(self._fill(query.expression), self.end)

    def minutes(self, series: Series) -> list[float]:
        return [(at - self.start) / 60 for at, _ in series.points]


def _row(reader: PanelReader, row: Row, out: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = _lines(row.panels)
    heights = [0.8 if line[0].kind == "stat" else 2.7 for line in lines]
    figure = pyplot.figure(figsize=(12, sum(heights) + 0.5), layout="constrained", dpi=80)
    figure.suptitle(row.title, x=0.01, ha="left", fontweight="bold")
    grid = figure.add_gridspec(len(lines), COLUMNS, height_ratios=heights)
    for number, line in enumerate(lines):
        x = 0
        for panel in line:
            axes = figure.add_subplot(grid[number, x : x + panel.width])
            DRAW[panel.kind](axes, panel, reader)
            axes.set_title(panel.title, fontsize=9, loc="left")
            x += panel.width
    path = out / (re.sub(r"\W+", "-", row.title.lower()).strip("-") + ".png")
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _lines(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Panels as they wrap over the columns."""
    lines: list[list[Panel]] = [[]]
    for panel in panels:
        if sum(other.width for other in lines[-1]) + panel.width > COLUMNS:
            lines.append([])
        lines[-1].append(panel)
    return lines


def _timeseries(axes: Any, panel: Panel, reader: PanelReader) -> None:
    scale, unit = UNITS[panel.unit]
    drawn = [(query, series) for query in panel.queries for series in reader.series(query)]
    drawn = [(query, series) for query, series in drawn if any(value > 0 for _, value in series.points)] or drawn[:1]
    base: dict[float, float] = {}
    for (query, series), colour in zip(drawn, COLOURS * 4, strict=False):
        times, label = reader.minutes(series), _legend(query, series)
        values = [scale * value for _, value in series.points]
        if panel.stacked and not query.dashed:
            below = [base.get(at, 0.0) for at in times]
            values = [low + (0 if math.isnan(value) else value) for low, value in zip(below, values, strict=True)]
            axes.fill_between(times, below, values, color=colour, alpha=0.75, label=label, linewidth=0)
            base |= dict(zip(times, values, strict=True))
        else:
            axes.plot(times, values, color=colour, label=label, lw=1.4, ls="--" if query.dashed else "-")
    axes.set_xlim(0, (reader.end - reader.start) / 60)
    flat = axes.get_ylim()[1] < 0.1
    axes.set_ylim(0, scale * panel.maximum if flat and panel.maximum else None)
    _ticks(axes, unit)
    axes.grid(alpha=0.25)
    if any(_legend(query, series) for query, series in drawn):
        axes.legend(fontsize=6.5, ncols=2, frameon=True, framealpha=0.8, loc="best")


def _stat(axes: Any, panel: Panel, reader: PanelReader) -> None:
    scale, unit = UNITS[panel.unit]
    points = [point for query in panel.queries for series in reader.series(query) for point in series.points]
    values = [value for _, value in points if not math.isnan(value)]
    decimals = panel.decimals or 0
    shown = f"{scale * values[-1]:.{decimals}f}{unit}" if values else "no data"
    axes.axis("off")
    axes.text(0, 0.6, shown, fontsize=20, color=COLOURS[0], va="center", transform=axes.transAxes)
    for query in panel.queries:
        for series in reader.last(query):
            axes.text(0, 0.1, _legend(query, series), fontsize=7, va="center", transform=axes.transAxes)


def _bars(axes: Any, panel: Panel, reader: PanelReader) -> None:
    scale, unit = UNITS[panel.unit]
    pairs = [(_legend(query, s), scale * s.points[0][1]) for query in panel.queries for s in reader.last(query)]
    pairs.sort(key=lambda pair: pair[1])
    axes.barh([name for name, _ in pairs], [value for _, value in pairs], color=COLOURS[0], height=0.6)
    for row, (_, value) in enumerate(pairs):
        axes.text(value, row, f" {value:,.0f}{unit}" if value >= 10 else f" {value:.3g}{unit}", va="center", fontsize=7)
    axes.set_xlim(0, 1.25 * max((value for _, value in pairs), default=1.0))
    axes.tick_params(labelsize=7)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _heatmap(axes: Any, panel: Panel, reader: PanelReader) -> None:
    """Buckets are cumulative: a row is what its bound adds to the one before."""
    found = [series for query in panel.queries for series in reader.series(query)]
    by_bound = {float(series.labels["le"]): dict(series.points) for series in found}
    times = sorted({at for counts in by_bound.values() for at in counts})
    rows, names, below = [], [], [0.0] * len(times)
    for bound, counts in sorted(by_bound.items()):
        values = [0.0 if math.isnan(value) else value for value in (counts.get(at, 0.0) for at in times)]
        added = [max(0.0, value - low) for value, low in zip(values, below, strict=True)]
        below = values
        if math.isfinite(bound) and (any(added) or bound <= 4):
            rows.append(added)
            names.append(f"{bound:g}")
    if rows:
        minutes = [(at - reader.start) / 60 for at in times]
        mesh = axes.pcolormesh(minutes, range(len(rows)), rows, cmap="Oranges", shading="nearest")
        axes.figure.colorbar(mesh, ax=axes, pad=0.01).ax.tick_params(labelsize=7)
    axes.set_yticks(range(len(names)), names)
    _ticks(axes, "")


DRAW = {"timeseries": _timeseries, "stat": _stat, "bargauge": _bars, "heatmap": _heatmap}


def _ticks(axes: Any, unit: str) -> None:
    axes.tick_params(labelsize=7)
    axes.set_xlabel("minutes", fontsize=7)
    if unit:
        axes.set_ylabel(unit.strip(), fontsize=7)


def _legend(query: Query, series: Series) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: series.labels.get(match[1], ""), query.legend)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    parser.add_argument("--seconds", type=float, default=3600.0, help="how far back to draw")
    parser.add_argument("--window", default="1m", help="of rates; four scrapes or more")
    parser.add_argument("--out", type=Path, default=Path("pictures"))
    args = parser.parse_args()
    end = time.time()
    for path in render(Prometheus(args.prometheus), end - args.seconds, end, args.out, args.window):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
