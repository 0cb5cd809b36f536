"""Sends hostile requests to a running server and judges the answers; as a command, many of them, with a report.

    python -m tests.fuzz.campaign --requests 10000 --sessions 2000 --report fuzz-report.md
    python -m tests.fuzz.campaign --requests 1000 --model demo/model

Allowed: any 2xx or 4xx, and 503 for a full queue. Errors are JSON in OpenAI's or Anthropic's shape, also for what is
no HTTP; a stream ends in [DONE], its own last event, or an error event. Every 200
requests and at the end the server is healthy, its engine was never started again, and nothing is left running.
Sessions are of several turns (histories.py): what we have said ourselves is never refused.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import logging
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, given, settings

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "support"))

from byte_model import write_model  # noqa: E402  (the path above makes it importable)
from serving import PATIENCE, Server, serving_in_thread  # noqa: E402

from tests.fuzz.histories import run_session  # noqa: E402
from tests.fuzz.hostile import REQUESTS, Hostile  # noqa: E402

LOOK_EVERY = 200


@dataclass
class Tally:
    """What was sent and how it was answered; seconds of the slowest answer."""

    sent: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.sent.values())


class ErrorLog(logging.Handler):
    """Keeps what the server logs as errors: a fault of ours behind a good answer is found too."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


def exchange(port: int, hostile: Hostile) -> tuple[int | None, http.client.HTTPMessage | None, bytes]:
    """Status, headers and body; (None, None, ...) where no answer came or none was waited for."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(hostile.sent)
        if hostile.read is not None:
            return None, None, connection.recv(hostile.read) if hostile.read else b""
        if not hostile.whole:
            # nothing more comes: the server need not wait for the rest
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        method = hostile.sent.split(b" ", 1)[0].decode("latin-1")
        response = http.client.HTTPResponse(connection, method=method)
        try:
            response.begin()
            return response.status, response.headers, response.read()
        except (http.client.HTTPException, ConnectionError, ValueError):
            if hostile.whole:
                raise
            return None, None, b""


def judge(hostile: Hostile, status: int | None, headers: Any, body: bytes) -> str:
    """A label for the tally. Raises AssertionError for an answer that must not be."""
    if status is None:
        assert not hostile.whole or hostile.read is not None, "no answer"
        return "left" if hostile.read is not None or hostile.kind.startswith("leaves") else "closed"
    kind = headers.get("Content-Type", "")
    if status == 503:
        assert json.loads(body)["error"]["code"] == "queue_full", body[:500]
    else:
        assert 200 <= status < 300 or 400 <= status < 500, f"{status} {body[:500]!r}"
    if kind.startswith("text/event-stream"):
        judge_stream(body)
    elif kind.startswith("application/json") and body:
        answer = json.loads(body)
        assert status < 400 or (isinstance(answer["error"]["message"], str) and answer["error"]["type"]), body[:500]
    else:
        assert status < 400 or not body, f"{status} {kind} {body[:200]!r}"
    return str(status)


def judge_stream(body: bytes) -> None:
    events = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    assert events, body[:500]
    whole = [json.loads(event) for event in events if event != "[DONE]"]
    error = next((event["error"] for event in whole if event.get("error")), None)
    if error is None:
        ended = events[-1] == "[DONE]" or whole[-1].get("type") in ("message_stop", "response.completed")
        assert ended or whole[-1].get("type") == "response.incomplete", events[-1]
    else:
        assert error.get("code") == "queue_full" or "invalid" in error["type"] or error["type"] == "overloaded_error", (
            error
        )


class Campaign:
    """Requests to one server, looked after every LOOK_EVERY of them."""

    def __init__(self, server: Server):
        self.server, self.tally, self.log = server, Tally(), ErrorLog()
        self.port = int(server.url.rsplit(":", 1)[1])
        logging.getLogger().addHandler(self.log)
        # as in `pilotfish serve`: what it logs as errors are malformed requests
        logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)

    def close(self) -> None:
        logging.getLogger().removeHandler(self.log)

    def send(self, hostile: Hostile) -> None:
        """Raises AssertionError at the first answer that must not be."""
        started = time.monotonic()
        label = judge(hostile, *exchange(self.port, hostile))
        self.tally.slowest = max(self.tally.slowest, time.monotonic() - started)
        self.tally.sent[hostile.kind] += 1
        self.tally.answers[label] += 1
        assert not self.log.messages, self.log.messages[0]
        if self.tally.total % LOOK_EVERY == 0:
            self.check_alive()

    def check_alive(self) -> None:
        client = self.server.service.client
        assert client.failure is None, client.failure
        with urllib.request.urlopen(self.server.url + "/health", timeout=PATIENCE) as response:
            assert response.status == 200

    def check_idle(self) -> None:
        """Nothing is held a moment after the last request, the engine is the first one, and it still answers."""
        self.check_alive()
        deadline = time.monotonic() + PATIENCE
        while (gauges := self.gauges())["num_requests_running"] and time.monotonic() < deadline:
            time.sleep(0.05)
        held = {name: value for name, value in gauges.items() if value}
        assert not held, held
        body = json.dumps({"prompt": "Hi", "max_tokens": 4}).encode()
        request = urllib.request.Request(self.server.v1 + "/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            assert json.loads(response.read())["usage"]["completion_tokens"] > 0

    def gauges(self) -> dict[str, float]:
        names = (
            "num_requests_running",
            "num_requests_waiting",
            "kv_pages_used",
            "state_slots_used",
            "engine_restarts_total",
        )
        with urllib.request.urlopen(self.server.url + "/metrics", timeout=PATIENCE) as response:
            lines = response.read().decode().splitlines()
        found = {
            line.split()[0].removeprefix("pilotfish_"): float(line.split()[-1]) for line in lines if line[0] != "#"
        }
        return {name: found[name] for name in names}


@contextlib.contextmanager
def campaign(model: Path | None = None, **more: Any) -> Iterator[Campaign]:
    """On the scripted engine, or on a model; `more` are the server's options."""
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"engine": {"max_num_seqs": 4, "max_waiting": 32}}
        if model is not None:
            options = {"core": "pilotfish.engine.start:make_core", "engine": {"max_model_len": 512, "max_num_seqs": 4}}
        with serving_in_thread(model or write_model(Path(folder)), **options, **more) as server:
            running = Campaign(server)
            try:
                yield running
            finally:
                running.close()


