"""What the HTTP process and the engine process say to each other.

Frozen msgspec structs, tagged by type, msgpack on the wire, each message behind a
4-byte big-endian length. This file imports no torch: both sides read it.

HTTP -> engine: `Submit`, `Abort`, `Ping`, `Shutdown`.  Engine -> HTTP: `Ready`, `StepReport`, `Pong`, `Fatal`.
Every submitted request ends in exactly one `RequestOutput` whose `finish_reason` is not None.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
ErrorCode = Literal["queue_full", "invalid", "nan"]
MAX_MESSAGE_BYTES = 256 << 20


JSON_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": " ?", "coerce_one_of": True}
"""How grammars are made from JSON schemas: at most one space between parts, or a small model could go on with white
space for ever; of oneOf's alternatives more than one may fit, which the server tells where it may be so."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the text must match. `source` is a JSON schema, a regular expression, a JSON list of strings (choice), a
    grammar in Lark ("lark") or one of Lark and GBNF ("grammar"); unused for json_object. `schemas` are further rules of
    a "lark" grammar, (name, JSON schema, a simpler one to take where the library cannot read the first).
    `after_token_id`: in force once that token has been generated (the end of thinking). `ends` are not chosen before
    `min_tokens` tokens as long as the grammar allows anything else."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar", "lark"]
    source: str = ""
    schemas: tuple[tuple[str, str, str], ...] = ()
    after_token_id: int | None = None
    min_tokens: int = 0
    ends: tuple[int, ...] = ()


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """A thinking block gets `num_tokens`; unless `end_token_id` was written by then, the tokens of `closing` follow.

    `start_token_id` opens the block; None: the prompt ends inside it. Goes before every other rule about tokens."""

    num_tokens: int
    start_token_id: int | None
    end_token_id: int
    closing: tuple[int, ...]


