"""Runs batches of equal shape through an engine and times them: prompt, then rounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import torch

from pilotfish.engine.check import driver
from pilotfish.engine.link.messages import StepReport
from pilotfish.engine.loop import EngineLoop

WARM_UP_ROUNDS = 4
SETTLE = 4
"""Rounds of a live batch before anyone looks at it."""
ROUNDS_BEHIND = 2
"""Rounds that are launched and not yet read, beyond those that were looked at."""


@dataclass(frozen=True)
class Case:
    """A batch to be measured."""

    depth: int
    batch: int
    context: int


@dataclass
class Run:
    """One batch. `texts`: what each request wrote. Times are the host's: `seconds` from the first request's arrival to
    the last one's end; a round's from one report to the next, the first rounds left out, and those in which a request
    ended; `timed`: when the first of these began and the last one ended, by perf_counter. `num_compiled`: kernels that
    it had to wait for. `graph_hits`: rounds read that were replayed; `graph_misses`: those launched for which there was
    no graph.

    `rounds` and `accepted` are of rounds that offered all drafts: near a request's limit there are fewer, and a short
    text's acceptance length would come out too small."""

    batch: int
    depth: int
    seconds: float = 0.0
    first_token_seconds: float = 0.0
    num_compiled: int = 0
    texts: dict[str, list[int]] = field(default_factory=dict)
    round_seconds: list[float] = field(default_factory=list)
    timed: tuple[float, float] = (0.0, 0.0)
    host_seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    accepted: int = 0
    accepted_counts: dict[int, int] = field(default_factory=dict)
    rounds: int = 0
    graph_hits: int = 0
    graph_misses: int = 0

    @property
    def acceptance_length(self) -> float | None:
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def round_ms(self) -> float | None:
        """None where the tokens did not reach to a round of all sequences that is timed."""
        return 1e3 * statistics.median(self.round_seconds) if self.round_seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of all sequences together, over whole rounds."""
        return sum(self.tokens) / sum(self.round_seconds) if self.round_seconds else None


def run_batch(loop: EngineLoop, prompts: list[list[int]], num_tokens: int, seed: int, *, pauses: bool = True) -> Run:
    """Decodes `num_tokens` of each prompt, greedily, to the limit. Without `pauses` a prompt's chunk is read at once,
    and one round of the sequences that have begun follows it, not as many as it takes time for."""
    run = Run(len(prompts), loop.depth)
    loop.pauses_after = None if pauses else loop.UNBROKEN
    missed = loop.executor.num_missed
    named = {f"b{number}": prompt for number, prompt in enumerate(prompts)}
    run.texts = {name: [] for name in named}
    began = last = perf_counter()
    driver.submit(loop, named, driver.greedy(num_tokens, seed))
    seen = 0
    for report in driver.reports(loop):
        now = perf_counter()
        run.num_compiled += report.stats.num_compiled
        outputs = [output for output in report.outputs if output.round]
        _collect(run, report)
        if all(run.texts.values()) and not run.first_token_seconds:
            run.first_token_seconds = now - began
        elif len(outputs) == len(prompts):
            seen += 1
            if seen > WARM_UP_ROUNDS and not any(output.finish_reason for output in outputs):
                run.timed = run.timed[0] or last, now
                run.round_seconds.append(now - last)
                run.tokens.append(sum(len(output.token_ids) for output in outputs))
                run.host_seconds.append(report.stats.phases.get("launch", 0.0))
        last = now
    loop.pauses_after = None
    run.seconds = last - began
    run.graph_misses = loop.executor.num_missed - missed
    return run


def _collect(run: Run, report: StepReport) -> None:
    for output in report.outputs:
        run.texts[output.request_id] += output.token_ids
        if output.round:
            if output.num_drafted == run.depth:
                run.rounds += 1
                run.accepted += output.num_accepted
            run.accepted_counts[output.num_accepted] = run.accepted_counts.get(output.num_accepted, 0) + 1
    if any(output.round for output in report.outputs):
        run.graph_hits += report.stats.graph


def live_tokens(num_rounds: int, depth: int, num_prompts: int, chunks: int) -> int:
    """Tokens that outlast so many rounds of a live batch and those around them, whatever is accepted: one between two
    chunks of the prompts, too, for those that have been read already."""
    return (num_prompts * chunks + SETTLE + num_rounds + ROUNDS_BEHIND) * (depth + 1)


@contextmanager
def live_batch(loop: EngineLoop, prompts: list[list[int]], num_rounds: int) -> Iterator[None]:
    """All prompts have been read, some rounds have run, and `num_rounds` more can before a request ends. They are
    aborted afterwards: what has been committed by then need not be what the loop has read."""
    chunks = loop.scheduler.grid.num_chunks(max(map(len, prompts)))
    num_tokens = live_tokens(num_rounds, loop.depth, len(prompts), chunks)
    named = {f"live{number}": prompt for number, prompt in enumerate(prompts)}
    # a chunk that pauses would let more rounds run than the one before it
    loop.pauses_after = loop.UNBROKEN
    driver.submit(loop, named, driver.greedy(num_tokens))
    settled = 0
    try:
        while settled < SETTLE:
            outputs = driver.step(loop)
            assert not any(output.finish_reason for output in outputs), f"a request of {num_tokens} tokens has ended"
            settled += len([output for output in outputs if output.round]) == len(prompts)
        yield
    finally:
        loop.pauses_after = None
        driver.drain(loop, named)


def read_prompt(loop: EngineLoop, prompt: list[int]) -> None:
    """A request for one token, from its arrival until the engine is idle."""
    driver.submit(loop, {"prompt": prompt}, driver.greedy(1))
    for _ in driver.reports(loop):
        pass


def random_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Different ones, the same every time."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, vocab_size, (count, length), generator=generator).tolist()
