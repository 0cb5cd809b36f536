"""The first request at each k and number of sequences against the second: once ready, nothing may be left to set up."""

from __future__ import annotations

from typing import Any

from pilotfish.engine.bench.measure import run_batch
from pilotfish.engine.loop import EngineLoop

NUM_TOKENS = 32


def first_and_second(loop: EngineLoop, prompts: list[list[int]], num_tokens: int, seed: int) -> dict[str, Any]:
    """Milliseconds of the same batch of short requests twice, from the first one's arrival to the last one's end, and
    how many kernels each compiled."""
    first, second = (run_batch(loop, prompts, min(num_tokens, NUM_TOKENS), seed) for _ in range(2))
    return {
        "first_request_ms": 1e3 * first.seconds,
        "second_request_ms": 1e3 * second.seconds,
        "num_compiled": first.num_compiled + second.num_compiled,
    }
