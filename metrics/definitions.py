"""Every metric: name, kind, unit, labels, buckets. What is not in this table is not exported.

Names end in their base unit; counters in `_total`. Acceptance is exported as raw counts, so that any window's
acceptance length is (accepted + drafts) / drafts of the rates.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry, Gauge

from pilotfish.metrics.series import Counter, Histogram

PREFIX = "pilotfish_"
SPEC = PREFIX + "spec_decode_"

# fine where one token takes 1-10 ms, coarse where only minutes matter
TOKEN_SECONDS = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.01),
    *(0.0125, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0),
)
FIRST_TOKEN_SECONDS = (
    *(0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
REQUEST_SECONDS = (
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    1.5,
    2.5,
    5.0,
    10.0,
    15.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1800.0,
    7200.0,
)
PHASE_SECONDS = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02),
    *(0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0),
)
COMMITTED = tuple(float(count) for count in range(1, 18))
ACCEPTANCE_LENGTH = tuple(1 + step / 4 for step in range(0, 33))
REQUEST_TOKENS = (
    1.0,
    8.0,
    16.0,
    32.0,
    64.0,
    128.0,
    256.0,
    512.0,
    1024.0,
    2048.0,
    4096.0,
    8192.0,
    16384.0,
    65536.0,
    262144.0,
)

PHASES = ("verify", "mask", "choose", "accept", "repair", "draft", "report", "launch", "wait", "prefill")
"""A round's, in order: operator by operator, or where it is launched from a graph, the host's share of it."""
ROUND_PATHS = ("graph", "eager")
FINISH_REASONS = ("stop", "length", "abort", "error")
REJECTION_REASONS = (
    *("queue_full", "invalid", "too_large", "unauthorized", "not_found", "unavailable", "engine_failed", "internal"),
    "rate_limited",
)
MISS_REASONS = ("short", "new", "differs", "evicted", "salt", "unread", "logprobs")
"""Of the prefix cache: engine/link/messages.py says what they mean."""
VOLATILE_LINES = ("billing_header", "token_counter")
"""Of system prompts: server/chat/volatile.py says what they are."""

Kind = Literal["counter", "gauge", "histogram"]


class Definition(msgspec.Struct, frozen=True):
    """One metric. `labels` have bounded values; histograms alone have `buckets`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


POSITION = ("position",)

