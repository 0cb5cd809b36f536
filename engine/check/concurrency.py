"""How many sequences are worth running at once: rounds timed at the start, over the number of sequences.

Tokens a second grow with it as long as a round costs less than in proportion; what each sequence gets shrinks. The
default cap follows doublings as long as each adds a quarter.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from pilotfish.engine.assemble import Engine
from pilotfish.engine.check import driver
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.plan import MEASURED, reserved_pages
from pilotfish.kernels.attention import PAGE

logger = logging.getLogger(__name__)

GAIN = 1.25
"""What a doubling must multiply tokens a second by to be worth it."""
ROUNDS, WARM_UPS = 5, 2
CONTEXT = PAGE // 16


def worth_running(seconds: Mapping[int, float]) -> int:
    """The number of sequences, of those whose rounds took `seconds`, up to which every doubling multiplied tokens a
    second by GAIN, or by as much less where the last step is less than a doubling."""
    counts = sorted(seconds)
    found = counts[0]
    for before, after in pairwise(counts):
        gain = after / seconds[after] / (before / seconds[before])
        if gain < GAIN ** math.log2(after / before):
            break
        found = after
    return found


def capped(engine: Engine, loop: EngineLoop, text: Sequence[int]) -> Engine:
    """The engine with the cap that its own rounds, over `loop`, say, or as it was where none can be timed; what was
    allocated stays. `text` may be empty."""
    seconds = round_seconds(loop, text or any_text(loop))
    ready, plan = engine.ready, engine.plan
    assert ready.execution is not None and plan is not None
    cap = worth_running(seconds) if seconds else ready.max_num_seqs
    for count, took in seconds.items():
        rate = f"{count / took:.0f} sequences' rounds a second"
        logger.info("%d at once: a round takes %.2f ms, %s%s", count, 1e3 * took, rate, " <-" * (count == cap))
    binding = MEASURED if cap < ready.max_num_seqs else "captured graphs"
    why = (
        f"another doubling must add {100 * (GAIN - 1):.0f} %" if seconds else "the context is too short to time rounds"
    )
    logger.info("max_num_seqs: %d, set by %s: %s", cap, binding, why)
    engine.scheduler.max_num_seqs = cap
    ready = msgspec.structs.replace(
        ready,
        max_num_seqs=cap,
        binding_limit=binding,
        limits=ready.limits | ({MEASURED: cap} if seconds else {}),
        execution=msgspec.structs.replace(ready.execution, round_seconds=seconds),
    )
    plan = dataclasses.replace(plan, max_num_seqs=cap, binding_limit=binding)
    return dataclasses.replace(engine, ready=ready, plan=plan)


def round_seconds(loop: EngineLoop, text: Sequence[int], depth: int | None = None) -> dict[int, float]:
    """Median seconds of a whole engine step over one sequence, two, four, .. and as many as may run, each at k =
    `depth` (None: the served one) and a short context; as far as the pages hold them, and none where the longest
    context is shorter than what the first one writes meanwhile. Sequences join those that run."""
    ready, served = loop.ready, loop.ready.num_speculative_tokens
    depth = served if depth is None else depth
    counts = sorted({1 << n for n in range(ready.max_num_seqs.bit_length())} | {ready.max_num_seqs})
    room = {count: _room(count, len(counts), depth) for count in counts}
    if CONTEXT + room[counts[-1]] > ready.max_model_len:
        return {}
    counts = [n for n in counts if n * reserved_pages(CONTEXT + room[n], served) <= ready.kv_pages_total]
    names: list[str] = []
    found: dict[int, float] = {}
    try:
        for count in counts:
            added = {f"timed-{n}": _prompt(text, n) for n in range(len(names), count)}
            names += added
            driver.submit(loop, added, driver.greedy(room[counts[-1]]), depth)
            driver.step_until_all_write(loop, added)
            if len(loop.scheduler.running) < count:
                break
            found[count] = _timed(loop)
    finally:
        driver.drain(loop, names)
    return found


def any_text(loop: EngineLoop) -> list[int]:
    """Tokens of prompts to be timed with, where there is no text."""
    return driver.filler(loop.ready.vocab_size, CONTEXT)


def _room(count: int, num_counts: int, depth: int) -> int:
    """Tokens that the first of so many sequences may write while others are read and rounds are timed."""
    return (2 * count + (WARM_UPS + ROUNDS + 2) * num_counts) * (depth + 1)


def _prompt(text: Sequence[int], number: int) -> list[int]:
    start = number * CONTEXT % len(text)
    return [*text[start:], *text, *text][:CONTEXT]


def _timed(loop: EngineLoop) -> float:
    return statistics.median(driver.seconds_of_steps(loop, WARM_UPS, ROUNDS))
