"""What to serve, decided once: every choice that options leave open, from the checkpoint and the device."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from pilotfish.draft_heads.lookup.head import LookupHead
from pilotfish.engine.cache.grid import Grid
from pilotfish.engine.checkpoint.kv_scales import KvScales, load_kv_scales
from pilotfish.engine.checkpoint.recognise import Checkpoint
from pilotfish.engine.config import ModelConfig
from pilotfish.engine.errors import BusyError, OptionError
from pilotfish.engine.memory import gib, total_bytes
from pilotfish.engine.model.build import CacheSizes
from pilotfish.engine.options import KV_DTYPES, MAX_DEPTH, EngineOptions
from pilotfish.engine.slow import slow_ways
from pilotfish.kernels.attention import PAGE, pages_for
from pilotfish.kernels.delta_net import MOST_PENDING
from pilotfish.kernels.linear import cpu_multiplies_bf16

logger = logging.getLogger(__name__)

DEFAULT_DEPTH = 3
DEFAULT_NGRAM = 5
DEFAULT_CHUNK = 256
FUSED_CHUNK = 2048
"""Prompt tokens of the largest chunk on a GPU, where expanding a layer's weights costs the same for few tokens as for
many."""
GPU_RESERVE_BYTES = 2 << 30
"""GPU memory beside weights, KV cache and `buffer_bytes`: graphs, libraries, prompts, and what a product's
programs leave each other."""
SLOT_TABLE_BYTES = 128 << 10
"""A slot's tables beside what has the vocabulary's width: word bans, mostly."""
MAX_NGRAM = 64
CPU_KV_BYTES = 2 << 30
SNAPSHOT_SHARE = 3
"""Prefix snapshots take the memory of the KV pages over this."""
MAX_SNAPSHOTS = 1024
"""The host looks through all of them to find the one to give up."""
FAST_ROWS = 16
MAX_ROWS = 256
MEASURED = "measured rounds"
"""The limit's name where rounds timed at the start set the cap."""
MEASURED_SEQS = (64, 32, 16, 8)
"""Most sequences that are timed for it: the first whose memory is a MEASURED_SHARE-th of what is left, or less."""
MEASURED_SHARE = 4


@dataclass(frozen=True)
class Plan:
    """The options with every None decided. `binding_limit` names what set max_num_seqs; `lookup` is the head to draft
    with in place of the checkpoint's. `prefill_chunk`, the largest chunk of a prompt, is part of the exactness
    contract: prompts are cut as `grid` says, whatever the load. `fused`: the kernels of kernels.cuda, `captured` in
    graphs. `kv_dtype`: of keys and values, None for `dtype`; `kv_scales` are the checkpoint's for FP8 ones.
    `num_snapshots` of the prefix cache; 0 switches it off."""

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
    num_snapshots: int = 0
    synthetic_length: float | None = None

    @property
    def uses_mtp_head(self) -> bool:
        """Whether drafts come from the checkpoint's own head."""
        return self.depth > 0 and self.lookup is None

    @property
    def grid(self) -> Grid:
        return Grid(self.prefill_chunk, PAGE)

    @property
    def cache_sizes(self) -> CacheSizes:
        # rounds of fused kernels keep pending rows of their own
        window = 0 if self.fused else self.depth + 1
        kv = self.kv_dtype or self.dtype
        return CacheSizes(self.num_pages + 1, self.max_num_seqs + 1, window, kv, self.kv_scales)


