"""Many streaming clients for a long time: no error but a full queue's 503, no leak, nothing held at the end.

    python -m tests.soak.soak --seconds 600 --report soak-report.md
    python -m tests.soak.soak --seconds 60 --rate 200

Starts `pilotfish serve` on a model, or, with --rate, on the scripted engine that writes so many tokens a second. The
clients ask a few things over and over, in several ways; what has a seed must give the same text every time. Some
leave early, and the queue is a little short of them all, so that some are refused and come again. Memory and CPU are
read from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "support"))

from byte_model import write_model  # noqa: E402  (the path above makes it importable)
from serving import ENVIRONMENT, script  # noqa: E402

from pilotfish.deploy.ports import free_port  # noqa: E402

CLIENTS, MAX_NUM_SEQS, MAX_WAITING = 64, 4, 56
LEAVING = 0.05
"""Share of the requests that are left while they stream."""
WARM_UP = 0.2
"""Of the time: what comes before does not count."""
SETTLING = 30.0
"""Seconds in which what is kept fills its room, whose pages are touched for the first time: memory is held against its
end from then on, and not at all in a run of less than twice that."""
MAX_GROWTH = 1.05
TOPICS = ("a fish", "a list in Python", "a wise king")
LENGTHS = (16, 48)
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 0.8, "seed": 7, "n": 2},
    {"temperature": 0.7, "seed": 1, "stop": ["\n\n", "the "], "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.9, "seed": 3, "speculation": {"k": 1}, "presence_penalty": 0.5},
    {"temperature": 0.9, "seed": 3, "bad_words": ["fish", "sea"], "speculation": {"k": 0}},
    {"temperature": 0, "structured_outputs": {"regex": "[a-z ]{20,60}"}},
)


@dataclass
class Record:
    """What the clients saw."""

    ended: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    repeated: int = 0
    first_event_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    """At a time: CPU seconds used and resident MiB of the HTTP process and of the engine's, tokens generated so far."""

    at: float
    http_cpu: float
    http_rss: float
    engine_cpu: float
    engine_rss: float
    tokens: float


# -- the server ----------------------------------------------------------------------------------------------------


def read_process(pid: int) -> tuple[float, float]:
    """(CPU seconds, resident MiB of its own). Pages of files come and go as the kernel wants, and show no growth."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    own = sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return ticks / os.sysconf("SC_CLK_TCK"), own / 1024


def child_of(pid: int) -> int:
    """The engine process."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in task.joinpath("children").read_text().split():
            return int(child)
    raise RuntimeError("no engine process")


@dataclass(frozen=True)
class Running:
    url: str
    http: int
    engine: int


