"""The log line for people."""

import logging

from pilotfish.engine.link.messages import RequestOutput, StepReport, StepStats
from pilotfish.server.http.throughput import ThroughputLog

ENDED = StepReport(outputs=[], stats=StepStats())


def report(tokens=3, accepted=2, prefill=0):
    output = RequestOutput(request_id="r", token_ids=[1] * tokens, num_drafted=3, num_accepted=accepted)
    return StepReport(outputs=[output], stats=StepStats(num_running=1, num_waiting=2, num_prefill_tokens=prefill))


def lines(caplog, *reports):
    """What is logged of (time, report) pairs; the log is made at time 0."""
    caplog.set_level(logging.INFO)
    times = iter([0.0, *(time for time, _ in reports)])
    log = ThroughputLog(times.__next__)
    for _, given in reports:
        log.on_report(given)
    return caplog.messages


def test_rates_cover_the_interval(caplog):
    given = [(1000.0, report(prefill=50)), (1005.0, report()), (1010.0, report(tokens=4, accepted=3))]
    expected = "1.0 tokens/s, 5.0 prompt tokens/s, 1 running, 2 waiting, acceptance length 3.33"
    assert lines(caplog, *given) == [expected]


def test_neither_loading_nor_a_pause_is_in_a_rate(caplog):
    before = [(8.0, report()), (11.0, report()), (11.5, ENDED)]
    after = [(17.0, report()), (22.0, report())]
    assert lines(caplog, *before, *after) == []
    expected = "1.0 tokens/s, 0.0 prompt tokens/s, 1 running, 2 waiting, acceptance length 3.33"
    assert lines(caplog, *before, *after, (27.0, report(tokens=4, accepted=3))) == [expected]


def test_short_requests_after_each_other_are_one_piece_of_work(caplog):
    given = [(float(second), entry) for second in range(11) for entry in (report(tokens=1, accepted=0), ENDED)]
    expected = "1.1 tokens/s, 0.0 prompt tokens/s, 1 running, 2 waiting, acceptance length 1.00"
    assert lines(caplog, *given) == [expected]


def test_without_drafts_there_is_no_acceptance(caplog):
    prompt = StepReport(outputs=[], stats=StepStats(num_running=1, num_prefill_tokens=60))
    assert lines(caplog, (1.0, prompt), (13.0, prompt)) == ["0.0 tokens/s, 10.0 prompt tokens/s, 1 running, 0 waiting"]
