"""Masks beside the loop: a round does not wait for a slow grammar, and one that takes too long ends alone."""

import threading
import time

import numpy as np
import pytest

from pilotfish.engine.grammar import steps as steps_module
from pilotfish.engine.grammar.steps import TOO_SLOW, Masks, Steps
from pilotfish.engine.guard import Guarded
from pilotfish.engine.link.messages import Grammar
from pilotfish.engine.round.reports import num_forced
from tests.support.grammars import MadeGrammars
from tests.support.loops import LoopDriver, assert_alone

SOME = Grammar(kind="regex", source="x")


class Rule:
    """Allows everything; `masks` and `takes` are called at each of its steps."""

    def __init__(self, masks=lambda: None, takes=lambda: None, forces=()):
        self.masks, self.takes, self.forces = masks, takes, list(forces)
        self.error, self.tokens, self.drafts, self.threads = None, [], [], set()

    def mask_rows(self, drafts, bits):
        self.threads.add(threading.current_thread().name)
        self.drafts.append(drafts)
        self.masks()

    def forced(self, most, num_words):
        return self.forces[:most]

    def advance(self, tokens):
        self.tokens += tokens
        self.takes()


def in_a_minute():
    return time.monotonic() + 60


def spin(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.fixture
def limits(monkeypatch):
    monkeypatch.setattr(steps_module, "LIMIT_SECONDS", 0.1)


def test_what_is_forced_stands_before_the_other_drafts_in_the_masks():
    rule, steps = Rule(forces=[7, 8]), Steps(64)
    steps.begin(1, Guarded(rule, "x"), [5], [1, 2, 3])
    assert steps.ready(1, in_a_minute()) and steps.settle(1) == [7, 8]
    assert steps.settle(1) == []
    words, missed = steps.masks([2, 1], 3).result()
    assert missed == []
    assert words.shape == (8, 2) and (words == -1).all()
    assert rule.drafts == [[7, 8, 3]] and rule.tokens == [5]


def test_rows_go_to_their_own_sequences():
    class Own(Rule):
        def mask_rows(self, drafts, bits):
            bits[:] = np.arange(len(drafts) + 1)[:, None]

    steps = Steps(32)
    steps.begin(4, Guarded(Own(), "x"), [], [9, 9, 9])
    assert steps.masks([3, 4], 1).result()[0].tolist() == [[-1], [-1], [0], [1]]
    assert steps.masks([3], 1) is None


def test_no_step_runs_on_the_loop_s_thread():
    rule = Rule()
    driver = LoopDriver(depth=2, agreeing="own")
    driver.loop.grammars = MadeGrammars(lambda: rule)
    asked = driver.ask("masked", 40, grammar=SOME)
    driver.run()
    assert_alone(asked)
    assert asked.finish == "length" and rule.tokens == asked.tokens[:-1]
    assert rule.threads and rule.threads <= {"grammar-masks", "grammar-slow"}


@pytest.mark.parametrize("run_ahead", [False, True])
def test_rounds_go_on_without_a_slow_grammar(run_ahead):
    go_on = threading.Event()
    counts = []

    def masks():
        counts.append(None)
        if len(counts) == 3:
            spin(2 * steps_module.SLOW_SECONDS)
        elif len(counts) == 4:
            assert go_on.wait(60)

    rule = Rule(masks)
    driver = LoopDriver(depth=2, agreeing="own", run_ahead=run_ahead)
    driver.loop.grammars = MadeGrammars(lambda: rule)
    slow, plain = driver.ask("slow", 40, grammar=SOME), driver.ask("plain", 21)
    for _ in range(1000):
        if plain.finish:
            break
        driver.step()
    assert plain.finish == "length" and slow.finish is None
    go_on.set()
    driver.run()
    assert_alone(plain)
    assert_alone(slow)
    assert slow.finish == "length" and "grammar-slow" in rule.threads


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("times", [[4], [4, 5, 7, 8]])
def test_a_launched_round_goes_on_without_masks_that_do_not_come(monkeypatch, times, run_ahead):
    """They come after the step that would have had to wait for them: whoever waits does so for ever."""
    blocked, go_on, counts, out = threading.Event(), threading.Semaphore(0), [], []

    def masks():
        counts.append(None)
        if len(counts) in times:
            blocked.set()
            assert go_on.acquire(timeout=60)

    result, ready = Masks.result, Steps.ready

    def settled(self, slot, until, whole=False):
        """What is forced is there before the masks: however busy the machine, a round is launched with it."""
        return ready(self, slot, until if whole else in_a_minute(), whole)

    def watched(self, *arguments):
        words, missed = result(self, *arguments)
        out.extend(missed)
        return words, missed

    monkeypatch.setattr(Masks, "result", watched)
    monkeypatch.setattr(Steps, "ready", settled)
    rule = Rule(masks)
    driver = LoopDriver(depth=2, run_ahead=run_ahead)
    driver.loop.grammars = MadeGrammars(lambda: rule)
    slow, plain = driver.ask("slow", 40, grammar=SOME), driver.ask("plain", 21, max_tokens=24)
    for _ in range(1000):
        if not driver.loop.has_work():
            break
        was_blocked = blocked.is_set()
        driver.step()
        if was_blocked:
            blocked.clear()
            go_on.release()
    for request in (slow, plain):
        assert request.finish == "length"
        assert_alone(request)
    assert out and 1 <= len(slow.tokens) - len(rule.tokens) <= 3 and slow.tokens[: len(rule.tokens)] == rule.tokens


def test_a_prompt_waits_for_its_own_grammar_and_no_other_one_does():
    go_on = threading.Event()
    rule = Rule(lambda: go_on.wait(60))
    driver = LoopDriver(depth=1, agreeing="own")
    driver.loop.grammars = MadeGrammars(lambda: rule)
    held, plain = driver.ask("held", 40, grammar=SOME), driver.ask("plain", 21)
    for _ in range(1000):
        if plain.finish:
            break
        driver.step()
    assert plain.finish == "length" and held.outputs == []
    go_on.set()
    driver.run()
    assert_alone(held)
    assert held.finish == "length"


def test_steps_that_do_not_end_keep_no_thread_from_the_others():
    go_on, steps = threading.Event(), Steps(32)
    rules = [Rule(lambda: go_on.wait(60)) for _ in range(3 * steps_module.NUM_QUICK)]
    for slot, rule in enumerate(rules):
        steps.begin(slot, Guarded(rule, "x"), [], [])
        # by the time that a round looks
        assert not steps.ready(slot, time.monotonic() + 0.05, whole=True)
    steps.begin(99, Guarded(Rule(), "x"), [], [])
    assert steps.ready(99, in_a_minute(), whole=True)
    go_on.set()
    for slot in range(len(rules)):
        steps.wait(slot, 60)
        assert steps.ready(slot, 0.0, whole=True)


@pytest.mark.parametrize("where", ["masks", "takes"])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_grammar_that_takes_too_long_ends_its_request_alone(limits, where, run_ahead):
    counts = []

    def work():
        counts.append(None)
        if len(counts) == 4:
            spin(0.4)

    rule = Rule(**{where: work})
    driver = LoopDriver(depth=2, agreeing="own", run_ahead=run_ahead)
    driver.loop.grammars = MadeGrammars(lambda: rule)
    late, plain = driver.ask("late", 40, grammar=SOME), driver.ask("plain", 21)
    driver.run()
    assert_alone(plain)
    assert plain.finish == "length"
    assert (late.finish, late.last.error, late.last.error_code) == ("error", TOO_SLOW, "invalid")
    assert late.tokens == late.reference.tokens[: len(late.tokens)]
    assert driver.loop.scheduler.slots.num_used == 0 and not driver.loop.executor.grammars.constraints


def test_who_was_slow_is_trusted_again_after_a_while(monkeypatch):
    monkeypatch.setattr(steps_module, "SLOW_STEPS", 3)
    pauses, steps = iter([0.03, 0, 0, 0, 0]), Steps(32)
    rule = Rule(masks=lambda: spin(next(pauses)))
    for _ in range(5):
        steps.begin(1, Guarded(rule, "x"), [], [])
        steps.masks([1], 0).result()
    assert rule.threads == {"grammar-masks", "grammar-slow"} and not steps._slow.get(1)


def test_a_slot_s_grammar_is_let_go_when_its_request_ends():
    rule = Rule()
    driver = LoopDriver(depth=1, agreeing="own")
    driver.loop.grammars = MadeGrammars(lambda: rule)
    driver.ask("a", 40, grammar=SOME)
    driver.run(6)
    assert driver.loop.executor.grammars.constraints
    driver.loop.abort("a")
    assert not driver.loop.executor.grammars.constraints and not driver.loop.executor.grammars.steps._newest
    driver.run()


def test_what_is_forced_is_known_of_the_newest_step_alone():
    steps = Steps(64)
    assert steps.forced(1) == []
    for forces in ([7, 8], []):
        steps.begin(1, Guarded(Rule(forces=forces), "x"), [], [1])
        assert steps.ready(1, in_a_minute()) and steps.settle(1) == forces
        assert steps.forced(1) == forces
    steps.release(1)
    assert steps.forced(1) == []


@pytest.mark.parametrize(
    ("tokens", "forced", "count"),
    [([7, 8, 9], [7, 8], 2), ([7], [7, 8], 1), ([7, 1], [7, 8], 1), ([1], [7], 0), ([], [7], 0)],
)
def test_forced_tokens_are_the_first_that_came_as_they_had_to(tokens, forced, count):
    assert num_forced(tokens, forced) == count
