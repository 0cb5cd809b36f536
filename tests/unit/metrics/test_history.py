"""Points of the last minutes against what was observed, counted by hand."""

import random

import pytest
from prometheus_client import CollectorRegistry

from pilotfish.engine.link.messages import Execution, PrefixCacheStats, RequestOutput, StepReport, StepStats
from pilotfish.metrics.collectors import Collector
from pilotfish.metrics.definitions import FIRST_TOKEN_SECONDS
from pilotfish.metrics.history import History, Latency, quantile
from tests.support.loaded import ready


def near(value):
    """Points are rounded to four places."""
    return pytest.approx(value, abs=5e-5)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def watched():
    clock, collector = Clock(), Collector(CollectorRegistry())
    return collector, clock, History(collector, num_points=3, clock=clock, wall_clock=lambda: 7.0)


def report(*outputs, **stats):
    made = [
        RequestOutput(request_id="r", token_ids=list(range(tokens)), num_drafted=drafted, num_accepted=accepted)
        for tokens, drafted, accepted in outputs
    ]
    return StepReport(outputs=made, stats=StepStats(**stats))


def test_a_point_says_what_happened_since_the_one_before(watched):
    collector, clock, history = watched
    collector.on_report(report((3, 3, 2)))
    history.sample()
    assert not history.points, "no time has passed"
    clock.now += 2
    history.sample()
    collector.on_report(report((4, 3, 3), (1, 3, 0), num_running=2, num_waiting=1, kv_pages_used=5, state_slots_used=2))
    collector.on_report(report((2, 2, 1), num_prefill_tokens=10, num_running=1, kv_pages_used=4))
    collector.on_report(report(prefix_cache=PrefixCacheStats(num_queried_tokens=40, num_hit_tokens=30), num_running=1))
    clock.now += 4
    history.sample()
    first, second = history.points
    assert (first.tokens_per_second, first.acceptance_length, first.accepted) == (1.5, 3.0, [1.0, 1.0, 0.0])
    assert (second.time, second.tokens_per_second, second.prompt_tokens_per_second) == (7.001, 1.75, 2.5)
    # three rounds with 8 drafts, 4 of them accepted: of three at the first place two, and so on
    assert second.acceptance_length == near(1 + 4 / 3)
    assert second.accepted == near([2 / 3, 1 / 3, 1 / 2])
    assert (second.num_running, second.num_waiting, second.kv_pages_used, second.cached_share) == (1, 0, 0, 0.75)


def test_what_the_cache_had_is_a_share_of_what_prompts_came_on_by(watched):
    """A prompt may be admitted in one interval, and find in a later one what another has read by then."""
    collector, clock, history = watched
    for queried, hit, read in ((1000, 0, 100), (1, 300, 0), (0, 300, 300)):
        cache = PrefixCacheStats(num_queried_tokens=queried, num_hit_tokens=hit)
        collector.on_report(report(prefix_cache=cache, num_prefill_tokens=read))
        clock.now += 1
        history.sample()
    assert [point.cached_share for point in history.points] == [0, 1, 0.5]


def test_nothing_is_said_of_what_did_not_happen(watched):
    _, clock, history = watched
    clock.now += 1
    history.sample()
    (point,) = history.points
    assert (
        point.acceptance_length
        is point.first_token
        is point.inter_token
        is point.cached_share
        is point.break_even
        is None
    )
    assert point.tokens_per_second == 0 and point.accepted == []


def test_no_more_points_than_wanted(watched):
    collector, clock, history = watched
    for number in range(5):
        collector.on_report(report((number, 0, 0)))
        clock.now += 1
        history.sample()
    assert [point.tokens_per_second for point in history.points] == [2, 3, 4]


def test_gauges_of_a_failed_engine_are_zero(watched):
    collector, clock, history = watched
    collector.on_report(report(num_running=2, kv_pages_used=3))
    collector.on_engine(False)
    clock.now += 1
    history.sample()
    assert (history.points[0].num_running, history.points[0].kv_pages_used) == (0, 0)


