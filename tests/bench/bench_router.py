"""Tokens that servers behind a router read of agents' conversations: cache_aware against round robin.

    python -m tests.bench.bench_router             simulated, in a second
    python -m tests.bench.bench_router --router vllm    the same through the real router, servers of the demo model

Each cache holds half of all conversations. The floor is one server with room for all: every token once, and what lies
past the last boundary of the turn before. Simulated is what is kept and which server is chosen, not time: one
request at a time, in an order that is drawn. What must hold in the real run: both policies have the same texts and
log-probabilities.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

SERVERS = 3


@dataclass(frozen=True)
class Load:
    """`count` conversations of `turns` prompts, each `growth` tokens longer than the one before.

    What was read is kept up to multiples of `page`.
    """

    count: int = 9
    turns: int = 6
    system: int = 600
    growth: int = 256
    page: int = 256
    seed: int = 1

    def order(self) -> Iterator[tuple[int, int]]:
        """(conversation, turn): each has its next turn once a pass, in an order drawn anew."""
        draw = random.Random(self.seed)
        for turn in range(self.turns):
            yield from ((one, turn) for one in draw.sample(range(self.count), self.count))

    def length(self, turn: int) -> int:
        return self.system + self.growth * (turn + 1)

    @property
    def tokens(self) -> int:
        return sum(self.length(turn) for _, turn in self.order())


class Cache:
    """What one server keeps: of each conversation what was read up to the last boundary; the longest unused goes."""

    def __init__(self, page: int, capacity: int) -> None:
        self._page, self._capacity = page, capacity
        self._kept: OrderedDict[int, int] = OrderedDict()

    def read(self, conversation: int, length: int) -> int:
        """Tokens that must be read of the prompt."""
        # the last token is always read: logits come of it
        cached = min(self._kept.pop(conversation, 0), (length - 1) // self._page * self._page)
        self._kept[conversation] = length // self._page * self._page
        while sum(self._kept.values()) > self._capacity and len(self._kept) > 1:
            self._kept.popitem(last=False)
        return length - cached


Policy = Callable[[int, int], int]
"""The server for a conversation's request, given its number in the order."""


def round_robin(load: Load) -> Policy:
    return lambda conversation, number: number % SERVERS


def cache_aware(load: Load) -> Policy:
    """A conversation stays; a new one goes to the server with the fewest, which is where load would send it."""
    places: dict[int, int] = {}

    def choose(conversation: int, number: int) -> int:
        held = list(places.values())
        return places.setdefault(conversation, min(range(SERVERS), key=held.count))

    return choose


LOADS = {
    "small": Load(),
    "short chats": Load(count=24, turns=5, system=300, growth=180),
    "agents": Load(count=24, turns=50, system=6000, growth=520, page=2048),
}
SHARES = (0.34, 0.5, 0.75, 1.0)
POLICIES = {"round_robin": round_robin, "cache_aware": cache_aware}


def simulate(load: Load, policy: str, share: float = 0.5) -> int:
    """Tokens read by all servers, each of which keeps that share of all conversations at their full length."""
    capacity = int(share * load.count * load.length(load.turns - 1))
    caches, choose = [Cache(load.page, capacity) for _ in range(SERVERS)], POLICIES[policy](load)
    turns = enumerate(load.order())
    return sum(caches[choose(one, number)].read(one, load.length(turn)) for number, (one, turn) in turns)


def floor(load: Load) -> int:
    cache = Cache(load.page, sys.maxsize)
    return sum(cache.read(one, load.length(turn)) for one, turn in load.order())


def real(load: Load, router: str, policy: str) -> tuple[int, list[list[str]]]:
    """Tokens read by three servers of the demo model behind the router, and each conversation's texts.

    All conversations go on at once: what begins anew goes to the server with the least to do.
    """
    sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
    from routers import ROOT, post, replicas_of, routed

    model = ROOT / "demo" / "model"
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    # pages of the pool hold half of all conversations: 4 sequences of this context
    context = load.count * load.length(load.turns - 1) // 2 // 4 // load.page * load.page
    flags = ("--max-model-len", str(context), "--max-num-seqs", "4", "--num-threads", "1", "--no-cost-table")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = stack.enter_context(replicas_of(model, folder, *flags))
        through = stack.enter_context(routed(router, folder, servers, "--policy", policy))

        def converse(conversation: int) -> list[str]:
            draw, texts = random.Random(conversation), []
            ids = [draw.randrange(1000, 7000) for _ in range(load.length(load.turns - 1))]
            for turn in range(load.turns):
                prompt = tokenizer.decode(ids[: load.length(turn) - 20])
                fields = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 1}
                answer = post(through.url + "/v1/completions", fields)
                assert answer.status == 200, answer.body
                texts.append(json.dumps(answer.json()["choices"]))
            return texts

        with ThreadPoolExecutor(load.count) as pool:
            texts = list(pool.map(converse, range(load.count)))
        asked, hit = (
            sum(server.metric(f"pilotfish_prefix_cache_{name}_total") for server in servers)
            for name in ("queries", "hits")
        )
    return int(asked - hit), texts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--router", choices=("vllm", "sglang"))
    args = parser.parse_args()
    for name, load in LOADS.items():
        print(f"{name}: {load}: prompts of {load.tokens} tokens, at least {floor(load)} to be read")
        for share in SHARES:
            read = {policy: simulate(load, policy, share) for policy in POLICIES}
            ratio = read["cache_aware"] / read["round_robin"]
            print(f"  simulated, each cache holds {share:.0%}: {read}, {ratio:.2f} of round robin's")
    load = LOADS["small"]
    if args.router:
        found = {policy: real(load, args.router, policy) for policy in POLICIES}
        assert found["cache_aware"][1] == found["round_robin"][1], "texts depend on the server"
        read = {policy: tokens for policy, (tokens, _) in found.items()}
        ratio = read["cache_aware"] / read["round_robin"]
        print(json.dumps({"router": args.router, "read": read, "ratio": round(ratio, 3), "prompts": load.tokens}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
