"""What a row must not show; each line makes the exit status 1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

SLOWER = 0.1
"""The share that the first request may take longer than the second."""


def complaints(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Tells of rounds without a graph where there are graphs, kernels compiled while requests waited, first requests
    that were slower than allowed, batches of which no round was timed, and turns of a conversation that read another
    number of tokens than the boundaries require: the row, what came and what is wanted. Rows of admissions have none of
    them."""
    found = []
    for row in rows:
        if "batch" in row:
            where = f"k = {row['k']}, batch {row['batch']}, context {row['context']}"
            found += [f"{where}: {complaint}" for complaint in _complaints(row)]
        elif "turn" in row:
            found += [f"k = {row['k']}, turn {row['turn']}: {complaint}" for complaint in _turn_complaints(row)]
    return found


def _turn_complaints(row: dict[str, Any]) -> Iterator[str]:
    if row["read"] != row["required"]:
        yield f"{row['read']} tokens of {row['prompt']} were read (want {row['required']})"
    if row["read"] + row["cached"] != row["prompt"]:
        yield f"{row['cached']} tokens are said to be cached (want {row['prompt'] - row['read']})"
    if row["num_compiled"]:
        yield f"{row['num_compiled']} kernels compiled while it waited (want 0)"
    if row.get("cold_read") not in (None, row["prompt"]):
        yield f"{row['cold_read']} tokens were read cold (want {row['prompt']})"


def _complaints(row: dict[str, Any]) -> Iterator[str]:
    if row["num_graphs"] and row["graph_misses"]:
        yield f"{row['graph_misses']} rounds had no graph (want 0 of them)"
    if row["num_compiled"]:
        yield f"{row['num_compiled']} kernels compiled while requests waited (want 0)"
    if row["round_ms"] is None:
        yield "no round of all sequences was timed, the first of them ended before (want more --tokens)"
    if row.get("first_request_ms") is None:
        return
    slower = row["first_request_ms"] / row["second_request_ms"] - 1
    if slower > SLOWER:
        yield (
            f"the first request took {row['first_request_ms']:.1f} ms, the second {row['second_request_ms']:.1f} ms "
            f"({slower:+.0%}, want at most {SLOWER:+.0%})"
        )
