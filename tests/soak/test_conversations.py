"""Conversations on memory for fewer, on a tiny engine; `make soak` has the model and servers. And the judge sees what
it must."""

from __future__ import annotations

import copy
from itertools import chain

import msgspec
import pytest

from pilotfish.engine.link.messages import SamplingParams
from pilotfish.kernels.attention import PAGE
from tests.soak.conversations import CONVERSATIONS, FITTING, ConversationsOutcome, Found, Talk
from tests.soak.soak import Record, Sample
from tests.support.prefixes import Prefixes
from tests.support.rounds import MODES
from tests.support.tiny_models import VOCAB_SIZE

LONGEST, GROWTH, TURNS = 3 * PAGE, (20, 200), 2
PARAMS = [msgspec.structs.replace(MODES[mode], max_tokens=3, logprobs=1) for mode in ("greedy", "sampled")]


def test_conversations_on_memory_for_fewer_write_what_they_write_cold():
    pages = FITTING * LONGEST // PAGE
    engine = Prefixes(num_pages=pages, num_snapshots=pages // 2, max_waiting=CONVERSATIONS, run_ahead=True)
    talks = [Talk(seed, VOCAB_SIZE, LONGEST, GROWTH) for seed in range(CONVERSATIONS)]
    asked: list[list[tuple[str, list[int], SamplingParams]]] = [[] for _ in talks]
    while True:
        for talk, turns in zip(talks, asked, strict=True):
            if len(turns) < TURNS and (not turns or engine.shown[turns[-1][0]].is_finished):
                prompt, params = talk.next_prompt(), talk.random.choice(PARAMS)
                turns.append((engine.submit(prompt, params), prompt, params))
        if not engine.loop.has_work():
            break
        engine.step()
    assert sum(shown.num_cached for shown in engine.shown.values()) > 0 < engine.num_evictions
    bare = Prefixes(num_snapshots=0)
    for name, prompt, params in chain(*asked):
        assert engine.shown[name].said == bare.ask(prompt, params).said, name
    engine.loop.scheduler.prefix.forget()
    assert engine.loop.scheduler.pages.num_free == pages


def good():
    record = Record()
    record.ended["finished"] = 100
    samples = [Sample(float(i), i * 0.05, 60.0, i * 0.9, 700.0, i * 180.0) for i in range(101)]
    return ConversationsOutcome(100.0, 16, record, samples, {"kv_pages_used": 0.0}, Found(5000, 4000, 100), 7.0)


def test_a_good_run_has_no_fault():
    assert good().faults() == []


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda outcome: outcome.record.errors.append("x"), "errors"),
        (lambda outcome: outcome.held.update(kv_pages_used=1.0), "kv_pages_used"),
        (lambda outcome: setattr(outcome.found, "cached_tokens", 0), "nothing was found"),
        (lambda outcome: setattr(outcome, "evictions", 0.0), "nothing had to give way"),
    ],
)
def test_faults_are_seen(spoil, word):
    outcome = copy.deepcopy(good())
    spoil(outcome)
    assert [fault for fault in outcome.faults() if word in fault]
