"""What a trace of the GPU says of a batch's rounds and of a prompt: launches, how long nothing runs, and which kernels
the time goes to.

A kernel that waits for the one before it (programmatic dependent launch) counts as running, so the lengths of kernels
add up to more than the time they took. Here each instant belongs to one kernel: of those that run, the one that ends
next. Times of kernels and the time in which none runs then add up to the whole, with and without such launches.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from pilotfish.engine.bench.measure import Case, live_batch, random_prompts, read_prompt
from pilotfish.engine.loop import EngineLoop

ROUNDS = 16
LONGEST = 15
"""Kernels, places of them, and calls of the driver that are named."""
FEW, MOST = 0.1, 0.9
"""Shares of a place's launches that take no longer than its `low_us` and `high_us`."""

Interval = tuple[float, float, str]
"""Begin and end of a kernel in microseconds, and its name."""


def profile(loop: EngineLoop, case: Case) -> dict[str, Any]:
    """`round`: of a batch's rounds as they are served, launches and microseconds of one; `prompt`: of one of its
    prompts read alone."""
    prompts = random_prompts(case.batch, case.context, loop.ready.vocab_size)
    with live_batch(loop, prompts, ROUNDS):
        found = traced(lambda: [loop.step() for _ in range(ROUNDS)], ROUNDS)
    return {"round": found, "prompt": profile_prompt(loop, prompts[0])}


def profile_prompt(loop: EngineLoop, prompt: list[int]) -> dict[str, Any]:
    """What the device does from a prompt's arrival to its first token, and its first drafts where there are any."""
    read_prompt(loop, prompt)
    found = traced(lambda: read_prompt(loop, prompt), 1)
    return {"tokens": len(prompt), "chunks": loop.scheduler.grid.num_chunks(len(prompt)), **found}


def traced(work: Callable[[], object], times: int) -> dict[str, Any]:
    """What the GPU does in `work`, and what the host asks the driver for, each divided by `times`."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as trace:
        work()
        torch.cuda.synchronize()
    spans, calls = [], []
    for event in trace.events():
        span = (event.time_range.start, event.time_range.end, event.name)
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.append(span)
        elif event.name.startswith(("cuda", "cu")):
            calls.append(span)
    if not spans:
        return {"nothing": "the profiler saw no kernel"}
    return summary(spans, times) | {"driver_calls": _calls(calls, times)}


def summary(spans: Iterable[Interval], times: int) -> dict[str, Any]:
    """Launches, microseconds from the first kernel's begin to the last one's end, the share of them in which none
    runs, the kernels that take most: their own microseconds and launches; and the same by place."""
    ordered = sorted(spans, key=lambda span: span[1])
    own, whole = own_times(ordered)
    names = [name for _, _, name in ordered]
    number = Counter(names)
    total: dict[str, float] = defaultdict(float)
    for name, spent in zip(names, own, strict=True):
        total[name] += spent
    return {
        "launches": len(ordered) / times,
        "gpu_us": whole / times,
        "gpu_idle_share": 1 - sum(own) / whole,
        "kernels": [
            {"name": name, "us": spent / times, "launches": number[name] / times} for name, spent in _largest(total)
        ],
        "places": places(names, own, times),
    }


def own_times(ordered: list[Interval]) -> tuple[list[float], float]:
    """What spans sorted by their end come to: the time that is each one's own, and the time from first to last."""
    # of the kernels that end no sooner than this one: when the first of them began
    begun = list(accumulate((begin for begin, _, _ in reversed(ordered)), min))[::-1]
    own = []
    reached = begun[0]
    for first, (_, end, _) in zip(begun, ordered, strict=True):
        own.append(end - max(reached, first))
        reached = end
    return own, reached - begun[0]


def places(names: list[str], own: list[float], times: int) -> list[dict[str, Any]]:
    """Launches of one kernel between the same two others, those that take most: their own microseconds and how far
    these lie apart. A product whose own time depends on where in a round it stands shows here and nowhere else."""
    found: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for number in range(1, len(names) - 1):
        found[tuple(names[number - 1 : number + 2])].append(own[number])
    lines = []
    for (before, name, after), spent in sorted(found.items(), key=lambda item: -sum(item[1]))[:LONGEST]:
        ordered = sorted(spent)
        low, middle, high = (ordered[int(share * (len(ordered) - 1))] for share in (FEW, 0.5, MOST))
        place = {"before": before, "name": name, "after": after, "us": sum(spent) / times}
        lines.append(place | {"launches": len(spent) / times, "low_us": low, "median_us": middle, "high_us": high})
    return lines


def _calls(spans: list[Interval], times: int) -> list[dict[str, Any]]:
    """The host's microseconds in each kind of call; those that wait for the device stand out."""
    spent: dict[str, float] = defaultdict(float)
    for begin, end, name in spans:
        spent[name] += end - begin
    number = Counter(name for _, _, name in spans)
    return [{"name": name, "us": total / times, "calls": number[name] / times} for name, total in _largest(spent)]


def _largest(times: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])[:LONGEST]
