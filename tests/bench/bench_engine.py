"""What the host does in the engine's process for admissions, prompts, first tokens, rounds, grammars and messages.

    python -m tests.bench.bench_engine [--model FOLDER] [--device cuda] [--requests 400] [--against CHECKOUT]

Regime: the soak's requests (tests/soak/soak.py: 16 or 48 tokens, sampled and greedy, no stop strings, one of seven
with a grammar), 64 in the queue, 4 at a time, k = 3, through EngineLoop in this process; every message is packed and
read as it is on the socket. Without a GPU the way is the kernels' one (rounds of fixed shapes, run ahead, prompts in
captured groups), and what would be on the device is left out but for the commit, a row of its own: every round writes
three times the letter a. The other rows are what a GPU's host does as well, with torch's small copies in place of
launches.

Figures are CPU microseconds of the engine's thread (time.thread_time), each part without the parts named inside of it,
less what the clock itself takes. The least of --runs is taken, part by part: other work on the machine adds to a part,
and nothing takes away. --against: the same in another checkout, in turn, each run in a process of its own. Physical
limit: none; what is compared is the same work before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from time import process_time, thread_time_ns
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pilotfish.engine.cache.prefix import PrefixCache
from pilotfish.engine.link.messages import Grammar, SamplingParams, Submit, decode_from_engine, decode_to_engine, frame
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.options import EngineOptions
from pilotfish.engine.plan import FAST_ROWS
from pilotfish.engine.requests.scheduler import Scheduler
from pilotfish.engine.round.batch_state import BatchState
from pilotfish.engine.round.body import RoundBody
from pilotfish.engine.round.executor import LaunchedRound, RoundExecutor, make_executor
from pilotfish.engine.round.grammars import SlotGrammars
from pilotfish.engine.round.graphs import Graphs
from pilotfish.engine.round.pinned import HostCopy, Placement
from pilotfish.engine.round.prompt import PromptPass
from pilotfish.engine.round.reading import FirstToken, Reading
from pilotfish.engine.round.shapes import Shape
from pilotfish.engine.start import make_core
from pilotfish.spec import accept
from tests.support.fixed_shapes import PaddedPrompts
from tests.support.tiny_models import build_tiny

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "model"
END_IDS = tuple(json.loads((DEMO / "generation_config.json").read_text())["eos_token_id"])
AT_ONCE, QUEUED, DEPTH = 4, 64, 3
PROMPT, LENGTHS = 28, (16, 48)
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 0.8, "seed": 7, "choice": 1},
    {"temperature": 0.7, "seed": 1, "logprobs": 2},
    {"temperature": 0.9, "seed": 3, "presence_penalty": 0.5},
    {"temperature": 0.9, "seed": 3, "bad_words_token_ids": ((300,), (301, 302))},
    {"temperature": 0.0, "grammar": Grammar(kind="regex", source="[a-z ]{20,60}")},
)
REQUEST, ROUND = "a request", "a round"
DEVICE = "captured work (replaces the device's)"
LETTER, OTHER = 64, 65
"""The demo tokenizer's ids of two letters."""
PARTS: tuple[tuple[str, str, type, tuple[str, ...]], ...] = (
    (REQUEST, "submit: checks, the queue", EngineLoop, ("submit",)),
    (REQUEST, "admission: scheduler", Scheduler, ("admit",)),
    (REQUEST, "admission: the prefix cache", PrefixCache, ("find", "enter", "leave", "publish", "advance")),
    (REQUEST, "admission: executor", RoundExecutor, ("admit",)),
    (REQUEST, "admission: the slot's state", BatchState, ("admit",)),
    (REQUEST, "prompt: its piece taken", Reading, ("__init__",)),
    (REQUEST, "prompt: steps of layers", Reading, ("advance",)),
    (REQUEST, "prompt: its end", Reading, ("finish", "end")),
    (REQUEST, "first token: launched", Reading, ("_choose_first", "_start_head")),
    (REQUEST, "first token: read", FirstToken, ("collect",)),
    (REQUEST, "sequence ended", Scheduler, ("finish", "release", "check")),
    (ROUND, "the next step chosen", Scheduler, ("next_step",)),
    (ROUND, "loop", EngineLoop, ("step",)),
    (ROUND, "launch", RoundExecutor, ("launch",)),
    (ROUND, "launch: log-probabilities", RoundExecutor, ("_logprobs",)),
    (ROUND, "launch: slots and tables placed", Placement, ("place",)),
    (ROUND, "launch: report fetched", RoundExecutor, ("fetch_report",)),
    (ROUND, "collect", LaunchedRound, ("collect",)),
    (ROUND, "outputs made", EngineLoop, ("_outputs",)),
    (ROUND, "stats made", EngineLoop, ("_stats",)),
    (ROUND, "grammars: steps begun, masks taken", SlotGrammars, ("admit", "release", "settle", "forced", "advance")),
    (ROUND, "grammars: masks started", SlotGrammars, ("start_masks",)),
    (ROUND, "replays", Graphs, ("replay",)),
    (ROUND, "waits (HostCopy.read)", HostCopy, ("read",)),
    (ROUND, DEVICE, RoundExecutor, ("_work", "_work_once")),
)


