"""What streaming costs: the engine's own rate beside the rate at which clients get text, and how late each token comes.

    python tests/bench/bench_http.py [--rates 1:1390,16:5510,64:192000] [--seconds 5]
    python tests/bench/bench_http.py --dummy Qwen3.6-35B-A3B --streams 1,16 [-- --num-speculative-tokens 3]

Regime: a server of two processes over HTTP on this machine, clients in a third, streamed completions; all share the
cores. --rates, streams:tokens a second of all of them: a scripted engine commits 3 tokens a round to each stream, at
times that do not depend on the host. A token's delay is from when its round was due to when its text was in the
client's hands; on time is what was there 5 ms after the last round was due. The defaults are Qwen3.6-35B-A3B's rates on
one H200, and 64 streams of 3 000.

--dummy: an engine with random weights of a released size, 3.2 tokens a round by decree; its own rate is tokens over the
seconds of its steps (/metrics), and delays are not known. Lost is the share of the engine's rate that the clients do
not see. CPU is of the server's two processes, a token: it says something on a busy machine too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
# the checkout's own folder `pilotfish` holds a part of the package alone: typings come first
sys.path[:0] = [str(SUPPORT), str(ROOT / "typings"), str(ROOT)]

from byte_model import write_model  # noqa: E402
from paced_core import RUN, write_pace  # noqa: E402

from pilotfish.deploy.ports import free_port  # noqa: E402
from pilotfish.engine.bench.sizes import COMMON, SIZES  # noqa: E402
from tests.soak.soak import child_of, read_metrics, read_process  # noqa: E402

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}
GRACE_SECONDS = 0.005
WARM_UP_TOKENS = 300
LENGTH = 3.2


@dataclass(frozen=True)
class Server:
    url: str
    http: int
    engine: int


@dataclass(frozen=True)
class Streamed:
    """Pieces of each stream, (when, characters); CPU seconds of both processes; metrics, before and after."""

    pieces: list[list[tuple[float, int]]]
    http_cpu: float
    engine_cpu: float
    before: dict[str, float]
    after: dict[str, float]

    @property
    def last(self) -> float:
        return max(pieces[-1][0] for pieces in self.pieces)

    def grown(self, name: str) -> float:
        return self.after[name] - self.before[name]


async def stream(session: aiohttp.ClientSession, url: str, tokens: int) -> list[tuple[float, bytes]]:
    """What came, and when. It is understood afterwards: to do so in between would delay the other streams."""
    body = {"prompt": "x", "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True}
    async with session.post(url + "/v1/completions", json=body) as response:
        response.raise_for_status()
        return [(time.monotonic(), data) async for data in response.content.iter_any()]


def pieces_of(arrived: list[tuple[float, bytes]]) -> Iterator[tuple[float, int]]:
    """Of each text of the events in what arrived, when its last byte was there and its characters."""
    rest = b""
    for when, data in arrived:
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
                    yield when, len(choice["text"])


async def measure(server: Server, streams: int, tokens: int) -> Streamed:
    async with aiohttp.ClientSession(read_bufsize=1 << 20) as session:
        before, (http, _), (engine, _) = (
            await read_metrics(session, server.url), read_process(server.http), read_process(server.engine),
        )  # fmt: skip
        arrived = await asyncio.gather(*(stream(session, server.url, tokens) for _ in range(streams)))
        http_cpu, engine_cpu = read_process(server.http)[0] - http, read_process(server.engine)[0] - engine
        pieces = [list(pieces_of(stream)) for stream in arrived]
        return Streamed(pieces, http_cpu, engine_cpu, before, await read_metrics(session, server.url))


def delays_of(found: Streamed, tokens: int, due: list[float], period: float) -> dict[str, float]:
    """Of streams whose first rounds were `due` then: those that start in the same round cannot be told apart, nor need
    they be. Every token is one character."""
    delays, on_time = [], 0
    for pieces, start in zip(sorted(found.pieces, key=lambda pieces: pieces[0][0]), sorted(due), strict=True):
        end, count = start + (-(-tokens // RUN) - 1) * period, 0
        for when, length in pieces:
            delays += [when - (start + (count + i) // RUN * period) for i in range(length)]
            count += length
            on_time += length if when <= end + GRACE_SECONDS else 0
        assert count == tokens, f"want {tokens} characters, got {count}"
    ordered = sorted(delays)
    return {
        "share_on_time": on_time / len(ordered),
        "delay_ms_median": 1e3 * statistics.median(ordered),
        "delay_ms_p99": 1e3 * ordered[int(0.99 * len(ordered))],
        "delay_ms_max": 1e3 * ordered[-1],
    }


def row_of(found: Streamed, streams: int, tokens: float, engine_rate: float, began: float) -> dict[str, float]:
    streamed = tokens / (found.last - began)
    return {
        "streams": streams,
        "engine_tokens_per_second": engine_rate,
        "streamed_tokens_per_second": streamed,
        "lost": 1 - streamed / engine_rate,
        "events": sum(map(len, found.pieces)),
        "http_cpu_us_per_token": 1e6 * found.http_cpu / tokens,
        "engine_cpu_us_per_token": 1e6 * found.engine_cpu / tokens,
    }


async def paced(server: Server, folder: Path, streams: int, rate: float, seconds: float) -> dict[str, float]:
    period, log = streams * RUN / rate, folder / "started.jsonl"
    write_pace(folder, period)
    tokens = max(WARM_UP_TOKENS, int(seconds * rate / streams))
    await measure(server, streams, WARM_UP_TOKENS)
    known = len(log.read_text().splitlines())
    found = await measure(server, streams, tokens)
    due = [json.loads(line)["due"] for line in log.read_text().splitlines()[known:]]
    # a round's tokens are there at its end
    row = row_of(found, streams, streams * tokens, rate, min(due) - period)
    return row | delays_of(found, tokens, due, period)


async def dummy(server: Server, streams: int, tokens: int) -> dict[str, float]:
    await measure(server, streams, WARM_UP_TOKENS)
    found = await measure(server, streams, tokens)
    written = found.grown("generation_tokens_total")
    assert written == streams * tokens, f"want {streams * tokens} tokens, got {written}"
    rate = written / found.grown("step_seconds_sum")
    row = row_of(found, streams, written, rate, min(pieces[0][0] for pieces in found.pieces))
    rounds, accepted = (found.grown(f"spec_decode_num_{name}_total") for name in ("drafts", "accepted_tokens"))
    return row | {"acceptance_length": 1 + accepted / rounds}


@contextlib.asynccontextmanager
async def serving(folder: Path, log: Path, flags: list[str]) -> AsyncIterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "pilotfish.server.cli", "serve", str(folder), "--port", str(port), *flags]
    with log.open("w") as output:
        process = await asyncio.create_subprocess_exec(*command, env=ENVIRONMENT, stdout=output, stderr=output)
    try:
        url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    if (await session.get(url + "/ready")).status == 200:
                        break
                if process.returncode is not None:
                    raise SystemExit(log.read_text()[-3000:])
                await asyncio.sleep(0.2)
        yield Server(url, process.pid, child_of(process.pid))
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def write_dummy(folder: Path, name: str) -> Path:
    """What `serve --load-format dummy` reads: the config of a released size or a folder, and the demo model's tokenizer
    with a word for every other id, or most rounds of random ids would have no text, and so no event."""
    size = SIZES.get(name.partition("-")[2])
    if size is None and not Path(name, "config.json").exists():
        raise SystemExit(f"--dummy {name}: want a folder with a config.json, or Qwen3.6- and one of {', '.join(SIZES)}")
    config = COMMON | size if size is not None else json.loads(Path(name, "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    demo = ROOT / "demo" / "model"
    for file in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo / file, folder)
    tokenizer = json.loads((demo / "tokenizer.json").read_text())
    known = len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"])
    vocab_size = config.get("text_config", config)["vocab_size"]
    tokenizer["model"]["vocab"] |= {f"\u0120fish{number}": number for number in range(known, vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


async def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "server.log"
        if args.dummy:
            flags = ["--load-format", "dummy", "--synthetic-acceptance-length", str(LENGTH), *args.flags]
            flags += ["--max-num-seqs", str(max(args.streams))]
            async with serving(write_dummy(Path(name), args.dummy), log, flags) as server:
                for streams in args.streams:
                    print(json.dumps(await dummy(server, streams, args.tokens)), flush=True)
            return
        folder = write_model(Path(name))
        flags = ["--core", "paced_core:make_core", "--max-num-seqs", "64", *args.flags]
        async with serving(folder, log, flags) as server:
            for streams, rate in args.rates:
                print(json.dumps(await paced(server, folder, streams, rate, args.seconds)), flush=True)


def read_rates(text: str) -> list[tuple[int, float]]:
    pairs = (word.split(":") for word in text.split(","))
    return [(int(streams), float(rate)) for streams, rate in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=read_rates, default=read_rates("1:1390,16:5510,64:192000"))
    parser.add_argument("--seconds", type=float, default=5.0, help="of each rate")
    parser.add_argument("--dummy", metavar="SIZE", help="a released size, e.g. Qwen3.6-35B-A3B, or a folder")
    parser.add_argument("--streams", type=lambda text: [int(word) for word in text.split(",")], default=[1, 16])
    parser.add_argument("--tokens", type=int, default=2000, help="of each stream of a dummy (default: %(default)s)")
    parser.add_argument("flags", nargs="*", help="after --: of `pilotfish serve`")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
