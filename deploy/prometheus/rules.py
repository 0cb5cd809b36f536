"""Recording and alert rules. An alert is a value, a condition on it and the traffic without which it says nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pilotfish.deploy.grafana import queries as q
from pilotfish.deploy.grafana.queries import BEFORE, LATELY, RULE

DOCS = "docs/operations.md"
SICK_HEAD = 0.3
"""A healthy MTP head has its first draft accepted 0.6 to 0.9 of the time; below this it is broken, not unlucky."""

BEHIND = 0.85
"""Of the middle server's acceptance length: servers behind one router have texts alike, and the same head."""

COLLAPSED = 0.3
"""Of the share of prompt tokens that was kept over hours; a few new users do not make it so little."""


@dataclass(frozen=True)
class Recording:
    name: str
    expression: str


@dataclass(frozen=True)
class Alert:
    """Fires when `value condition [and guard]` has held for `hold`. `severity` is page or ticket."""

    name: str
    value: str
    condition: str
    hold: str
    severity: str
    summary: str
    guard: str = ""

    @property
    def expression(self) -> str:
        base = f"({self.value}) {self.condition}"
        return f"({base}) and on(instance) ({self.guard})" if self.guard else base


DRAFTING = f"{RULE.rate('spec_decode_num_drafts_total')} > 0.1"
"""Enough rounds for their mean to say something."""

RECORDINGS = (
    Recording("pilotfish:acceptance_length:rate5m", q.acceptance_length(RULE)),
    Recording("pilotfish:acceptance_by_position:rate5m", q.acceptance_by_position(RULE)),
    Recording("pilotfish:break_even_length:rate5m", q.break_even(RULE)),
    Recording("pilotfish:speed_up:rate5m", q.speed_up(RULE)),
    Recording("pilotfish:tokens_per_second:rate5m", q.tokens_per_second(RULE)),
    Recording("pilotfish:plain_tokens_per_second:rate5m", q.plain_tokens_per_second(RULE)),
    Recording("pilotfish:prefix_cache_hit_share:rate5m", q.hit_share(RULE)),
    Recording("pilotfish:waiting_per_place", q.mean_wait(RULE)),
)