class LoopRule(msgspec.Struct, frozen=True):
    """A text loops once its last `min_period` .. `max_period` tokens have come `repeats` times in a row, over at least
    `tokens` tokens. That ends an answer; a thinking block is closed as one whose budget is spent."""

    repeats: int = 4
    tokens: int = 256
    min_period: int = 1
    max_period: int = 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen; names and defaults are vLLM's.

    temperature 0 is greedy. top_k 0 or -1, top_p 1, min_p 0 switch the filters off.
    `stop_token_ids` end a request and are not part of its text; `eos_token_ids` (the model's own
    end ids, filled in by the server) do too unless `ignore_eos`. `max_tokens` counts generated tokens.
    `logprobs` = n returns the n most likely tokens beside the chosen one; None returns nothing.
    `seed` is a 64-bit integer (the server draws one where the client gave none). Under a `grammar` the model's own end
    ids always stop. `prompt_logprobs` = n returns the same of the prompt's own tokens, from the second on. With
    `max_tokens` 0 the prompt is read, and nothing written. `bad_words_token_ids` are sequences that must not be
    generated; where `allowed_token_ids` is given, nothing but those may be.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    choice: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    thinking: ThinkingBudget | None = None
    loop_rule: LoopRule | None = None


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """One sequence to decode. `speculative_k` lowers the served draft depth for it (None: the served k). `key` is the
    label of its API key: keys are served in turn. Of one key lower `priority` comes first.

    Prompts share what was read of them only under the same `cache_salt`. `system_tokens`: so many of the prompt's first
    tokens are system prompt and tools, which other conversations are likely to begin with too (None: not known)."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    speculative_k: int | None = None
    key: str = ""
    priority: int = 0
    cache_salt: str = ""
    system_tokens: int | None = None


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Free the sequence within one round; its last output says finish_reason "abort"."""

    request_id: str


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answered by a `Pong`: at once where there is no work, else between two steps."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the engine process; what still runs is aborted."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability of a token under the trunk's raw logits, and the n most likely ones. `rank`, of a prompt's token:
    1 for the likeliest."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []
    rank: int = 0


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step added to one request.

    `token_ids` are committed tokens in order, a stop id included as the last one (`stop_token_id` names it).
    num_drafted / num_accepted count this step's drafts really offered and accepted; the first num_forced tokens were
    known beforehand to be all that the grammar allows, drafts or not.
    `round` is False for the token that prefill chose. `queue_seconds`, once: from submission to admission.
    `looped`: finish_reason "stop", because the text repeats itself. `prompt_logprobs`: of the prompt's next tokens.
    `num_cached_tokens`, once, with the first output of a request that was admitted: the prompt's first tokens that were
    not read, because the prefix cache had them.
    `error_code` says whose fault an error is: "queue_full" (503, try again), "invalid" (400), "nan" (500, the
    model's logits hold NaN), None (500).
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    error_code: ErrorCode | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    num_forced: int = 0
    round: bool = True
    queue_seconds: float | None = None
    looped: bool = False
    prompt_logprobs: list[TokenLogprob] | None = None
    num_cached_tokens: int | None = None


MissReason = Literal["short", "new", "differs", "evicted", "salt", "unread", "logprobs"]
"""Why more of a prompt was read than the grid requires. "short": it ends before the first boundary. "new": no kept
prompt begins like it. "differs": it leaves the nearest kept prompt at a token. "evicted": it was kept, and gave way.
"salt": it is kept under another salt that this key has used. "unread": another request is reading the same tokens just
now. "logprobs": those of its own tokens were asked for, so it is read whole."""
MAX_MISSES = 16
"""Misses that one report may tell of."""


class CacheMiss(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt of which less was cached than the grid allows, and why.

    `key` is its request's. `num_allowed_tokens` is the last boundary at or below its end. Where it "differs",
    `first_difference` is the index of the first token that does, and `here` and `there` are a few tokens from it on in
    this prompt and in the nearest kept one of the same salt.
    """

    request_id: str
    reason: MissReason
    num_prompt_tokens: int
    key: str = ""
    num_cached_tokens: int = 0
    num_allowed_tokens: int = 0
    first_difference: int | None = None
    here: tuple[int, ...] = ()
    there: tuple[int, ...] = ()


class PrefixCacheStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The prefix cache. Since the last report: prompt tokens of admitted requests (`num_queried_tokens`), those of them
    that were not read again (`num_hit_tokens`), snapshots evicted, and the newest `misses`, at most MAX_MISSES.

    Now: snapshots kept, their bytes with those of the pages that nothing but the cache holds, and the most bytes that
    they may take.
    """

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_evictions: int = 0
    misses: tuple[CacheMiss, ...] = ()
    num_snapshots: int = 0
    num_bytes: int = 0
    capacity_bytes: int = 0


class StepStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Gauges after the step and the step's own times, in seconds.

    `phases` maps a phase of a round (verify, choose, accept, repair, draft, report) or "prefill" to seconds;
    it is empty when the step ran nothing. `num_prefill_tokens` are prompt tokens processed in this step.
    `num_audited_tokens` and `num_audit_mismatches` (requests) are what --audit-rate has compared since the last report.
    `memory_bytes` is in use now, as in the ledger: on a CPU resident in this process, on a GPU in use on the device; 0
    while requests run.
    `graph` is True where a round replayed a captured graph, False where it was launched operator by operator.
    `num_compiled` kernels had to be compiled since the report before.
    `num_sat_out`: rounds since then that went on without a sequence whose grammar's masks had not come, by sequence.
    `prefix_cache` is None where nothing of it has changed since the report before, or it is off.
    """

    phases: dict[str, float] = {}
    step_seconds: float = 0.0
    num_prefill_tokens: int = 0
    graph: bool = False
    num_compiled: int = 0
    num_sat_out: int = 0
    num_audited_tokens: int = 0
    num_audit_mismatches: int = 0
    memory_bytes: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    state_slots_used: int = 0
    state_slots_total: int = 0
    prefix_cache: PrefixCacheStats | None = None


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One engine step: outputs of the requests it touched, and the gauges."""

    outputs: list[RequestOutput]
    stats: StepStats


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The answer to a `Ping`, by the thread that runs the steps."""


class HeadCheck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the draft head made of a known text at load. Tuples go by draft, the first one first.

    `trunk_top1`, `head_top1`: shares of the text's tokens ranked first. "dead" is far below the trunk, "weak" well
    below, "untested" without a verdict; `reason` says why.
    """

    verdict: Literal["ok", "weak", "dead", "untested"]
    reason: str = ""
    num_positions: int = 0
    trunk_top1: float = 0.0
    head_top1: tuple[float, ...] = ()
    head_median_rank: tuple[int, ...] = ()


class TrunkCheck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the trunk made of the same text. `top1`: the share of its tokens ranked first; "failed" is too small a share
    for a model that writes sense, and `reason` says what was found or is likely."""

    verdict: Literal["ok", "failed", "untested"]
    reason: str = ""
    num_positions: int = 0
    top1: float = 0.0


class Execution(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is loaded and what was seen to run, none of it read from options.

    `routes`: kernel and dtype -> the layers that took it in the requests of engine/check/probe.py. `head_weights`: the
    draft head's weights that were loaded, and how many a whole one has. `num_graphs`: captured rounds and parts of
    rounds, which hold `graph_bytes` of device memory beside the buffers that all of them share.
    `round_seconds`: sequences at once -> seconds of their round, timed at the start to set the cap.
    `break_even`: sequences at once -> tokens that a round must commit to each to gain over k = 0, timed at the start.
    `start_seconds`: what the engine did until it was ready: "weights" (opened, read, packed, the head tested),
    "kernels" compiled, "graphs" captured, "rest" (caches, buffers, requests of our own, timed rounds).
    `slow`: what runs far slower than it could here, and what would mend it (engine/slow.py).
    """

    num_layers: int
    kv_dtype: str
    state_dtype: str
    head_weights: tuple[int, int] = (0, 0)
    num_graphs: int = 0
    graph_bytes: int = 0
    routes: dict[str, list[str]] = {}
    round_seconds: dict[int, float] = {}
    break_even: dict[int, float] = {}
    start_seconds: dict[str, float] = {}
    slow: list[str] = []


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Sent once, when the engine can take requests.

    `num_speculative_tokens` is the k really served: 0 when the head is missing, and then
    `speculation_disabled_reason` says why. `binding_limit` names what set `max_num_seqs`; `limits` has the sequences
    that each limit would allow (KV pages: sequences of the full context). `ledger` is engine/ledger.py's, in bytes.
    `draft_head` says what drafts, and from where; `head_check` how it did on a known text, `trunk_check` how the trunk
    did; `execution` what runs. `prefill_chunk` is the largest chunk of a prompt: with the prompt's length it says where
    prompts are cut (engine/cache/grid.py). `prefix_caching`: what was read of prompts is kept, in snapshots of
    `snapshot_bytes` each at such cuts and in KV pages.
    """

    model_type: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    binding_limit: str
    num_speculative_tokens: int
    speculation_disabled_reason: str | None
    max_waiting: int
    kv_pages_total: int
    page_size: int
    device: str
    dtype: str
    load_seconds: float
    ledger: dict[str, int]
    limits: dict[str, int] = {}
    kv_bytes_per_token: int = 0
    bytes_per_sequence: int = 0
    draft_head: str | None = None
    head_check: HeadCheck | None = None
    trunk_check: TrunkCheck | None = None
    execution: Execution | None = None
    prefill_chunk: int = 0
    prefix_caching: bool = False
    snapshot_bytes: int = 0


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine cannot go on; the process exits after it. `part` is load, prefill, round or protocol. `permanent`: the
    same start would fail again."""

    part: str
    message: str
    permanent: bool = False


ToEngine = Submit | Abort | Ping | Shutdown
FromEngine = Ready | StepReport | Pong | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def frame(message: ToEngine | FromEngine) -> bytes:
    """Length-prefixed bytes of a message. Raises ValueError above MAX_MESSAGE_BYTES."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(body)} bytes, want at most {MAX_MESSAGE_BYTES}")
    return len(body).to_bytes(4, "big") + body


def decode_to_engine(body: bytes) -> ToEngine:
    """Raises msgspec.DecodeError on anything but one of the messages above."""
    return _to_engine.decode(body)


def decode_from_engine(body: bytes) -> FromEngine:
    """Raises msgspec.DecodeError on anything but one of the messages above."""
    return _from_engine.decode(body)
