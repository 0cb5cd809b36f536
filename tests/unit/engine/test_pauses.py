"""A chunk of a prompt pauses between its groups of layers for rounds of the others: nobody's text changes, and whoever
leaves meanwhile leaves nothing behind."""

from __future__ import annotations

import math

import pytest

from pilotfish.engine.link.messages import SamplingParams, Submit
from pilotfish.engine.requests.round_times import RoundTimes
from pilotfish.engine.round import reading as reading_module
from pilotfish.engine.round.prompt import PromptPass
from pilotfish.engine.round.reading import Reading
from tests.support.fixed_shapes import FixedDriver
from tests.support.loops import LoopDriver, Request, assert_alone, assert_seen_alone
from tests.support.rounds import random_prompt

TIME_A_PROMPT = PromptPass._time


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
    driver.loop.executor.steps_at_a_time = lambda num_rows, seconds, read: 1
    beside = driver.ask("a", 21, max_tokens=12)
    run_until(driver, lambda: beside.tokens)
    # another one at once: no two rounds have followed each other
    driver.ask("long", 60, seed=2, max_tokens=2)
    while driver.loop.has_work():
        driver.step()
        assert driver.loop.scheduler._paused is None or driver.loop._round_times.round_seconds


def test_how_often_follows_from_what_a_step_and_a_round_take(monkeypatch):
    monkeypatch.setattr(PromptPass, "_time", TIME_A_PROMPT)
    executor = pausing().loop.executor
    (rows, *_), seconds = executor.prompt.lengths(), executor.prompt.step_seconds
    assert seconds.keys() == set(executor.prompt.lengths()) and all(value > 0 for value in seconds.values())
    seconds[rows] = 0.004
    executor.prompt.groups = (executor.prompt.groups * 17)[:17]

    def steps(round_seconds, read_seconds=0.0):
        return executor.steps_at_a_time(rows, round_seconds, read_seconds)

    # a whole piece takes 68 ms: rounds of 3.8 after each half of one take 5.5 % more of the time than after each one
    assert steps(0.0038) == 9
    assert [steps(time) for time in (0.00001, 0.0001, 0.001, 0.004, 1.0)] == [1, 1, 4, 9, 17]
    # what was read without a round counts; a step is one
    assert [steps(0.004, read) for read in (0.001, 0.0019, 0.028, 0.036, 1.0)] == [9, 8, 2, 1, 1]
    # of what is not captured nothing is known
    assert executor.steps_at_a_time(rows + 1, 0.001, 0.0) is None


MEASURED = {
    "35B-A3B": (11, {256: 0.0011, 1024: 0.00189, 2048: 0.00297}, 0.00408),
    "27B": (17, {256: 0.0022, 1024: 0.00612, 2048: 0.01059}, 0.00880),
}
"""Steps of a piece, seconds of one by rows, and those of a round of 4 sequences at k = 3, of one H200 on 2026-12-01; of
256 rows about a first token's time by the number of steps."""


class Turns:
    """A loop with two sequences that decode, whose prompts are read by such times; `between`: measured seconds of the
    steps since each round, the last of those that none has followed yet. Nothing of a prompt is computed."""

    def __init__(self, model, monkeypatch):
        num_steps, step_seconds, round_seconds = MEASURED[model]
        sizes = {"prefill_chunk": 2048, "max_model_len": 17000, "num_pages": 300}
        self.driver = FixedDriver("hv_gt_hk", 2, agreeing="own", observed=False, captured=False, **sizes)
        self.loop, self.between = self.driver.loop, [0.0]
        self.streams = [self.ask(f"s{number}", 10 + number, max_tokens=200) for number in range(2)]
        run_until(self.driver, lambda: all(stream.tokens for stream in self.streams))
        monkeypatch.setattr(RoundTimes, "round_seconds", round_seconds)
        monkeypatch.setattr(PromptPass, "steps", lambda *taken: iter([None] * (num_steps - 1)))
        prompt = self.loop.executor.prompt
        prompt.groups, prompt.step_seconds = [None] * num_steps, step_seconds
        advance, launch = Reading.advance, self.loop.executor.launch

        def advanced(reading, *limits):
            is_read = advance(reading, *limits)
            self.between[-1] += reading.advanced_seconds
            return is_read

        def launched(*batch):
            self.between.append(0.0)
            return launch(*batch)

        monkeypatch.setattr(Reading, "advance", advanced)
        self.loop.executor.launch = launched
        self.driver.step()

    def ask(self, name, length, max_tokens=2, key=""):
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
        submit = Submit(request_id=name, prompt_token_ids=random_prompt(length), sampling=params, key=key)
        self.loop.submit(submit)
        return self.driver.requests.setdefault(name, Request(submit, None))

    def read(self, *requests):
        """Until all have their first token; what was read between two rounds meanwhile, in ms."""
        run_until(self.driver, lambda: all(request.tokens for request in requests))
        assert all(stream.finish is None for stream in self.streams)
        return [round(1e3 * seconds, 2) for seconds in self.between if seconds]