ALERTS = (
    Alert(
        "PilotfishUnreachable",
        'up{job="pilotfish"}',
        "== 0",
        "1m",
        "page",
        "{{ $labels.instance }} does not answer Prometheus.",
    ),
    Alert(
        "PilotfishEngineDown",
        RULE.gauge("engine_up"),
        "== 0",
        "5m",
        "page",
        "The engine of {{ $labels.instance }} loads for long, or has failed: see /health.",
    ),
    Alert(
        "PilotfishEngineRestarted",
        # 0 is an engine that has not been ready yet: a first start is none again
        f"changes(({RULE.select('engine_ready_timestamp_seconds')} > 0)[15m:1s])",
        "> 0",
        "0m",
        "ticket",
        "The engine of {{ $labels.instance }} was started again within 15 minutes.",
    ),
    Alert(
        "PilotfishAcceptanceCollapsed",
        q.acceptance_by_position(RULE, 'position="0"'),
        f"< {SICK_HEAD}",
        "10m",
        "ticket",
        "Only {{ $value | humanizePercentage }} of first drafts are accepted on {{ $labels.instance }}.",
        DRAFTING,
    ),
    Alert(
        "PilotfishReplicaBehind",
        # of two, the middle is their mean; an idle one is no measure for others
        f"({q.acceptance_length(RULE)}) / on() group_left() "
        f"quantile(0.5, ({q.acceptance_length(RULE)}) and on(instance) ({DRAFTING}))",
        f"< {BEHIND}",
        "30m",
        "ticket",
        "{{ $labels.instance }} has {{ $value | humanizePercentage }} of the acceptance length of the middle server.",
        DRAFTING,
    ),
    Alert(
        "PilotfishSpeculationLoses",
        q.speed_up(RULE),
        "< 1",
        "15m",
        "ticket",
        "{{ $labels.instance }} would decode faster at k = 0 (now {{ $value | printf `%.2f` }} times its speed, by "
        "{{ $labels.by }}).",
        DRAFTING,
    ),
    Alert(
        "PilotfishSpeculationOff",
        RULE.gauge("spec_decode_disabled", 'reason!="num_speculative_tokens is 0"', by=("reason",)),
        "== 1",
        "1m",
        "ticket",
        "{{ $labels.instance }} serves without speculation: {{ $labels.reason }}.",
    ),
    Alert(
        "PilotfishSelfTestFailed",
        RULE.gauge("self_test_failed", by=("part",)),
        "== 1",
        "1m",
        "ticket",
        "The {{ $labels.part }} of {{ $labels.instance }} could not tell a known text at load: see /health.",
    ),
    Alert(
        "PilotfishQueueFull",
        RULE.rate("request_rejected_total", 'reason="queue_full"'),
        "> 0",
        "2m",
        "page",
        "{{ $labels.instance }} refuses requests: its queue is full.",
    ),
    Alert(
        "PilotfishQueueLong",
        q.mean_wait(RULE),
        "> 2",
        "10m",
        "ticket",
        "{{ $labels.instance }} has {{ $value | printf `%.1f` }} requests waiting for each place.",
    ),
    Alert(
        "PilotfishKvCacheBinds",
        f"{RULE.gauge('max_num_seqs')} - {RULE.gauge('num_requests_running')}",
        "> 0",
        "10m",
        "ticket",
        "Requests wait on {{ $labels.instance }} for KV pages while {{ $value }} places are free.",
        f"{RULE.gauge('num_requests_waiting')} > 0",
    ),
    Alert(
        "PilotfishPrefixCacheCollapsed",
        q.hit_share(LATELY),
        f"< {COLLAPSED} * ({q.hit_share(BEFORE)})",
        "20m",
        "ticket",
        "Only {{ $value | humanizePercentage }} of prompt tokens are found in the cache of {{ $labels.instance }},"
        " where it was far more.",
        f"{q.hit_share(BEFORE)} > 0.2",
    ),
    Alert(
        "PilotfishRequestsFail",
        RULE.rate("request_finished_total", 'finish_reason="error"'),
        "> 0",
        "1m",
        "page",
        "Requests end with an error on {{ $labels.instance }}: the engine failed while it served them.",
    ),
    Alert(
        "PilotfishExactnessMismatch",
        f"increase({RULE.select('exactness_mismatched_requests_total')}[1h])",
        "> 0",
        "0m",
        "page",
        "{{ $labels.instance }} wrote text that plain decoding does not write.",
    ),
    Alert(
        "PilotfishExactnessUnchecked",
        f"increase({RULE.select('exactness_checked_tokens_total')}[6h])"
        f" and {RULE.select('exactness_checked_tokens_total')} > 0",
        "== 0",
        "1h",
        "ticket",
        "{{ $labels.instance }} has not checked its text for 6 hours, though it did before.",
        f"{RULE.rate('generation_tokens_total')} > 0",
    ),
    Alert(
        "PilotfishNan",
        f"increase({RULE.select('nan_requests_total')}[15m])",
        "> 0",
        "0m",
        "page",
        "The model of {{ $labels.instance }} gave NaN.",
    ),
)


def rules_text() -> str:
    """The rule file, as Prometheus reads it."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Generated by python -m pilotfish.deploy.grafana.generate from rules.py."
    yield "groups:"
    yield "  - name: pilotfish-recordings"
    yield "    rules:"
    for recording in RECORDINGS:
        yield f"      - record: {recording.name}"
        yield f"        expr: {_quoted(recording.expression)}"
    yield "  - name: pilotfish-alerts"
    yield "    rules:"
    for alert in ALERTS:
        yield f"      - alert: {alert.name}"
        yield f"        expr: {_quoted(alert.expression)}"
        yield f"        for: {alert.hold}"
        yield f"        labels: {{severity: {alert.severity}}}"
        yield "        annotations:"
        yield f"          summary: {_quoted(alert.summary)}"
        yield f"          runbook: {DOCS}#{alert.name.lower()}"


def _quoted(text: str) -> str:
    """A YAML string in which only the quote itself needs care."""
    return "'" + text.replace("'", "''") + "'"
