"""Prompts as a server reads them: the first token alone and of many at once, and what running streams wait beside one.

    python tests/bench/bench_prompts.py Qwen3.6-35B-A3B --load-format dummy --kernels fused --device cuda
    python tests/bench/bench_prompts.py demo/model --lengths 16,64 --many 4x16 --long 128

Regime: one engine at k = 3, captured, prompts of random tokens. The limits are the products of a prompt at the device's
bf16 rate (35B-A3B 8 ms for 1 024 tokens, 27B 70) and, below some hundred tokens, one read of all packed weights. First
what must hold: beside streams, pausing after every step and as served, the long prompt's logits have the bits that they
have alone.
One JSON line a row; `idle` is the share of a prompt's time in which no kernel runs, which is the host's. Where pieces
are read in pairs they are read one by one too, in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from pilotfish.engine.bench import command, flags
from pilotfish.engine.bench.admission import STREAMS, measure_admission
from pilotfish.engine.bench.measure import random_prompts
from pilotfish.engine.bench.profile import profile_prompt
from pilotfish.engine.check import driver
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.model.build import build_model
from pilotfish.engine.round.reading import FIRST, Once

DEPTH = 3
TIMES = 3
MANY_STEPS = 1 << 20


def first_tokens(loop: EngineLoop, prompts: list[list[int]]) -> float:
    """Seconds until every one of these prompts, which arrive together, has its first token."""
    named = {f"p{number}": prompt for number, prompt in enumerate(prompts)}
    began = perf_counter()
    driver.submit(loop, named, driver.greedy(2))
    waiting = set(named)
    while waiting:
        waiting -= {output.request_id for output in driver.step(loop) if output.token_ids}
    seconds = perf_counter() - began
    driver.drain(loop)
    return seconds


def beside(
    loop: EngineLoop, context: int, length: int, steps: int | None
) -> tuple[dict[str, float], list[torch.Tensor]]:
    """Times beside streams, a piece pausing after so many steps (None: as the engine would), and the logits of the long
    prompt's first token each time that it was read."""
    executor, found = loop.executor, []
    run_once: Callable[[Once], None] = executor.run_once

    def watched(once: Once) -> None:
        run_once(once)
        if once.part == FIRST:
            found.append(executor.body.buffers.logits[0].clone())

    executor.run_once = watched  # type: ignore[method-assign]
    loop.pauses_after = steps
    try:
        return measure_admission(loop, context, length).as_row(), found
    finally:
        del executor.run_once
        loop.pauses_after = None


def check_bits(loop: EngineLoop, context: int, length: int) -> None:
    """The long prompt is read three times alone, then, after the streams, beside them."""
    for steps in (1, None):
        _, found = beside(loop, context, length, steps)
        alone, (last,) = found[:3], found[-1:]
        assert len(found) == 4 + STREAMS, len(found)
        assert all(torch.equal(logits, last) for logits in alone), "a prompt that paused has other logits"


def measure(args: argparse.Namespace, bench: argparse.Namespace, say: Callable[..., None]) -> None:
    config, weights, _ = command._weights(bench)
    plan = command._plan(bench, config)
    model = build_model(weights, config, plan.cache_sizes, plan.dtype, plan.device, plan.fused)
    loop = command._loop(bench, model, plan, DEPTH)
    vocab_size, executor = loop.ready.vocab_size, loop.executor
    graphs = {"num_graphs": executor.num_graphs, "prompt_graphs": executor.prompt_graphs.counts.number}
    memory = {"graph_bytes": executor.graph_bytes, "prompt_bytes": executor.prompt.num_bytes}
    say("start", **executor.start_seconds, **graphs, **memory)
    say("steps", ms={rows: 1e3 * seconds for rows, seconds in executor.prompt.step_seconds.items()})
    context = min(args.lengths)
    check_bits(loop, context, args.long)
    say("bits", equal=True)
    for length in args.lengths:
        prompts = [random_prompts(1, length + number, vocab_size)[0][:length] for number in range(TIMES + 1)]
        ways = (True, False) if loop.scheduler.pairs else (False,)
        spent: dict[bool, list[float]] = {pairs: [] for pairs in ways}
        for number, prompt in enumerate(prompts):
            for pairs in ways:
                loop.scheduler.pairs = pairs
                seconds = first_tokens(loop, [prompt])
                # the first one is to warm up
                spent[pairs] += [seconds] if number else []
        loop.scheduler.pairs = ways[0]
        for pairs, times in spent.items():
            say("first", tokens=length, pairs=pairs, ms=1e3 * statistics.median(times), best=1e3 * min(times))
    count, length = args.many
    for _ in range(2):
        say(
            "many", prompts=count, tokens=length, ms=1e3 * first_tokens(loop, random_prompts(count, length, vocab_size))
        )
    for name, steps in (("paused", None), ("whole", MANY_STEPS)):
        say("beside", pieces=name, streams=STREAMS, tokens=args.long, **beside(loop, context, args.long, steps)[0])
    if plan.device.type == "cuda":
        for length in args.lengths[:2]:
            found = profile_prompt(loop, random_prompts(1, length, vocab_size)[0])
            say("profile", **{name: found.get(name) for name in ("tokens", "launches", "gpu_us", "gpu_idle_share")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lengths", type=_numbers(","), default=[256, 1024, 8192], help="default: 256,1024,8192")
    parser.add_argument("--many", type=_numbers("x"), default=[16, 256], metavar="COUNTxTOKENS", help="default: 16x256")
    parser.add_argument("--long", type=int, default=8192)
    args, rest = parser.parse_known_args()
    shape = [f"--k={DEPTH}", f"--batch={args.many[0]}", f"--context={max(args.lengths)}", f"--admission={args.long}"]
    bench = flags.parse([args.model, *shape, "--tokens=64", *rest])
    began = perf_counter()

    def say(kind: str, **row: Any) -> None:
        print(
            json.dumps({"kind": kind, "model": args.model, "at": round(perf_counter() - began, 1), **row}), flush=True
        )

    with torch.inference_mode():
        measure(args, bench, say)


def _numbers(separator: str) -> Callable[[str], list[int]]:
    return lambda text: [int(part) for part in text.split(separator)]


if __name__ == "__main__":
    main()
