"""The log line for people."""

import logging

from pilotfish.engine.messages import RequestOutput, StepReport, StepStats
from pilotfish.server.throughput import ThroughputLog


def report(tokens=3, accepted=2, prefill=0):
    output = RequestOutput(request_id="r", token_ids=[1] * tokens, num_drafted=3, num_accepted=accepted)
    return StepReport(outputs=[output], stats=StepStats(num_running=1, num_waiting=2, num_prefill_tokens=prefill))


def test_rates_cover_the_interval_and_idle_time_is_in_none(caplog):
    caplog.set_level(logging.INFO)
    now = 0.0
    log = ThroughputLog(lambda: now)
    now = 1000.0
    log.on_report(report(prefill=50))
    now = 1005.0
    log.on_report(report())
    assert not caplog.messages
    now = 1010.0
    log.on_report(report(tokens=4, accepted=3))
    expected = "1.0 tokens/s, 5.0 prompt tokens/s, 1 running, 2 waiting, acceptance length 3.33"
    assert caplog.messages == [expected]


def test_without_drafts_there_is_no_acceptance(caplog):
    caplog.set_level(logging.INFO)
    now = 0.0
    log = ThroughputLog(lambda: now)
    now = 12.0
    log.on_report(StepReport(outputs=[], stats=StepStats()))
    assert caplog.messages == ["0.0 tokens/s, 0.0 prompt tokens/s, 0 running, 0 waiting"]