@pytest.mark.parametrize(
    ("model", "most", "wanted"),
    [
        ("35B-A3B", 2, [22.68, 21.87, 23.76, 23.76, 23.76, 23.76]),
        ("27B", 4, [85.68, 85.68, 89.67, 84.72, 84.72, 84.72, 84.72, 84.72, 63.54]),
    ],
)
def test_rounds_beside_a_long_prompt_are_as_many_as_its_time_has_room_for(model, most, wanted, monkeypatch):
    turns = Turns(model, monkeypatch)
    # pieces of 1 024, 1 024, 2 048, 2 048 and 2 048 rows; the last round is the one after the prompt
    between = turns.read(turns.ask("long", 8192))
    assert between == wanted and len(between) <= 5 + most


@pytest.mark.parametrize(
    ("model", "length", "wanted"),
    [
        ("35B-A3B", 1024, [20.79]),
        ("35B-A3B", 2048, [22.68, 18.9]),
        ("27B", 1024, [85.68, 18.36]),
        ("27B", 2048, [85.68, 85.68, 36.72]),
    ],
)
def test_a_short_prompt_has_no_more_rounds_beside_it_than_its_pieces_and_its_time_give(
    model, length, wanted, monkeypatch
):
    turns = Turns(model, monkeypatch)
    assert turns.read(turns.ask("short", length)) == wanted


@pytest.mark.parametrize("model", MEASURED)
def test_a_round_runs_between_two_prompts(model, monkeypatch):
    turns, (num_steps, step_seconds, _) = Turns(model, monkeypatch), MEASURED[model]
    prompts = [turns.ask(f"p{number}", 256) for number in range(3)]
    assert turns.read(*prompts) == [round(1e3 * num_steps * step_seconds[256], 2)] * 3


@pytest.mark.parametrize("model", MEASURED)
def test_those_beside_prompts_that_are_read_in_turn_wait_no_longer(model, monkeypatch):
    turns, (num_steps, step_seconds, round_seconds) = Turns(model, monkeypatch), MEASURED[model]
    # a piece of the one, a piece of the other
    prompts = [turns.ask(f"p{number}", length, key=f"key{number}") for number, length in enumerate((16384, 9216))]
    largest, between = max(step_seconds.values()), turns.read(*prompts)
    assert max(between) <= 1e3 * (1 / (1 / (num_steps * largest) + 0.055 / round_seconds) + largest)


@pytest.mark.parametrize("unbroken", [False, True], ids=["no times", "unbroken"])
def test_a_round_follows_each_piece_where_no_times_say_otherwise(unbroken, monkeypatch):
    turns, ends = Turns("35B-A3B", monkeypatch), []
    if unbroken:
        turns.loop.pauses_after = turns.loop.UNBROKEN
    else:
        turns.loop.executor.prompt.step_seconds = {}
    launch = turns.loop.executor.launch

    def launched(*batch):
        ends.append(turns.loop.scheduler.running[-1].num_prefilled)
        return launch(*batch)

    turns.loop.executor.launch = launched
    turns.read(turns.ask("long", 8192))
    assert ends == [1024, 2048, 4096, 6144, 8192]


@pytest.mark.parametrize("steps", [3, 1000], ids=["a few steps", "a prompt"])
def test_what_a_round_counts_from_changes_no_text(steps):
    driver = pausing(steps=None)
    driver.loop.executor.steps_at_a_time = lambda num_rows, seconds, read: steps
    requests = [driver.ask("a", 21, max_tokens=24), driver.ask("b", 9, seed=1, mode="sampled", max_tokens=24)]
    run_until(driver, lambda: driver.loop._round_times.round_seconds)
    requests += [driver.ask("long", 150, seed=2, max_tokens=6), driver.ask("other", 70, seed=3, max_tokens=6)]
    driver.run()
    for request in requests:
        assert_seen_alone(request)
    driver.loop.scheduler.check()


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
