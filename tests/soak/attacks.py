"""Clients that try to stall all others, one kind at a time, beside a victim: one stream whose longest gap is printed.

    python -m tests.soak.attacks --seconds 10
    python -m tests.soak.attacks --scripted --only "giant prompt"

Starts `pilotfish serve` and measures the stream alone, then beside each attack. A fault: a gap of more than 3 times the
longest one of the stream alone, a stream that breaks off, an engine that was started again, an answer that must not be,
anything held at the end, memory that does not come back, a log that grows without bound. A run of all legs ends with
its tables as docs/soak.md has them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.soak.grammar_attacks import GRAMMAR_ATTACKS
from tests.soak.soak import HELD, ROOT, Running, read_metrics, read_process, script, server, write_model

TIMES = 3.0
"""A gap beside an attack may be so many times the longest one without."""
LEAST_GAP = 0.050
"""The undisturbed gap is taken as at least this: on a machine that others use, shorter ones are luck."""
MAX_GROWTH_MIB = 200.0
MAX_LOG_BYTES = 1 << 20
LEGS_A_ROW = 3
JSON = {"Content-Type": "application/json"}
CONTEXT = 8192


@dataclass
class Target:
    """What an attack is aimed at, and what it was told. `post` never raises for what a server may answer."""

    running: Running
    session: aiohttp.ClientSession
    answers: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.running.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    async def post(self, path: str, body: bytes, allowed: tuple[int, ...] = (200, 400, 413, 429, 503)) -> None:
        try:
            async with self.session.post(self.running.url + path, data=io.BytesIO(body), headers=JSON) as response:
                text = await response.read()
                self.answers[str(response.status)] += 1
                if response.status not in allowed:
                    self.errors.append(f"{path}: {response.status} {text[:200]!r}")
        except (aiohttp.ClientError, ConnectionError):
            self.answers["cut"] += 1


Attack = Callable[[Target], Awaitable[None]]
"""Goes on until it is cancelled; its bodies are made before."""
ATTACKS: dict[str, Attack] = dict(GRAMMAR_ATTACKS)


def repeated(
    name: str, path: str, body: Callable[[], bytes], at_once: int = 4, leaves_after: float | None = None
) -> None:
    """An attack that sends one body over and over, so many at a time; or hangs up so many seconds after."""

    async def attack(target: Target) -> None:
        sent = await asyncio.to_thread(body)

        async def client() -> None:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(leaves_after):
                        await target.post(path, sent)

        await asyncio.gather(*(client() for _ in range(at_once)))

    ATTACKS[name] = attack


def attack(name: str) -> Callable[[Attack], Attack]:
    def register(function: Attack) -> Attack:
        ATTACKS[name] = function
        return function

    return register


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _chat(content: str, count: int = 1) -> bytes:
    return _json(messages=[{"role": "user", "content": content}] * count, max_tokens=1)


def _counted(content: str, count: int = 1) -> bytes:
    return _json(messages=[{"role": "user", "content": content}] * count, model=MODEL)


def _lists(prefix: bytes, element: bytes, num_bytes: int) -> bytes:
    return prefix + b"[" + b",".join([element] * (num_bytes // (len(element) + 1))) + b"]}"


MODEL = "soaked"
WORDS = "The quick, brown fox. "
MANY_CALLS = [
    {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [' + "[]," * 20000 + "1]}"}}
]

repeated("4 MB to count", "/v1/messages/count_tokens", lambda: _counted(WORDS * 190_000))
repeated("30 MB to count", "/tokenize", lambda: _json(prompt="xq" * 15_000_000), at_once=2)
repeated("4 MB prompt", "/v1/completions", lambda: _json(prompt=WORDS * 190_000))
repeated("4 MB prompts, hung up", "/v1/completions", lambda: _json(prompt=WORDS * 190_000), 8, leaves_after=0.3)
repeated("128 long prompts", "/v1/completions", lambda: _json(prompt=[WORDS * 9_000] * 128))
repeated("30 MB of lists", "/v1/completions", lambda: _lists(b'{"prompt": ', b"[]", 30_000_000), at_once=2)
repeated("1 MB of lists", "/v1/completions", lambda: _lists(b'{"prompt": ', b"[]", 700_000), at_once=8)
repeated("15 M ids to text", "/detokenize", lambda: _lists(b'{"tokens": ', b"7", 30_000_000), at_once=2)
repeated("900 k ids to text", "/detokenize", lambda: _lists(b'{"tokens": ', b"7", 1_800_000), at_once=8)
repeated("130 k ids to text", "/detokenize", lambda: _lists(b'{"tokens": ', b"7", 260_000), at_once=8)
repeated("20 000 messages", "/v1/chat/completions", lambda: _chat("a", 20_000))
repeated("8 000 messages to count", "/v1/messages/count_tokens", lambda: _counted("a", 8_000))
repeated("small chats of many messages", "/v1/chat/completions", lambda: _chat("", 100), at_once=64)
repeated(
    "arguments of many lists",
    "/tokenize",
    lambda: _json(messages=[{"role": "assistant", "content": "", "tool_calls": MANY_CALLS * 8}]),
)
repeated("depth", "/v1/completions", lambda: b'{"prompt": ' + b"[" * 200_000, at_once=8)
repeated("many fields", "/v1/completions", lambda: _json(**{f"f{i}": 1 for i in range(200_000)}))
repeated("n = 56", "/v1/completions", lambda: _json(prompt="a" * 1000, n=56, max_tokens=1), leaves_after=1.0)
repeated("banned ids", "/v1/completions", lambda: _json(prompt="a", allowed_token_ids=[7] * 900_000, n=16), 2)


repeated("chats, hung up at once", "/v1/chat/completions", lambda: _chat("a", 8), at_once=32, leaves_after=0.02)
repeated(
    "every rule at its most",
    "/v1/chat/completions",
    lambda: _json(
        messages=[{"role": "user", "content": "a"}],
        n=3,
        max_tokens=4,
        logprobs=True,
        top_logprobs=20,
        logit_bias={str(i): 1 for i in range(300)},
        stop=["x" * 1000 + str(i) for i in range(16)],
        bad_words=["never " * 8 + str(i) for i in range(256)],
    ),
)


repeated("small counts", "/tokenize", lambda: _json(prompt=WORDS * 20), at_once=32)


def polled(name: str, path: str, at_once: int = 32) -> None:
    """An attack that asks for a page over and over."""

    async def attack(target: Target) -> None:
        async def client() -> None:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with target.session.get(target.running.url + path) as response:
                        await response.read()
                        target.answers[str(response.status)] += 1

        await asyncio.gather(*(client() for _ in range(at_once)))

    ATTACKS[name] = attack


polled("scrapes", "/metrics")
polled("watchers", "/v1/watch")
polled("who asks for what was read", "/v1/cache")
polled("who asks for the schema", "/openapi.json")
polled("who asks for the models", "/v1/models")
polled("probes", "/health")


@attack("streams left after their first event")
async def left_streams(target: Target) -> None:
    body = _json(prompt="a", max_tokens=2000, stream=True, ignore_eos=True)

    async def client() -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with target.session.post(
                    target.running.url + "/v1/completions", data=body, headers=JSON
                ) as response:
                    target.answers[str(response.status)] += 1
                    await response.content.readany()

    await asyncio.gather(*(client() for _ in range(32)))


@attack("pipelined requests")
async def pipelined(target: Target) -> None:
    body = b"[]" * 50
    sent = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    async def client() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(*target.address)
                try:
                    writer.write(sent * 1000)
                    while piece := await reader.read(1 << 16):
                        target.answers["answered"] += piece.count(b"HTTP/1.1 ")
                finally:
                    writer.transport.abort()

    await asyncio.gather(*(client() for _ in range(16)))


@attack("bodies by the drop")
async def drops(target: Target) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"

    async def client() -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(*target.address)
                try:
                    writer.write(head + b'{"prompt": "')
                    while True:
                        writer.write(b"x")
                        await writer.drain()
                        target.answers["drops"] += 1
                        await asyncio.sleep(0.05)
                finally:
                    writer.transport.abort()

    await asyncio.gather(*(client() for _ in range(200)))


@attack("streams that nobody reads")
async def unread_streams(target: Target) -> None:
    body = _json(prompt="a", max_tokens=2000, stream=True, ignore_eos=True, logprobs=5, n=2)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    await _hold(target, 32, head % len(body) + body)


@attack("half-sent heads")
async def half_sent_heads(target: Target) -> None:
    await _hold(target, 600, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Half: ")


@attack("half-sent bodies")
async def half_sent_bodies(target: Target) -> None:
    size = 32 << 20
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    await _hold(target, 20, head % size + b'{"prompt": "' + b"x" * (size - 1000))


@attack("connections that come and go")
async def churn(target: Target) -> None:
    async def client() -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(*target.address)
                target.answers["opened"] += 1
                writer.close()

    await asyncio.gather(*(client() for _ in range(50)))


async def _hold(target: Target, count: int, sent: bytes) -> None:
    """So many connections, each with so much sent, held open."""
    writers = []

    async def hold() -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(*target.address)
            writers.append(writer)
            writer.write(sent)
            await writer.drain()
            target.answers[(await reader.read(12)).decode("latin-1") or "closed"] += 1

    try:
        await asyncio.gather(*(hold() for _ in range(count)))
        await asyncio.sleep(3600)
    finally:
        for writer in writers:
            writer.transport.abort()


# -- the run -------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Of one attack, or of none. Gaps in seconds, memory of the HTTP process in MiB."""

    name: str
    gaps: list[float]
    errors: list[str]
    answers: Counter[str]
    memory: float = 0.0

    @property
    def longest(self) -> float:
        return max(self.gaps, default=float("inf"))

    @property
    def middle(self) -> float:
        return statistics.median(self.gaps) if self.gaps else float("nan")

    def row(self) -> str:
        told = ", ".join(f"{count} {answer}" for answer, count in self.answers.most_common(4))
        return f"| {self.name} | {self.longest * 1e3:.0f} | {self.middle * 1e3:.0f} | {self.memory:.0f} | {told} |"


