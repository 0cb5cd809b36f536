"""A thousand hostile requests: only 2xx, 4xx and a full queue's 503, and the engine lives. Sessions of our own answers:
only 200. `make fuzz` sends more."""

import logging

import pytest

from tests.fuzz.campaign import ErrorLog, Hostile, bombard, campaign, converse, judge

SEED = 20260101


def test_hostile_requests_get_refusals_and_nothing_worse():
    with campaign() as running:
        bombard(running, 1000, SEED)
        running.check_idle()
    # the requests are of all kinds, and not all refused
    assert len(running.tally.sent) == 9
    assert running.tally.answers["200"] > 50 and running.tally.answers["400"] > 200


def test_what_we_said_ourselves_is_never_refused():
    with campaign() as running:
        converse(running, 60, SEED)
        running.check_idle()
    assert running.tally.answers["200"] > 120


def test_sessions_find_a_server_that_refuses():
    with campaign(strict_fields=True) as running, pytest.raises(AssertionError, match="Unrecognized"):
        converse(running, 60, SEED)


@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (500, "application/json", b'{"error": {"message": "x", "type": "server_error"}}'),
        (503, "application/json", b'{"error": {"message": "x", "type": "server_error", "code": "engine_failed"}}'),
        (400, "application/json", b'{"detail": "x"}'),
        (400, "text/plain", b"x"),
        (200, "text/event-stream", b'data: {"choices": []}\n\n'),
        (200, "text/event-stream", b'data: {"error": {"type": "server_error", "code": null}}\n\n'),
        (302, "text/plain", b""),
        (None, None, b""),
    ],
)
def test_bad_answers_are_seen(status, kind, body):
    with pytest.raises((AssertionError, KeyError)):
        judge(Hostile("fields", b"POST"), status, {"Content-Type": kind} if kind else None, body)


def test_logged_errors_are_seen():
    log, logger = ErrorLog(), logging.Logger("x")
    logger.addHandler(log)
    logger.warning("no")
    logger.error("yes")
    assert log.messages == ["yes"]
