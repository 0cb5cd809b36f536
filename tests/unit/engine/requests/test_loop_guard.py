"""Where a text begins to loop, against a search over all periods, in every cut into runs."""

from __future__ import annotations

import random

import pytest

from pilotfish.engine.errors import RequestError
from pilotfish.engine.link.messages import LoopRule, SamplingParams, ThinkingBudget
from pilotfish.engine.requests.loop_guard import CLOSING_LAG, GOES_ON, LoopGuard, check_loop_rule
from tests.support.loops import LoopDriver


def by_search(tokens, rule):
    """The definition, word for word."""
    for end in range(1, len(tokens) + 1):
        for period in range(rule.min_period, rule.max_period + 1):
            copies = -(-max(rule.repeats * period, rule.tokens) // period)
            covered = max(rule.repeats * period, rule.tokens)
            if covered <= end and copies >= rule.repeats:
                tail = tokens[end - covered : end]
                if all(tail[i] == tail[i + period] for i in range(covered - period)):
                    return end
    return None


def by_guard(tokens, rule, draw):
    guard, at = LoopGuard(rule, SamplingParams(), 5), 0
    while at < len(tokens):
        run = tokens[at : at + draw.randint(1, 9)]
        verdict = guard.read(run)
        assert verdict.close_at is None
        if verdict.kept is not None:
            return at + verdict.kept
        at += len(run)
    return None


@pytest.mark.parametrize("seed", range(8))
def test_it_is_the_definition_whatever_the_runs(seed):
    draw = random.Random(seed)
    found = 0
    for _ in range(40):
        rule = LoopRule(draw.randint(2, 5), draw.randint(0, 24), draw.randint(1, 3), draw.randint(3, 8))
        tokens = [draw.randint(0, 2) for _ in range(draw.randint(0, 20))]
        phrase = [draw.randint(0, 3) for _ in range(draw.randint(1, 9))]
        tokens += phrase * draw.randint(1, 8) + [draw.randint(0, 2) for _ in range(10)]
        wanted = by_search(tokens, rule)
        assert by_guard(tokens, rule, draw) == wanted
        found += wanted is not None
    assert 5 < found < 40


def test_text_that_does_not_repeat_is_left_alone():
    draw = random.Random(0)
    guard = LoopGuard(LoopRule(), SamplingParams(), 3)
    assert guard.read([draw.randint(0, 5000) for _ in range(5000)]) == GOES_ON


START, END = 90, 91


@pytest.mark.parametrize("opened_by_prompt", (True, False))
@pytest.mark.parametrize("size", (1, 4, 100))
def test_a_block_is_closed_at_a_place_that_the_text_alone_decides(opened_by_prompt, size):
    """And what comes after it is a text of its own."""
    rule = ThinkingBudget(
        num_tokens=1 << 30, start_token_id=None if opened_by_prompt else START, end_token_id=END, closing=(END,)
    )
    tokens = [] if opened_by_prompt else [START]
    tokens += [7, *[1, 2] * 60]
    looped_with = len(tokens) - 120 + 6
    tokens += [END, *[1, 2] * 2, 3, *[4] * 5]
    guard = LoopGuard(LoopRule(3, 0), SamplingParams(thinking=rule), 10)
    verdicts = [guard.read(tokens[at : at + size]) for at in range(0, len(tokens), size)]
    assert [v.close_at for v in verdicts if v.close_at is not None] == [10 + looped_with + CLOSING_LAG]
    kept = [at * size + v.kept for at, v in enumerate(verdicts) if v.kept is not None]
    assert kept[0] == tokens.index(4) + 3


def test_an_answer_has_its_least_tokens():
    guard = LoopGuard(LoopRule(2, 0), SamplingParams(min_tokens=9), 1)
    assert guard.read([5] * 20).kept == 9


@pytest.mark.parametrize(
    "rule", (LoopRule(1), LoopRule(2, -1), LoopRule(2, 0, 0), LoopRule(2, 0, 3, 2), LoopRule(2, 0, 1, 2000))
)
def test_rules_that_mean_nothing_are_refused(rule):
    with pytest.raises(RequestError, match="loop_guard"):
        check_loop_rule(rule)


@pytest.mark.parametrize("depth", (0, 1, 3, 8))
def test_the_engine_ends_the_same_text_for_every_k(depth):
    driver = LoopDriver(depth=depth, max_num_seqs=3, agreeing="own")
    rule = LoopRule(4, 12, 1, 16)
    requests = [
        driver.ask(name, 21, seed=seed, mode=mode, max_tokens=120, **change)
        for name, seed, mode, change in (
            ("greedy", 0, "greedy", {"loop_rule": rule, "allowed_token_ids": (5, 6)}),
            ("one id", 2, "sampled", {"loop_rule": rule, "allowed_token_ids": (7,)}),
            ("without", 2, "greedy", {"allowed_token_ids": (7,)}),
        )
    ]
    driver.run()
    greedy, one, without = requests
    assert one.tokens == [7] * 12 and one.finish == "stop" and one.last.looped and one.last.stop_token_id is None
    assert len(without.tokens) == 120 and without.finish == "length" and not without.last.looped
    assert greedy.last.looped and by_search(greedy.tokens, rule) == len(greedy.tokens)


@pytest.mark.parametrize("depth", (0, 1, 3, 8))
def test_the_engine_closes_a_block_that_loops_at_the_same_place_for_every_k(depth):
    driver = LoopDriver(depth=depth, max_num_seqs=2, agreeing="own")
    thinking = ThinkingBudget(num_tokens=1 << 30, start_token_id=None, end_token_id=9, closing=(8, 9))
    fields = {"thinking": thinking, "loop_rule": LoopRule(3, 0, 1, 4), "allowed_token_ids": (7,)}
    request = driver.ask("thinks", 21, max_tokens=200, **fields)
    driver.run()
    assert request.tokens == [7] * (3 + CLOSING_LAG) + [8, 9] + [7] * 3
    assert request.finish == "stop" and request.last.looped
