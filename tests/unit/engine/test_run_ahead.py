"""Rounds read one behind: the same text, ended sequences commit nothing more, and nothing is freed too early."""

from __future__ import annotations

import random

import pytest

from pilotfish.engine.requests import scheduler as scheduling
from tests.support.loops import LoopDriver, assert_alone


def assert_idle(driver):
    scheduler = driver.loop.scheduler
    scheduler.check()
    assert not driver.loop.has_work() and not scheduler.retired
    assert scheduler.pages.num_used == scheduler.slots.num_used == 0


@pytest.mark.parametrize("depth", (1, 4, 8))
def test_more_requests_than_places_are_as_each_alone(depth):
    driver = LoopDriver(depth=depth, max_num_seqs=2, seed=depth, run_ahead=True)
    requests = [
        driver.ask("greedy", 21),
        driver.ask("sampled", 40, seed=2, mode="sampled", max_tokens=5),
        driver.ask("penalised", 63, seed=3, mode="every feature"),
        driver.ask("one token", 5, seed=4, max_tokens=1),
        driver.ask("long prompt", 150, seed=5, mode="sampled", max_tokens=7),
        driver.ask("last", 9, seed=9),
    ]
    driver.run()
    for request in requests:
        assert_alone(request)
        assert request.finish == "length"
        assert len(request.tokens) == request.submit.sampling.max_tokens
    assert_idle(driver)


def test_the_next_round_is_launched_before_the_one_before_is_read():
    driver = LoopDriver(depth=2, agreeing=1, run_ahead=True)
    request = driver.ask("a", 21, max_tokens=9)
    driver.step()
    assert len(request.tokens) == 0 and driver.loop.has_work()
    driver.step()
    assert len(request.tokens) == 1 and driver.loop.has_work()
    driver.step()
    assert len(request.tokens) == 3


def test_a_first_token_that_ends_its_request_is_read_behind_a_round_that_keeps_its_slot():
    driver = LoopDriver(depth=2, agreeing=1, max_num_seqs=2, run_ahead=True)
    other = driver.ask("other", 21, max_tokens=20)
    driver.run(3)
    one = driver.ask("one", 21, max_tokens=1)
    while one.finish is None:
        driver.run(1)
    assert driver.loop._in_flight is not None and len(driver.loop.scheduler.retired) == 1
    driver.run()
    assert_alone(one)
    assert_alone(other)
    assert_idle(driver)


def test_pages_and_slot_are_kept_until_the_last_launched_round_is_read():
    driver = LoopDriver(depth=2, agreeing=2, max_num_seqs=1, run_ahead=True)
    first, second = driver.ask("a", 21, max_tokens=4), driver.ask("b", 21, max_tokens=4)
    driver.run(3)
    # the round that ended it has been read, with one more in flight
    assert first.finish == "length" and len(driver.loop.scheduler.retired) == 1
    assert driver.loop.scheduler.slots.num_used == 1 and second.finish is None
    driver.run()
    assert_alone(second)
    assert_idle(driver)


@pytest.mark.parametrize("steps", range(8))
def test_a_request_aborted_at_any_time_frees_everything_and_its_name(steps):
    driver = LoopDriver(depth=3, agreeing=1, run_ahead=True)
    other = driver.ask("other", 40, seed=2)
    request = driver.ask("a", 150, seed=5)
    driver.run(steps)
    driver.loop.abort("a")
    driver.run(1)
    assert request.finish == "abort"
    del driver.requests["a"]
    again = driver.ask("a", 40, seed=7, mode="sampled")
    driver.run()
    assert_alone(other)
    assert_alone(again)
    assert_idle(driver)


@pytest.mark.parametrize("seed", range(4))
def test_a_random_walk_of_requests_and_aborts(seed):
    walk = random.Random(seed)
    driver = LoopDriver(depth=4, max_num_seqs=3, max_waiting=64, seed=seed, run_ahead=True)
    requests, aborted = [], set()
    for number in range(12):
        kind = walk.choice((("greedy", 21, 0), ("sampled", 40, 2), ("every feature", 63, 3)))
        requests.append(driver.ask(str(number), kind[1], seed=kind[2], mode=kind[0], max_tokens=walk.randint(1, 20)))
        driver.run(walk.randint(0, 4))
        if walk.random() < 0.3 and requests[-1].finish is None:
            driver.loop.abort(str(number))
            aborted.add(number)
    driver.run()
    for number, request in enumerate(requests):
        assert_alone(request)
        assert request.finish == ("abort" if number in aborted else "length")
    assert_idle(driver)


def test_a_request_that_fails_ends_alone():
    driver = LoopDriver(depth=3, agreeing=1, run_ahead=True)
    good, bad = driver.ask("good", 21), driver.ask("bad", 40, seed=2)
    driver.run(3)
    slot = next(s.slot for s in driver.loop.scheduler.running if s.request_id == "bad")
    driver.loop.executor.model.trunk.state.s[:, slot] = float("nan")
    driver.run()
    assert bad.finish == "error" and bad.last.error_code == "nan"
    assert_alone(good)
    assert_idle(driver)


@pytest.mark.parametrize(("ahead", "is_enough"), [(scheduling.LOOK_AHEAD, True), (scheduling.LOOK_AHEAD - 4, False)])
def test_pages_are_there_before_a_round_writes(ahead, is_enough, monkeypatch):
    """Where all eight drafts are right: what stands in no page of a sequence would stand in the null page."""
    monkeypatch.setattr(scheduling, "LOOK_AHEAD", ahead)
    driver = LoopDriver(depth=8, agreeing=8, run_ahead=True)
    model, running = driver.loop.executor.model, driver.loop.scheduler.running
    pages = [keys for cache in (*model.trunk.kv, *model.head.caches) for keys in (cache.k[0], cache.v[0])]
    for length in (230, 231, 232):
        driver.ask(f"{length}", length)
        driver.run(1)
        while not running[0].is_prefilled:
            driver.run(1)
        for page in pages:
            # a padded prompt writes there
            page.fill_(float("nan"))
        driver.run()
        if not all(bool(page.isnan().all()) for page in pages):
            assert not is_enough
            return
    assert is_enough
