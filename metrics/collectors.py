"""Turns what the engine reports and how requests end into series. The registry is a parameter.

Acceptance comes from the step reports that the engine client hands on: outputs of requests that had already ended
are not in them, and a run cut by a stop string arrives cut, so nothing over-produced is counted.
"""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from pilotfish.metrics.definitions import (
    FINISH_REASONS,
    MISS_REASONS,
    PHASES,
    REJECTION_REASONS,
    ROUND_PATHS,
    VOLATILE_LINES,
    build,
)

if TYPE_CHECKING:
    from pilotfish.engine.link.messages import PrefixCacheStats, Ready, RequestOutput, StepReport

OF_ENGINE = (
    *("num_requests_running", "num_requests_waiting", "kv_pages_used", "kv_cache_usage", "state_slots_used"),
    *("prefix_cache_snapshots", "prefix_cache_bytes"),
)
"""Gauges of what ends with the engine."""


class RequestEnd(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence's end. Rounds are those that committed tokens; the token that prefill chose is in no round."""

    finish_reason: str
    seconds: float
    num_prompt_tokens: int
    num_tokens: int
    num_rounds: int
    num_round_tokens: int


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """What has been counted so far, and the gauges now. Lists go by draft position or by bucket; a histogram's counts
    have one entry more than its bounds.

    Rounds committed `num_committed` tokens, and had to commit `num_needed` to be as fast as k = 0, by the rounds that
    were timed at the start: 0 where none were. Of these `num_needed_drafting` in rounds with drafts, in which sequences
    took part `num_drafting` times.
    """

    num_tokens: float
    num_prompt_tokens: float
    num_drafts: float
    num_committed: float
    num_needed: float
    num_drafting: int
    num_needed_drafting: float
    drafted_at: list[float]
    accepted_at: list[float]
    num_cached: float
    first_token: list[int]
    first_token_bounds: tuple[float, ...]
    inter_token: list[int]
    inter_token_bounds: tuple[float, ...]
    num_running: int
    num_waiting: int
    kv_pages_used: int
    state_slots_used: int


class Collector:
    """Owns one set of series. Every method is cheap and none raises for odd values."""

    def __init__(self, registry: CollectorRegistry, version: str = "") -> None:
        self.registry = registry
        self._version = version
        self._series: dict[str, Any] = {**build(registry)}
        self._rounds = _RoundSeries(self._series)
        self._phases = {name: self._series["round_seconds"].labels(name) for name in PHASES}
        self._break_even: list[tuple[int, float]] = []
        """Sequences at once, and tokens a round must commit to each of them; empty where no rounds were timed."""
        self._num_drafting, self._num_needed_drafting = 0, 0.0
        self._paths = {name: self._series["rounds"].labels(name) for name in ROUND_PATHS}
        self._first_token = self._series["time_to_first_token_seconds"]
        self._inter_token = self._series["inter_token_latency_seconds"]
        for reason in FINISH_REASONS:
            self._series["request_finished"].labels(reason)
        for reason in REJECTION_REASONS:
            self._series["request_rejected"].labels(reason)
        for reason in MISS_REASONS:
            self._series["prefix_cache_misses"].labels(reason)
        for line in VOLATILE_LINES:
            self._series["volatile_lines_left_out"].labels(line)

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def totals(self) -> Totals:
        first_token, inter_token = self._first_token.labels(), self._inter_token.labels()
        drafted_at, accepted_at = self._rounds.by_position()
        committed = self._series["spec_decode_committed_tokens_per_round"].labels()
        return Totals(
            num_tokens=self._series["generation_tokens"].labels().value,
            num_prompt_tokens=self._series["prefill_tokens"].labels().value,
            num_drafts=self._series["spec_decode_num_drafts"].labels().value,
            num_committed=committed.sum,
            num_needed=self._series["spec_decode_break_even_tokens"].labels().value,
            num_drafting=self._num_drafting,
            num_needed_drafting=self._num_needed_drafting,
            drafted_at=drafted_at,
            accepted_at=accepted_at,
            num_cached=self._series["prefix_cache_hits"].labels().value,
            first_token=list(first_token.counts),
            first_token_bounds=first_token.bounds,
            inter_token=list(inter_token.counts),
            inter_token_bounds=inter_token.bounds,
            num_running=self._gauge("num_requests_running"),
            num_waiting=self._gauge("num_requests_waiting"),
            kv_pages_used=self._gauge("kv_pages_used"),
            state_slots_used=self._gauge("state_slots_used"),
        )

    def _gauge(self, name: str) -> int:
        (family,) = self._series[name].collect()
        return int(family.samples[0].value)

    def on_ready(self, ready: Ready) -> None:
        series = self._series
        kv_dtype = ready.execution.kv_dtype if ready.execution is not None else ""
        series["build_info"].labels(self._version, ready.model_type, ready.device, ready.dtype, kv_dtype).set(1)
        series["spec_decode_k"].set(ready.num_speculative_tokens)
        if ready.speculation_disabled_reason is not None:
            series["spec_decode_disabled"].labels(ready.speculation_disabled_reason).set(1)
        series["max_num_seqs"].labels(ready.binding_limit).set(ready.max_num_seqs)
        series["kv_pages"].set(ready.kv_pages_total)
        series["engine_load_seconds"].set(ready.load_seconds)
        series["engine_ready_timestamp_seconds"].set(time.time())
        if ready.execution is not None:
            for sequences, seconds in ready.execution.round_seconds.items():
                series["timed_round_seconds"].labels(str(sequences)).set(seconds)
            self._break_even = sorted(ready.execution.break_even.items())
            for sequences, tokens in self._break_even:
                series["spec_decode_break_even_acceptance_length"].labels(str(sequences)).set(tokens)
        for part, check in (("trunk", ready.trunk_check), ("head", ready.head_check)):
            if check is not None and check.verdict != "untested":
                series["self_test_failed"].labels(part).set(int(check.verdict != "ok"))
        self._on_capacity(ready)
        self._rounds.prepare(ready.num_speculative_tokens)
        self.on_engine(True)

    def _on_capacity(self, ready: Ready) -> None:
        series = self._series
        for limit, count in ready.limits.items():
            series["concurrency_limit"].labels(limit).set(count)
        parts = {name.removesuffix("_bytes"): amount for name, amount in ready.ledger.items()}
        # the file's size and the sum are no parts
        for part in parts.keys() - {"total", "checkpoint"}:
            series["memory_bytes"].labels(part).set(parts[part])
        series["kv_bytes_per_token"].set(ready.kv_bytes_per_token)
        series["bytes_per_sequence"].set(ready.bytes_per_sequence)
        series["state_slots"].set(ready.limits.get("state slots", ready.max_num_seqs))

    def on_engine(self, up: bool) -> None:
        self._series["engine_up"].set(int(up))
        if not up:
            for gauge in OF_ENGINE:
                self._series[gauge].set(0)

    def on_restart(self) -> None:
        """The engine has failed and is started again."""
        self._series["engine_restarts"].inc()
        self.on_engine(False)

    def on_report(self, report: StepReport) -> None:
        stats, series = report.stats, self._series
        series["num_requests_running"].set(stats.num_running)
        series["num_requests_waiting"].set(stats.num_waiting)
        series["kv_pages_used"].set(stats.kv_pages_used)
        series["kv_pages"].set(stats.kv_pages_total)
        series["kv_cache_usage"].set(stats.kv_pages_used / max(1, stats.kv_pages_total))
        series["state_slots_used"].set(stats.state_slots_used)
        series["state_slots"].set(stats.state_slots_total)
        if stats.prefix_cache is not None:
            self._on_prefix_cache(stats.prefix_cache)
        if stats.memory_bytes:
            series["memory_used_bytes"].set(stats.memory_bytes)
        if stats.num_prefill_tokens:
            series["prefill_tokens"].inc(stats.num_prefill_tokens)
        series["kernels_compiled"].inc(stats.num_compiled)
        series["grammar_rounds_missed"].inc(stats.num_sat_out)
        series["exactness_checked_tokens"].inc(stats.num_audited_tokens)
        series["exactness_mismatched_requests"].inc(stats.num_audit_mismatches)
        if stats.step_seconds:
            series["step_seconds"].observe(stats.step_seconds)
        if "verify" in stats.phases or "wait" in stats.phases:
            self._paths["graph" if stats.graph else "eager"].inc()
        for phase, seconds in stats.phases.items():
            if phase in self._phases:
                self._phases[phase].observe(seconds)
        self._on_outputs(report.outputs)
        if self._break_even:
            self._on_round([output for output in report.outputs if output.round])

    def _on_round(self, outputs: list[RequestOutput]) -> None:
        """What the round's sequences had to commit; a round without drafts is plain decoding."""
        drafting = any(output.num_drafted for output in outputs)
        committing = sum(bool(output.token_ids) for output in outputs)
        needed = committing * (_between(self._break_even, len(outputs)) if drafting else 1.0)
        self._series["spec_decode_break_even_tokens"].inc(needed)
        if drafting:
            self._num_drafting += committing
            self._num_needed_drafting += needed

    def _on_prefix_cache(self, cache: PrefixCacheStats) -> None:
        series = self._series
        series["prefix_cache_queries"].inc(cache.num_queried_tokens)
        series["prefix_cache_hits"].inc(cache.num_hit_tokens)
        series["prefix_cache_evictions"].inc(cache.num_evictions)
        for miss in cache.misses:
            series["prefix_cache_misses"].labels(miss.reason).inc()
        series["prefix_cache_snapshots"].set(cache.num_snapshots)
        series["prefix_cache_bytes"].set(cache.num_bytes)
        series["prefix_cache_capacity_bytes"].set(cache.capacity_bytes)

    def _on_outputs(self, outputs: list[RequestOutput]) -> None:
        self._series["generation_tokens"].inc(sum(len(output.token_ids) for output in outputs))
        self._series["nan_requests"].inc(sum(output.error_code == "nan" for output in outputs))
        # many sequences of a round fare alike: what they have in common is counted once
        rounds = Counter((len(each.token_ids), each.num_drafted, each.num_accepted) for each in outputs if each.round)
        for (num_tokens, num_drafted, num_accepted), times in rounds.items():
            self._rounds.observe(num_tokens, num_drafted, num_accepted, times)

    def on_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def on_queue(self, key: str, seconds: float) -> None:
        """A sequence was admitted, `seconds` after it was submitted; `key` is the label of its API key."""
        self._series["request_queue_time_seconds"].labels(key).observe(seconds)

    def on_tokens(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` that arrived together, `seconds` after the ones before."""
        self._inter_token.observe(seconds / num_tokens, num_tokens)

    def on_end(self, end: RequestEnd) -> None:
        series = self._series
        series["request_finished"].labels(end.finish_reason).inc()
        series["e2e_request_latency_seconds"].observe(end.seconds)
        series["prompt_tokens"].inc(end.num_prompt_tokens)
        series["request_generation_tokens"].observe(end.num_tokens)
        if end.num_rounds:
            length = end.num_round_tokens / end.num_rounds
            self._rounds.acceptance_length.observe(length)

    def on_key(self, key: str, num_tokens: int) -> None:
        """A request has ended, answered or not; `key` is the label of its API key, or "none"."""
        self._series["key_requests"].labels(key).inc()
        self._series["key_generation_tokens"].labels(key).inc(num_tokens)

    def on_unused_field(self, name: str) -> None:
        """A request had a field that changes nothing; `name` is one of a fixed list."""
        self._series["unused_fields"].labels(name).inc()

    def on_schema_left_out(self, keyword: str) -> None:
        """A request's schemas have a keyword that is not held; `keyword` is one of a fixed list."""
        self._series["schema_keywords_left_out"].labels(keyword).inc()

    def on_volatile_line(self, line: str) -> None:
        """A line of a system prompt was left out; `line` is one of a fixed list."""
        self._series["volatile_lines_left_out"].labels(line).inc()

    def on_rejection(self, reason: str) -> None:
        self._series["request_rejected"].labels(reason).inc()


def _between(points: list[tuple[int, float]], x: int) -> float:
    """The value at x on the lines between points in order; beyond the first and the last their own."""
    x = min(max(x, points[0][0]), points[-1][0])
    for (left, low), (right, high) in pairwise(points):
        if x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return points[0][1]


class _RoundSeries:
    """The acceptance series."""

    def __init__(self, series: dict[str, Any]) -> None:
        self._drafts = series["spec_decode_num_drafts"]
        self._drafted = series["spec_decode_num_draft_tokens"]
        self._accepted = series["spec_decode_num_accepted_tokens"]
        self._drafted_at = series["spec_decode_num_draft_tokens_per_pos"]
        self._accepted_at = series["spec_decode_num_accepted_tokens_per_pos"]
        self._committed = series["spec_decode_committed_tokens_per_round"]
        self.acceptance_length = series["spec_decode_request_acceptance_length"]
        self._positions: list[tuple[Any, Any]] = []

    def prepare(self, num_positions: int) -> None:
        """Series exist, at 0, before anything happens: rates then start from the first scrape."""
        for position in range(len(self._positions), num_positions):
            self._positions.append((self._drafted_at.labels(str(position)), self._accepted_at.labels(str(position))))

    def by_position(self) -> tuple[list[float], list[float]]:
        """Drafts offered and accepted so far, by position."""
        return [drafted.value for drafted, _ in self._positions], [accepted.value for _, accepted in self._positions]

    def observe(self, num_tokens: int, num_drafted: int, num_accepted: int, times: int) -> None:
        """So many sequences of a round. Accepted drafts are always a prefix, so the counts by position follow from the
        two numbers."""
        if num_tokens:
            self._committed.observe(num_tokens, times)
        if num_drafted == 0:
            return
        self._drafts.inc(times)
        self._drafted.inc(num_drafted * times)
        self._accepted.inc(num_accepted * times)
        self.prepare(num_drafted)
        for position in range(num_drafted):
            drafted, accepted = self._positions[position]
            drafted.inc(times)
            if position < num_accepted:
                accepted.inc(times)
