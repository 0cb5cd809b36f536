"""What the prefix cache costs the host: an admission that hits, a chunk of a prompt that does not.

    python tests/bench/bench_prefix_cache.py --snapshots 64,400,1024

Regime: a scheduler without a device, the grid of a GPU, prompts of random ids; snapshots are all taken, so each chunk
must find one to give up. An agent's turns of 32 k tokens hit, prompts of 8 k that nobody asked before do not. The
limits: under 1 ms an admission that hits, under 1 % of a chunk (28 ms for 1 024 tokens of the 35B-A3B on an H200).
First what must hold: every turn hits the last boundary of the one before. CPU time of one thread, median and 95th
percentile in microseconds; one JSON line a row.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
from collections import defaultdict
from time import thread_time

from pilotfish.engine.cache.grid import Grid
from pilotfish.engine.cache.pool import Pool
from pilotfish.engine.cache.prefix import PrefixCache, PrefixSizes
from pilotfish.engine.link.messages import SamplingParams, Submit
from pilotfish.engine.requests.scheduler import PrefillStep, Scheduler
from pilotfish.engine.requests.sequence import Sequence

GRID = Grid(2048, 256)
NUM_PAGES = 16_000
SIZES = 61 << 20, 6 << 20
"""Bytes of a snapshot and of a page, about the 35B-A3B's."""
COLD, COLD_TOKENS = 400, 8_200
TURNS, FIRST_TURN, GROWTH = 50, 30_000, 50
VOCAB_SIZE = 248_320


class Clock:
    """Seconds of CPU by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def time(self, part: str, began: float) -> None:
        self.seconds[part].append(thread_time() - began)

    def row(self) -> dict[str, dict[str, float]]:
        """Median and 95th percentile, microseconds."""
        return {
            part: {"median_us": 1e6 * statistics.median(found), "p95_us": 1e6 * statistics.quantiles(found, n=20)[-1]}
            for part, found in self.seconds.items()
        }


def read(scheduler: Scheduler, prompt: list[int], clock: Clock) -> int:
    """One prompt from its admission to its end; the tokens of it that were found."""
    request = Submit(request_id="r", prompt_token_ids=prompt, sampling=SamplingParams())
    sequence = Sequence(request, len(prompt) + 100, 3, -(-(len(prompt) + 104) // GRID.page))
    scheduler.add(sequence)
    began = thread_time()
    scheduler.admit()
    clock.time("admission", began)
    while not sequence.is_prefilled:
        began = thread_time()
        step = scheduler.next_step()
        assert isinstance(step, PrefillStep)
        sequence.take_restore()
        sequence.num_prefilled = step.end
        scheduler.prefix.publish(sequence)
        clock.time("chunk", began)
    scheduler.finish(sequence)
    scheduler.check()
    return sequence.num_cached


def measure(num_snapshots: int) -> dict[str, object]:
    generator = random.Random(0)
    pages, slots = Pool("KV pages", NUM_PAGES + 1), Pool("state slots", 5)
    prefix = PrefixCache(GRID, pages, PrefixSizes(num_snapshots, *SIZES))
    scheduler = Scheduler(pages, slots, 4, 100, GRID, prefix)
    cold, warm = Clock(), Clock()
    for _ in range(COLD):
        assert read(scheduler, generator.choices(range(VOCAB_SIZE), k=COLD_TOKENS), cold) == 0
    prompt = generator.choices(range(VOCAB_SIZE), k=FIRST_TURN)
    read(scheduler, prompt, cold)
    for _ in range(TURNS):
        before = GRID.last_boundary(len(prompt))
        prompt = [*prompt, *generator.choices(range(VOCAB_SIZE), k=GROWTH)]
        assert read(scheduler, prompt, warm) == before
    return {
        "snapshots": num_snapshots,
        "evictions": prefix.tree.num_evictions,
        "cold": cold.row(),
        "hit": warm.row(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--snapshots", default="64,400,1024", help="numbers of snapshots, with commas")
    args = parser.parse_args()
    for number in map(int, args.snapshots.split(",")):
        row = measure(number)
        for kind in ("cold", "hit"):
            parts = ", ".join(f"{p} {t['median_us']:.0f} us (95 %: {t['p95_us']:.0f})" for p, t in row[kind].items())  # type: ignore[attr-defined]
            print(f"{number} snapshots, {kind}: {parts}")
        print(json.dumps(row | {"python": platform.python_version(), "machine": platform.machine()}))


if __name__ == "__main__":
    main()
