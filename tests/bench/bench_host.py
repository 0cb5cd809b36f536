"""Whether the host keeps up: a scripted engine commits 3 tokens every 1.0 ms for each stream, whatever the host does.

    python tests/bench/bench_host.py [--streams 1,4,16] [--seconds 5]

Regime: a server of two processes over HTTP on this machine, clients in a third, streamed completions. A token's added
delay is the time from when its round was due in the engine to when its text was in the client's hands; its share of the
rate is tokens received by the time the last one was due, over tokens due. Engine, server and clients share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

SUPPORT = Path(__file__).parents[1] / "support"
sys.path.insert(0, str(SUPPORT))

from byte_model import write_model  # noqa: E402
from paced_core import PERIOD, RUN  # noqa: E402

from pilotfish.deploy.ports import free_port  # noqa: E402

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}


async def stream(session: aiohttp.ClientSession, url: str, tokens: int) -> list[tuple[float, int]]:
    """When each piece of text came, and its length: every token is one character."""
    body = {"prompt": "x", "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True}
    pieces = []
    async with session.post(url + "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                now = time.monotonic()
                for choice in json.loads(line[6:])["choices"]:
                    pieces.append((now, len(choice["text"])))
    return pieces


async def measure(url: str, streams: int, tokens: int, log: Path) -> dict[str, float]:
    known = len(log.read_text().splitlines()) if log.exists() else 0
    async with aiohttp.ClientSession(read_bufsize=1 << 20) as session:
        found = await asyncio.gather(*(stream(session, url, tokens) for _ in range(streams)))
    starts = sorted(json.loads(line)["due"] for line in log.read_text().splitlines()[known:])
    # streams that start in the same round cannot be told apart, nor need they be
    found.sort(key=lambda pieces: pieces[0][0])
    delays, on_time, received = [], 0, 0
    for pieces, start in zip(found, starts, strict=True):
        end, count = start + (-(-tokens // RUN) - 1) * PERIOD, 0
        for when, length in pieces:
            for _ in range(length):
                delays.append(when - (start + count // RUN * PERIOD))
                count += 1
            on_time += length if when <= end + 0.005 else 0
        received += count
    assert received == streams * tokens, f"want {streams * tokens} characters, got {received}"
    ordered = sorted(delays)
    return {
        "streams": streams,
        "tokens_per_second_due": streams * RUN / PERIOD,
        "share_on_time": on_time / received,
        "delay_ms_median": 1e3 * statistics.median(ordered),
        "delay_ms_p99": 1e3 * ordered[int(0.99 * len(ordered))],
        "delay_ms_max": 1e3 * ordered[-1],
        "events": sum(map(len, found)),
    }


async def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name))
        port = free_port()
        command = [sys.executable, "-m", "pilotfish.server.cli", "serve", str(folder), "--port", str(port)]
        command += ["--core", "paced_core:make_core", "--max-num-seqs", "64"]
        output = (folder / "server.log").open("w")
        server = await asyncio.create_subprocess_exec(*command, env=ENVIRONMENT, stdout=output, stderr=output)
        url = f"http://127.0.0.1:{port}"
        try:
            await _ready(url)
            print("streams  due tok/s  on time  median ms  p99 ms  max ms  events")
            for streams in args.streams:
                await measure(url, streams, 300, folder / "started.jsonl")
                row = await measure(url, streams, int(args.seconds * RUN / PERIOD), folder / "started.jsonl")
                delays = f"{row['delay_ms_median']:9.2f}  {row['delay_ms_p99']:6.2f}  {row['delay_ms_max']:6.1f}"
                due = f"{row['streams']:7d}  {row['tokens_per_second_due']:9.0f}  {row['share_on_time']:7.1%}"
                print(f"{due}  {delays}  {row['events']:6d}")
        finally:
            server.terminate()
            await server.wait()


async def _ready(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(300):
            try:
                async with session.get(url + "/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise SystemExit("the server does not get ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=lambda text: [int(word) for word in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--seconds", type=float, default=5.0)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
