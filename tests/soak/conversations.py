"""Conversations for a long time on memory for fewer: nothing lost, every text that of a server that keeps nothing.

    python -m tests.soak.conversations --seconds 600
    python -m tests.soak.conversations --seconds 600 --tiny

Starts `pilotfish serve` twice on a model: once with keys and values for 5 of 16 conversations, so that what is kept
must always give way, once without a prefix cache. Each client lets a prompt grow turn by turn, goes back and on from an
earlier place, begins anew, or leaves while its answer streams. Each answer, with its log-probabilities, is asked of the
other server too. The scripted engine of tests keeps nothing of prompts; in its place there is a tiny model of random
weights (--tiny), which answers as fast and has the real tree, pools and snapshots.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.soak.soak import (
    HELD,
    MAX_GROWTH,
    ROOT,
    SETTLING,
    Outcome,
    Record,
    Sample,
    read_metrics,
    sample,
    server,
    write_model,
)

CONVERSATIONS, FITTING = 16, 5
LONGEST = 2048
"""Tokens of the longest conversation; a new one begins then."""
GROWTH = (20, 400)
SYSTEMS = 3
"""Beginnings that conversations share."""
GOING_BACK, LEAVING = 0.15, 0.05
ANSWER_TOKENS = 12
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 0.9, "seed": 3, "presence_penalty": 0.5, "speculation": {"k": 1}},
)


class Talk:
    """The prompts of one client: `next_prompt` of token ids below `vocab_size`, at most `longest`."""

    def __init__(self, seed: int, vocab_size: int, longest: int = LONGEST, growth: tuple[int, int] = GROWTH):
        self.random = random.Random(seed)
        self.vocab_size, self.longest, self.growth = vocab_size, longest, growth
        self.prompt: list[int] = []
        self.lengths: list[int] = []

    def next_prompt(self) -> list[int]:
        draw = self.random
        if len(self.lengths) > 1 and draw.random() < GOING_BACK:
            # a message is written anew: what came before it stays
            del self.lengths[draw.randrange(1, len(self.lengths)) :]
            self.prompt = self.prompt[: self.lengths[-1] - draw.randint(0, 3)]
        longest_turn = self.growth[1]
        if not self.prompt or len(self.prompt) + longest_turn > self.longest:
            system = random.Random(draw.randrange(SYSTEMS))
            self.prompt = self._tokens(system, system.randint(longest_turn, 2 * longest_turn))
            self.lengths = []
        self.prompt = [*self.prompt, *self._tokens(draw, draw.randint(*self.growth))]
        self.lengths.append(len(self.prompt))
        return self.prompt

    def _tokens(self, generator: random.Random, count: int) -> list[int]:
        return [generator.randrange(self.vocab_size) for _ in range(count)]


@dataclass
class Found:
    """Tokens of prompts, and those of them that were not read."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_compared: int = 0


@dataclass
class ConversationsOutcome(Outcome):
    found: Found = field(default_factory=Found)
    evictions: float = 0.0

    def faults(self) -> list[str]:
        faults = super().faults()
        if not self.found.cached_tokens:
            faults.append("nothing was found in the cache")
        if not self.evictions:
            faults.append("nothing had to give way: the memory held all")
        return faults


async def answer(session: aiohttp.ClientSession, url: str, body: dict[str, Any], leaves_after: int | None) -> Any:
    """The whole answer, once its first `leaves_after` lines have come None: the client leaves then."""
    async with session.post(url + "/v1/completions", json=body | {"stream": leaves_after is not None}) as response:
        if response.status != 200:
            raise ValueError(f"{response.status}: {(await response.text())[:300]}")
        if leaves_after is None:
            return json.loads(await response.text())
        for _ in range(leaves_after):
            await response.content.readline()
        return None


