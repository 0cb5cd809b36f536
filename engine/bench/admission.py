"""How long running streams wait for their next token while a long prompt is read, by the scheduler that serves.

Steps of a prompt and rounds take turns, so the longest wait is about the most steps between two rounds, and a round;
what a client would see is measured, from one report with tokens to the next.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

import torch

from pilotfish.engine.bench.measure import random_prompts
from pilotfish.engine.bench.oracle import Oracle
from pilotfish.engine.cache.grid import Grid
from pilotfish.engine.check import driver
from pilotfish.engine.config import ModelConfig
from pilotfish.engine.errors import PilotfishError
from pilotfish.engine.loop import EngineLoop

STREAMS = 4
SETTLE = 16
"""Rounds of the streams before the prompt arrives, of which the first few are not timed."""
WARM_UPS = 4
LONG = "long"


@dataclass(frozen=True)
class AdmissionTimes:
    """Seconds. `gap`: the longest between two reports with tokens of one stream, from the prompt's arrival to its first
    token. `round`: median between the streams' reports before it. `chunks`: of the prompt alone, each waited for.
    `first_token`, `first_token_alone`: from the prompt's arrival, beside the streams and without them."""

    gap: float
    round: float
    chunks: list[float]
    first_token: float
    first_token_alone: float

    def as_row(self) -> dict[str, float]:
        """Milliseconds, for a table or a line of JSON."""
        return {
            "largest_gap_ms": 1e3 * self.gap,
            "round_ms": 1e3 * self.round,
            "chunk_ms": 1e3 * statistics.median(self.chunks),
            "largest_chunk_ms": 1e3 * max(self.chunks),
            "first_token_ms": 1e3 * self.first_token,
            "first_token_alone_ms": 1e3 * self.first_token_alone,
        }


def stream_tokens(depth: int, context: int, length: int, grid: Grid, config: ModelConfig) -> int:
    """Tokens that outlast a prompt of `length`, whatever is accepted, and wherever it and the streams' own prompts of
    `context` pause."""
    chunks = STREAMS * grid.num_chunks(context) + grid.num_chunks(length)
    # a chunk may pause after each step (uncaptured, those of PromptPass are layers and what is left before a full
    # attention), and before what follows; then comes a round of its own
    rounds_of_chunk = len(config.layer_types) + len(config.full_layers) + 5
    return (SETTLE + chunks * rounds_of_chunk + 8) * (depth + 1)


def measure_admission(loop: EngineLoop, context: int, length: int) -> AdmissionTimes:
    """A prompt of `length` tokens beside STREAMS of `context`. Raises PilotfishError if a stream ends too early."""
    vocab_size = loop.ready.vocab_size
    (prompt,) = random_prompts(1, length, vocab_size)
    streams = random_prompts(STREAMS, context, vocab_size)
    oracle = loop.executor.state.oracle
    if isinstance(oracle, Oracle):
        # what is drafted does not matter here
        for text in (prompt, *streams):
            oracle.tell(text, [0])
    _read(loop, prompt, wait=True)
    chunks = _read(loop, prompt, wait=True)
    alone = sum(_read(loop, prompt, wait=False))
    gap, usual, first = _beside(loop, prompt, streams)
    return AdmissionTimes(gap, usual, chunks, first, alone)


def _step(loop: EngineLoop, times: dict[str, list[float]]) -> None:
    """One step; notes for every request that got tokens when it did."""
    outputs = driver.step(loop)
    now = perf_counter()
    for output in outputs:
        if output.token_ids:
            times[output.request_id].append(now)


def _read(loop: EngineLoop, prompt: list[int], wait: bool) -> list[float]:
    """Seconds of each chunk of a prompt that is read alone, or of two that are read together, the first token of the
    last one with it; `wait`: for the device, too, after each one."""
    driver.submit(loop, {LONG: prompt}, driver.greedy(1))
    times: dict[str, list[float]] = {LONG: []}
    seconds = []
    while not times[LONG]:
        began = perf_counter()
        _step(loop, times)
        if wait and loop.executor.model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(perf_counter() - began)
    driver.drain(loop)
    last = loop.scheduler.num_steps(len(prompt)) - 1
    return [*seconds[:last], sum(seconds[last:])]


def _beside(loop: EngineLoop, prompt: list[int], streams: list[list[int]]) -> tuple[float, float, float]:
    """The longest gap, the usual one, and the time to the prompt's first token."""
    grid, config = loop.scheduler.grid, loop.executor.model.config
    num_tokens = stream_tokens(loop.depth, len(streams[0]), len(prompt), grid, config)
    names = [f"s{number}" for number in range(len(streams))]
    times: dict[str, list[float]] = {name: [] for name in (*names, LONG)}
    driver.submit(loop, dict(zip(names, streams, strict=True)), driver.greedy(num_tokens))
    while not all(times[name] for name in names):
        _step(loop, times)
    settled = {name: len(times[name]) for name in names}
    for _ in range(SETTLE):
        _step(loop, times)
    usual = [b - a for name in names for a, b in pairwise(times[name][settled[name] + WARM_UPS :])]
    before = {name: len(times[name]) for name in names}
    arrived = perf_counter()
    driver.submit(loop, {LONG: prompt}, driver.greedy(2))
    while not times[LONG]:
        _step(loop, times)
    # the wait that the last chunk began ends with the next round
    ends = {name: len(times[name]) for name in names}
    while loop.has_work() and any(len(times[name]) == ends[name] for name in names):
        _step(loop, times)
    if any(len(times[name]) == ends[name] for name in names):
        raise PilotfishError(f"admission: a stream of {num_tokens} tokens ended before the prompt was read")
    gap = max(b - a for name in names for a, b in pairwise(times[name][before[name] - 1 : ends[name] + 1]))
    driver.drain(loop, (*names, LONG))
    return gap, statistics.median(usual), times[LONG][0] - arrived
