"""Drives an engine loop by hand, for what times an engine or looks at what it does: requests, steps, what came of them.

A request that fails is raised, but while an engine is drained: nobody waits for what is left then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from time import perf_counter

from pilotfish.engine.link.messages import RequestOutput, SamplingParams, StepReport, Submit
from pilotfish.engine.loop import EngineLoop


def greedy(max_tokens: int, seed: int = 0) -> SamplingParams:
    """The likeliest tokens, to the limit."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=seed)


def submit(
    loop: EngineLoop,
    prompts: Mapping[str, list[int]],
    sampling: SamplingParams,
    speculative_k: int | None = None,
    *,
    cache_salt: str = "",
    system_tokens: int | None = None,
) -> None:
    """Requests by their names, in this order."""
    for name, ids in prompts.items():
        loop.submit(
            Submit(
                request_id=name,
                prompt_token_ids=ids,
                sampling=sampling,
                speculative_k=speculative_k,
                cache_salt=cache_salt,
                system_tokens=system_tokens,
            )
        )


def filler(vocab_size: int, length: int) -> list[int]:
    """A prompt of many different tokens, for where no text is at hand."""
    return [(7 * i + 1) % vocab_size for i in range(length)]


def step(loop: EngineLoop) -> list[RequestOutput]:
    """What one step gave. Raises RuntimeError where a request failed."""
    report = loop.step()
    return _checked(report).outputs if report is not None else []


def reports(loop: EngineLoop) -> Iterator[StepReport]:
    """Steps until nothing is left to do, those left out in which nothing could be done. Raises as `step` does."""
    while loop.has_work():
        if (report := loop.step()) is not None:
            yield _checked(report)


def step_until_all_write(loop: EngineLoop, names: Iterable[str]) -> None:
    """Steps until each of these requests has given a token. Raises as `step` does."""
    waiting = set(names)
    while waiting:
        waiting -= {output.request_id for output in step(loop)}


def seconds_of_steps(loop: EngineLoop, warm_ups: int, count: int) -> list[float]:
    """What each of `count` steps took, after some that are not timed."""
    for _ in range(warm_ups):
        loop.step()
    times = []
    for _ in range(count):
        began = perf_counter()
        loop.step()
        times.append(perf_counter() - began)
    return times


def drain(loop: EngineLoop, names: Iterable[str] = ()) -> None:
    """Aborts these requests, and steps until nothing is left to do."""
    for name in names:
        loop.abort(name)
    while loop.has_work():
        loop.step()


def _checked(report: StepReport) -> StepReport:
    for output in report.outputs:
        if output.error is not None:
            raise RuntimeError(f"request {output.request_id}: {output.error}")
    return report
