"""Makes the pictures of docs/operations.md: a server, a Prometheus, a changing load, and each panel drawn.

python -m pilotfish.deploy.grafana.record demo/model --seconds 180 --out docs/pictures
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from pilotfish.deploy.grafana.generate import DEPLOY
from pilotfish.deploy.grafana.render import render
from pilotfish.deploy.prometheus.api import scraping
from pilotfish.deploy.prompts import domains
from pilotfish.deploy.sweep.target import started

KEYS = ("bot", "agent")
CLIENTS = (1, 4, 8, 2)
"""Clients in each quarter of the time: alone, at the cap, beyond it, few."""


async def load(url: str, seconds: float) -> None:
    """Domains and paths in turn; now and then a request that is refused."""
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        for count in CLIENTS:
            until = time.monotonic() + seconds / len(CLIENTS)
            await asyncio.gather(*(_client(http, url, number, until) for number in range(count)))


async def _client(http: aiohttp.ClientSession, url: str, number: int, until: float) -> None:
    prompts = list(domains().values())
    headers = {"Authorization": f"Bearer {KEYS[number % len(KEYS)]}"}
    for turn in itertools.count(number):
        if time.monotonic() > until:
            return
        prompt = prompts[turn % len(prompts)]
        fields = {"max_tokens": -2 if turn % 10 == 9 else 60 + 30 * (turn % 4), "temperature": 0.6 * (turn % 2)}
        chat = {"messages": [{"role": "user", "content": prompt.chat}]}
        path, body = ("chat/completions", chat) if turn % 3 else ("completions", {"prompt": prompt.completion})
        async with http.post(f"{url}/v1/{path}", json=body | fields, headers=headers) as response:
            await response.read()
        await asyncio.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    args = parser.parse_args()
    flags = ["--cost-table", "--api-key", *KEYS]
    rules = DEPLOY / "prometheus" / "pilotfish.rules.yml"
    with (
        tempfile.TemporaryDirectory() as folder,
        started(args.model, flags, Path(folder, "server.log")) as url,
        scraping(url.removeprefix("http://"), rules) as prometheus,
    ):
        begin = time.time()
        asyncio.run(load(url, args.seconds))
        for path in render(prometheus, begin + 5, time.time(), args.out):
            print(path, f"{path.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
