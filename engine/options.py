"""What a user may set about the engine; resolved once at start. No torch here: the HTTP process reads it too."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from pilotfish.engine.errors import OptionError

MAX_DEPTH = 8
"""The largest k the kernels and the pending buffer are made for."""

KvCacheDtype = Literal["auto", "bfloat16", "fp8", "fp8_e4m3"]
"""vLLM's names."""
KV_CACHE_DTYPES: tuple[str, ...] = get_args(KvCacheDtype)
KV_DTYPES = {"bfloat16": "bfloat16", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
"""What torch calls those that do not follow the model."""

DummyLayout = Literal["bf16", "nvfp4", "nvfp4-bf16-head", "mixed"]
"""nvfp4: every matrix but routers, gates and `mtp.fc`; the same with the head in BF16; mixed: NVIDIA's packs, FP8 for
attention and GatedDeltaNet, NVFP4 for the rest, the head in BF16."""
DUMMY_LAYOUTS: tuple[str, ...] = get_args(DummyLayout)


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may set. None means: decide from the checkpoint and the device; the start-up log says what was
    decided.

    `num_speculative_tokens` is k (3 where there is a head); 0 is plain decoding. `speculative_method` "ngram" drafts
    what followed the newest prompt_lookup_max .. prompt_lookup_min tokens where they stood before (default 5 .. 5, or
    the one that is given), and needs no head. `draft_head` is a file or folder with a head to use in place of the
    checkpoint's, `draft_vocab` a file with the ids that drafts are chosen from. `head_check`: a head that cannot tell a
    known text is refused, warned about, or not tested. `max_num_seqs` caps running sequences (default: with
    `cost_table` and captured rounds what rounds timed at the start say, else the fast path's rows over k + 1).
    `kv_cache_tokens` sizes the page pool, else `gpu_memory_utilization` does on a GPU, and max_num_seqs sequences of
    max_model_len, at most 2 GiB, on a CPU.
    `kv_cache_dtype` is of keys and values, the head's too: the model's ("auto"), bfloat16, or FP8 (e4m3), which holds
    twice as many tokens in the same memory and changes the text, though not with k, batch or the cut of a prompt.
    `eos_token_ids`: the end ids that requests will bring; grammars read the tokenizer with them before the engine is
    ready, which would hold up every stream later.
    `load_format` "dummy" reads config.json and no weights: these are random, stored as a checkpoint of `dummy_layout`
    has them, and head and trunk are not tested; to measure a server of any size. `synthetic_acceptance_length`: with
    these alone, so many tokens a round are accepted by decree.
    `kernels`: "fused" multiplies packed weights on the GPU and runs rounds from captured graphs, "torch" expands each
    weight for each product; "auto" is fused wherever that runs. `enforce_eager` captures no graphs.
    `enable_prefix_caching`: keep what was read of prompts, for later ones that begin with the same tokens.
    """

    model: str
    num_speculative_tokens: int | None = None
    speculative_method: Literal["mtp", "ngram"] = "mtp"
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    draft_head: str | None = None
    draft_vocab: str | None = None
    head_check: Literal["refuse", "warn", "off"] = "refuse"
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_waiting: int = 256
    kv_cache_tokens: int | None = None
    kv_cache_dtype: KvCacheDtype = "auto"
    num_threads: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    audit_rate: float = 0.0
    cost_table: bool = False
    load_format: Literal["auto", "dummy"] = "auto"
    dummy_layout: DummyLayout = "nvfp4"
    synthetic_acceptance_length: float | None = None
    kernels: Literal["auto", "torch", "fused"] = "auto"
    enforce_eager: bool = False
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        """Raises OptionError for a path that cannot be told to another process."""
        for name in ("model", "draft_head", "draft_vocab"):
            path = getattr(self, name) or ""
            if (told := path.encode("utf-8", "backslashreplace").decode()) != path:
                raise OptionError(f"{name}: want a path in UTF-8, got {told}")