def bombard(running: Campaign, count: int, seed: int, progress: bool = False) -> None:
    """count requests drawn by seed; raises at the first bad answer, with the smallest request that gets one."""

    @hypothesis.seed(seed)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(REQUESTS)
    def each(hostile: Hostile) -> None:
        running.send(hostile)
        if progress and running.tally.total % 100 == 0:
            print(f"\r{running.tally.total} of {count}", end="", file=sys.stderr, flush=True)

    each()


def converse(running: Campaign, count: int, seed: int) -> None:
    """Sessions `seed` .. `seed + count - 1`. Raises AssertionError at the first turn that is refused."""
    for number in range(seed, seed + count):
        turns = run_session(running.port, number)
        running.tally.sent["turns of sessions"] += turns
        running.tally.answers["200"] += turns
        assert not running.log.messages, running.log.messages[0]
    running.check_alive()


def report(running: Campaign, seed: int, seconds: float, what: str) -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    tally = running.tally
    kinds = "".join(f"| {kind} | {count} |\n" for kind, count in sorted(tally.sent.items()))
    answers = "".join(f"| {answer} | {count} |\n" for answer, count in sorted(tally.answers.items()))
    return (
        f"{tally.total} requests to {what}, seed {seed}, in {seconds:.0f} s on {datetime.now(UTC):%Y-%m-%d}, "
        f"commit {git('rev-parse', '--short', 'HEAD')}. No answer but 2xx, 4xx and a full queue's 503; no error was "
        f"logged; the engine was never started again; nothing was held at the end. The slowest answer took "
        f"{tally.slowest:.2f} s.\n\n| sent | |\n|---|---|\n{kinds}\n| answered | |\n|---|---|\n{answers}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--sessions", type=int, default=0, help="of several turns, after the requests")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--model", type=Path, help="a checkpoint in place of the scripted engine")
    parser.add_argument("--report", type=Path, help="file to write the report to")
    args = parser.parse_args()
    print(f"seed {args.seed}", file=sys.stderr)
    started = time.monotonic()
    with campaign(args.model) as running:
        bombard(running, args.requests, args.seed, progress=True)
        converse(running, args.sessions, args.seed)
        running.check_idle()
        text = report(running, args.seed, time.monotonic() - started, str(args.model or "the scripted engine"))
    print(text)
    if args.report is not None:
        args.report.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
