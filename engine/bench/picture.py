"""A picture of a conversation. matplotlib is an extra (pip install 'pilotfish[plots]')."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from pilotfish.engine.errors import OptionError


def check() -> None:
    """Raises OptionError where nothing can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError("--picture: want matplotlib (pip install 'pilotfish[plots]')")


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Tokens of each turn's prompt, those that were read, and milliseconds to the first token, cold beside warm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 3.6), layout="constrained", dpi=80)
    depths = list(dict.fromkeys(row["k"] for row in rows))
    # what is read does not depend on k
    turns = [row for row in rows if row["k"] == depths[0]]
    numbers = [row["turn"] for row in turns]
    left.plot(numbers, [row["prompt"] for row in turns], color="grey", marker=".", label="of the prompt")
    left.plot(numbers, [row["read"] for row in turns], marker=".", label="read")
    for index, depth in enumerate(depths):
        turns = [row for row in rows if row["k"] == depth]
        cold = [(row["turn"], row["cold_first_token_ms"]) for row in turns if "cold_first_token_ms" in row]
        if cold:
            right.plot(*zip(*cold, strict=True), marker=".", ls="--", color=f"C{index}", label=f"cold, k = {depth}")
        warm = [row["first_token_ms"] for row in turns]
        right.plot(numbers, warm, marker=".", color=f"C{index}", label=f"k = {depth}")
    for axes, title, unit in ((left, "Tokens of each turn", "tokens"), (right, "Time to first token", "ms")):
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("turn", fontsize=8)
        axes.set_ylabel(unit, fontsize=8)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=8)
    figure.savefig(file)
    pyplot.close(figure)
