"""What the prefix cache costs prompts that find nothing, and an admission that finds: whole engines, on and off.

    python tests/bench/bench_prefix_overhead.py --seconds 150

Regime: the demo model on a CPU, one thread, three engines over it in one process: one that keeps prompts and two that
do not, which differ by nothing and so show the spread of the measure itself. Each turn all three get the same new
prompts, with no common beginning, and read and answer them, in an order that is drawn; figures are medians over turns
of the seconds beside those of the first engine that keeps nothing. Limits: 1 % for prompts that find nothing, 1 ms for
an admission that finds its prompt's beginning. First what must hold: the three write the same tokens. The JSON line has
the quartiles too.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
from pathlib import Path
from time import perf_counter

import torch

from pilotfish.engine.check import driver
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.options import EngineOptions
from pilotfish.engine.start import make_core

DEMO = Path(__file__).resolve().parents[2] / "demo" / "model"
ON, OFF, OFF_TOO = "on", "off", "off too"
MAX_MODEL_LEN, PAGES_FOR = 8192, 16_384
LENGTHS, WRITTEN = (300, 560, 820, 1080), 8
"""Tokens of a turn's prompts, which are read beside each other, and written after each."""
WARM_UPS = 2
LONG = 8000
HITS = 30


def engine(model: Path, keeps: bool) -> EngineLoop:
    return make_core(
        EngineOptions(
            model=str(model),
            max_model_len=MAX_MODEL_LEN,
            kv_cache_tokens=PAGES_FOR,
            num_threads=1,
            enable_prefix_caching=keeps,
        )
    )


def answer(loop: EngineLoop, prompts: list[list[int]]) -> tuple[float, dict[str, list[int]]]:
    """Seconds until all prompts are read and answered, and what was written."""
    written: dict[str, list[int]] = {f"p{number}": [] for number in range(len(prompts))}
    began = perf_counter()
    driver.submit(loop, dict(zip(written, prompts, strict=True)), driver.greedy(WRITTEN))
    for report in driver.reports(loop):
        for output in report.outputs:
            written[output.request_id] += output.token_ids
    return perf_counter() - began, written


def compare(loops: dict[str, EngineLoop], seconds: float, generator: random.Random) -> dict[str, list[float]]:
    """Seconds of each turn by engine."""
    vocab_size = loops[ON].ready.vocab_size
    took: dict[str, list[float]] = {name: [] for name in loops}
    began, turn = perf_counter(), 0
    while perf_counter() - began < seconds or len(took[ON]) < 5:
        prompts = [generator.choices(range(vocab_size), k=length) for length in LENGTHS]
        texts = []
        for name in generator.sample(list(loops), len(loops)):
            gc.collect()
            spent, text = answer(loops[name], prompts)
            texts.append(text)
            if turn >= WARM_UPS:
                took[name].append(spent)
        assert all(text == texts[0] for text in texts), "engines write other tokens"
        turn += 1
    return took


def admissions(loop: EngineLoop, generator: random.Random) -> list[float]:
    """Seconds of the step's part that admits a request, for one whose prompt is kept; each adds some tokens to it."""
    prompt = generator.choices(range(loop.ready.vocab_size), k=LONG - HITS)
    answer(loop, [prompt])
    scheduler, spent = loop.scheduler, []
    admit = scheduler.admit

    def timed():
        began = perf_counter()
        admitted = admit()
        if admitted:
            spent.append(perf_counter() - began)
            assert admitted[0].num_cached == scheduler.grid.last_boundary(len(prompt) - 1), "nothing was found"
        return admitted

    scheduler.admit = timed  # type: ignore[method-assign]
    for _ in range(HITS):
        prompt = [*prompt, generator.randrange(loop.ready.vocab_size)]
        answer(loop, [prompt])
    del scheduler.admit  # type: ignore[method-assign]
    return spent


def ratios(took: dict[str, list[float]], name: str) -> list[float]:
    """The quartiles of an engine's seconds over those of the first that keeps nothing, turn by turn."""
    return statistics.quantiles(
        [mine / other for mine, other in zip(took[name], took[OFF], strict=True)], n=4, method="inclusive"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, default=DEMO)
    parser.add_argument("--seconds", type=float, default=150, help="how long the turns are compared")
    args = parser.parse_args()
    generator = random.Random(0)
    loops = {ON: engine(args.model, True), OFF: engine(args.model, False), OFF_TOO: engine(args.model, False)}
    took = compare(loops, args.seconds, generator)
    print(f"{len(took[ON])} turns of prompts of {LENGTHS} tokens that find nothing, {WRITTEN} written after each")
    for name, seconds in took.items():
        low, middle, high = ratios(took, name)
        print(
            f"{name:>8}: median {statistics.median(seconds):.3f} s; beside off {middle:.4f} ({low:.4f} .. {high:.4f})"
        )
    hits = admissions(loops[ON], generator)
    print(f"an admission that finds some {LONG} tokens: median {1e3 * statistics.median(hits):.2f} ms, of {len(hits)}")
    row = {
        "turns": len(took[ON]),
        "seconds": {name: statistics.median(seconds) for name, seconds in took.items()},
        "beside_off": {name: ratios(took, name) for name in (ON, OFF_TOO)},
        "admission_ms": [1e3 * part for part in statistics.quantiles(hits, n=4)],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