@contextlib.asynccontextmanager
async def server(model: Path, folder: Path, *flags: str) -> AsyncIterator[Running]:
    """`pilotfish serve`, ready. Raises RuntimeError with its log if it ends."""
    port = free_port()
    command = [sys.executable, "-m", "pilotfish.server.cli", "serve", str(model), "--port", str(port), *flags]
    command += ["--max-num-seqs", str(MAX_NUM_SEQS), "--max-waiting", str(MAX_WAITING)]
    command += ["--served-model-name", "soaked", "--no-cost-table"]
    with (folder / "log").open("w") as log:
        process = await asyncio.create_subprocess_exec(*command, env=ENVIRONMENT, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    if (await session.get(url + "/ready")).status == 200:
                        break
                if process.returncode is not None:
                    raise RuntimeError((folder / "log").read_text()[-3000:])
                await asyncio.sleep(0.2)
        yield Running(url, process.pid, child_of(process.pid))
        if process.returncode is not None:
            raise RuntimeError((folder / "log").read_text()[-3000:])
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


HELD = ("num_requests_running", "num_requests_waiting", "kv_pages_used", "state_slots_used", "engine_restarts_total")


async def read_metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Series of one name are added up."""
    found: dict[str, float] = {}
    for line in (await (await session.get(url + "/metrics")).text()).splitlines():
        if line[0] != "#":
            name = line.partition(" ")[0].partition("{")[0].removeprefix("pilotfish_")
            found[name] = found.get(name, 0.0) + float(line.split()[-1])
    return found


async def sample(session: aiohttp.ClientSession, running: Running) -> Sample:
    tokens = (await read_metrics(session, running.url))["generation_tokens_total"]
    return Sample(time.monotonic(), *read_process(running.http), *read_process(running.engine), tokens)


# -- the clients ---------------------------------------------------------------------------------------------------


def draw(generator: random.Random, rate: float | None) -> tuple[dict[str, Any], str | None]:
    """A request, and what its text is known by where it must always be the same."""
    topic, way = generator.choice(TOPICS), generator.randrange(len(WAYS))
    length = generator.choice(LENGTHS)
    content = f"Tell me about {topic}."
    if rate is not None:
        # the scripted engine steps all its sequences at once: 4 of them, 2.5 tokens a step each on average
        content = script(reply=f"{topic} ", times=99, runs=[3, 2], delay=MAX_NUM_SEQS * 2.5 / rate)
    body = {"model": "soaked", "messages": [{"role": "user", "content": content}], "max_tokens": length, "stream": True}
    body |= {"stream_options": {"include_usage": True}, **WAYS[way]}
    return body, f"{topic}, {length}, {way}"


async def client(number: int, url: str, session: aiohttp.ClientSession, record: Record, rate: float | None) -> None:
    generator = random.Random(number)
    while True:
        body, name = draw(generator, rate)
        leaves_after = generator.randint(1, 12) if generator.random() < LEAVING else None
        try:
            await ask(url, session, record, body, name, leaves_after)
        except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
            record.errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(1)


async def ask(
    url: str,
    session: aiohttp.ClientSession,
    record: Record,
    body: dict[str, Any],
    name: str | None,
    leaves_after: int | None,
) -> None:
    started = time.monotonic()
    async with session.post(url + "/v1/chat/completions", json=body) as response:
        if response.status == 503:
            error = (await response.json())["error"]
            record.ended["refused: queue full"] += 1
            if error["code"] != "queue_full":
                record.errors.append(str(error))
            await asyncio.sleep(float(response.headers["Retry-After"]))
            return
        if response.status != 200:
            record.errors.append(f"{response.status}: {(await response.text())[:300]}")
            return
        finished, usage, done, events = 0, None, False, 0
        pieces: dict[int, list[str]] = {}
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                done = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                record.errors.append(str(event["error"]))
                return
            events += 1
            if events == 1:
                record.first_event_seconds.append(time.monotonic() - started)
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                pieces.setdefault(choice["index"], []).append(choice["delta"].get("content") or "")
                finished += choice["finish_reason"] is not None
            if leaves_after is not None and events >= leaves_after:
                record.ended["left"] += 1
                return
        if not done or finished != body.get("n", 1) or usage is None:
            record.errors.append(f"a stream broke off: {finished} choices, [DONE] {done}, usage {usage}")
            return
        record.ended["finished"] += 1
        text = json.dumps(["".join(pieces[index]) for index in sorted(pieces)])
        if name is not None:
            record.repeated += name in record.texts
            if record.texts.setdefault(name, text) != text:
                record.errors.append(f"{name}: another text than before")


# -- the run -------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    seconds: float
    clients: int
    record: Record
    samples: list[Sample]
    held: dict[str, float]

    def rates(self) -> tuple[float, float, float]:
        """Tokens a second, and the shares of a core that the HTTP process and the engine used, after the warm-up."""
        first, last = self.samples[self._warm()], self.samples[-1]
        seconds = last.at - first.at
        return (
            (last.tokens - first.tokens) / seconds,
            (last.http_cpu - first.http_cpu) / seconds,
            (last.engine_cpu - first.engine_cpu) / seconds,
        )

    def growth(self, name: str) -> float:
        """Resident memory of the last tenth over that of as long a time after the warm-up; medians."""
        warm = self.samples[self._warm() :]
        settled = [sample for sample in warm if sample.at - self.samples[0].at >= SETTLING]
        values = [getattr(sample, name) for sample in settled or warm]
        tenth = max(1, len(values) // 10)
        return statistics.median(values[-tenth:]) / statistics.median(values[:tenth])

    @property
    def judges_memory(self) -> bool:
        return self.seconds >= 2 * SETTLING

    def _warm(self) -> int:
        return int(len(self.samples) * WARM_UP)

    def faults(self) -> list[str]:
        """What must not be, in words; empty after a good run."""
        found = [f"{len(self.record.errors)} errors, the first: {self.record.errors[0]}"] if self.record.errors else []
        found += [f"{name} is {value:g} at the end" for name, value in self.held.items() if value]
        for name in ("http_rss", "engine_rss"):
            if self.judges_memory and self.growth(name) > MAX_GROWTH:
                found.append(f"{name} grew to {self.growth(name):.3f} of what it was after the warm-up")
        if not self.record.ended["finished"]:
            found.append("nothing was finished")
        return found


async def soak(model: Path | None, seconds: float, rate: float | None, clients: int, progress: bool = True) -> Outcome:
    """`rate`: on the scripted engine, at so many tokens a second."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--max-model-len", "1024"]
        if rate is not None:
            model, flags = write_model(Path(folder)), ["--core", "scripted_core:make_core"]
        assert model is not None
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            server(model, Path(folder), *flags) as running,
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session,
        ):
            record, samples, begun = Record(), [await sample(session, running)], time.monotonic()
            tasks = [asyncio.create_task(client(i, running.url, session, record, rate)) for i in range(clients)]
            while (now := time.monotonic() - begun) < seconds:
                await asyncio.sleep(min(1.0, seconds - now))
                samples.append(await sample(session, running))
                if progress:
                    done = record.ended["finished"]
                    print(f"\r{now:.0f} of {seconds:.0f} s, {done} finished", end="", file=sys.stderr, flush=True)
            # all leave at once, most of them in the middle of something
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            deadline = time.monotonic() + 30
            while True:
                metrics = await read_metrics(session, running.url)
                held = {name: metrics[name] for name in HELD}
                if not any(held.values()) or time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.1)
        return Outcome(seconds, clients, record, samples, held)


