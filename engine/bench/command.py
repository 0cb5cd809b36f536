"""`pilotfish bench MODEL`: builds what its flags ask for, measures each row and shows them; see flags.py."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from pilotfish.engine import ledger
from pilotfish.engine.assemble import assemble
from pilotfish.engine.bench import picture
from pilotfish.engine.bench.admission import STREAMS, measure_admission, stream_tokens
from pilotfish.engine.bench.clocks import Clocks
from pilotfish.engine.bench.complaints import complaints
from pilotfish.engine.bench.conversation import Conversation, measure_conversation
from pilotfish.engine.bench.experts import count_experts
from pilotfish.engine.bench.first import first_and_second
from pilotfish.engine.bench.flags import parse
from pilotfish.engine.bench.measure import Case, Run, live_batch, live_tokens, random_prompts, run_batch
from pilotfish.engine.bench.oracle import Oracle
from pilotfish.engine.bench.profile import profile
from pilotfish.engine.bench.roof import Frame, distinct_experts, memory_rate, round_bytes, stored_share
from pilotfish.engine.bench.show import ADMISSION, ROUND, TURN, show
from pilotfish.engine.bench.sizes import SIZES, released_config
from pilotfish.engine.cache.grid import Grid
from pilotfish.engine.check import probe
from pilotfish.engine.checkpoint.dummy import dummy_weights
from pilotfish.engine.checkpoint.load import Weight, load_weights
from pilotfish.engine.checkpoint.names import is_mtp
from pilotfish.engine.checkpoint.recognise import loaded_parts, open_checkpoint
from pilotfish.engine.command_line.output import check_file
from pilotfish.engine.config import ModelConfig
from pilotfish.engine.errors import CheckpointError, ConfigError, OptionError, PilotfishError
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.model.build import Model, build_model
from pilotfish.engine.plan import (
    MAX_ROWS,
    Plan,
    choose_device,
    choose_dtype,
    choose_fused,
    choose_kv_dtype,
    default_chunk,
    reserved_pages,
)
from pilotfish.engine.round.executor import PLAIN, VERIFY, WHOLE
from pilotfish.engine.round.shapes import Shape, Shapes
from pilotfish.engine.round.synthetic import acceptance_rate
from pilotfish.engine.slow import slow_ways
from pilotfish.kernels.attention import PAGE

REPLAYS = 16
"""How often each captured part is replayed over a live batch, and timed."""
LIVE_ROUNDS = 2 * (1 + REPLAYS)
WARM_UP_TOKENS = 8
NUM_SNAPSHOTS = 32
"""Kept of a conversation: more than thinning leaves of it."""


def measure_all(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each k, batch and context, and one for each k's admission if asked for. Raises PilotfishError."""
    began = perf_counter()
    config, weights, packed_bytes = _weights(args)
    plan = _plan(args, config)
    clocks = Clocks.of(plan.device) if args.clocks else None
    draft_ids = None if args.draft_vocab_size is None else range(min(args.draft_vocab_size, config.vocab_size))
    model = build_model(weights, config, plan.cache_sizes, plan.dtype, plan.device, plan.fused, draft_ids)
    weights_seconds = perf_counter() - began
    resident_bytes = _resident_bytes(model)
    rate = memory_rate(plan.device) if plan.device.type == "cuda" else None
    frame = {
        "model": args.model,
        "load_format": args.load_format,
        "layout": args.dummy_layout if args.load_format == "dummy" else None,
        "device": torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else "cpu",
        "kernels": "fused" if plan.fused else "torch",
        "kv_dtype": str(plan.cache_sizes.kv_dtype).removeprefix("torch."),
        "pdl": plan.fused and not args.no_pdl,
        "memory_bytes_per_second": rate,
        "weights_bytes": sum(linear.num_bytes for linear in _products(model)),
        "resident_bytes": resident_bytes,
        "prefill_scratch_bytes": ledger.scratch_bytes(model),
        "packed_bytes": packed_bytes,
        "synthetic": args.load_format == "dummy" or args.synthetic_acceptance_length is not None,
    }
    texts: dict[tuple[int, int], dict[str, list[int]]] = {}
    for depth in sorted({0, *args.k}) if not args.conversation else args.k:
        loop = _loop(args, model, plan, depth)
        # as a server does: a collection that walks what stays would count as a round's or a prompt's time
        gc.collect()
        gc.freeze()
        frame["start_seconds"] = {"weights": weights_seconds} | loop.executor.start_seconds
        frame |= {"num_graphs": loop.executor.num_graphs, "graph_bytes": loop.executor.graph_bytes}
        if args.conversation:
            turns = measure_conversation(loop, _conversation(args), args.seed)
            yield from (frame | {"kind": TURN, "k": depth} | turn for turn in turns)
        for batch in args.batch if not args.conversation else ():
            if batch * (depth + 1) > MAX_ROWS:
                continue
            for context in args.context:
                known = texts.get((batch, context))
                case = Case(depth, batch, context)
                run, first = _run(args, loop, case, known, clocks)
                if known is None:
                    texts[batch, context] = run.texts
                elif known != run.texts:
                    raise PilotfishError(f"k = {depth}, batch {batch}, context {context}: other text than k = 0")
                if depth in args.k:
                    yield frame | _row(args, model, loop, case, run, rate) | first
        if args.admission is not None and depth in args.k:
            yield frame | _admission_row(args, loop, depth)
        del loop
        gc.unfreeze()
        gc.collect()


