"""What a round costs at each depth, number of sequences and context, timed on the loaded model.

A round at depth k must commit t(k) / t(0) tokens a sequence, the break-even, before speculation gains anything. Both
are whole engine steps, host work included, and at k = 0 the head is off, as in a server without one.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from pilotfish.engine.assemble import assemble
from pilotfish.engine.check import concurrency, driver
from pilotfish.engine.check.head_check import text_of
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.model.build import Model
from pilotfish.engine.plan import Plan, reserved_pages
from pilotfish.engine.round.shapes import Shape
from pilotfish.kernels.attention import PAGE, pages_for

ROUNDS, BLOCKS = 5, 3
"""Each depth is timed over BLOCKS times ROUNDS rounds, the depths in turn, so that all meet the same machine."""
WARM_UPS = 2
BOOT_SECONDS = 10.0
"""After so long a start begins with no further number of sequences: on a slow machine a table of a few is enough."""


@dataclass(frozen=True)
class Cost:
    """Median seconds of a round of `batch` sequences of about `context` tokens, with k drafts and without."""

    k: int
    batch: int
    context: int
    seconds: float
    plain_seconds: float

    @property
    def break_even(self) -> float:
        """Tokens that a round must commit to a sequence to be worth its time."""
        return self.seconds / self.plain_seconds


def room(depth: int, batch: int, context: int) -> int:
    """Tokens that a timed sequence may write: it goes on while the others' prompts are read, chunk by chunk."""
    return (WARM_UPS + ROUNDS + 2 + batch * pages_for(context)) * (depth + 1)


def fits(plan: Plan, batch: int, context: int) -> bool:
    """Whether the plan's caches hold the timed sequences."""
    tokens = context + room(plan.depth, batch, context)
    pages = batch * reserved_pages(tokens, plan.depth)
    return batch <= plan.max_num_seqs and tokens <= plan.max_model_len and pages <= plan.num_pages


@torch.inference_mode()
def measure(
    model: Model,
    plan: Plan,
    ids: Sequence[int],
    depths: Sequence[int],
    places: Iterable[tuple[int, int]],
    tell: Callable[[str], object] = lambda _: None,
    seconds: float = math.inf,
) -> list[Cost]:
    """Costs of each depth > 0 against 0, for every (batch, context) that fits. `ids` is text for the prompts; `tell`
    hears what is done, once for each block of a depth. What has not begun after `seconds` is left out, but for one
    block of the first place."""
    costs: list[Cost] = []
    over = perf_counter() + seconds
    for batch, context in places:
        if costs and perf_counter() > over:
            break
        loops = {depth: _loop(model, plan, depth, batch) for depth in (0, *depths)}
        times: dict[int, list[float]] = {depth: [] for depth in loops}
        for block in range(BLOCKS):
            if block and perf_counter() > over:
                break
            for depth, loop in loops.items():
                times[depth] += _timed(loop, _prompts(ids, batch, context), depth)
                tell(f"{batch} at once, {context} tokens, k = {depth}")
        # their buffers and graphs go before the next ones are made
        loops.clear()
        medians = {depth: statistics.median(found) for depth, found in times.items()}
        costs += [Cost(depth, batch, context, medians[depth], medians[0]) for depth in depths]
    return costs


def _loop(model: Model, plan: Plan, depth: int, batch: int) -> EngineLoop:
    """An engine in which rounds of `batch` sequences are captured where the plan's rounds are, and nothing else is."""
    alone = dataclasses.replace(plan, depth=depth, max_num_seqs=batch, captured=False, num_snapshots=0)
    engine = assemble(model, alone, batch, 0, 0.0)
    if plan.captured:
        engine.executor.capture([Shape(batch, depth)], progress=False, prompts=False)
    return EngineLoop(engine)


def _prompts(ids: Sequence[int], batch: int, context: int) -> list[list[int]]:
    """Text for each sequence from a place of its own, over and over until it is long enough."""
    repeated = [*ids] * (2 + context // len(ids))
    return [repeated[b * len(ids) // batch :][:context] for b in range(batch)]


def _timed(loop: EngineLoop, prompts: list[list[int]], depth: int) -> list[float]:
    """Seconds of ROUNDS steps in a row that each ran one round of all sequences."""
    named = {str(number): prompt for number, prompt in enumerate(prompts)}
    driver.submit(loop, named, driver.greedy(room(depth, len(prompts), len(prompts[0]))))
    driver.step_until_all_write(loop, named)
    times = driver.seconds_of_steps(loop, WARM_UPS, ROUNDS)
    driver.drain(loop, named)
    return times


def of_served(loop: EngineLoop, seconds: Mapping[int, float], text: Sequence[int]) -> list[Cost]:
    """Costs of the served depth over rounds of fixed shapes, whose `seconds` by number of sequences are known: only
    rounds at k = 0 are timed, on the same engine, whose head rests in them. `text` may be empty."""
    assert loop.executor.ops.fixed_shapes
    plain = concurrency.round_seconds(loop, text or concurrency.any_text(loop), depth=0)
    return [
        Cost(loop.depth, count, concurrency.CONTEXT, seconds[count], took)
        for count, took in plain.items()
        if count in seconds
    ]


def at_boot(model: Model, plan: Plan, folder: Path) -> list[Cost]:
    """Costs of the served depth, over a text where the checkpoint has a tokenizer: for one sequence, two, four, .. and
    as many as may run, at a quarter of a page of context or less: on a CPU prompts would take longer than rounds."""
    counts = sorted({1 << n for n in range(plan.max_num_seqs.bit_length())} | {plan.max_num_seqs})
    for context in (PAGE // 4, PAGE // 16):
        places = [(count, context) for count in counts if fits(plan, count, context)]
        if places:
            vocab_size = model.config.vocab_size
            ids = text_of(folder, vocab_size, PAGE) or driver.filler(vocab_size, PAGE)
            return measure(model, plan, ids, [plan.depth], places, seconds=BOOT_SECONDS)
    return []
