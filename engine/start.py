"""From options to a running engine: what to serve, how much memory for what, and a ledger that adds up."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch

from pilotfish.draft_heads.lookup.head import LookupHead
from pilotfish.draft_heads.vocabulary import read_draft_vocab
from pilotfish.engine import ledger
from pilotfish.engine.batch_state import BatchState
from pilotfish.engine.cache.pool import Pool
from pilotfish.engine.check.head_check import check_head, describe, longest_text, text_of
from pilotfish.engine.checkpoint.kv_scales import KvScales, load_kv_scales
from pilotfish.engine.checkpoint.load import Weight, load_weights
from pilotfish.engine.checkpoint.names import is_mtp
from pilotfish.engine.checkpoint.recognise import Checkpoint, open_checkpoint
from pilotfish.engine.checkpoint.sidecar import attach_head
from pilotfish.engine.config import ModelConfig
from pilotfish.engine.errors import CheckpointError, OptionError
from pilotfish.engine.grammar import GrammarLibrary
from pilotfish.engine.link.messages import Execution, HeadCheck, Ready
from pilotfish.engine.model.build import CacheSizes, Model, build_model
from pilotfish.engine.options import KV_DTYPES, MAX_DEPTH, EngineOptions
from pilotfish.engine.round import EagerRounds, Rounds
from pilotfish.engine.runner import Runner
from pilotfish.engine.scheduler import Scheduler
from pilotfish.kernels.attention import PAGE
from pilotfish.kernels.linear import cpu_multiplies_bf16

logger = logging.getLogger(__name__)

DEFAULT_DEPTH = 3
DEFAULT_NGRAM = 5
DEFAULT_CHUNK = 256
FUSED_CHUNK = 2048
"""Prompt tokens of a chunk on a GPU, where expanding a layer's weights costs the same for few tokens as for many."""
GPU_RESERVE_BYTES = 2 << 30
"""Of GPU memory, beside weights, KV cache and `buffer_bytes`: graphs, libraries, prompts."""
SLOT_TABLE_BYTES = 128 << 10
"""Of a slot, beside what has the vocabulary's width: word bans, mostly."""
MAX_NGRAM = 64
CPU_KV_BYTES = 2 << 30
FAST_ROWS = 16
MAX_ROWS = 256


@dataclass(frozen=True)
class Engine:
    """What the loop drives. `grammars` is None where there is no tokenizer.json to read them with."""

    runner: Runner
    rounds: Rounds
    scheduler: Scheduler
    ready: Ready
    grammars: GrammarLibrary | None = None
    audit_rate: float = 0.0
    plan: Plan | None = None


@dataclass(frozen=True)
class HeadReport:
    """What drafts and from where, how it did on a known text, and its weights: loaded, and of a whole one."""

    origin: str | None
    check: HeadCheck | None
    weights: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Plan:
    """The options with every None decided. `binding_limit` names what set max_num_seqs; `lookup` is the head to draft
    with in place of the checkpoint's. `fused`: the kernels of kernels.cuda, `captured` in graphs. `kv_dtype`: of keys
    and values, None for `dtype`; `kv_scales` are the checkpoint's for FP8 ones."""

    device: torch.device
    dtype: torch.dtype
    depth: int
    disabled_reason: str | None
    max_model_len: int
    max_num_seqs: int
    binding_limit: str
    num_pages: int
    prefill_chunk: int
    lookup: LookupHead | None = None
    fused: bool = False
    captured: bool = False
    kv_dtype: torch.dtype | None = None
    kv_scales: KvScales = field(default_factory=dict)

    @property
    def cache_sizes(self) -> CacheSizes:
        # rounds of fused kernels keep pending rows of their own
        window = 0 if self.fused else self.depth + 1
        kv = self.kv_dtype or self.dtype
        return CacheSizes(self.num_pages + 1, self.max_num_seqs + 1, window, kv, self.kv_scales)