DEFINITIONS = (
    Definition(SPEC + "num_drafts_total", "counter", "Rounds of a sequence in which at least one draft was offered."),
    Definition(SPEC + "num_draft_tokens_total", "counter", "Drafted tokens offered to the trunk."),
    Definition(SPEC + "num_accepted_tokens_total", "counter", "Drafted tokens that the trunk agreed with."),
    Definition(
        SPEC + "num_draft_tokens_per_pos_total",
        "counter",
        "Drafted tokens offered, by draft position from 0.",
        POSITION,
    ),
    Definition(
        SPEC + "num_accepted_tokens_per_pos_total", "counter", "Drafted tokens accepted, by draft position.", POSITION
    ),
    Definition(
        SPEC + "committed_tokens_per_round",
        "histogram",
        "Tokens that one round added to one sequence, the trunk's own token included.",
        buckets=COMMITTED,
    ),
    Definition(
        SPEC + "request_acceptance_length",
        "histogram",
        "Mean committed tokens a round over a whole request, observed at its end.",
        buckets=ACCEPTANCE_LENGTH,
    ),
    Definition(SPEC + "k", "gauge", "Drafted tokens a round that are served (0: plain decoding)."),
    Definition(
        SPEC + "break_even_acceptance_length",
        "gauge",
        "Tokens a round must commit to a sequence to gain over k = 0, timed at the start (--cost-table), by sequences.",
        ("sequences",),
    ),
    Definition(
        SPEC + "break_even_tokens_total",
        "counter",
        "Tokens that the rounds so far had to commit to be as fast as k = 0, by those timed at the start; else 0.",
    ),
    Definition(SPEC + "disabled", "gauge", "1 while the engine decodes without speculation, by reason.", ("reason",)),
    Definition(PREFIX + "num_requests_running", "gauge", "Sequences that take part in rounds or prefill."),
    Definition(PREFIX + "num_requests_waiting", "gauge", "Sequences queued in the engine."),
    Definition(PREFIX + "max_num_seqs", "gauge", "Cap on running sequences, by the limit that set it.", ("limit",)),
    Definition(
        PREFIX + "timed_round_seconds",
        "gauge",
        "Seconds of a round at the served k, timed at the start to set the cap, by sequences.",
        ("sequences",),
    ),
    Definition(
        PREFIX + "concurrency_limit",
        "gauge",
        "Sequences that each limit would let run at once; KV pages: sequences of the full context.",
        ("limit",),
    ),
    Definition(PREFIX + "memory_bytes", "gauge", "The start-up memory ledger; its parts add up.", ("part",)),
    Definition(
        PREFIX + "memory_used_bytes",
        "gauge",
        "Memory in use when the engine was last idle: resident in its process on a CPU, in use on the device on a GPU.",
    ),
    Definition(PREFIX + "kv_bytes_per_token", "gauge", "Key-value cache of one token, the draft head's included."),
    Definition(PREFIX + "bytes_per_sequence", "gauge", "State, pending rows and buffers of one running sequence."),
    Definition(PREFIX + "kv_pages_used", "gauge", "Key-value cache pages reserved."),
    Definition(PREFIX + "kv_pages", "gauge", "Key-value cache pages there are."),
    # no raw count: what picks a server for Kubernetes' gateway reads one series, and divides none
    Definition(PREFIX + "kv_cache_usage", "gauge", "The one by the other, 0 to 1."),
    Definition(PREFIX + "state_slots_used", "gauge", "Recurrent-state slots taken."),
    Definition(PREFIX + "state_slots", "gauge", "Recurrent-state slots there are."),
    Definition(
        PREFIX + "time_to_first_token_seconds",
        "histogram",
        "From a request's arrival to its first token.",
        (),
        FIRST_TOKEN_SECONDS,
    ),
    Definition(
        PREFIX + "request_queue_time_seconds",
        "histogram",
        "From a sequence's submission to the engine to its admission, by the API key's label.",
        ("key",),
        FIRST_TOKEN_SECONDS,
    ),
    Definition(
        PREFIX + "inter_token_latency_seconds",
        "histogram",
        "Time per output token after the first; the tokens of one round share its time equally.",
        (),
        TOKEN_SECONDS,
    ),
    Definition(
        PREFIX + "e2e_request_latency_seconds", "histogram", "From a request's arrival to its end.", (), REQUEST_SECONDS
    ),
    Definition(PREFIX + "round_seconds", "histogram", "Time of a step's phases.", ("phase",), PHASE_SECONDS),
    Definition(
        PREFIX + "rounds_total",
        "counter",
        "Rounds, by how they ran: a captured graph replayed, or eager.",
        ("path",),
    ),
    Definition(PREFIX + "step_seconds", "histogram", "Time of whole engine steps.", (), PHASE_SECONDS),
    Definition(
        PREFIX + "exactness_checked_tokens_total", "counter", "Tokens decoded again at k = 0 while idle (--audit-rate)."
    ),
    Definition(
        PREFIX + "exactness_mismatched_requests_total", "counter", "Requests that k = 0 decoded otherwise; must stay 0."
    ),
    Definition(PREFIX + "nan_requests_total", "counter", "Requests ended because the model's logits held NaN."),
    Definition(PREFIX + "request_finished_total", "counter", "Sequences ended, by reason.", ("finish_reason",)),
    Definition(
        PREFIX + "request_rejected_total", "counter", "HTTP requests answered with an error, by reason.", ("reason",)
    ),
    Definition(
        PREFIX + "unused_fields_total",
        "counter",
        "Fields of requests that were accepted and have no effect on the answer, by name.",
        ("field",),
    ),
    Definition(
        PREFIX + "schema_keywords_left_out_total",
        "counter",
        "Keywords of JSON schemas that no grammar holds and that were left out, by name, once a request.",
        ("keyword",),
    ),
    Definition(
        PREFIX + "volatile_lines_left_out_total",
        "counter",
        "Lines of system prompts that change with every request and were left out, by what they are.",
        ("line",),
    ),
    Definition(PREFIX + "key_requests_total", "counter", "Requests answered, by the API key's label.", ("key",)),
    Definition(
        PREFIX + "key_generation_tokens_total", "counter", "Tokens of answers, by the API key's label.", ("key",)
    ),
    Definition(PREFIX + "kernels_compiled_total", "counter", "Kernels compiled while serving: rounds waited for them."),
    Definition(
        PREFIX + "grammar_rounds_missed_total",
        "counter",
        "Rounds that did not wait for a sequence's grammar and went on without it, once for each such sequence.",
    ),
    Definition(PREFIX + "prompt_tokens_total", "counter", "Prompt tokens of ended sequences."),
    Definition(PREFIX + "prefill_tokens_total", "counter", "Prompt tokens that the engine has processed."),
    Definition(
        PREFIX + "prefix_cache_queries_total", "counter", "Prompt tokens of admitted requests, looked for in the cache."
    ),
    Definition(PREFIX + "prefix_cache_hits_total", "counter", "Prompt tokens that were not read: the cache had them."),
    Definition(
        PREFIX + "prefix_cache_misses_total",
        "counter",
        "Prompts of which less was cached than the cuts allow, by reason; of many at once the newest are counted.",
        ("reason",),
    ),
    Definition(PREFIX + "prefix_cache_evictions_total", "counter", "Snapshots that gave way to others or to requests."),
    Definition(PREFIX + "prefix_cache_snapshots", "gauge", "Snapshots kept: places where prompts can be gone on with."),
    Definition(PREFIX + "prefix_cache_bytes", "gauge", "Memory of snapshots and of pages that nothing else holds."),
    Definition(PREFIX + "prefix_cache_capacity_bytes", "gauge", "The most memory that the prefix cache may take."),
    Definition(PREFIX + "generation_tokens_total", "counter", "Tokens generated and counted."),
    Definition(
        PREFIX + "request_generation_tokens", "histogram", "Tokens generated by one sequence.", (), REQUEST_TOKENS
    ),
    Definition(PREFIX + "engine_up", "gauge", "1 while the engine process serves."),
    Definition(PREFIX + "engine_restarts_total", "counter", "Times the engine was started again after it had failed."),
    Definition(PREFIX + "engine_ready_timestamp_seconds", "gauge", "When the engine became ready, in Unix time."),
    Definition(
        PREFIX + "self_test_failed",
        "gauge",
        "1 where the part (trunk, head) could not tell a known text at load, 0 where it could; absent where untested.",
        ("part",),
    ),
    Definition(PREFIX + "engine_load_seconds", "gauge", "Time the engine took to load."),
    Definition(
        PREFIX + "build_info",
        "gauge",
        "Always 1; the labels say what runs.",
        ("version", "model_type", "device", "dtype", "kv_dtype"),
    ),
)


def build(registry: CollectorRegistry) -> dict[str, Counter | Gauge | Histogram]:
    """Every metric of the table in `registry`, by name without the prefix and `_total`."""
    built: dict[str, Counter | Gauge | Histogram] = {}
    for entry in DEFINITIONS:
        key = entry.name.removeprefix(PREFIX).removesuffix("_total")
        if entry.kind == "histogram":
            built[key] = Histogram(entry.name, entry.help, entry.labels, entry.buckets, registry)
        elif entry.kind == "counter":
            built[key] = Counter(entry.name, entry.help, entry.labels, registry)
        else:
            built[key] = Gauge(entry.name, entry.help, entry.labels, registry=registry)
    return built
