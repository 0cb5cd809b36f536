"""Makes an engine that serves from its options: the checkpoint opened, weights loaded, the head tested, rounds
ready."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

import msgspec
import torch

from pilotfish.engine import ledger
from pilotfish.engine.assemble import Engine, HeadFacts, assemble, build_planned
from pilotfish.engine.check import concurrency, cost_table, probe, trunk_check
from pilotfish.engine.check.head_check import check_head, describe, longest_text, text_of
from pilotfish.engine.checkpoint.draft_vocab import read_draft_vocab
from pilotfish.engine.checkpoint.dummy import DummyCheckpoint, dummy_checkpoint, dummy_weights
from pilotfish.engine.checkpoint.findings import NOT_FINITE, UNTRAINED, ZEROS, findings
from pilotfish.engine.checkpoint.load import Weight, load_weights
from pilotfish.engine.checkpoint.names import is_mtp
from pilotfish.engine.checkpoint.recognise import Checkpoint, open_checkpoint
from pilotfish.engine.checkpoint.sidecar import attach_head
from pilotfish.engine.errors import CheckpointError, OptionError
from pilotfish.engine.grammar.library import GrammarLibrary
from pilotfish.engine.link.messages import HeadCheck, TrunkCheck
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.memory import refusals_told
from pilotfish.engine.model.build import Model
from pilotfish.engine.options import EngineOptions
from pilotfish.engine.plan import MEASURED, Plan, make_plan
from pilotfish.engine.slow import slow_ways
from pilotfish.kernels.attention import PAGE

logger = logging.getLogger(__name__)

MAX_THREADS = 1024
"""More threads than machines have; the library that starts them ends the process where it cannot."""


@refusals_told()
def make_core(options: EngineOptions) -> EngineLoop:
    """Loads the model and makes the caches; raises PilotfishError with the reason if it cannot."""
    began = perf_counter()
    engine = start_engine(options)
    if not engine.executor.num_graphs:
        engine.executor.compile()
    # a rate of 0: requests of our own are not audited
    unaudited = EngineLoop(dataclasses.replace(engine, audit_rate=0.0))
    if engine.executor.model.device.type == "cuda":
        probe.warm_up(unaudited)
    if engine.plan.binding_limit == MEASURED:
        engine = concurrency.capped(engine, unaudited, _text(options, engine))
        unaudited = EngineLoop(dataclasses.replace(engine, audit_rate=0.0))
    routes = probe.routes(unaudited)
    assert engine.ready.execution is not None
    break_even = _break_even(unaudited, engine, options) if options.cost_table else {}
    # requests of our own are no client's prefix, and others than this engine have written its pages
    engine.scheduler.prefix.forget()
    # what was compiled up to here kept no request waiting
    engine.executor.take_compiled()
    seconds = {"weights": engine.ready.load_seconds} | engine.executor.start_seconds
    whole = perf_counter() - began
    seconds["rest"] = whole - sum(seconds.values())
    logger.info("ready after %.1f s: %s", whole, ", ".join(f"{part} {took:.1f}" for part, took in seconds.items()))
    plan = engine.plan
    slow = slow_ways(plan.device, plan.fused, options.device)
    execution = msgspec.structs.replace(
        engine.ready.execution, routes=routes, break_even=break_even, start_seconds=seconds, slow=slow
    )
    return EngineLoop(dataclasses.replace(engine, ready=msgspec.structs.replace(engine.ready, execution=execution)))


def _text(options: EngineOptions, engine: Engine) -> list[int]:
    """Known text for prompts to be timed with, where the checkpoint has a tokenizer."""
    return text_of(Path(options.model), engine.ready.vocab_size, PAGE)


def _break_even(loop: EngineLoop, engine: Engine, options: EngineOptions) -> dict[int, float]:
    """Timed on the loaded model, only at k = 0 where the cap's rounds were timed; {} where nothing is drafted, or the
    device has no memory for these rounds beside."""
    if engine.plan.depth == 0:
        return {}
    assert engine.ready.execution is not None
    try:
        if known := engine.ready.execution.round_seconds:
            costs = cost_table.of_served(loop, known, _text(options, engine))
        else:
            costs = cost_table.at_boot(engine.executor.model, engine.plan, Path(options.model))
    except torch.OutOfMemoryError as error:
        logger.warning("rounds were not timed, and break-even is modelled: %s", str(error).splitlines()[0])
        return {}
    for cost in costs:
        logger.info(
            "%d at once: a round takes %.2f ms at k = %d, %.2f ms at k = 0: it must commit %.2f tokens to gain",
            cost.batch,
            1e3 * cost.seconds,
            cost.k,
            1e3 * cost.plain_seconds,
            cost.break_even,
        )
    return {cost.batch: cost.break_even for cost in costs}


@refusals_told()
def start_engine(options: EngineOptions) -> Engine:
    """Opens, plans, loads and allocates. Raises PilotfishError naming the option or file at fault."""
    started = perf_counter()
    if not 0 <= options.audit_rate <= 1:
        raise OptionError(f"audit_rate: want a share in 0..1, got {options.audit_rate}")
    torch.set_num_threads(_num_threads(options))
    checkpoint = _open(options)
    if options.draft_head is not None:
        checkpoint = attach_head(checkpoint, options.draft_head)
    logger.info(checkpoint.summary())
    plan = make_plan(options, checkpoint)
    grammars = _grammars(options, checkpoint)
    weights = _load(checkpoint, plan.device)
    weight_bytes = checkpoint.num_bytes
    num_head_weights = _num_head_weights(checkpoint, weights) if plan.uses_mtp_head else 0
    draft_ids = _draft_ids(options, plan, checkpoint)
    model = build_planned(weights, checkpoint.config, plan, draft_ids)
    head_check, trunk = _self_test(model, plan, options, checkpoint)
    report = HeadFacts(_origin(checkpoint, plan), head_check, (num_head_weights, checkpoint.num_head_weights), trunk)
    engine = assemble(model, plan, options.max_waiting, weight_bytes, perf_counter() - started, report)
    logger.info("loaded in %.1f s\n%s", engine.ready.load_seconds, "\n".join(ledger.show(engine.ready)))
    if grammars is not None:
        grammars.wait_read()
    return dataclasses.replace(engine, grammars=grammars, audit_rate=options.audit_rate)


def _open(options: EngineOptions) -> Checkpoint:
    if options.load_format != "dummy":
        return open_checkpoint(options.model)
    if options.draft_head is not None:
        raise OptionError("draft_head: want it with weights that are read, not with load_format dummy")
    return dummy_checkpoint(options.model, options.dummy_layout)


def _load(checkpoint: Checkpoint, device: torch.device) -> dict[str, Weight]:
    if isinstance(checkpoint, DummyCheckpoint):
        return dummy_weights(checkpoint.config, checkpoint.layout, device)
    return load_weights(checkpoint, device)


def _grammars(options: EngineOptions, checkpoint: Checkpoint) -> GrammarLibrary | None:
    """Begins to read the tokenizer for grammars."""
    tokenizer, vocab_size = Path(options.model) / "tokenizer.json", checkpoint.config.vocab_size
    eos_token_ids = tuple(token_id for token_id in options.eos_token_ids if 0 <= token_id < vocab_size)
    return GrammarLibrary(tokenizer, vocab_size, eos_token_ids) if tokenizer.exists() else None


def _draft_ids(options: EngineOptions, plan: Plan, checkpoint: Checkpoint) -> list[int] | None:
    if options.draft_vocab is None:
        return None
    if not plan.uses_mtp_head:
        raise OptionError("draft_vocab: want a head that drafts with an lm_head")
    ids = read_draft_vocab(Path(options.draft_vocab), checkpoint.config.vocab_size)
    logger.info("drafts are chosen from %d of %d ids", len(ids), checkpoint.config.vocab_size)
    return ids


def _num_head_weights(checkpoint: Checkpoint, weights: Mapping[str, Weight]) -> int:
    """The number of the head's modules whose weights were loaded; fused experts were taken apart."""
    loaded = [name for name in weights if is_mtp(name)]
    stems = [name.removesuffix("gate_up_proj").removesuffix("experts.down_proj") for name in checkpoint.modules]
    return sum(any(name.startswith(stem) for name in loaded) for stem in stems if is_mtp(stem))


