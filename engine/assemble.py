"""An engine around a built model: scheduler, buffers and executor, with a ledger that adds up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from pilotfish.engine import ledger
from pilotfish.engine.cache.pool import Pool
from pilotfish.engine.cache.prefix import PrefixCache, PrefixSizes
from pilotfish.engine.cache.snapshots import Snapshots
from pilotfish.engine.checkpoint.load import Weight
from pilotfish.engine.checkpoint.names import is_mtp
from pilotfish.engine.config import ModelConfig
from pilotfish.engine.grammar.library import GrammarLibrary
from pilotfish.engine.link.messages import Execution, HeadCheck, Ready, TrunkCheck
from pilotfish.engine.model.build import Model, build_model
from pilotfish.engine.options import MAX_DEPTH
from pilotfish.engine.plan import FAST_ROWS, MAX_ROWS, Plan, reserved_pages
from pilotfish.engine.requests.scheduler import Scheduler
from pilotfish.engine.round.batch_state import BatchState
from pilotfish.engine.round.executor import RoundExecutor, make_executor
from pilotfish.engine.round.synthetic import SyntheticAcceptance
from pilotfish.kernels.attention import PAGE


@dataclass(frozen=True)
class Engine:
    """What the loop drives. `grammars` is None where there is no tokenizer.json to read them with, `snapshots` where
    nothing of prompts is kept."""

    plan: Plan
    executor: RoundExecutor
    scheduler: Scheduler
    ready: Ready
    snapshots: Snapshots | None = None
    grammars: GrammarLibrary | None = None
    audit_rate: float = 0.0


@dataclass(frozen=True)
class HeadFacts:
    """What drafts and from where, how it did on a known text, its weights (loaded, and of a whole one), and how the
    trunk did on the text."""

    origin: str | None
    check: HeadCheck | None
    weights: tuple[int, int] = (0, 0)
    trunk: TrunkCheck | None = None


def build_planned(
    weights: dict[str, Weight], config: ModelConfig, plan: Plan, draft_ids: Sequence[int] | None = None
) -> Model:
    """The model that a plan wants of a checkpoint's weights, which are consumed: without the MTP head where nothing is
    drafted or something else drafts. `draft_ids`: a vocabulary for drafts."""
    if not plan.uses_mtp_head:
        for name in [name for name in weights if is_mtp(name)]:
            del weights[name]
    model = build_model(weights, config, plan.cache_sizes, plan.dtype, plan.device, plan.fused, draft_ids)
    return model if plan.lookup is None else dataclasses.replace(model, head=plan.lookup)


def assemble(
    model: Model,
    plan: Plan,
    max_waiting: int,
    weight_bytes: int,
    load_seconds: float,
    head: HeadFacts | None = None,
) -> Engine:
    """Scheduler, buffers and executor around a built model."""
    reads_history = model.head is not None and model.head.reads_history
    # a last window may reach past the limit
    history_length = plan.max_model_len + MAX_DEPTH + 1 if reads_history else 0
    vocab_size = model.config.vocab_size
    slots_and_depth = (plan.max_num_seqs + 1, max(1, plan.depth))
    state = BatchState(*slots_and_depth, vocab_size, plan.device, history_length)
    if plan.synthetic_length is not None and plan.depth:
        sizes = state.num_slots, plan.synthetic_length, plan.depth, vocab_size
        state.synthetic = SyntheticAcceptance(*sizes, plan.device)
    executor = _make_executor(model, state, plan)
    pages, slots = Pool("KV pages", plan.num_pages + 1), Pool("state slots", plan.max_num_seqs + 1)
    snapshots = Snapshots.empty(model.trunk.state, plan.num_snapshots) if plan.num_snapshots else None
    prefix = _prefix_cache(model, plan, pages, snapshots)
    pairs = executor.prompt.reads_pairs
    scheduler = Scheduler(pages, slots, plan.max_num_seqs, max_waiting, plan.grid, prefix, pairs)
    held = snapshots.num_bytes if snapshots is not None else 0
    account = ledger.measure(model, state, executor, plan.device, held) | {"checkpoint_bytes": weight_bytes}
    ready = Ready(
        model_type=model.config.model_type,
        vocab_size=model.config.vocab_size,
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        binding_limit=plan.binding_limit,
        num_speculative_tokens=plan.depth,
        speculation_disabled_reason=plan.disabled_reason,
        max_waiting=max_waiting,
        kv_pages_total=plan.num_pages,
        page_size=PAGE,
        device=str(plan.device),
        dtype=str(plan.dtype).removeprefix("torch."),
        load_seconds=load_seconds,
        prefill_chunk=plan.prefill_chunk,
        prefix_caching=prefix.is_on,
        snapshot_bytes=prefix.sizes.snapshot_bytes,
        ledger=account,
        limits=limits(plan, slots.capacity, executor),
        kv_bytes_per_token=ledger.bytes_per_token(model),
        bytes_per_sequence=ledger.bytes_per_sequence(account, slots.total),
        draft_head=head.origin if head else None,
        head_check=head.check if head else None,
        trunk_check=head.trunk if head else None,
        execution=Execution(
            num_layers=len(model.trunk.layers),
            kv_dtype=_shared_dtype(cache.k for cache in ledger.caches_of(model)),
            state_dtype=_shared_dtype([model.trunk.state.s]),
            head_weights=head.weights if head else (0, 0),
            num_graphs=executor.num_graphs,
            graph_bytes=executor.graph_bytes,
        ),
    )
    return Engine(plan, executor, scheduler, ready, snapshots)


def _prefix_cache(model: Model, plan: Plan, pages: Pool, snapshots: Snapshots | None) -> PrefixCache:
    if snapshots is None:
        return PrefixCache(plan.grid, pages, PrefixSizes())
    count = plan.num_snapshots
    sizes = PrefixSizes(count, snapshots.num_bytes // count, ledger.bytes_per_token(model) * PAGE)
    return PrefixCache(plan.grid, pages, sizes, snapshots.is_sound)


def _make_executor(model: Model, state: BatchState, plan: Plan) -> RoundExecutor:
    sizes = plan.depth, plan.max_num_seqs, plan.max_model_len, FAST_ROWS
    executor = make_executor(model, state, *sizes, prefill_chunk=plan.prefill_chunk)
    if plan.captured:
        with torch.inference_mode():
            executor.capture()
    executor.take_compiled()
    return executor


def _shared_dtype(tensors: Iterable[torch.Tensor]) -> str:
    return ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))


def limits(plan: Plan, num_slots: int, executor: RoundExecutor) -> dict[str, int]:
    """Sequences that each limit would let run."""
    longest = reserved_pages(plan.max_model_len, plan.depth)
    counted = {
        "fast-path rows": FAST_ROWS // (plan.depth + 1),
        "wide-path rows": MAX_ROWS // (plan.depth + 1),
        "state slots": num_slots,
        "KV pages": plan.num_pages // longest,
    }
    if executor.num_graphs:
        counted["captured graphs"] = executor.max_captured
    return counted | ({"configured": plan.max_num_seqs} if plan.binding_limit == "configured" else {})