def test_break_even_and_what_it_brought_are_of_the_rounds_that_ran(watched):
    collector, clock, history = watched
    execution = Execution(num_layers=1, kv_dtype="", state_dtype="", break_even={1: 1.5, 2: 2.0})
    collector.on_ready(ready(execution=execution))
    clock.now += 1
    history.sample()
    # a round of one sequence has to commit 1.5 tokens, one of two 2 each
    collector.on_report(report((3, 3, 2)))
    collector.on_report(report((4, 3, 3), (1, 3, 0)))
    clock.now += 1
    history.sample()
    before, after = history.points
    assert before.break_even is before.speedup is None
    assert after.break_even == near((1.5 + 2 + 2) / 3)
    assert after.speedup == near((3 + 4 + 1) / (1.5 + 2 + 2))


def test_plain_rounds_and_sequences_count_for_the_speedup_alone(watched):
    """Break-even is held against the acceptance length, which rounds without drafts are no part of."""
    collector, clock, history = watched
    execution = Execution(num_layers=1, kv_dtype="", state_dtype="", break_even={1: 1.5, 2: 2.0})
    collector.on_ready(ready(execution=execution))
    # one that drafts beside one that was asked for at k = 0, which then goes on alone
    collector.on_report(report((3, 3, 2), (1, 0, 0)))
    collector.on_report(report((1, 0, 0)))
    clock.now += 1
    history.sample()
    (point,) = history.points
    assert (point.acceptance_length, point.break_even) == (3, 2)
    assert point.speedup == near((3 + 1 + 1) / (2 + 2 + 1))


def test_latencies_are_of_the_interval(watched):
    collector, clock, history = watched
    for seconds in (100.0, 100.0):
        collector.on_first_token(seconds)
    clock.now += 1
    history.sample()
    collector.on_first_token(0.012)
    collector.on_tokens(0.02, 10)
    clock.now += 1
    history.sample()
    before, after = history.points
    assert before.first_token.median > 80 and before.inter_token is None
    # one value, in the bucket from 0.01 to 0.02; ten in the one up to 0.002
    assert after.first_token == Latency(0.015, pytest.approx(0.0195))
    assert 0.0015 < after.inter_token.median <= 0.002


@pytest.mark.parametrize("times", [[7.0, 7.0004, 7.0004, 9.0], [7.0, 3.0, 7.0015, 7.0016], [1e9, 1.0, 2.0, 1e9]])
def test_what_comes_after_a_point_has_a_later_time(times):
    """Two points within a millisecond, and a clock that is set back: who asks for those after the newest gets all."""
    clock, walls = Clock(), iter(times)
    history = History(Collector(CollectorRegistry()), clock=clock, wall_clock=lambda: next(walls))
    for _ in times:
        clock.now += 1
        history.sample()
    told = [point.time for point in history.points]
    assert len(told) == len(times) and sorted(set(told)) == told
    assert told[0] == times[0] and told[-1] - max(times) < 0.01


def test_a_quantile_lies_in_the_bucket_of_the_sample_that_it_is_of():
    rng, bounds = random.Random(3), FIRST_TOKEN_SECONDS
    for _ in range(200):
        values = sorted(rng.lognormvariate(-2, 2) for _ in range(rng.randrange(1, 40)))
        counts = [
            sum(low < value <= high for value in values) for low, high in zip((0, *bounds), (*bounds, 1e9), strict=True)
        ]
        for share in (0.5, 0.95):
            found = quantile(bounds, counts, share)
            # the smallest value that at least this share of the values does not exceed
            wanted = next(value for place, value in enumerate(values, 1) if place >= share * len(values))
            low = max((bound for bound in (0, *bounds) if bound < wanted), default=0)
            high = min((bound for bound in bounds if bound >= wanted), default=bounds[-1])
            assert low <= found <= high