def start_engine(options: EngineOptions) -> Engine:
    """Opens, plans, loads and allocates. Raises PilotfishError naming the option or file at fault."""
    started = perf_counter()
    if not 0 <= options.audit_rate <= 1:
        raise OptionError(f"audit_rate: want a share in 0..1, got {options.audit_rate}")
    torch.set_num_threads(_num_threads(options))
    checkpoint = open_checkpoint(options.model)
    if options.draft_head is not None:
        checkpoint = attach_head(checkpoint, options.draft_head)
    logger.info(checkpoint.summary())
    plan = make_plan(options, checkpoint)
    weights = load_weights(checkpoint, plan.device)
    weight_bytes = checkpoint.num_bytes
    if plan.depth == 0 or plan.lookup is not None:
        weights = {name: weight for name, weight in weights.items() if not name.startswith("mtp.")}
    head_weights = _num_head_weights(checkpoint, weights), checkpoint.num_head_weights
    draft_ids = _draft_ids(options, plan, checkpoint)
    model = build_model(weights, checkpoint.config, plan.cache_sizes, plan.dtype, plan.device, plan.fused, draft_ids)
    if plan.lookup is not None:
        model = dataclasses.replace(model, head=plan.lookup)
    report = HeadReport(_origin(checkpoint, plan), _test_head(model, plan, options), head_weights)
    engine = assemble(model, plan, options.max_waiting, weight_bytes, perf_counter() - started, report)
    logger.info("loaded in %.1f s\n%s", engine.ready.load_seconds, "\n".join(ledger.show(engine.ready)))
    tokenizer = Path(options.model) / "tokenizer.json"
    grammars = GrammarLibrary(tokenizer, checkpoint.config.vocab_size) if tokenizer.exists() else None
    return dataclasses.replace(engine, grammars=grammars, audit_rate=options.audit_rate, plan=plan)


def _draft_ids(options: EngineOptions, plan: Plan, checkpoint: Checkpoint) -> list[int] | None:
    if options.draft_vocab is None:
        return None
    if plan.depth == 0 or plan.lookup is not None:
        raise OptionError("draft_vocab: want a head that drafts with an lm_head")
    ids = read_draft_vocab(Path(options.draft_vocab), checkpoint.config.vocab_size)
    logger.info("drafts are chosen from %d of %d ids", len(ids), checkpoint.config.vocab_size)
    return ids


def _num_head_weights(checkpoint: Checkpoint, weights: Mapping[str, Weight]) -> int:
    """Of the head's modules those whose weights were loaded; fused experts were taken apart."""
    loaded = [name for name in weights if is_mtp(name)]
    stems = [name.removesuffix("gate_up_proj").removesuffix("experts.down_proj") for name in checkpoint.modules]
    return sum(any(name.startswith(stem) for name in loaded) for stem in stems if is_mtp(stem))


def _origin(checkpoint: Checkpoint, plan: Plan) -> str | None:
    """What drafts, in a few words."""
    if plan.depth == 0:
        return None
    if plan.lookup is not None:
        return f"look-up of {plan.lookup.longest} to {plan.lookup.shortest} tokens"
    return f"MTP head from {checkpoint.head.path}" if checkpoint.head else "MTP head of the checkpoint"


def _test_head(model: Model, plan: Plan, options: EngineOptions) -> HeadCheck | None:
    """Raises CheckpointError for a dead head unless the options say otherwise."""
    if plan.depth == 0 or plan.lookup is not None or options.head_check == "off":
        return None
    num_tokens = longest_text(plan.max_model_len, plan.depth)
    ids = text_of(Path(options.model), model.config.vocab_size, num_tokens)
    check = check_head(model, ids, plan.depth)
    line = describe(check, model.config.vocab_size)
    if check.verdict == "dead" and options.head_check == "refuse":
        where = options.draft_head or options.model
        raise CheckpointError(
            f"{where}: {line}. --num-speculative-tokens 0 serves without it, --head-check warn with it"
        )
    logger.log(logging.WARNING if check.verdict in ("dead", "weak") else logging.INFO, line)
    return check