def report(outcome: Outcome, what: str) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    record, (tokens, http, engine) = outcome.record, outcome.rates()
    first = sorted(record.first_event_seconds) or [0.0]
    ended = ", ".join(f"{count} {how}" for how, count in sorted(record.ended.items()))
    rows = {
        "requests": ended,
        "errors": str(len(record.errors)),
        "texts asked again, all the same": str(record.repeated),
        "tokens a second": f"{tokens:.0f}",
        "HTTP process, share of a core": f"{http:.1%} ({1e3 * http / max(tokens, 1e-9):.2f} ms a token)",
        "engine process, share of a core": f"{engine:.1%}",
        "memory after the warm-up and at the end, HTTP process": f"{_memory(outcome, 'http_rss')}",
        "memory, engine process": f"{_memory(outcome, 'engine_rss')}",
        "first event, seconds (median, largest)": f"{statistics.median(first):.1f}, {first[-1]:.1f}",
        "held at the end": ", ".join(f"{name} {value:g}" for name, value in outcome.held.items()),
    }
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    return (
        f"{outcome.clients} streaming clients of {what}, {outcome.seconds:.0f} s, {MAX_NUM_SEQS} sequences at a time, "
        f"{MAX_WAITING} waiting; {datetime.now(UTC):%Y-%m-%d}, commit {commit}, {os.cpu_count()} CPU cores shared with "
        f"the clients.\n\n| | |\n|---|---|\n{table}"
    )


def _memory(outcome: Outcome, name: str) -> str:
    judged = "" if outcome.judges_memory else f" (not judged: less than {2 * SETTLING:.0f} s)"
    return f"{getattr(outcome.samples[-1], name):.0f} MiB, {outcome.growth(name):.3f} of what it was{judged}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--model", type=Path, default=ROOT / "demo" / "model")
    parser.add_argument(
        "--rate", type=float, help="the scripted engine at so many tokens a second, in place of a model"
    )
    parser.add_argument("--report", type=Path, help="file to write the report to")
    args = parser.parse_args()
    what = f"the scripted engine at {args.rate:g} tokens a second" if args.rate else args.model.name
    outcome = asyncio.run(soak(args.model, args.seconds, args.rate, args.clients))
    text = report(outcome, what)
    print("\n" + text)
    if args.report is not None:
        args.report.write_text(text)
    for fault in outcome.faults():
        print(f"FAULT: {fault}", file=sys.stderr)
    return 1 if outcome.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