async def client(
    number: int, vocab_size: int, urls: tuple[str, str], session: aiohttp.ClientSession, record: Record, found: Found
) -> None:
    """One conversation after the other, at the server that keeps prompts and at the one that does not."""
    talk = Talk(number, vocab_size)
    while True:
        body = {"model": "soaked", "prompt": talk.next_prompt(), "max_tokens": ANSWER_TOKENS, "logprobs": 1}
        body |= {"ignore_eos": True, **talk.random.choice(WAYS)}
        leaves_after = talk.random.randint(0, 5) if talk.random.random() < LEAVING else None
        try:
            warm = await answer(session, urls[0], body, leaves_after)
            if warm is None:
                record.ended["left"] += 1
                continue
            record.ended["finished"] += 1
            found.prompt_tokens += warm["usage"]["prompt_tokens"]
            found.cached_tokens += warm["usage"]["prompt_tokens_details"]["cached_tokens"]
            cold = await answer(session, urls[1], body, None)
            found.num_compared += 1
            if warm["choices"] != cold["choices"]:
                record.errors.append(f"a prompt of {len(talk.prompt)} tokens: another answer than cold")
        except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
            record.errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(1)


def write_tiny(folder: Path) -> Path:
    """A tiny model of random weights, with a tokenizer."""
    from tests.support.tiny_models import build_tiny  # imports transformers

    return build_tiny(write_model(folder), "moe", max_position_embeddings=2 * LONGEST)


async def soak(model: Path, seconds: float, progress: bool = True) -> ConversationsOutcome:
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    # a head of random weights is a dead one
    flags = ["--max-model-len", str(LONGEST + 256), "--head-check", "warn"]
    small = ["--kv-cache-tokens", str(FITTING * LONGEST)]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        async with (
            server(model, Path(folder), *flags, *small) as running,
            server(model, Path(other), *flags, "--no-enable-prefix-caching") as bare,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
        ):
            record, found, begun = Record(), Found(), time.monotonic()
            samples: list[Sample] = [await sample(session, running)]
            urls = running.url, bare.url
            tasks = [
                asyncio.create_task(client(number, vocab_size, urls, session, record, found))
                for number in range(CONVERSATIONS)
            ]
            while (now := time.monotonic() - begun) < seconds:
                await asyncio.sleep(min(1.0, seconds - now))
                samples.append(await sample(session, running))
                if progress:
                    text = f"\r{now:.0f} of {seconds:.0f} s, {found.num_compared} answers compared"
                    print(text, end="", file=sys.stderr, flush=True)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            metrics = await read_metrics(session, running.url)
            deadline = time.monotonic() + 30
            while any(metrics[name] for name in HELD) and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
                metrics = await read_metrics(session, running.url)
        held = {name: metrics[name] for name in HELD}
        evictions = metrics["prefix_cache_evictions_total"]
        return ConversationsOutcome(seconds, CONVERSATIONS, record, samples, held, found, evictions)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--model", type=Path, default=ROOT / "demo" / "model")
    parser.add_argument("--tiny", action="store_true", help="a tiny model of random weights in place of one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny(Path(folder)) if args.tiny else args.model
        outcome = asyncio.run(soak(model, args.seconds))
    found, ended = outcome.found, outcome.record.ended
    share = found.cached_tokens / max(1, found.prompt_tokens)
    print(
        f"\n{CONVERSATIONS} conversations on memory for {FITTING}, {args.seconds:.0f} s: {ended['finished']} answers, "
        f"{ended['left']} left, {found.num_compared} compared with cold ones; {found.cached_tokens} of "
        f"{found.prompt_tokens} prompt tokens were not read ({share:.0%}), {outcome.evictions:.0f} snapshots gave way; "
        f"memory {outcome.growth('http_rss'):.3f} and {outcome.growth('engine_rss'):.3f} of what it was "
        f"(at most {MAX_GROWTH}, in {2 * SETTLING:.0f} s and more), "
        f"{outcome.samples[-1].engine_rss:.0f} MiB of the engine's at the end"
    )
    for fault in outcome.faults():
        print(f"FAULT: {fault}", file=sys.stderr)
    return 1 if outcome.faults() else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
