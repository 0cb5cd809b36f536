"""Rounds that sequences are made to sit out, at random, and what each request then got, round by round."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from pilotfish.engine.grammar import steps as steps_module
from pilotfish.engine.grammar.steps import Masks, Steps
from pilotfish.engine.link.messages import Grammar, RequestOutput, Submit
from pilotfish.engine.loop import EngineLoop

SOME = Grammar(kind="regex", source="x")
FREE, FORCED = 4, 3
"""Tokens that are free and then so many that are forced, in turn."""


class Turns:
    """Stands for a grammar: multiples of 3 may come, and at times one token alone, of which drafts then consist."""

    def __init__(self, vocab_size: int):
        self.taken, self.error = 0, None
        self._num_bits = -(-vocab_size // 32) * 32
        self._free = range(0, vocab_size, 3)

    def mask_rows(self, drafts: list[int], bits: np.ndarray) -> None:
        for row in range(len(drafts) + 1):
            allowed = np.zeros(self._num_bits, dtype=bool)
            allowed[list(self._allowed(self.taken + row))] = True
            bits[row] = np.packbits(allowed, bitorder="little").view(np.int32)

    def advance(self, tokens: list[int]) -> None:
        for token in tokens:
            if token not in self._allowed(self.taken):
                self.error = f"token {token} at {self.taken}"
            self.taken += 1

    def forced(self, most: int, num_words: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < most and len(only := self._allowed(self.taken + len(tokens))) == 1:
            tokens += only
        return tokens if len(tokens) > 1 else []

    def _allowed(self, place: int) -> range:
        if place % (FREE + FORCED) < FREE:
            return self._free
        only = 10 + place % 40
        return range(only, only + 1)


class Misses:
    """Makes sequences sit rounds out with some probability: those with grammars, or `every` one beside them. Nothing
    else is missed: whoever waits for masks waits until they are there.

    `num_first`: of rounds that came first after a prompt; `num_whole`: of rounds that none was left in.
    """

    def __init__(self, share: float, seed: int = 0, every: bool = False):
        self.share, self.every, self._random = share, every, random.Random(seed)
        self.num_missed = self.num_first = self.num_whole = 0
        self.on_miss: Callable[[], None] = lambda: None

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real, ready = Masks.result, Steps.ready

        def result(masks: Any, is_verified: Any = lambda: True, patience: float = math.inf) -> Any:
            words, missed = real(masks, is_verified, math.inf)
            assert not missed
            # nobody sits the choice of a prompt's first token out
            if patience != math.inf:
                missed = [b for b, step in enumerate(masks._steps) if self._draw(step)]
                self.num_missed += len(missed)
                self.num_whole += len(missed) == len(masks._steps)
                if missed:
                    self.on_miss()
            return words, missed

        monkeypatch.setattr(Masks, "result", result)
        monkeypatch.setattr(
            Steps, "ready", lambda steps, slot, until, **whole: ready(steps, slot, until + 600, **whole)
        )
        monkeypatch.setattr(steps_module, "SLOW_SECONDS", math.inf)

    def _draw(self, step: Any) -> bool:
        if (step is None and not self.every) or self._random.random() >= self.share:
            return False
        if step is not None:
            step.is_missed, step.is_settled = True, False
            self.num_first += step.constraint._rule.taken == 1
        return True


def shown(output: RequestOutput) -> Any:
    """What a round gave to one sequence; no times."""
    logprobs = output.logprobs and [(entry.token_id, entry.logprob, entry.top) for entry in output.logprobs]
    return (
        output.token_ids, output.num_drafted, output.num_accepted, output.num_forced, logprobs, output.finish_reason,
        output.error, output.round,
    )  # fmt: skip


def run_all(
    loop: EngineLoop, requests: Iterable[Submit], after: Callable[[], None] = lambda: None
) -> tuple[dict[str, list[Any]], int]:
    """Every output of each request, in order, and how many rounds the engine says were sat out. Calls `after` each
    step."""
    found: dict[str, list[Any]] = {}
    num_sat_out = 0
    for request in requests:
        found[request.request_id] = []
        loop.submit(request)
    for _ in range(3000):
        if not loop.has_work():
            break
        report = loop.step()
        after()
        for output in report.outputs if report else ():
            found[output.request_id].append(shown(output))
        num_sat_out += report.stats.num_sat_out if report else 0
    assert not loop.has_work()
    loop.scheduler.check()
    return found, num_sat_out


def counts(found: dict[str, list[Any]]) -> tuple[int, int, int]:
    """Drafts offered, accepted, and tokens that were known to come."""
    offered, accepted, forced = (
        sum(output[place] for outputs in found.values() for output in outputs) for place in (1, 2, 3)
    )
    return offered, accepted, forced