def _origin(checkpoint: Checkpoint, plan: Plan) -> str | None:
    """What drafts, in a few words."""
    if plan.depth == 0:
        return None
    if plan.lookup is not None:
        return f"look-up of {plan.lookup.longest} to {plan.lookup.shortest} tokens"
    if isinstance(checkpoint, DummyCheckpoint):
        decree = (
            "" if plan.synthetic_length is None else f", synthetic: {plan.synthetic_length} tokens a round by decree"
        )
        return f"MTP head of random weights{decree}"
    return f"MTP head from {checkpoint.head.path}" if checkpoint.head else "MTP head of the checkpoint"


def _self_test(
    model: Model, plan: Plan, options: EngineOptions, checkpoint: Checkpoint
) -> tuple[HeadCheck | None, TrunkCheck | None]:
    """How head and trunk do on a known text. Raises CheckpointError for a dead head unless options say otherwise."""
    if options.head_check == "off" or options.load_format == "dummy":
        return None, None
    ids = text_of(Path(options.model), model.config.vocab_size, longest_text(plan.max_model_len, plan.depth))
    head = _test_head(model, plan, options, checkpoint, ids)
    trunk = trunk_check.check_trunk(model, ids, checkpoint, head)
    # of a trunk that knows the text the head's line tells
    if head is None or trunk.verdict != "ok":
        logger.log(logging.WARNING if trunk.verdict == "failed" else logging.INFO, trunk_check.describe(trunk))
    return head, trunk


def _test_head(
    model: Model, plan: Plan, options: EngineOptions, checkpoint: Checkpoint, ids: list[int]
) -> HeadCheck | None:
    if not plan.uses_mtp_head:
        return None
    check = check_head(model, ids, plan.depth)
    if check.verdict in ("dead", "weak"):
        found = findings(module for name, module in checkpoint.modules.items() if is_mtp(name))
        reasons = [found.get(NOT_FINITE) or check.reason, found.get(ZEROS), found.get(UNTRAINED)]
        check = msgspec.structs.replace(check, reason="; ".join(filter(None, reasons)))
    line = describe(check, model.config.vocab_size)
    if check.verdict == "dead" and options.head_check == "refuse":
        where = options.draft_head or options.model
        raise CheckpointError(
            f"{where}: {line}. --num-speculative-tokens 0 serves without it, --head-check warn with it"
        )
    logger.log(logging.WARNING if check.verdict in ("dead", "weak") else logging.INFO, line)
    return check


def _num_threads(options: EngineOptions) -> int:
    """The number of CPU threads. By default one core is left to the HTTP process: two that spin for one core are slower
    by far than one."""
    if options.num_threads is None:
        return max(1, len(os.sched_getaffinity(0)) - 1)
    if not 1 <= options.num_threads <= MAX_THREADS:
        raise OptionError(f"num_threads: want 1..{MAX_THREADS}, got {options.num_threads}")
    return options.num_threads
