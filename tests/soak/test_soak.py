"""A short soak on the demo model; `make soak` is the long one. And the judge sees what it must."""

import asyncio
import copy
from pathlib import Path

import pytest

from tests.soak.soak import CLIENTS, MAX_GROWTH, Outcome, Record, Sample, soak

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"


def test_many_clients_get_no_error_and_leave_nothing_behind():
    outcome = asyncio.run(soak(MODEL, 15, None, CLIENTS, progress=False))
    assert outcome.faults() == []
    assert outcome.record.ended["refused: queue full"] > 0


def good():
    record = Record()
    record.ended["finished"], record.repeated = 100, 50
    samples = [Sample(float(i), i * 0.05, 60.0, i * 0.9, 700.0, i * 180.0) for i in range(101)]
    return Outcome(100.0, 64, record, samples, {"num_requests_running": 0.0})


def test_a_good_run_has_no_fault_and_its_rates():
    assert good().faults() == []
    assert good().rates() == pytest.approx((180, 0.05, 0.9))


def test_memory_is_judged_when_what_is_kept_has_its_room():
    """It grows until then, and in a shorter run nothing else could be seen."""
    short, long = good(), good()
    for outcome in (short, long):
        outcome.samples = [
            Sample(s.at, s.http_cpu, s.http_rss, s.engine_cpu, 600 + min(s.at, 30.0) * 3, s.tokens)
            for s in outcome.samples
        ]
    short.seconds, short.samples = 20.0, short.samples[:21]
    assert short.growth("engine_rss") > MAX_GROWTH > long.growth("engine_rss")
    assert short.faults() == long.faults() == []


def spoil_memory(outcome):
    outcome.samples = [
        Sample(s.at, s.http_cpu, 60 + s.at / 10, s.engine_cpu, s.engine_rss, s.tokens) for s in outcome.samples
    ]


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda outcome: outcome.record.errors.append("x"), "errors"),
        (lambda outcome: outcome.held.update(kv_pages_used=1.0), "kv_pages_used"),
        (spoil_memory, "http_rss"),
        (lambda outcome: outcome.record.ended.clear(), "nothing was finished"),
    ],
)
def test_faults_are_seen(spoil, word):
    outcome = copy.deepcopy(good())
    spoil(outcome)
    assert [fault for fault in outcome.faults() if word in fault]