def make_plan(options: EngineOptions, checkpoint: Checkpoint) -> Plan:
    """Every choice that options leave open. Raises OptionError naming the flag."""
    config = checkpoint.config
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, config, device)
    lookup = _lookup(options)
    depth, reason = _depth(options, checkpoint)
    max_model_len = _max_model_len(options, config)
    fused = choose_fused(options.kernels, device, dtype)
    captured = fused and not options.enforce_eager
    max_num_seqs, binding = _max_num_seqs(options, depth)
    if captured and options.cost_table and options.max_num_seqs is None:
        room = _room_beside_weights(options, checkpoint, device)[0]
        max_num_seqs, binding = most_to_measure(config, depth, room, max_num_seqs), MEASURED
    for sentence in slow_ways(device, fused, options.device):
        logger.warning("slow: %s", sentence)
    kv_dtype = choose_kv_dtype(options.kv_cache_dtype, dtype, device, fused)
    kv_scales = _kv_scales(checkpoint, kv_dtype)
    num_pages = _num_pages(options, checkpoint, depth, kv_dtype, max_model_len, max_num_seqs, device)
    with_mtp = depth > 0 and options.speculative_method == "mtp"
    pages_bytes = num_pages * page_bytes(config, kv_dtype, with_head=with_mtp)
    return Plan(
        device,
        dtype,
        depth,
        reason,
        max_model_len,
        max_num_seqs,
        binding,
        num_pages,
        default_chunk(fused),
        lookup,
        fused,
        captured,
        kv_dtype,
        kv_scales,
        num_snapshots(config, dtype, num_pages, pages_bytes) if options.enable_prefix_caching else 0,
        _synthetic_length(options, depth),
    )


def _synthetic_length(options: EngineOptions, depth: int) -> float | None:
    """The acceptance length that is decreed. Raises OptionError where text would be made up by it."""
    length = options.synthetic_acceptance_length
    if length is None:
        return None
    if options.load_format != "dummy":
        raise OptionError("synthetic_acceptance_length: want it with load_format dummy alone; it makes text up")
    if options.audit_rate:
        raise OptionError("synthetic_acceptance_length: want audit_rate 0, its text is another one at each k")
    if not depth or not 1 <= length <= depth + 1:
        raise OptionError(
            f"synthetic_acceptance_length: want k > 0 and 1..k + 1 tokens a round, got {length}, k = {depth}"
        )
    logger.warning("synthetic: %s tokens a round are accepted by decree, whatever the weights say", length)
    return length


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


def choose_device(wanted: str) -> torch.device:
    """The device for "auto", "cpu" or "cuda". Raises OptionError where there is none."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise OptionError("device: want a CUDA device, torch finds none")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def choose_dtype(wanted: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of products, for "auto", "bfloat16" or "float32"."""
    if wanted != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[wanted]
    if config.dtype == "float32":
        return torch.float32
    if device.type == "cpu" and not cpu_multiplies_bf16():
        logger.warning("dtype: this CPU has no bf16 products; the %s checkpoint runs in float32", config.dtype)
        return torch.float32
    # float16 checkpoints too: real activations pass 65 504
    return torch.bfloat16


def choose_kv_dtype(wanted: str, dtype: torch.dtype, device: torch.device, fused: bool) -> torch.dtype:
    """The dtype of keys and values, for one of KV_CACHE_DTYPES. Raises OptionError for what the kernels cannot read."""
    kv_dtype: torch.dtype = getattr(torch, KV_DTYPES[wanted]) if wanted in KV_DTYPES else dtype
    if fused and kv_dtype == torch.float8_e4m3fn:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            raise OptionError(
                f"kv_cache_dtype: fused kernels read {wanted} from compute capability 8.9 on, got {capability}"
            )
    return kv_dtype


def default_chunk(fused: bool) -> int:
    """Prompt tokens that a server reads at a time, at most."""
    return FUSED_CHUNK if fused else DEFAULT_CHUNK


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


def most_to_measure(config: ModelConfig, depth: int, room: int, least: int) -> int:
    """Sequences to make room for where the cap is measured, given the bytes that weights leave."""
    fitting = (
        count
        for count in MEASURED_SEQS
        if count * (depth + 1) <= MAX_ROWS and buffer_bytes(config, depth, count) * MEASURED_SHARE <= room
    )
    return max(least, next(fitting, least))


def _room_beside_weights(options: EngineOptions, checkpoint: Checkpoint, device: torch.device) -> tuple[int, int]:
    """Bytes of the GPU that weights and the reserve leave, and those that they would leave if no other process held
    any."""
    free, total = torch.cuda.mem_get_info(device)
    taken = int(total * (1 - options.gpu_memory_utilization)) + checkpoint.num_bytes + GPU_RESERVE_BYTES
    return free - taken, total - taken


