"""A chunk of a prompt pauses between its groups of layers for rounds of the others: nobody's text changes, and whoever
leaves meanwhile leaves nothing behind."""

from __future__ import annotations

import math

import pytest

from pilotfish.engine.link.messages import SamplingParams
from pilotfish.engine.round import reading as reading_module
from tests.support.fixed_shapes import FixedDriver
from tests.support.loops import LoopDriver, assert_alone, assert_seen_alone


def pausing(kind="hv_gt_hk", steps=1, observed=False):
    """A driver whose chunks pause after so many steps."""
    driver = FixedDriver(kind, 2, agreeing=1, observed=observed)
    driver.loop.pauses_after = steps
    return driver


def run_until(driver, condition):
    for _ in range(100):
        if condition():
            return
        driver.step()
    raise AssertionError("it never came")


@pytest.mark.parametrize("observed", [False, True], ids=["run ahead", "observed"])
@pytest.mark.parametrize("kind", ["hv_gt_hk", "moe"])
def test_texts_are_those_of_each_alone(kind, observed):
    driver = pausing(kind, observed=observed)
    requests = [driver.ask("a", 21, max_tokens=24), driver.ask("b", 9, seed=1, mode="sampled", max_tokens=24)]
    run_until(driver, lambda: all(request.tokens for request in requests))
    requests += [driver.ask("long", 150, seed=2, max_tokens=6), driver.ask("other", 70, seed=3, max_tokens=6)]
    before, paused = len(requests[0].tokens), 0
    while not requests[2].tokens:
        driver.step()
        paused += driver.loop.scheduler._paused is not None
    assert paused and len(requests[0].tokens) > before
    driver.run()
    for request in requests:
        assert_seen_alone(request)
    driver.loop.scheduler.check()
    assert not driver.loop.has_work()


def test_it_goes_on_without_a_pause_once_nobody_is_beside_it():
    driver = pausing()
    beside = driver.ask("a", 21, max_tokens=3)
    run_until(driver, lambda: beside.tokens)
    alone = driver.ask("long", 60, seed=2, max_tokens=2)
    run_until(driver, lambda: beside.finish is not None)
    steps = 0
    while not alone.tokens:
        driver.step()
        steps += 1
    assert steps <= 2
    driver.run()
    assert_seen_alone(alone)


def test_one_that_leaves_while_it_is_paused_leaves_nothing_behind():
    driver = pausing()
    beside = driver.ask("a", 21, max_tokens=24)
    run_until(driver, lambda: beside.tokens)
    driver.ask("gone", 60, seed=2, max_tokens=5)
    run_until(driver, lambda: driver.loop.scheduler._paused is not None)
    driver.loop.abort("gone")
    assert driver.loop.scheduler._paused is None
    after = driver.ask("after", 60, seed=4, max_tokens=5)
    driver.run()
    assert_seen_alone(beside)
    assert_seen_alone(after)
    driver.loop.scheduler.check()
    assert driver.loop.scheduler.slots.num_used == 0


def test_nothing_pauses_before_a_round_has_been_timed():
    driver = pausing(steps=None)
    driver.loop.executor.steps_at_a_time = lambda num_rows, seconds: 1
    beside = driver.ask("a", 21, max_tokens=12)
    run_until(driver, lambda: beside.tokens)
    # another one at once: no two rounds have followed each other
    driver.ask("long", 60, seed=2, max_tokens=2)
    while driver.loop.has_work():
        driver.step()
        assert driver.loop.scheduler._paused is None or driver.loop._round_times.round_seconds


def test_how_often_follows_from_what_a_step_and_a_round_take():
    executor = pausing().loop.executor
    (rows, *_), seconds = executor.prompt.lengths(), executor.prompt.step_seconds
    assert seconds.keys() == set(executor.prompt.lengths()) and all(value > 0 for value in seconds.values())
    seconds[rows] = 0.004
    executor.prompt.groups = (executor.prompt.groups * 17)[:17]
    # never longer than 8 rounds, in pieces as equal as can be
    assert [executor.steps_at_a_time(rows, time) for time in (0.0001, 0.001, 0.0026, 0.004, 1.0)] == [1, 2, 5, 6, 17]
    # of what is not captured nothing is known
    assert executor.steps_at_a_time(rows + 1, 0.001) is None


