"""Which cell to serve, why, and with which flags."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pilotfish.deploy.sweep.records import Cell, Measurement, SweepSettings

CLOSE = 0.03
"""Cells within this share of the fastest count as equally fast: single runs differ by about as much."""

BUSY = 0.2
"""The share of the processors in use by others at which a warning is due."""


def pick(
    cell: Cell, kind: str, *, path: str | None = None, domain: str | None = None, concurrency: int | None = None
) -> list[Measurement]:
    """A cell's direct measurements of one kind."""
    return [
        one
        for one in cell.measurements
        if one.kind == kind
        and one.via == "direct"
        and path in (None, one.path)
        and domain in (None, one.domain)
        and concurrency in (None, one.concurrency)
    ]


def single_rate(cell: Cell, path: str | None = None, domain: str | None = None) -> float | None:
    """Median tokens/s of one stream over domains and passes."""
    rates = [one.tokens_per_second for one in pick(cell, "single", path=path, domain=domain)]
    return statistics.median(rates) if rates else None


def rate_at(cell: Cell, concurrency: int) -> float | None:
    """Tokens/s of `concurrency` streams together, waiting for first tokens included; of one, the median of the single
    streams counted in the same way."""
    if concurrency == 1:
        whole = [one.completion_tokens / one.seconds for one in pick(cell, "single")]
        return statistics.median(whole) if whole else None
    rates = [one.tokens_per_second for one in pick(cell, "concurrent", concurrency=concurrency)]
    return statistics.median(rates) if rates else None


def acceptance(cell: Cell, domain: str | None = None) -> float | None:
    """Acceptance length over all rounds of the single streams: counts are added before they are divided."""
    ones = [one for one in pick(cell, "single", domain=domain) if one.drafts]
    drafts = sum(one.drafts or 0 for one in ones)
    return 1 + sum(one.accepted or 0 for one in ones) / drafts if drafts else None


def long_figures(cell: Cell) -> dict[int, tuple[float, float]]:
    """Median tokens/s and seconds to the first token after each length of prompt."""
    ones = pick(cell, "long")
    return {
        context: (
            statistics.median(one.tokens_per_second for one in ones if one.context == context),
            statistics.median(one.first_token_seconds for one in ones if one.context == context),
        )
        for context in sorted({one.context for one in ones})
    }


@dataclass(frozen=True)
class Recommendation:
    """`concurrency` is what was optimised for; `reasons` are sentences, the most important first."""

    cell: Cell
    concurrency: int
    reasons: tuple[str, ...]
    command: str


def recommend(cells: Sequence[Cell], settings: SweepSettings, concurrency: int | None = None) -> Recommendation | None:
    """The cell with the most tokens/s at `concurrency` (default: the largest measured); of those within a few percent,
    the one that is fastest for a single stream, then the smaller k and the fewer sequences. None without figures.
    """
    wanted = concurrency or max(settings.concurrency, default=1)
    rated = {cell.name: rate for cell in cells if cell.error is None and (rate := rate_at(cell, wanted))}
    if not rated:
        return None
    best = max(rated.values())
    close = [cell for cell in cells if rated.get(cell.name, 0) >= (1 - CLOSE) * best]
    fastest = max(single_rate(cell) or 0 for cell in close)
    close = [cell for cell in close if (single_rate(cell) or 0) >= (1 - CLOSE) * fastest]
    chosen = min(close, key=lambda cell: (cell.k or 0, cell.max_num_seqs or 0))
    reasons = tuple(_reasons(chosen, cells, rated, wanted))
    return Recommendation(chosen, wanted, reasons, _command(chosen, settings))


def _reasons(chosen: Cell, cells: Sequence[Cell], rated: dict[str, float], wanted: int) -> list[str]:
    rate, best = rated[chosen.name], max(rated.values())
    at_once = "one stream" if wanted == 1 else f"{wanted} requests at once"
    first = f"{rate:.1f} tokens/s with {at_once}"
    first += ", the most of all cells." if rate == best else f", within {CLOSE:.0%} of the most ({best:.1f})."
    reasons = [first]
    plain = {cell.name: rated[cell.name] for cell in cells if cell.k == 0 and cell.name in rated}
    if chosen.k == 0:
        drafting = [rated[cell.name] for cell in cells if cell.k and cell.name in rated]
        if drafting:
            reasons.append(f"Speculation does not pay here: the best cell with drafts gives {max(drafting):.1f}.")
    elif plain:
        gain = rate / max(plain.values())
        beside = f"the best cell at k = 0 ({max(plain.values()):.1f})"
        reasons.append(
            f"{gain:.2f} times {beside}." if gain > 1 + CLOSE else f"No more than {beside}, but faster for one stream."
        )
    if length := acceptance(chosen):
        reasons.append(f"Acceptance length {length:.2f} of at most {(chosen.k or 0) + 1} on single streams.")
    return reasons + _warnings(chosen, cells)


def _warnings(chosen: Cell, cells: Sequence[Cell]) -> list[str]:
    """Where another cell is clearly better: for one stream, or in a domain."""
    found: list[str] = []
    busy = max((cell.busy_before or 0 for cell in cells), default=0)
    if busy > BUSY:
        found.append(f"Others used up to {busy:.0%} of the processor before a cell: differences may be noise.")
    rates = {cell.name: rate for cell in cells if (rate := single_rate(cell))}
    own = rates.get(chosen.name)
    if own and max(rates.values()) > (1 + CLOSE) * own:
        name = max(rates, key=lambda key: rates[key])
        other = next(cell for cell in cells if cell.name == name)
        found.append(
            f"For one stream alone k = {other.k} with --max-num-seqs {other.max_num_seqs} decodes faster: "
            f"{rates[name]:.1f} against {own:.1f} tokens/s."
        )
    for domain in sorted({one.domain for one in pick(chosen, "single")}):
        mine = single_rate(chosen, domain=domain)
        plain = max((single_rate(cell, domain=domain) or 0 for cell in cells if cell.k == 0), default=0)
        if chosen.k and mine and plain > (1 + CLOSE) * mine:
            found.append(f"On {domain} plain decoding is faster: {plain:.1f} against {mine:.1f} tokens/s.")
    return found


def _command(cell: Cell, settings: SweepSettings) -> str:
    """What to type. For an endpoint that was not ours to start there is nothing."""
    if settings.url is not None or cell.k is None:
        return ""
    words = ["pilotfish", "serve", settings.model, "--num-speculative-tokens", str(cell.k)]
    words += ["--max-num-seqs", str(cell.max_num_seqs)] if cell.max_num_seqs is not None else []
    return shlex.join([*words, *settings.server_flags])