class Profile:
    """Nanoseconds and calls of each part, and what it asks torch for. A part's own: without the parts called in it."""

    def __init__(self) -> None:
        self.own: defaultdict[str, int] = defaultdict(int)
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.torch_calls: defaultdict[str, int] = defaultdict(int)
        self._inner = [0]
        self._parts = [""]
        self._clock = 0
        self._clock = self._least()

    def _least(self) -> int:
        """What one call of nothing comes to."""
        nothing = self.watched("", lambda: None)
        for _ in range(2000):
            nothing()
        least = self.own[""] // self.calls[""]
        self.clear()
        return least

    def clear(self) -> None:
        self.own.clear()
        self.calls.clear()

    def watched(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed as this part."""
        own, calls, inner, parts = self.own, self.calls, self._inner, self._parts

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            inner.append(0)
            parts.append(part)
            began = thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                took = thread_time_ns() - began
                own[part] += took - inner.pop() - self._clock
                calls[parts.pop()] += 1
                inner[-1] += took + self._clock

        return timed

    def watch_all(self) -> None:
        """Puts timed methods in place of all PARTS."""
        for _, part, owner, names in PARTS:
            for name in names:
                # one that another checkout does not have is a part of what calls it
                if name in vars(owner):
                    setattr(owner, name, self.watched(part, vars(owner)[name]))


class NoDevice(RoundBody):
    """A round without a model: the same letter at every row, of three drafts two that agree with it."""

    def verify(self, shape: Shape) -> None:
        """Nothing is computed."""

    def decide(self, shape: Shape, next_depth: int, flags: int) -> None:
        b, count = self.buffers, shape.num_sequences
        chosen = b.chosen[: shape.num_rows].fill_(LETTER)
        self.ops.accept_commit(chosen, b.slots[:count], self.state, b.verdicts(count), shape.width, next_depth, flags)

    def draft(self, shape: Shape, next_depth: int, flags: int) -> None:
        slots = self.buffers.slots[: shape.num_sequences]
        self.state.drafts[slots] = torch.tensor([LETTER, LETTER, OTHER])
        accept.offer(self.state, slots, next_depth)

    def choose_first(self, next_depth: int, flags: int) -> None:
        self.state.length.index_add_(0, self.buffers.slots[:1], self._one)
        self.decide(Shape(1, 0), next_depth, flags)


class NoPrompts(PaddedPrompts):
    def attend_prompt(self, *_: object) -> None:
        """Nothing is computed."""


class TorchCalls(TorchDispatchMode):
    """Counts operators by the part that asks for them."""

    def __init__(self, profile: Profile):
        super().__init__()
        self._profile = profile

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._profile.torch_calls[self._profile._parts[-1]] += 1
        return func(*args, **(kwargs or {}))


def make_loop(model: Path, device: str) -> EngineLoop:
    options = EngineOptions(
        model=str(model),
        device=device,  # type: ignore[arg-type]
        num_speculative_tokens=DEPTH,
        max_num_seqs=AT_ONCE,
        max_waiting=QUEUED,
        max_model_len=2048,
        num_threads=1,
        head_check="off",
        eos_token_ids=END_IDS,
    )
    loop = make_core(options)
    if device != "cpu":
        return loop
    before, operators = loop.executor, NoPrompts()
    state = BatchState(AT_ONCE + 1, DEPTH, loop.ready.vocab_size, before.model.device)
    sizes = DEPTH, AT_ONCE, loop.ready.max_model_len, FAST_ROWS, operators, loop.ready.prefill_chunk
    loop.executor = make_executor(before.model, state, *sizes)
    loop.executor.body = NoDevice(before.model, state, loop.executor.body.buffers, operators)
    PromptPass._end_span = lambda *_: None  # type: ignore[method-assign,assignment]
    PromptPass._layers = lambda *_: iter(())  # type: ignore[method-assign,assignment,return-value]
    with torch.inference_mode():
        loop.executor.capture(progress=False)
    return loop


def requests(count: int, vocab_size: int) -> list[Submit]:
    draw = random.Random(1)
    topics = [[draw.randrange(256, vocab_size - 8) for _ in range(PROMPT)] for _ in range(3)]
    return [
        Submit(
            request_id=f"cmpl-{number:032x}-0",
            prompt_token_ids=draw.choice(topics),
            sampling=SamplingParams(
                max_tokens=draw.choice(LENGTHS), eos_token_ids=END_IDS, ignore_eos=True, **draw.choice(WAYS)
            ),
            key="soak",
        )
        for number in range(count)
    ]


def serve(loop: EngineLoop, asked: list[Submit], profile: Profile) -> int:
    """Answers all requests, as engine/link/process.py does; how many rounds it took."""
    read = profile.watched("messages: a request read", decode_to_engine)
    pack = profile.watched("messages: a report packed", frame)
    waiting = [frame(request)[4:] for request in asked][::-1]
    num_open, num_rounds = 0, 0
    while waiting or num_open:
        while waiting and num_open < QUEUED:
            loop.submit(read(waiting.pop()))
            num_open += 1
        report = loop.step()
        if report is None:
            continue
        decode_from_engine(pack(report)[4:])
        num_open -= sum(output.finish_reason is not None for output in report.outputs)
        num_rounds += any(output.round for output in report.outputs)
        if errors := [output.error for output in report.outputs if output.error is not None]:
            raise RuntimeError(errors[0])
    return num_rounds


def measure(model: Path, device: str, num_requests: int) -> dict[str, Any]:
    profile = Profile()
    # before what is captured is bound
    profile.watch_all()
    loop = make_loop(model, device)
    asked = requests(num_requests, loop.ready.vocab_size)
    serve(loop, asked[: num_requests // 4], profile)
    profile.clear()
    process, thread = process_time(), thread_time_ns()
    num_rounds = serve(loop, asked, profile)
    whole = (thread_time_ns() - thread) / 1e3
    tokens = sum(request.sampling.max_tokens for request in asked)
    us, calls = {part: own / 1e3 for part, own in profile.own.items()}, dict(profile.calls)
    others = 1e6 * (process_time() - process) - whole
    with TorchCalls(profile):
        serve(loop, asked, profile)
    return {
        "requests": num_requests,
        "rounds": num_rounds,
        "tokens": tokens,
        "us": us,
        "calls": calls,
        "torch_calls": dict(profile.torch_calls),
        "thread_us": whole,
        "other_threads_us": others,
    }


def least(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each part the run in which it took least."""
    found = runs[0]
    for run in runs[1:]:
        found["us"] = {part: min(took, run["us"][part]) for part, took in found["us"].items()}
        found["other_threads_us"] = min(found["other_threads_us"], run["other_threads_us"])
    return found


def show(columns: dict[str, dict[str, Any]]) -> None:
    any_run = next(iter(columns.values()))
    groups = dict.fromkeys(part for _, part, _, _ in PARTS) | dict.fromkeys(any_run["us"])
    per = {part: group for group, part, _, _ in PARTS}
    print(f"{any_run['requests']} requests, {any_run['tokens']} tokens, {any_run['rounds']} rounds")
    print(f"{'CPU us, torch operators':44} {'calls':>7}  " + "  ".join(f"{name:>16}" for name in columns))
    for part in groups:
        group = per.get(part, REQUEST if "request" in part else ROUND)
        number = any_run["requests" if group == REQUEST else "rounds"]
        cells = ((run["us"].get(part, 0.0), run["torch_calls"].get(part, 0)) for run in columns.values())
        row = "  ".join(f"{took / number:9.1f} {asked / number:6.1f}" for took, asked in cells)
        print(f"{part:44} {any_run['calls'].get(part, 0):7d}  {row}  {group}")
    for name, run in columns.items():
        own = {part: took for part, took in run["us"].items() if part != DEVICE}
        print(
            f"{name}: {sum(own.values()) / run['tokens']:.1f} us a token without the operators, of which a request's "
            f"share is {sum(own[p] for p in own if per.get(p, REQUEST) == REQUEST and p in own) / run['requests']:.0f} "
            f"us a request; other threads {run['other_threads_us'] / run['requests']:.0f} us a request"
        )


def in_own_process(checkout: Path, args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """This file, over the package of a checkout."""
    # after the checkout's, whatever packages are found by
    paths = [str(checkout / "typings"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, str(Path(__file__).resolve()), "--once", "--model", str(model)]
    command += ["--device", args.device, "--requests", str(args.requests)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def tiny_model(folder: Path) -> Path:
    """Next to no work for operators, beside the demo model's tokenizer, for grammars."""
    size = json.loads((DEMO / "config.json").read_text())
    vocab_size = size.get("vocab_size") or size["text_config"]["vocab_size"]
    build_tiny(folder, "dense", vocab_size=vocab_size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((DEMO / name).read_bytes())
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: a tiny one, or on a GPU the demo model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout's root, measured in turn")
    parser.add_argument("--json", type=Path, help="the rows, one line a checkout")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("want a CUDA device")
    if args.once:
        print(json.dumps(measure(args.model, args.device, args.requests)))
        return
    with tempfile.TemporaryDirectory() as name:
        model = args.model or (DEMO if args.device == "cuda" else tiny_model(Path(name) / "tiny"))
        checkouts = ({"before": args.against.resolve()} if args.against else {}) | {"now": ROOT}
        runs: dict[str, list[dict[str, Any]]] = {checkout: [] for checkout in checkouts}
        for _ in range(args.runs):
            for checkout, path in checkouts.items():
                runs[checkout].append(in_own_process(path, args, model))
    columns = {checkout: least(found) for checkout, found in runs.items()}
    show(columns)
    for checkout, found in columns.items():
        print(json.dumps({"checkout": checkout, "device": args.device} | found))


if __name__ == "__main__":
    main()
