"""Long texts token by token: what every k and batch writes, against what k = 0 writes, on a device.

    python -m tests.gpu.long_comparison demo/model [--device cuda] [--kernels fused] [--tokens 1000000]
        [--k 0,3,8] [--batch 1,5,16]

Requests of 500 to 2 000 tokens, one half greedy and one half sampled, continue the prompts of MODEL/../prompts. One
engine for each k serves every batch, as a server would: rounds captured and run ahead, requests waiting in line, places
taken again. --tokens counts what all of them write together. A batch's share is in proportion to its size, so that all
run about as many rounds: requests are the same everywhere, and a smaller batch writes the first few of them. Each text
is held against the first one written of its request: at k = 0 in the smallest batch that wrote it. The audit compares
rows of short texts; this, tokens of long ones.

A line for each k and batch: tokens, how many sequences a round had at most, and how many of its rounds were full, the
acceptance length. The first token that differs is named. Exit status 1 if there is one, 2 if it could not run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch
from tqdm import tqdm

from pilotfish.engine.assemble import assemble, build_planned
from pilotfish.engine.check import driver
from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.checkpoint.tokenizer import read_tokenizer
from pilotfish.engine.command_line.parser import Parser, numbers, whole_number
from pilotfish.engine.errors import PilotfishError
from pilotfish.engine.link.messages import RequestOutput, SamplingParams, Submit
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.model.build import Model
from pilotfish.engine.options import MAX_DEPTH, EngineOptions
from pilotfish.engine.plan import Plan, make_plan, reserved_pages
from pilotfish.kernels.attention import PAGE

FILES = ("code.jsonl", "functions.jsonl")
LONGEST = 2000
"""Tokens of the longest request; the shortest has a quarter."""
MAX_BATCH = 64


@dataclass(frozen=True)
class Case:
    """An engine's k, and how many requests may run at once."""

    depth: int
    batch: int

    def __str__(self) -> str:
        return f"k = {self.depth}, batch {self.batch}"


@dataclass
class Written:
    """What a case wrote: tokens by request, rounds by their number of sequences, drafts. `accepted`, `offered`: of a
    sequence's rounds that offered all k drafts."""

    texts: dict[str, list[int]]
    sizes: Counter[int] = field(default_factory=Counter)
    accepted: int = 0
    offered: int = 0
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts.values()))


@dataclass(frozen=True)
class Difference:
    """Where a text leaves the first one written of its request: place among its tokens, both tokens (None: it ended),
    and the case that wrote the first."""

    request: str
    place: int
    token: int | None
    wanted: int | None
    by: Case

    def __str__(self) -> str:
        return f"request {self.request}, token {self.place}: {self.token}, but {self.wanted} at {self.by}"


def read_prompts(folder: Path, model: Path) -> list[list[int]]:
    """Token ids of the prompts in a folder's files, which are read in turn."""
    tokenizer = read_tokenizer(model)
    texts = [json.loads(line)["prompt"] for name in FILES for line in (folder / name).read_text().splitlines()]
    return [tokenizer.encode(text).ids for text in texts]