def documented(alone: Outcome, outcomes: list[Outcome], bound: float) -> str:
    """What docs/soak.md says of a run of all legs: its sentence and its two tables. `bound` in seconds."""
    over = [outcome for outcome in outcomes if outcome.longest > bound]
    told = f"of {len(outcomes)} legs {len(over)} are over it"
    if over:
        told += f" ({', '.join(f'{outcome.name} {outcome.longest * 1e3:.0f}' for outcome in over)})"
    longest = statistics.median(outcome.longest for outcome in outcomes)
    lines = [
        f"The stream alone: {alone.longest * 1e3:.0f} ms, median {alone.middle * 1e3:.0f}; so the bound is "
        f"{bound * 1e3:.0f} ms; {told}; the median of all longest gaps is {longest * 1e3:.0f} ms."
    ]
    for is_grammar in (True, False):
        legs = [outcome for outcome in outcomes if (outcome.name in GRAMMAR_ATTACKS) is is_grammar]
        lines += ["", "| beside | longest gap, ms | median |", "|---|---|---|"]
        for start in range(0, len(legs), LEGS_A_ROW):
            row = legs[start : start + LEGS_A_ROW]
            names = "; ".join(outcome.name for outcome in row)
            gaps = "; ".join(f"{outcome.longest * 1e3:.0f}" for outcome in row)
            lines.append(f"| {names} | {gaps} | {'; '.join(f'{outcome.middle * 1e3:.0f}' for outcome in row)} |")
    return "\n".join(lines)