def assemble(
    model: Model,
    plan: Plan,
    max_waiting: int,
    weight_bytes: int,
    load_seconds: float,
    head: HeadReport | None = None,
) -> Engine:
    """Scheduler, buffers and runner around a built model."""
    reads_history = model.head is not None and model.head.reads_history
    # a last window may reach past the limit
    history_length = plan.max_model_len + MAX_DEPTH + 1 if reads_history else 0
    vocab_size = model.config.vocab_size
    slots_and_depth = (plan.max_num_seqs + 1, max(1, plan.depth))
    state = BatchState(*slots_and_depth, vocab_size, plan.device, history_length, complete=plan.fused)
    rounds = _make_rounds(model, state, plan)
    pages, slots = Pool("KV pages", plan.num_pages + 1), Pool("state slots", plan.max_num_seqs + 1)
    scheduler = Scheduler(pages, slots, plan.max_num_seqs, max_waiting, plan.prefill_chunk)
    account = ledger.measure(model, state, rounds, plan.device) | {"checkpoint_bytes": weight_bytes}
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
        ledger=account,
        limits=limits(plan, slots.capacity, rounds),
        kv_bytes_per_token=ledger.bytes_per_token(model),
        bytes_per_sequence=ledger.bytes_per_sequence(account, slots.total),
        draft_head=head.origin if head else None,
        head_check=head.check if head else None,
        execution=Execution(
            num_layers=len(model.trunk.layers),
            kv_dtype=_shared_dtype(cache.k for cache in ledger.caches_of(model)),
            state_dtype=_shared_dtype([model.trunk.state.s]),
            head_weights=head.weights if head else (0, 0),
            num_graphs=rounds.num_graphs,
            graph_bytes=rounds.graph_bytes,
        ),
    )
    return Engine(rounds.runner, rounds, scheduler, ready)


def _make_rounds(model: Model, state: BatchState, plan: Plan) -> Rounds:
    if not plan.fused:
        return EagerRounds(Runner(model, state, plan.depth > 0 and model.head is not None))
    from pilotfish.engine.device_round.start import make_rounds  # imports Triton

    rounds = make_rounds(model, state, plan.depth, plan.max_num_seqs, plan.max_model_len, FAST_ROWS)
    if plan.captured:
        with torch.inference_mode():
            rounds.capture()
    rounds.take_compiled()
    return rounds


def _shared_dtype(tensors: Iterable[torch.Tensor]) -> str:
    return ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))


def make_plan(options: EngineOptions, checkpoint: Checkpoint) -> Plan:
    """Every choice that options leave open. Raises OptionError naming the flag."""
    config = checkpoint.config
    device = _device(options)
    dtype = _dtype(options, config, device)
    lookup = _lookup(options)
    depth, reason = _depth(options, checkpoint)
    max_model_len = _max_model_len(options, config)
    max_num_seqs, binding = _max_num_seqs(options, depth)
    fused = choose_fused(options.kernels, device, dtype)
    kv_dtype = choose_kv_dtype(options.kv_cache_dtype, dtype, device, fused)
    kv_scales = _kv_scales(checkpoint, kv_dtype)
    chunk = options.prefill_chunk or (FUSED_CHUNK if fused else DEFAULT_CHUNK)
    if options.prefill_chunk is not None and not 1 <= options.prefill_chunk <= 8192:
        raise OptionError(f"prefill_chunk: want 1..8192, got {options.prefill_chunk}")
    num_pages = _num_pages(options, checkpoint, depth, kv_dtype, max_model_len, max_num_seqs, device)
    return Plan(
        device,
        dtype,
        depth,
        reason,
        max_model_len,
        max_num_seqs,
        binding,
        num_pages,
        chunk,
        lookup,
        fused,
        fused and not options.enforce_eager,
        kv_dtype,
        kv_scales,
    )


