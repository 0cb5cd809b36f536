"""What is remembered of reports about the prefix cache: bounded, of this engine, each key its own."""

import pytest
from loaded import ready

from pilotfish.engine.link.messages import CacheMiss, PrefixCacheStats, StepReport, StepStats
from pilotfish.server.http.cache import MAX_MISSES, CacheLog

READY = ready(prefix_caching=True, prefill_chunk=256, snapshot_bytes=10)


def report(*misses, **counts):
    stats = PrefixCacheStats(misses=misses, **counts)
    return StepReport(outputs=[], stats=StepStats(prefix_cache=stats))


def miss(number=0, key="none", **fields):
    shape = {"reason": "differs", "num_prompt_tokens": 9, "first_difference": 4, "here": (1,), "there": (2,)}
    return CacheMiss(request_id=f"r{number}", key=key, **{**shape, **fields})


def test_counts_add_up_and_gauges_are_the_last_ones():
    log = CacheLog()
    log.on_report(report(num_queried_tokens=100, num_hit_tokens=40, num_snapshots=3, num_bytes=30, capacity_bytes=99))
    log.on_report(StepReport(outputs=[], stats=StepStats()))
    log.on_report(report(num_queried_tokens=10, num_evictions=2, num_snapshots=1, num_bytes=10, capacity_bytes=99))
    status = log.status(READY, "none")
    assert (status.queried_tokens, status.hit_tokens, status.evictions) == (110, 40, 2)
    assert (status.snapshots, status.bytes, status.capacity_bytes) == (1, 10, 99)


def test_another_engine_begins_with_nothing():
    log = CacheLog()
    log.on_report(report(miss(), num_queried_tokens=100))
    log.on_start()
    status = log.status(READY, "none")
    assert (status.queried_tokens, status.misses, status.last_misses) == (0, {}, [])


def test_the_newest_misses_are_remembered_and_told_first():
    log = CacheLog()
    for number in range(MAX_MISSES + 5):
        log.on_report(report(miss(number)))
    found = log.status(READY, "none")
    assert found.misses == {"differs": MAX_MISSES + 5}
    assert [one.request for one in found.last_misses] == [f"r{n}" for n in range(MAX_MISSES + 4, 4, -1)]


@pytest.mark.parametrize(
    ("key", "isolates", "shows_text", "here", "there"),
    [
        ("none", False, True, "<1>", "<2>"),
        ("alice", False, True, "<1>", None),
        ("alice", True, True, "<1>", "<2>"),
        ("alice", True, False, None, None),
    ],
)
def test_what_stands_in_a_prompt_is_shown_to_whom_it_is(key, isolates, shows_text, here, there):
    text_of = (lambda ids: "".join(f"<{i}>" for i in ids)) if shows_text else None
    log = CacheLog(isolates_keys=isolates, text_of=text_of)
    log.on_report(report(miss(key=key), miss(key="bob")))
    (own,) = log.status(READY, key).last_misses
    assert (own.here or None, own.there or None) == (here, there)
    assert own.first_difference == 4