async def beside(target: Target, victim: bytes, name: str, seconds: float) -> Outcome:
    """The victim's gaps while the attack of that name goes on, or none does."""
    command = [sys.executable, "-m", "tests.soak.victim", *map(str, target.address), victim.decode()]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert process.stdin and process.stdout
    assert await process.stdout.readline() == b"streaming\n"
    target.answers.clear()
    target.errors.clear()
    task = asyncio.create_task(ATTACKS[name](target)) if name in ATTACKS else None
    await asyncio.sleep(seconds)
    process.stdin.close()
    said = json.loads(await process.stdout.read())
    if task is not None:
        if task.done():
            task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    memory = read_process(target.running.http)[1]
    return Outcome(name, said["gaps"], said["errors"] + target.errors[:3], Counter(target.answers), memory)


@contextlib.asynccontextmanager
async def attacked(model: Path | None, *flags: str) -> AsyncIterator[tuple[Target, bytes, Path]]:
    """A server, the stream that the victim asks for, and the server's log. No model: the scripted engine."""
    with tempfile.TemporaryDirectory() as folder:
        victim: dict[str, Any] = {"prompt": "A story", "max_tokens": CONTEXT - 100, "stream": True, "ignore_eos": True}
        engine = ["--max-model-len", str(CONTEXT), "--audit-rate", "0", *flags]
        if model is None:
            model, engine = write_model(Path(folder)), ["--core", "scripted_core:make_core", *engine]
            victim["prompt"] = script(reply="x", times=CONTEXT, delay=0.03)
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            server(model, Path(folder), *engine) as running,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session,
        ):
            yield Target(running, session), _json(**victim), Path(folder, "log")