def reserved_pages(num_tokens: int, depth: int) -> int:
    """Pages that a request of at most so many tokens owns: its last window may begin with the last token, which has
    `depth` rows after it, and the head's cache is one place longer than the trunk's."""
    return pages_for(num_tokens + depth + 1)


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
    longest = reserved_pages(max_model_len, depth)
    page = page_bytes(config, kv_dtype, with_head=depth > 0 and options.speculative_method == "mtp")
    alone = 0
    if options.kv_cache_tokens is not None:
        pages = options.kv_cache_tokens // PAGE
        if pages * page > (total := total_bytes(device)):
            raise OptionError(
                f"kv_cache_tokens: {options.kv_cache_tokens} tokens take {gib(pages * page)}, "
                f"the device has {gib(total)}"
            )
    elif device.type == "cuda":
        free, whole = _room_beside_weights(options, checkpoint, device)
        buffers = buffer_bytes(config, depth, max_num_seqs)
        pages = max(0, free - buffers) // page
        if options.enable_prefix_caching:
            # what sequences leave is the cache's, and snapshots stand beside the pages
            pages = max(min(pages, longest), pages * SNAPSHOT_SHARE // (SNAPSHOT_SHARE + 1))
        else:
            pages = min(longest * max_num_seqs, pages)
        alone = max(0, whole - buffers) // page
    else:
        pages = min(longest * max_num_seqs, max(longest, CPU_KV_BYTES // page))
    if pages < longest:
        short = f"kv cache: {pages} pages of {PAGE} tokens, want at least {longest} for one sequence of {max_model_len}"
        if alone >= longest:
            raise BusyError(f"{short} tokens; other processes hold memory of the device")
        raise OptionError(f"{short} tokens; lower max_model_len or give it more memory")
    return pages


def page_bytes(config: ModelConfig, kv_dtype: torch.dtype, with_head: bool) -> int:
    """Keys and values of a page, of every attention layer, the MTP head's too where there is one."""
    layers = len(config.full_layers) + with_head
    return 2 * layers * config.num_key_value_heads * config.head_dim * PAGE * kv_dtype.itemsize


def num_snapshots(config: ModelConfig, dtype: torch.dtype, num_pages: int, pages_bytes: int) -> int:
    """Snapshots of the prefix cache beside so many pages, which take `pages_bytes`; each has a page at least."""
    count = pages_bytes // SNAPSHOT_SHARE // snapshot_bytes(config, dtype)
    if count == 0:
        logger.warning("prefix caching is off: the memory beside the KV pages holds no snapshot of a state")
    return min(count, num_pages, MAX_SNAPSHOTS)


def snapshot_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """The recurrent state of all layers and a hidden row."""
    state = 4 * config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    history = (config.linear_conv_kernel_dim - 1) * config.conv_dim * dtype.itemsize
    return len(config.linear_layers) * (state + history) + config.hidden_size * dtype.itemsize


def buffer_bytes(config: ModelConfig, depth: int, max_num_seqs: int) -> int:
    """An estimate of what fused rounds and prompts hold beside weights and keys and values: of each slot its state,
    pending rows and sampling tables; of each row its logits; of experts those of one layer, expanded."""
    vocab, layers = config.vocab_size, len(config.linear_layers)
    state = 4 * config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    held = config.conv_dim + 2 * config.linear_num_value_heads
    inputs = config.linear_conv_kernel_dim - 1 + max(depth + 1, MOST_PENDING)
    slot = layers * (state + 2 * held * inputs) + 9 * vocab + SLOT_TABLE_BYTES
    rows = max(FAST_ROWS, max_num_seqs * (depth + 1))
    experts = 4 * (config.num_experts + 1) * config.moe_intermediate_size * config.hidden_size if config.is_moe else 0
    return (max_num_seqs + 1) * slot + 16 * rows * vocab + experts
