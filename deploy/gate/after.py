"""Gates that look back on the others' requests: did the counters count them, and does the server still stand."""

from __future__ import annotations

import time
from collections.abc import Callable

from pilotfish.deploy.gate.gate import Found, Subject
from pilotfish.deploy.gate.requests import COMPLETIONS, ask

SETTLE_SECONDS = 3.0


def metrics(subject: Subject) -> Found:
    """The scraped counters moved by what the clients were told, and none that must stay 0 did."""
    ask(subject)
    return settled(lambda: _counted(subject))


def settled(look: Callable[[], Found]) -> Found:
    """What is found once the last request is counted everywhere, or after some seconds."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while not (found := look()).passed and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _counted(subject: Subject) -> Found:
    server, before = subject.server, subject.before
    after = server.metrics()

    def growth(name: str) -> int:
        return int(after.total(name) - before.total(name))

    tokens, ended, drafted = map(
        growth, ("generation_tokens_total", "request_finished_total", "spec_decode_num_draft_tokens_total")
    )
    bad = {name: growth(name) for name in ("nan_requests_total", "exactness_mismatched_requests_total")}
    passed = tokens >= server.tokens > 0 and ended >= server.requests and bool(drafted) == bool(subject.k)
    passed = passed and not any(bad.values()) and after.total("engine_up") == 1
    wanted = (
        f"at least {server.tokens} tokens and {server.requests} requests counted, drafts if k > 0, no NaN, no mismatch"
    )
    faults = "".join(f", {count} {name}" for name, count in bad.items() if count)
    return Found(passed, wanted, f"{tokens} tokens, {ended} requests, {drafted} drafts{faults}")


def stays_up(subject: Subject) -> Found:
    """Nothing dies in the first seconds, and nothing was started again behind our back."""
    server, seconds = subject.server, subject.expected.watch_seconds
    while True:
        if not server.get("/ready")["ready"]:
            return Found(False, f"ready for {seconds:g} s", "it is no longer ready")
        left = subject.began + seconds - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(0.5, left))
    server.post(COMPLETIONS, {"prompt": "one two", "max_tokens": 2})
    after = server.metrics()
    names = ("engine_restarts_total", "engine_ready_timestamp_seconds")
    restarts, since = (after.total(name) - subject.before.total(name) for name in names)
    came = f"answered throughout, engine started again {restarts:g} times"
    return Found(restarts == 0 == since, f"the same engine, answering, for at least {seconds:g} s", came)