def choose_fused(wanted: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether rounds run on the kernels of kernels.cuda: wherever they can, unless "torch" is wanted. Raises
    OptionError where they are wanted and cannot, and where the device could and Triton cannot."""
    problem = _no_fused_kernels(device, dtype)
    if wanted == "fused" and problem:
        raise OptionError(f"kernels: fused ones want {problem}")
    if wanted == "auto" and problem and device.type == "cuda":
        logger.warning("kernels: torch's operators, slower by far than fused ones, which want %s", problem)
    if wanted == "torch" or problem:
        return False
    from pilotfish.kernels.cuda.warm import prepare  # imports Triton

    try:
        prepare()
    except RuntimeError as error:
        raise OptionError(f"kernels: {error}; it wants a C compiler and Python.h, or --kernels torch") from error
    return True


def _no_fused_kernels(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"a CUDA device, got {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"compute capability 8.0 (bf16 products), got {capability[0]}.{capability[1]}"
    if dtype != torch.bfloat16:
        return f"bfloat16, got {dtype}"
    return None


def _device(options: EngineOptions) -> torch.device:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("device: want a CUDA device, torch finds none")
    use_cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if use_cuda else "cpu")


def _num_threads(options: EngineOptions) -> int:
    """By default one core is left to the HTTP process: two that spin for one core are slower by far than one."""
    if options.num_threads is None:
        return max(1, len(os.sched_getaffinity(0)) - 1)
    if options.num_threads < 1:
        raise OptionError(f"num_threads: want at least 1, got {options.num_threads}")
    return options.num_threads


def _dtype(options: EngineOptions, config: ModelConfig, device: torch.device) -> torch.dtype:
    if options.dtype != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[options.dtype]
    if config.dtype == "float32":
        return torch.float32
    if device.type == "cpu" and not cpu_multiplies_bf16():
        logger.warning("dtype: this CPU has no bf16 products; the %s checkpoint runs in float32", config.dtype)
        return torch.float32
    # float16 checkpoints too: real activations pass 65 504
    return torch.bfloat16


def choose_kv_dtype(wanted: str, dtype: torch.dtype, device: torch.device, fused: bool) -> torch.dtype:
    """Of keys and values, for one of KV_CACHE_DTYPES. Raises OptionError for what the kernels cannot read."""
    kv_dtype: torch.dtype = getattr(torch, KV_DTYPES[wanted]) if wanted in KV_DTYPES else dtype
    if fused and kv_dtype == torch.float8_e4m3fn:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            raise OptionError(
                f"kv_cache_dtype: fused kernels read {wanted} from compute capability 8.9 on, got {capability}"
            )
    return kv_dtype


def _kv_scales(checkpoint: Checkpoint, kv_dtype: torch.dtype) -> KvScales:
    """The checkpoint's, where the cache is divided by scales at all."""
    if kv_dtype != torch.float8_e4m3fn:
        return {}
    scales = load_kv_scales(checkpoint)
    of = f"the checkpoint's scales for {len(scales)} layers" if scales else "no scales: beyond 448 it saturates"
    logger.info("KV cache in float8_e4m3fn, %s", of)
    return scales


def _depth(options: EngineOptions, checkpoint: Checkpoint) -> tuple[int, str | None]:
    wanted = options.num_speculative_tokens
    if wanted is not None and not 0 <= wanted <= MAX_DEPTH:
        raise OptionError(f"num_speculative_tokens: want 0..{MAX_DEPTH}, got {wanted}")
    if wanted == 0:
        return 0, "num_speculative_tokens is 0"
    if checkpoint.has_mtp or options.speculative_method == "ngram":
        return DEFAULT_DEPTH if wanted is None else wanted, None
    reason = checkpoint.mtp_problem or "the checkpoint has no MTP head"
    logger.warning("SPECULATION IS OFF: %s. Serving plain decoding.", reason)
    return 0, reason


def _lookup(options: EngineOptions) -> LookupHead | None:
    """vLLM's rule: of the two bounds the one that is missing is the other's, or 5 where both are."""
    longest, shortest = options.prompt_lookup_max, options.prompt_lookup_min
    if options.speculative_method != "ngram":
        if longest is not None or shortest is not None:
            raise OptionError("prompt_lookup_max, prompt_lookup_min: want them with the method 'ngram' alone")
        return None
    if options.draft_head is not None:
        raise OptionError("draft_head: want it with the method 'mtp' alone")
    longest, shortest = longest or shortest or DEFAULT_NGRAM, shortest or longest or DEFAULT_NGRAM
    if not 1 <= shortest <= longest <= MAX_NGRAM:
        raise OptionError(
            f"prompt_lookup_min, prompt_lookup_max: want 1 <= min <= max <= {MAX_NGRAM}, got {shortest}, {longest}"
        )
    return LookupHead(longest, shortest)


def _max_model_len(options: EngineOptions, config: ModelConfig) -> int:
    limit = config.max_position_embeddings
    wanted = options.max_model_len
    if wanted is not None and not 2 <= wanted <= limit:
        raise OptionError(f"max_model_len: want 2..{limit} (max_position_embeddings), got {wanted}")
    return wanted or limit


def _max_num_seqs(options: EngineOptions, depth: int) -> tuple[int, str]:
    """The default keeps a round's rows within one tile, where its cost is nearly flat."""
    fast, most = FAST_ROWS // (depth + 1), MAX_ROWS // (depth + 1)
    wanted = options.max_num_seqs
    if wanted is None:
        return fast, "fast-path rows"
    if not 1 <= wanted <= most:
        raise OptionError(f"max_num_seqs: want 1..{most} ({MAX_ROWS} rows at k = {depth}), got {wanted}")
    if wanted > fast:
        logger.warning("max_num_seqs %d is beyond the fast path (%d at k = %d)", wanted, fast, depth)
    return wanted, "configured"


def _num_pages(
    options: EngineOptions,
    checkpoint: Checkpoint,
    depth: int,
    kv_dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int,
    device: torch.device,
) -> int:
    """Pages that sequences can own. At least one sequence of max_model_len must fit."""
    config = checkpoint.config
    longest = -(-(max_model_len + depth + 1) // PAGE)
    layers = len(config.full_layers) + (depth > 0 and options.speculative_method == "mtp")
    page_bytes = 2 * layers * config.num_key_value_heads * config.head_dim * PAGE * kv_dtype.itemsize
    if options.kv_cache_tokens is not None:
        pages = options.kv_cache_tokens // PAGE
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        room = free - int(total * (1 - options.gpu_memory_utilization)) - checkpoint.num_bytes
        room -= GPU_RESERVE_BYTES + buffer_bytes(config, depth, max_num_seqs)
        pages = min(longest * max_num_seqs, max(0, room) // page_bytes)
    else:
        pages = min(longest * max_num_seqs, max(longest, CPU_KV_BYTES // page_bytes))
    if pages < longest:
        raise OptionError(
            f"kv cache: {pages} pages of {PAGE} tokens, want at least {longest} for one sequence of {max_model_len} "
            "tokens; lower max_model_len or give it more memory"
        )
    return pages


def buffer_bytes(config: ModelConfig, depth: int, max_num_seqs: int) -> int:
    """About what fused rounds and prompts hold beside weights and keys and values: of each slot its state, pending rows
    and sampling tables; of each row its logits; of experts those of one layer, expanded."""
    vocab, layers = config.vocab_size, len(config.linear_layers)
    state = 4 * config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    held = config.conv_dim + 2 * config.linear_num_value_heads
    slot = layers * (state + 2 * held * (config.linear_conv_kernel_dim + depth)) + 9 * vocab + SLOT_TABLE_BYTES
    rows = max(FAST_ROWS, max_num_seqs * (depth + 1))
    experts = 4 * (config.num_experts + 1) * config.moe_intermediate_size * config.hidden_size if config.is_moe else 0
    return (max_num_seqs + 1) * slot + 16 * rows * vocab + experts


def limits(plan: Plan, num_slots: int, rounds: Rounds) -> dict[str, int]:
    """Sequences that each limit would let run."""
    longest = -(-(plan.max_model_len + plan.depth + 1) // PAGE)
    counted = {
        "fast-path rows": FAST_ROWS // (plan.depth + 1),
        "wide-path rows": MAX_ROWS // (plan.depth + 1),
        "state slots": num_slots,
        "KV pages": plan.num_pages // longest,
    }
    if rounds.num_graphs:
        counted["captured graphs"] = rounds.max_captured
    return counted | ({"configured": plan.max_num_seqs} if plan.binding_limit == "configured" else {})
