"""The first request at each k and number of sequences against the second: once ready, nothing may be left to set up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pilotfish.engine.bench.measure import run_batch
from pilotfish.engine.loop import EngineLoop

NUM_TOKENS = 32
SLOWER = 0.1
"""The share that the first may take longer than the second."""


def first_and_second(loop: EngineLoop, prompts: list[list[int]], num_tokens: int, seed: int) -> dict[str, Any]:
    """Milliseconds of the same batch of short requests twice, from the first one's arrival to the last one's end, and
    how many kernels each compiled."""
    first, second = (run_batch(loop, prompts, min(num_tokens, NUM_TOKENS), seed) for _ in range(2))
    return {
        "first_request_ms": 1e3 * first.seconds,
        "second_request_ms": 1e3 * second.seconds,
        "num_compiled": first.num_compiled + second.num_compiled,
    }


def complaints(rows: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each row whose first request was slower than allowed, or compiled a kernel."""
    found = []
    for row in rows:
        if row.get("first_request_ms") is None:
            continue
        slower = row["first_request_ms"] / row["second_request_ms"] - 1
        if slower > SLOWER or row["num_compiled"]:
            found.append(
                f"first request at k = {row['k']}, batch {row['batch']}, context {row['context']}: "
                f"{row['first_request_ms']:.1f} ms, the second {row['second_request_ms']:.1f} ms ({slower:+.0%}, want "
                f"at most {SLOWER:+.0%}), {row['num_compiled']} kernels compiled (want 0)"
            )
    return found
