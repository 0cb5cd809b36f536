"""An answer is a cold run's, whatever was kept, given up or left before it: histories that hypothesis draws."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pilotfish.engine.link.messages import Grammar, SamplingParams
from pilotfish.kernels.attention import PAGE
from tests.support.grammars import MadeGrammars, Multiples
from tests.support.prefixes import LOGPROBS, Prefixes, Shown
from tests.support.rounds import MODES, random_prompt

DEPTH, LONGEST = 3, 3 * PAGE + 40
TEXTS = [random_prompt(LONGEST, seed=31), random_prompt(LONGEST, seed=32)]
ENGINES: dict[str, dict[str, Any]] = {
    "room for the longest alone": {"num_pages": 4, "num_snapshots": 3},
    "one snapshot": {"num_snapshots": 1},
    "dense": {"kind": "hv_gt_hk", "num_pages": 12, "num_snapshots": 6},
    "half a chunk first": {"prefill_chunk": 2 * PAGE, "num_pages": 10, "num_snapshots": 3},
    "ahead, with pauses": {"fixed": True, "run_ahead": True, "num_pages": 12, "num_snapshots": 5},
    "in pairs": {"kind": "hv_gt_hk", "fixed": True, "run_ahead": True, "num_pages": 12, "num_snapshots": 5},
}
SALTS = ("", "another", "ü\N{ZERO WIDTH SPACE}" * 2000)


class Ask(msgspec.Struct, frozen=True):
    """A prompt: the first `cut` tokens of a text, then `beyond` others. `stops`: at the first token that it writes."""

    text: int
    cut: int
    beyond: int
    mode: str
    max_tokens: int
    k: int | None
    salt: str
    num_choices: int
    way: str
    system_tokens: int | None

    @property
    def prompt(self) -> list[int]:
        return [*TEXTS[self.text][: self.cut], *TEXTS[1 - self.text][: self.beyond]]

    def params(self, choice: int, first_token: int | None = None) -> SamplingParams:
        more: dict[str, Any] = {"max_tokens": self.max_tokens, "logprobs": 1, "choice": choice}
        if self.way == "grammar":
            more |= {"grammar": Grammar(kind="regex", source="x"), "min_tokens": 0}
        elif self.way == "prompt_logprobs":
            more |= {"prompt_logprobs": 1}
        elif first_token is not None:
            more |= {"stop_token_ids": (first_token,), "min_tokens": 0}
        return msgspec.structs.replace(MODES[self.mode], **more)


cuts = st.one_of(
    st.builds(lambda page, more: page * PAGE + more, st.integers(1, 3), st.integers(-1, 2)), st.integers(1, LONGEST)
)
asks = st.builds(
    Ask,
    text=st.sampled_from((0, 0, 0, 0, 1)),
    cut=cuts,
    beyond=st.sampled_from((0, 0, 0, 1, 7)),
    mode=st.sampled_from(list(MODES)),
    max_tokens=st.sampled_from((5, 5, 1, 0)),
    k=st.sampled_from((None, 0, 1, 2)),
    salt=st.sampled_from(("",) * 6 + SALTS[1:]),
    num_choices=st.sampled_from((1, 1, 1, 3)),
    way=st.sampled_from(("plain", "plain", "stops", "grammar", "prompt_logprobs")),
    system_tokens=st.none() | st.integers(0, LONGEST),
)
aborts = st.builds(lambda number: ("abort", number), st.integers(0, 9))
events = asks | asks | asks | st.sampled_from((1, 2, 5, 20, 99)) | aborts | st.just("forget")
"""A number is so many steps."""


def engine_of(name: str, **more: Any) -> Prefixes:
    engine = Prefixes(**{"depth": DEPTH, "max_waiting": 99} | ENGINES[name] | more)
    engine.loop.grammars = MadeGrammars(Multiples)  # type: ignore[assignment]
    if name != "dense":
        engine.loop.pauses_after = 1
    return engine


@cache
def cold_engine(name: str) -> Prefixes:
    engine = engine_of(name, num_pages=24, num_snapshots=0, run_ahead=False)
    # one chunk after the other
    engine.loop.scheduler.pairs = False
    return engine


@cache
def cold(name: str, prompt: tuple[int, ...], params: bytes, k: int | None) -> Shown:
    return cold_engine(name).ask(list(prompt), msgspec.msgpack.decode(params, type=SamplingParams), speculative_k=k)


def cold_answer(name: str, ask: Ask, params: SamplingParams) -> Shown:
    return cold(name, tuple(ask.prompt), msgspec.msgpack.encode(params), ask.k)


def params_of(name: str, ask: Ask, choice: int) -> SamplingParams:
    if ask.way != "stops" or not ask.max_tokens:
        return ask.params(choice)
    return ask.params(choice, cold_answer(name, ask, ask.params(choice)).tokens[0])


class History:
    """One engine through a list of events; `check` compares what it answered."""

    def __init__(self, name: str):
        self.name, self.engine = name, engine_of(name)
        self.found: Counter[str] = Counter()
        self.asked: dict[str, tuple[Ask, SamplingParams]] = {}
        self.aborted: set[str] = set()

    def happen(self, event: Any) -> None:
        if isinstance(event, Ask):
            for choice in range(event.num_choices):
                params = params_of(self.name, event, choice)
                fields = {"cache_salt": event.salt, "system_tokens": event.system_tokens}
                name = self.engine.submit(event.prompt, params, speculative_k=event.k, **fields)
                self.asked[name] = event, params
        elif isinstance(event, int):
            for _ in range(event):
                self.engine.step()
        elif event == "forget":
            self.engine.loop.scheduler.prefix.forget()
        else:
            self.abort(event[1])

    def abort(self, number: int) -> None:
        going = [name for name in self.asked if not self.engine.shown[name].is_finished]
        if number < len(going) and going[number] not in self.aborted:
            self.aborted.add(going[number])
            self.engine.loop.abort(going[number])

    def check(self) -> None:
        for name, (ask, params) in self.asked.items():
            shown, wanted = self.engine.shown[name], cold_answer(self.name, ask, params)
            if name in self.aborted:
                assert shown.said[:-1] == wanted.said[: len(shown.said) - 1], ask
                continue
            assert shown.said == wanted.said, ask
            logprobs = [[output.prompt_logprobs for output in one.outputs] for one in (shown, wanted)]
            assert logprobs[0] == logprobs[1], ask
            assert (shown.num_cached or 0) <= self.engine.loop.scheduler.grid.last_boundary(len(ask.prompt))
            if shown.num_cached:
                assert ask.way != "prompt_logprobs"
                self.found[ask.way] += 1
                self.found["whole"] += shown.num_cached == len(ask.prompt)


@pytest.mark.parametrize("name", ENGINES)
def test_every_answer_is_a_cold_run_s(name):
    found: Counter[str] = Counter()

    @settings(max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(history=st.lists(events, min_size=6, max_size=14))
    def run(history: list[Any]) -> None:
        one = History(name)
        one.engine.ask(TEXTS[0], LOGPROBS)
        for event in history:
            one.happen(event)
        one.engine.run()
        one.check()
        found.update(one.found)
        scheduler = one.engine.loop.scheduler
        scheduler.prefix.forget()
        assert scheduler.pages.num_free == scheduler.pages.capacity and not scheduler.prefix.tree.num_kept

    run()
    # the histories did meet what they are for
    assert found["plain"] and found["whole"] and found["stops"] + found["grammar"], found