def _weights(args: argparse.Namespace) -> tuple[ModelConfig, dict[str, Weight], int]:
    """What to build from, and its bytes as a checkpoint holds them."""
    device, with_head = choose_device(args.device), max(args.k) > 0
    if args.load_format == "dummy":
        config = released_config(args.model)
        if config is None:
            if not (Path(args.model) / "config.json").is_file():
                raise OptionError(f"model: want a folder with a config.json or one of {', '.join(SIZES)}")
            config = ModelConfig.load(args.model)
        weights = dummy_weights(config, args.dummy_layout, device, with_head)
        return config, weights, ledger.tensor_bytes(weights)
    checkpoint = open_checkpoint(args.model)
    weights = load_weights(checkpoint, device)
    if with_head and not checkpoint.has_mtp:
        raise OptionError(f"k: {args.model} has no draft head")
    kept = {name: weight for name, weight in weights.items() if with_head or not is_mtp(name)}
    modules = [module for name, module in checkpoint.modules.items() if with_head or not is_mtp(name)]
    packed = sum(info.num_bytes for module in modules for info in loaded_parts(module).values())
    return checkpoint.config, kept, packed


def _resident_bytes(model: Model) -> int:
    """Bytes of all weights: on a GPU whatever the allocator has given out beyond the caches and prefill's scratch,
    forgotten copies included; on a CPU the tensors that the model reaches."""
    scratch = ledger.scratch_bytes(model)
    if model.device.type != "cuda":
        return ledger.tensor_bytes(model) - scratch
    gc.collect()
    state = model.trunk.state
    caches = sum(cache.k.nbytes + cache.v.nbytes for cache in ledger.caches_of(model))
    held = (state.s, state.conv, *vars(state.pending).values())
    states = sum(tensor.nbytes for tensor in held if isinstance(tensor, torch.Tensor))
    return torch.cuda.memory_allocated(model.device) - scratch - caches - states


def _plan(args: argparse.Namespace, config: ModelConfig) -> Plan:
    device, depth, batch = choose_device(args.device), max(args.k), max(args.batch)
    dtype = choose_dtype("auto", config, device)
    fused = choose_fused(args.kernels, device, dtype)
    for sentence in slow_ways(device, fused, args.device):
        print(f"pilotfish bench: slow: {sentence}", file=sys.stderr)
    if args.profile and device.type != "cuda":
        raise OptionError("profile: want a CUDA device, whose kernels it traces")
    chunk = args.prefill_chunk or default_chunk(fused)
    grid = Grid(chunk, PAGE)
    # the most rounds that anything looks at while a batch is live
    live = live_tokens(LIVE_ROUNDS, depth, batch, grid.num_chunks(max(args.context)))
    longest = max(args.context) + max(args.tokens, live)
    pages = reserved_pages(longest, depth) * batch
    if args.admission is not None:
        context = min(args.context)
        stream = context + stream_tokens(depth, context, args.admission, grid, config)
        lengths = [stream] * STREAMS + [args.admission + 2]
        pages = max(pages, sum(reserved_pages(length, depth) for length in lengths))
        longest, batch = max(longest, *lengths), max(batch, len(lengths))
    if args.conversation:
        # a cold prompt beside what is kept of the warm one
        longest = _conversation(args).lengths[-1] + args.growth
        pages, batch = 2 * reserved_pages(longest, depth), 1
    kv_dtype = choose_kv_dtype(args.kv_cache_dtype, dtype, device, fused)
    # what is captured is what the batches at each k may become
    plan = Plan(device, dtype, depth, None, longest, batch, "configured", pages, chunk, fused=fused, kv_dtype=kv_dtype)
    # batches repeat their prompts, and are to read them
    return dataclasses.replace(plan, num_snapshots=NUM_SNAPSHOTS) if args.conversation else plan