async def settled(target: Target) -> dict[str, float]:
    """What is held once the last of an attack has ended."""
    deadline = time.monotonic() + 60
    while True:
        metrics = await read_metrics(target.session, target.running.url)
        held = {name: metrics[name] for name in HELD}
        if not any(held.values()) or time.monotonic() > deadline:
            return held
        await asyncio.sleep(0.2)


async def campaign(names: list[str], seconds: float, model: Path | None, show: Callable[[str], None]) -> list[str]:
    """Runs them, shows a row for each; what must not be, in words."""
    faults: list[str] = []
    async with attacked(model) as (target, victim, log):
        alone = await beside(target, victim, "nothing else", seconds)
        show("| beside | longest gap, ms | median | memory, MiB | answers |\n|---|---|---|---|---|")
        show(alone.row())
        bound = TIMES * max(alone.longest, LEAST_GAP)
        outcomes = []
        for name in names:
            outcome = await beside(target, victim, name, seconds)
            outcomes.append(outcome)
            show(outcome.row())
            faults += [f"{name}: {error}" for error in outcome.errors]
            if outcome.longest > bound:
                faults.append(f"{name}: a gap of {outcome.longest * 1e3:.0f} ms, want at most {bound * 1e3:.0f}")
            held = await settled(target)
            faults += [f"{name}: {what} is {value:g} afterwards" for what, value in held.items() if value]
        deadline = time.monotonic() + 10
        while (grown := read_process(target.running.http)[1] - alone.memory) > MAX_GROWTH_MIB:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
        show(f"\nMemory at the end: {grown:.0f} MiB more than before.")
        if grown > MAX_GROWTH_MIB:
            faults.append(f"the HTTP process holds {grown:.0f} MiB more than before")
        if log.stat().st_size > MAX_LOG_BYTES:
            faults.append(f"the log has {log.stat().st_size} bytes")
        if names == list(ATTACKS):
            show(f"\n{documented(alone, outcomes, bound)}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--model", type=Path, default=ROOT / "demo" / "model")
    parser.add_argument("--scripted", action="store_true", help="the scripted engine in place of a model")
    parser.add_argument("--only", action="append", choices=list(ATTACKS), help="this attack; may be given again")
    args = parser.parse_args()
    model = None if args.scripted else args.model
    faults = asyncio.run(campaign(args.only or list(ATTACKS), args.seconds, model, lambda row: print(row, flush=True)))
    for fault in faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