def make_requests(prompts: Sequence[list[int]], num_tokens: int, batch: int) -> list[Submit]:
    """As many as write so many tokens together, and fill a batch; a prompt that comes again is read in the other
    mode."""
    chance, requests, total = random.Random(0), list[Submit](), 0
    longest = min(LONGEST, max(8, num_tokens // batch))
    while total < num_tokens or len(requests) < batch:
        number = len(requests)
        is_sampled = (number + number // len(prompts)) % 2
        modes = {"temperature": 0.9, "top_k": 40, "top_p": 0.95} if is_sampled else {"temperature": 0.0}
        length = chance.randint(longest // 4, longest)
        sampling = SamplingParams(**modes, seed=number, max_tokens=length, ignore_eos=True)  # type: ignore[arg-type]
        name = f"{number}-{'sampled' if is_sampled else 'greedy'}"
        prompt = prompts[number % len(prompts)]
        requests.append(Submit(request_id=name, prompt_token_ids=prompt, sampling=sampling))
        total += length
    return requests


def shares(num_tokens: int, depths: Sequence[int], batches: Sequence[int]) -> dict[int, int]:
    """Tokens that each batch writes at each k."""
    parts = len(depths) * sum(batches)
    return {batch: -(-num_tokens * batch // parts) for batch in batches}


def first_of(requests: Sequence[Submit], num_tokens: int, batch: int) -> list[Submit]:
    """The first requests, as many as write so many tokens and fill a batch."""
    total = 0
    for count, request in enumerate(requests):
        if total >= num_tokens and count >= batch:
            return list(requests[:count])
        total += request.sampling.max_tokens
    return list(requests)


def load(args: argparse.Namespace, requests: Sequence[Submit]) -> tuple[Model, Plan]:
    """The model, with caches for the largest k and batch. Raises PilotfishError."""
    checkpoint = open_checkpoint(args.model)
    longest = max(len(request.prompt_token_ids) + request.sampling.max_tokens for request in requests)
    depth, batch = args.k[-1], args.batch[-1]
    options = EngineOptions(
        model=args.model,
        num_speculative_tokens=depth,
        max_num_seqs=batch,
        max_model_len=longest,
        kv_cache_tokens=batch * reserved_pages(longest, depth) * PAGE,
        device=args.device,
        kernels=args.kernels,
        enable_prefix_caching=False,
    )
    plan = make_plan(options, checkpoint)
    return build_planned(load_weights(checkpoint, plan.device), checkpoint.config, plan), plan


@torch.inference_mode()
def make_loop(model: Model, plan: Plan, depth: int, num_requests: int) -> EngineLoop:
    """An engine of one k; of captured rounds, those of this k alone."""
    loop = EngineLoop(assemble(model, dataclasses.replace(plan, depth=depth, captured=False), num_requests, 0, 0.0))
    if plan.captured:
        shapes = loop.executor.shapes
        loop.executor.capture([shape for shape in shapes if shape.depth == shapes.depths[-1]], progress=False)
    return loop


def write(loop: EngineLoop, batch: int, requests: Sequence[Submit], progress: tqdm) -> Written:
    """Runs the requests, as many at once as fit `batch`. Raises RuntimeError where one fails."""
    written, began = Written({request.request_id: [] for request in requests}), perf_counter()
    loop.scheduler.max_num_seqs = batch
    for request in requests:
        loop.submit(request)
    for report in driver.reports(loop):
        _note(written, loop.depth, report.outputs)
        progress.update(sum(len(output.token_ids) for output in report.outputs))
    written.seconds = perf_counter() - began
    return written


def _note(written: Written, depth: int, outputs: Sequence[RequestOutput]) -> None:
    for output in outputs:
        written.texts[output.request_id] += output.token_ids
        if output.round and output.num_drafted == depth:
            written.offered += 1
            written.accepted += output.num_accepted
    if size := sum(output.round for output in outputs):
        written.sizes[size] += 1


class Comparison:
    """Requests that every k and batch writes its share of; `first` has the first text of each, and who wrote it."""

    def __init__(self, model: Model, plan: Plan, requests: Sequence[Submit], parts: dict[int, int]):
        self.model, self.plan, self.requests, self.parts = model, plan, requests, parts
        self.first: dict[str, tuple[Case, list[int]]] = {}
        self.num_tokens = 0

    def run(self, depths: Sequence[int]) -> Iterator[tuple[Case, Written, EngineLoop, list[Difference]]]:
        """Every k and batch, and where its texts differ from the first ones."""
        chosen = {batch: first_of(self.requests, share, batch) for batch, share in sorted(self.parts.items())}
        total = len(depths) * sum(r.sampling.max_tokens for requests in chosen.values() for r in requests)
        with tqdm(total=total, unit="token", unit_scale=True, disable=not sys.stderr.isatty()) as progress:
            for depth in sorted(depths):
                progress.set_description(f"k = {depth}: getting ready")
                loop = make_loop(self.model, self.plan, depth, len(self.requests))
                for batch, requests in chosen.items():
                    case = Case(depth, batch)
                    progress.set_description(str(case))
                    written = write(loop, batch, requests, progress)
                    self.num_tokens += written.num_tokens
                    yield case, written, loop, self._compare(case, written)

    def _compare(self, case: Case, written: Written) -> list[Difference]:
        found = []
        for request, text in written.texts.items():
            by, wanted = self.first.setdefault(request, (case, text))
            if text != wanted:
                both = zip(text, wanted, strict=False)
                place = next((i for i, (a, b) in enumerate(both) if a != b), min(len(text), len(wanted)))
                token, other = (tokens[place] if place < len(tokens) else None for tokens in (text, wanted))
                found.append(Difference(request, place, token, other, by))
        return found


def line(case: Case, written: Written, loop: EngineLoop, num_wrong: int) -> str:
    """What a case wrote, in words."""
    count, most = sum(written.sizes.values()), max(written.sizes, default=0)
    full = written.sizes[case.batch] / max(1, count)
    words = [
        f"{'FAIL' if num_wrong else 'ok':4} {written.num_tokens:7} tokens of {len(written.texts)} requests",
        f"{count} rounds of up to {most} at once, {full:.0%} with {case.batch}",
        f"acceptance length {1 + written.accepted / max(1, written.offered):.2f}",
        f"{written.num_tokens / written.seconds:.0f} tokens/s",
    ]
    if loop.executor.ops.fixed_shapes:
        words.append(f"{loop.executor.num_graphs} graphs, {loop.executor.num_missed} rounds without one so far")
    return f"{case!s:15} {', '.join(words)}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder; its prompts are in MODEL/../prompts")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--kernels", choices=("auto", "torch", "fused"), default="auto")
    parser.add_argument("--tokens", type=whole_number(1), default=1_000_000, metavar="N", help="in all, at least")
    parser.add_argument("--k", type=numbers(0, MAX_DEPTH), default=[0, 3, 8], metavar="LIST")
    parser.add_argument("--batch", type=numbers(1, MAX_BATCH), default=[1, 5, 16], metavar="LIST")
    args = parser.parse_args(argv)
    if args.k[0] != 0:
        parser.error("--k: want 0 among them, which the others are held against")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)
    parts = shares(args.tokens, args.k, args.batch)
    began, most = perf_counter(), args.batch[-1]
    try:
        requests = make_requests(read_prompts(Path(args.model).parent / "prompts", Path(args.model)), parts[most], most)
        model, plan = load(args, requests)
    except (PilotfishError, OSError) as error:
        print(f"long comparison: {error}", file=sys.stderr)
        return 2
    where = torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else "cpu"
    print(f"{args.model} on {where}, context up to {plan.max_model_len} tokens", flush=True)
    comparison, num_wrong = Comparison(model, plan, requests, parts), 0
    for case, written, loop, differences in comparison.run(args.k):
        num_wrong += len(differences)
        tqdm.write(line(case, written, loop, len(differences)), file=sys.stdout)
        for difference in differences[:1]:
            tqdm.write(f"    {case}: {difference}", file=sys.stdout)
        sys.stdout.flush()
    held = ", ".join(f"{count} by {case}" for case, count in Counter(by for by, _ in comparison.first.values()).items())
    told = f"{comparison.num_tokens} tokens in {perf_counter() - began:.0f} s; requests first written: {held}"
    print(f"PASS: every k and batch writes the same: {told}" if not num_wrong else f"FAIL: {num_wrong} texts: {told}")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
