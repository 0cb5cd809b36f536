"""`pilotfish bench MODEL`: speed of rounds by k, batch and context, beside what the memory's rate allows.

MODEL is a checkpoint folder, or with --load-format dummy a released size by name (Qwen3.6-35B-A3B) or a folder with a
config.json: its weights are then random values made on the device. Batches of random prompts are decoded greedily for
--tokens tokens. Every k must write what k = 0 writes, or there are no figures. With --synthetic-acceptance-length the
head runs as ever, and its drafts are replaced by the known text with seeded errors; rows with random weights or
replaced drafts say that they are synthetic.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import statistics
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from pilotfish.engine.bench.measure import Case, Run, random_prompts, run_batch
from pilotfish.engine.bench.oracle import Oracle, acceptance_rate
from pilotfish.engine.bench.profile import profile
from pilotfish.engine.bench.roof import Frame, distinct_experts, memory_rate, round_bytes
from pilotfish.engine.bench.sizes import SIZES, released_config
from pilotfish.engine.checkpoint.dummy import dummy_weights
from pilotfish.engine.checkpoint.load import Weight, load_weights
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.config import ModelConfig
from pilotfish.engine.errors import OptionError, PilotfishError
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.model.build import CacheSizes, Model, build_model
from pilotfish.engine.options import MAX_DEPTH
from pilotfish.engine.start import MAX_ROWS, Plan, assemble
from pilotfish.kernels.attention import PAGE
from pilotfish.kernels.linear import cpu_multiplies_bf16

COLUMNS = (
    ("k", "k"), ("batch", "B"), ("context", "context"), ("tokens_per_second", "tok/s"), ("round_ms", "round ms"),
    ("acceptance_length", "accepted"), ("floor_ms", "floor ms"), ("share_of_roof", "of roof"),
    ("first_token_ms", "first ms"), ("host_ms", "host ms"), ("graph_hits", "hits"), ("graph_misses", "misses"),
)  # fmt: skip
REPLAYS = 50
WARM_UP_TOKENS = 8


def measure_all(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each k, batch and context. Raises PilotfishError."""
    config, weights = _weights(args)
    plan = _plan(args, config)
    sizes = CacheSizes(plan.num_pages + 1, plan.max_num_seqs + 1, 0 if plan.fused else plan.depth + 1)
    draft_ids = None if args.draft_vocab_size is None else range(min(args.draft_vocab_size, config.vocab_size))
    model = build_model(weights, config, sizes, plan.dtype, plan.device, plan.fused, draft_ids)
    rate = memory_rate(plan.device) if plan.device.type == "cuda" else None
    frame = {
        "model": args.model,
        "load_format": args.load_format,
        "layout": args.dummy_layout if args.load_format == "dummy" else None,
        "device": torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else "cpu",
        "kernels": "fused" if plan.fused else "torch",
        "pdl": plan.fused and not args.no_pdl,
        "memory_bytes_per_second": rate,
        "weights_bytes": sum(linear.num_bytes for linear in _products(model)),
    }
    texts: dict[tuple[int, int], dict[str, list[int]]] = {}
    for depth in sorted({0, *args.k}):
        loop = _loop(args, model, plan, depth)
        for batch in args.batch:
            if batch * (depth + 1) > MAX_ROWS:
                continue
            for context in args.context:
                known = texts.get((batch, context))
                run = _run(args, loop, Case(depth, batch, context), known)
                if known is None:
                    texts[batch, context] = run.texts
                elif known != run.texts:
                    raise PilotfishError(f"k = {depth}, batch {batch}, context {context}: other text than k = 0")
                if depth in args.k:
                    yield frame | _row(args, model, loop, Case(depth, batch, context), run, rate)
        del loop
        gc.collect()