def _loop(args: argparse.Namespace, model: Model, plan: Plan, depth: int) -> EngineLoop:
    loop = EngineLoop(assemble(model, dataclasses.replace(plan, depth=depth), max(args.batch), 0, 0.0))
    state = loop.executor.state
    if depth and args.synthetic_acceptance_length is not None:
        rates = [acceptance_rate(args.synthetic_acceptance_length, depth)] * depth
        state.oracle = Oracle(state.num_slots, plan.max_model_len, state.vocab_size, rates, plan.device)
    if plan.fused:
        from pilotfish.engine.round.cuda_table import CudaOperators  # imports Triton

        assert isinstance(loop.executor.ops, CudaOperators)
        if args.no_pdl:
            loop.executor.ops.use_pdl(False)
        shapes = _shapes(args, loop.executor.shapes, depth)
        with torch.inference_mode():
            if args.enforce_eager:
                loop.executor.compile(shapes)
            else:
                loop.executor.capture(shapes)
    if args.first_requests or (args.conversation and plan.fused):
        # as a server does before it is ready; what is asked then is not the oracle's text
        oracle, state.oracle = state.oracle, None
        probe.routes(loop)
        probe.warm_up(loop)
        state.oracle = oracle
    loop.executor.take_compiled()
    return loop


def _shapes(args: argparse.Namespace, shapes: Shapes, depth: int) -> list[Shape]:
    """Shapes of all numbers of sequences that there are while the batches grow and shrink, prompt by prompt and end by
    end."""
    most = [batch for batch in args.batch if batch * (depth + 1) <= MAX_ROWS]
    most += [] if args.admission is None else [STREAMS + 1]
    fitting = (shapes.fit(count, depth) for count in range(1, max(most, default=0) + 1))
    return sorted({shape for shape in fitting if shape is not None})


def _run(
    args: argparse.Namespace, loop: EngineLoop, case: Case, known: dict[str, list[int]] | None, clocks: Clocks | None
) -> tuple[Run, dict[str, Any]]:
    """The timed batch; and what was measured beside it, the first requests and the card's clocks where they are looked
    at."""
    prompts = random_prompts(case.batch, case.context, loop.ready.vocab_size)
    oracle = loop.executor.state.oracle
    if isinstance(oracle, Oracle) and known is not None:
        for number, prompt in enumerate(prompts):
            oracle.tell(prompt, known[f"b{number}"])
    first: dict[str, Any] = {}
    if args.first_requests:
        first = first_and_second(loop, prompts, args.tokens, args.seed)
    else:
        # once for what libraries set up at their first call
        run_batch(loop, prompts[:1], WARM_UP_TOKENS, args.seed)
    with clocks or nullcontext():
        run = run_batch(loop, prompts, args.tokens, args.seed, pauses=not args.prompts_once)
    if clocks is not None:
        first |= clocks.between(*run.timed)
    first["num_compiled"] = first.get("num_compiled", 0) + run.num_compiled
    counts = loop.executor.model.config.is_moe and not args.prompts_once
    if counts and (by_layer := count_experts(loop, prompts)):
        first |= {"distinct_experts": statistics.fmean(by_layer), "distinct_experts_by_layer": by_layer}
    return run, first


def _admission_row(args: argparse.Namespace, loop: EngineLoop, depth: int) -> dict[str, Any]:
    context = min(args.context)
    return {
        "kind": ADMISSION,
        "k": depth,
        "streams": STREAMS,
        "context": context,
        "prompt": args.admission,
        "prefill_chunk": loop.scheduler.grid.chunk,
        **measure_admission(loop, context, args.admission).as_row(),
    }