class Clock:
    """In place of perf_counter: a step of a prompt takes a second, what follows it three."""

    def __init__(self, reading, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(reading_module, "perf_counter", lambda: self.now)
        reading._steps = self._slowly(reading._steps)
        reading.executor.prompt.first_token_seconds = 3.0

    def _slowly(self, steps):
        while True:
            self.now += 1.0
            try:
                next(steps)
            except StopIteration:
                return
            yield


@pytest.fixture
def read_by_clock(monkeypatch):
    """Reads a whole prompt, 9 steps, up to so many seconds at a time; how many seconds each time took."""

    def read(seconds, **fields):
        executor = LoopDriver(depth=2, agreeing="own").loop.executor
        executor.state.admit(1, [5] * 30, SamplingParams(), 31, 2)
        reading = executor.prefill(1, [1, 2], [5] * 30, 0, 30, 2, None, **fields)
        clock, took, is_done = Clock(reading, monkeypatch), [], False
        while not is_done:
            before = clock.now
            is_done = reading.advance(until=before + seconds)
            took.append(clock.now - before)
        return took

    return read


def test_without_a_gpu_a_chunk_pauses_before_it_has_run_longer_than_it_may(read_by_clock):
    (whole,) = read_by_clock(100.0)
    assert read_by_clock(whole + 3) == [whole]
    # one step at least; what follows a prompt waits for a turn of its own if it would end too late
    assert read_by_clock(whole + 2) == [whole, 0]
    assert read_by_clock(0.5) == [1] * int(whole) + [0]
    assert read_by_clock(2.5) == [2] * int(whole // 2) + [1] * int(whole % 2) + [0]


def test_nothing_is_left_to_wait_for_behind_a_prompt_that_nothing_follows(read_by_clock):
    (whole,) = read_by_clock(100.0)
    assert read_by_clock(whole, generates=False) == [whole]


def test_log_probabilities_of_a_prompt_are_steps_of_their_own(read_by_clock):
    (whole,) = read_by_clock(100.0)
    assert read_by_clock(100.0, prompt_logprobs=1) == [whole + 1]


def test_without_a_gpu_a_piece_runs_for_the_time_of_a_round(monkeypatch):
    monkeypatch.setattr("pilotfish.engine.round.executor.HOST_ROUNDS_SHARE", 1)
    assert LoopDriver(depth=2, agreeing="own").loop.executor.seconds_at_a_time(0.25) == 0.25
    # launches do not tell when they end: steps are counted
    assert pausing().loop.executor.seconds_at_a_time(0.25) == math.inf


def test_without_a_gpu_rounds_run_between_the_steps_of_one_chunk():
    driver = LoopDriver(depth=0, agreeing="own")
    driver.loop.executor.seconds_at_a_time = lambda seconds: 0.0
    beside = driver.ask("a", 21, max_tokens=24)
    for _ in range(5):
        driver.step()
    long = driver.ask("long", 60, seed=2, max_tokens=2)
    before, paused = len(beside.tokens), 0
    while not long.tokens:
        driver.step()
        paused += driver.loop.scheduler._paused is not None
    # one for each layer at least, seen after the step that paused, and after the round
    pauses = paused // 2
    assert pauses >= len(driver.loop.executor.model.trunk.layers) and len(beside.tokens) >= before + pauses
    driver.run()
    assert_alone(beside)
    assert_alone(long)


def test_without_a_gpu_others_requests_change_no_log_probability_of_a_prompt():
    def ask(beside):
        driver = LoopDriver(depth=2, agreeing="own")
        driver.loop.executor.seconds_at_a_time = lambda seconds: 0.0
        if beside:
            driver.ask("a", 21, max_tokens=60)
            for _ in range(5):
                driver.step()
        asked = driver.ask("asks", 150, seed=2, max_tokens=2, prompt_logprobs=2)
        driver.run()
        return [found for output in asked.outputs for found in output.prompt_logprobs or ()]

    assert ask(True) == ask(False) != []