def _weights(args: argparse.Namespace) -> tuple[ModelConfig, dict[str, Weight]]:
    device, with_head = _device(args), max(args.k) > 0
    if args.load_format == "dummy":
        config = released_config(args.model)
        if config is None:
            if not (Path(args.model) / "config.json").is_file():
                raise OptionError(f"model: want a folder with a config.json or one of {', '.join(SIZES)}")
            config = ModelConfig.load(args.model)
        return config, dummy_weights(config, args.dummy_layout, device, with_head)
    checkpoint = open_checkpoint(args.model)
    weights = load_weights(checkpoint, device)
    if with_head and not checkpoint.has_mtp:
        raise OptionError(f"k: {args.model} has no draft head")
    return checkpoint.config, {n: w for n, w in weights.items() if with_head or not n.startswith("mtp.")}


def _device(args: argparse.Namespace) -> torch.device:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("device: want a CUDA device, torch finds none")
    return torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")


def _plan(args: argparse.Namespace, config: ModelConfig) -> Plan:
    device, depth, batch = _device(args), max(args.k), max(args.batch)
    dtype = torch.bfloat16 if device.type == "cuda" or cpu_multiplies_bf16() else torch.float32
    fused = args.kernels == "fused"
    if fused and device.type != "cuda":
        raise OptionError("kernels: want a CUDA device for fused ones")
    longest = max(args.context) + args.tokens
    pages = -(-(longest + depth + 1) // PAGE) * batch
    chunk = args.prefill_chunk or (2048 if fused else 256)
    # what is captured is chosen batch by batch
    return Plan(device, dtype, depth, None, longest, batch, "configured", pages, chunk, fused=fused)


def _loop(args: argparse.Namespace, model: Model, plan: Plan, depth: int) -> EngineLoop:
    loop = EngineLoop(assemble(model, dataclasses.replace(plan, depth=depth), max(args.batch), 0, 0.0))
    state = loop.runner.state
    if depth and args.synthetic_acceptance_length is not None:
        rates = [acceptance_rate(args.synthetic_acceptance_length, depth)] * depth
        state.oracle = Oracle(state.num_slots, plan.max_model_len, state.vocab_size, rates, plan.device)
    if plan.fused:
        from pilotfish.engine.device_round.rounds import DeviceRounds
        from pilotfish.engine.device_round.shapes import Shape

        assert isinstance(loop.rounds, DeviceRounds)
        loop.rounds.body.ops.use_pdl(not args.no_pdl)
        if not args.enforce_eager:
            with torch.inference_mode():
                fitting = (loop.rounds.shapes.fit(batch, depth) for batch in args.batch)
                loop.rounds.capture({shape for shape in fitting if isinstance(shape, Shape)})
    return loop


def _run(args: argparse.Namespace, loop: EngineLoop, case: Case, known: dict[str, list[int]] | None) -> Run:
    prompts = random_prompts(case.batch, case.context, loop.ready.vocab_size)
    oracle = loop.runner.state.oracle
    if isinstance(oracle, Oracle) and known is not None:
        for number, prompt in enumerate(prompts):
            oracle.tell(prompt, known[f"b{number}"])
    # once for what libraries set up at their first call
    run_batch(loop, prompts[:1], WARM_UP_TOKENS, args.seed)
    return run_batch(loop, prompts, args.tokens, args.seed)


def _row(
    args: argparse.Namespace, model: Model, loop: EngineLoop, case: Case, run: Run, rate: float | None
) -> dict[str, Any]:
    frame = Frame(case.batch, case.depth, case.context + args.tokens // 2)
    floor = round_bytes(model, frame, args.draft_vocab_size)
    floor_ms = 1e3 * floor / rate if rate else None
    config = model.config
    row: dict[str, Any] = {
        "k": case.depth,
        "batch": case.batch,
        "context": case.context,
        "tokens_per_second": run.tokens_per_second,
        "round_ms": run.round_ms,
        "acceptance_length": run.acceptance_length,
        "accepted_counts": {str(count): run.accepted_counts[count] for count in sorted(run.accepted_counts)},
        "floor_bytes": floor,
        "floor_ms": floor_ms,
        "share_of_roof": floor_ms / run.round_ms if floor_ms else None,
        "first_token_ms": 1e3 * run.first_token_seconds,
        "host_ms": 1e3 * statistics.median(run.host_seconds) if run.host_seconds else None,
        "graph_hits": run.graph_hits,
        "graph_misses": run.graph_misses,
        "synthetic": args.load_format == "dummy" or args.synthetic_acceptance_length is not None,
    }
    if config.is_moe:
        row["distinct_experts_uniform"] = distinct_experts(config.num_experts, config.num_experts_per_tok, frame.rows)
    row["draft_vocab_size"] = args.draft_vocab_size
    return row | _device_times(loop, case) | (profile(loop, case) if args.profile else {})


def _device_times(loop: EngineLoop, case: Case) -> dict[str, Any]:
    """Milliseconds of the captured round and of its first part, replayed back to back over what the batch left."""
    if not loop.rounds.num_graphs:
        return {}
    from pilotfish.engine.device_round.rounds import VERIFY, WHOLE, DeviceRounds

    assert isinstance(loop.rounds, DeviceRounds)
    shape = loop.rounds.shapes.fit(case.batch, case.depth)
    times = {}
    for part in (WHOLE, VERIFY):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        events[0].record()
        for event in events[1:]:
            loop.rounds.graphs.replay((shape, part))
            event.record()
        events[-1].synchronize()
        times[f"device_{part}_ms"] = statistics.median(a.elapsed_time(b) for a, b in pairwise(events))
    return times


def _products(root: object) -> Iterator[Any]:
    """Every packed or plain product that a model reaches, once."""
    seen: set[int] = set()
    todo: list[Any] = [root]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, torch.Tensor):
            continue
        seen.add(id(item))
        if hasattr(item, "num_bytes") and hasattr(item, "bulk"):
            yield item
        elif isinstance(item, list | tuple):
            todo += item
        elif type(item).__module__.startswith("pilotfish."):
            todo += getattr(item, "__dict__", {}).values()


def show(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The rows as a table."""
    table = [[title for _, title in COLUMNS], *([_cell(row[name]) for name, _ in COLUMNS] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
    for line in table:
        yield "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) and value < 100 else f"{value:.0f}"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pilotfish bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    layouts = ("bf16", "nvfp4", "nvfp4-bf16-head", "mixed")
    parser.add_argument("--dummy-layout", choices=layouts, default="nvfp4", help="default: %(default)s")
    parser.add_argument("--k", type=_numbers(0, MAX_DEPTH), default=[0, 3], metavar="LIST", help="default: 0,3")
    parser.add_argument("--batch", type=_numbers(1, MAX_ROWS), default=[1], metavar="LIST", help="default: 1")
    parser.add_argument("--context", type=_numbers(1, 1 << 20), default=[1024], metavar="LIST", help="default: 1024")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="of each request (default: %(default)s)")
    parser.add_argument("--synthetic-acceptance-length", type=float, metavar="N", help="committed tokens a round")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--kernels", choices=("torch", "fused"), default="torch")
    parser.add_argument("--enforce-eager", action="store_true", help="capture no graphs")
    parser.add_argument("--no-pdl", action="store_true", help="no programmatic dependent launch between kernels")
    parser.add_argument(
        "--draft-vocab-size", type=int, metavar="N", help="drafts are chosen from the first N ids alone"
    )
    parser.add_argument("--profile", action="store_true", help="launches a round, and the GPU's idle share, by tracing")
    parser.add_argument("--prefill-chunk", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="one JSON line a row, too")
    return parser.parse_args(argv)


def _numbers(least: int, most: int) -> Any:
    def read(text: str) -> list[int]:
        values = sorted({int(word) for word in text.split(",") if word.strip()})
        if not values or values[0] < least or values[-1] > most:
            raise argparse.ArgumentTypeError(f"want numbers in {least}..{most}, got {text!r}")
        return values

    return read


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    args = parse(sys.argv[1:] if argv is None else argv)
    rows = []
    try:
        for row in measure_all(args):
            rows.append(row)
            if args.json is not None:
                with args.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    except PilotfishError as error:
        print(f"pilotfish bench: {error}", file=sys.stderr)
        return 1
    for line in show(rows):
        print(line)
    if any(row["synthetic"] for row in rows):
        print("synthetic: random weights, or drafts replaced by a known text with seeded errors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