def _row(
    args: argparse.Namespace, model: Model, loop: EngineLoop, case: Case, run: Run, rate: float | None
) -> dict[str, Any]:
    frame = Frame(case.batch, case.depth, case.context + args.tokens // 2, _stored(loop, case, run))
    floor = round_bytes(model, frame, args.draft_vocab_size)
    floor_ms = 1e3 * floor / rate if rate else None
    config = model.config
    row: dict[str, Any] = {
        "kind": ROUND,
        "k": case.depth,
        "batch": case.batch,
        "context": case.context,
        "tokens_per_second": run.tokens_per_second,
        "round_ms": run.round_ms,
        "acceptance_length": run.acceptance_length,
        "accepted_counts": {str(count): run.accepted_counts[count] for count in sorted(run.accepted_counts)},
        "floor_bytes": floor,
        "floor_ms": floor_ms,
        "share_of_roof": floor_ms / run.round_ms if floor_ms and run.round_ms else None,
        "first_token_ms": 1e3 * run.first_token_seconds,
        "host_ms": 1e3 * statistics.median(run.host_seconds) if run.host_seconds else None,
        "graph_hits": run.graph_hits,
        "graph_misses": run.graph_misses,
    }
    if config.is_moe:
        row["distinct_experts_uniform"] = distinct_experts(config.num_experts, config.num_experts_per_tok, frame.rows)
    row["draft_vocab_size"] = args.draft_vocab_size
    device_times = {} if args.prompts_once else _device_times(loop, case)
    return row | device_times | ({"profile": profile(loop, case)} if args.profile else {})


def _stored(loop: EngineLoop, case: Case, run: Run) -> float:
    """The share of rounds that store the recurrent state."""
    width, accepted = case.depth + 1, run.acceptance_length or case.depth + 1
    shape = loop.executor.shapes.fit(case.batch, case.depth)
    num_sequences = shape.num_sequences if shape else case.batch
    return stored_share(width, accepted, loop.executor.ops.most_pending(width, num_sequences))


def _device_times(loop: EngineLoop, case: Case) -> dict[str, Any]:
    """Milliseconds of the captured round, with and without the launches for filters, and of its first part, replayed
    back to back while the batch's sequences run: each replay of a whole round moves them on as a round does."""
    if not loop.executor.num_graphs:
        return {}
    shape, graphs = loop.executor.shapes.fit(case.batch, case.depth), loop.executor.graphs
    times = {}
    with live_batch(loop, random_prompts(case.batch, case.context, loop.ready.vocab_size), LIVE_ROUNDS):
        # the last: its window is not committed, the next replay takes it once more
        for part in (WHOLE, PLAIN, VERIFY):
            spent = _replay_times(partial(graphs.replay, (shape, part)))
            # not the median: a state that is stored in some rounds takes its time in these
            times[f"device_{part}_ms"] = statistics.fmean(spent)
    return times


def _replay_times(replay: Callable[[], None]) -> list[float]:
    """Milliseconds on the device of each of REPLAYS calls, back to back, behind one that has to wait for its graph."""
    replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    events[0].record()
    for event in events[1:]:
        replay()
        event.record()
    events[-1].synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


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


def _conversation(args: argparse.Namespace) -> Conversation:
    return Conversation(args.turns, args.system, args.growth, cold_every=args.cold_every)


def _append(file: Path, line: str) -> None:
    try:
        with file.open("a") as opened:
            opened.write(line)
    except OSError as error:
        raise OptionError(f"--json {file}: cannot be written: {error.strerror or error}") from error


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    rows = []
    try:
        check_file(args.json, "--json")
        if args.picture is not None:
            check_file(args.picture, "--picture")
            picture.check()
        for row in measure_all(args):
            rows.append(row)
            if args.json is not None:
                _append(args.json, json.dumps(row) + "\n")
    except PilotfishError as error:
        print(f"pilotfish bench: {error}", file=sys.stderr)
        # 2 for what the operator can set right, which another text at another k is not
        return 2 if isinstance(error, OptionError | ConfigError | CheckpointError) else 1
    for line in show(rows):
        print(line)
    if args.picture is not None:
        picture.draw(rows, args.picture)
    found = complaints(rows)
    for line in found:
        print(f"pilotfish bench: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
