"""PromQL from the metric table: a name that is not in metrics/definitions.py cannot be written here.

A `Scope` says where an expression stands. In a panel: the chosen instances, together or each for itself,
over Grafana's own rate interval.
In a rule: each instance for itself, over a fixed window. One function a quantity, used by panels and rules alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from pilotfish.metrics.definitions import DEFINITIONS, PREFIX

_KINDS = {entry.name.removeprefix(PREFIX): entry for entry in DEFINITIONS}
_SUFFIXES = {"histogram": ("bucket", "sum", "count"), "counter": ("",), "gauge": ("",)}

PLAIN_PHASES = 'phase=~"verify|choose|accept|report"'
"""What a round at k = 0 would do too."""


def name_of(key: str, suffix: str = "") -> str:
    """The exported name of a metric (given without its prefix), or of a histogram's sum, count or bucket.

    Raises KeyError for a metric that is not exported, ValueError for a suffix its kind does not have.
    """
    entry = _KINDS[key]
    if suffix not in _SUFFIXES[entry.kind]:
        raise ValueError(f"{entry.name} is a {entry.kind}: want a suffix of {_SUFFIXES[entry.kind]}, got {suffix!r}")
    return f"{entry.name}_{suffix}" if suffix else entry.name


@dataclass(frozen=True)
class Scope:
    """`filters` are label matchers of every selector; `by` are labels that every sum keeps."""

    window: str
    filters: tuple[str, ...] = ()
    by: tuple[str, ...] = ()

    def select(self, key: str, *matchers: str, suffix: str = "") -> str:
        inside = ",".join((*matchers, *self.filters))
        return name_of(key, suffix) + (f"{{{inside}}}" if inside else "")

    def total(self, expression: str, *by: str) -> str:
        labels = ", ".join((*self.by, *by))
        return f"sum by ({labels}) ({expression})" if labels else f"sum({expression})"

    def gauge(self, key: str, *matchers: str, by: tuple[str, ...] = ()) -> str:
        return self.total(self.select(key, *matchers), *by)

    def rate(self, key: str, *matchers: str, suffix: str = "", by: tuple[str, ...] = ()) -> str:
        return self.total(f"rate({self.select(key, *matchers, suffix=suffix)}[{self.window}])", *by)

    def quantile(self, share: float, key: str, *matchers: str, by: tuple[str, ...] = ()) -> str:
        return f"histogram_quantile({share}, {self.rate(key, *matchers, suffix='bucket', by=('le', *by))})"


PANEL = Scope("$__rate_interval", ('instance=~"$instance"',), ("$split",))
TOGETHER = Scope(PANEL.window, PANEL.filters)
"""For what one picture holds once."""
SPLITS = ("together", "instance")
"""What `$split` may be: a label that no series has, so that sums are over all, or one for each server."""
RULE = Scope("5m", (), ("instance",))
LATELY = Scope("15m", (), ("instance",))
BEFORE = Scope("6h", (), ("instance",))


def acceptance_length(scope: Scope) -> str:
    """Committed tokens per sequence and round that had drafts, the trunk's own token included: 1 .. k + 1."""
    accepted = scope.rate("spec_decode_num_accepted_tokens_total")
    return f"1 + {accepted} / {scope.rate('spec_decode_num_drafts_total')}"


def acceptance_by_position(scope: Scope, *matchers: str) -> str:
    """Accepted over drafted, at each draft position: a position that was not drafted is not counted against it."""
    accepted, drafted = (
        scope.rate(f"spec_decode_num_{what}_tokens_per_pos_total", *matchers, by=("position",))
        for what in ("accepted", "draft")
    )
    return f"{accepted} / {drafted}"


def committed_per_round(scope: Scope) -> str:
    """Tokens per sequence and round, rounds without drafts and cut ends included."""
    name = "spec_decode_committed_tokens_per_round"
    return f"{scope.rate(name, suffix='sum')} / {scope.rate(name, suffix='count')}"


def committed_buckets(scope: Scope) -> str:
    """Rounds in the window by the tokens they committed, cumulative as buckets are."""
    buckets = scope.select("spec_decode_committed_tokens_per_round", suffix="bucket")
    return scope.total(f"increase({buckets}[{scope.window}])", "le")


def rounds_per_second(scope: Scope) -> str:
    return scope.rate("rounds_total")


def seconds_by_phase(scope: Scope) -> str:
    """Seconds that each phase takes in a round, on average."""
    spent = scope.rate("round_seconds", 'phase!="prefill"', suffix="sum", by=("phase",))
    return f"{spent} / on({', '.join(scope.by)}) group_left() {rounds_per_second(scope)}"


def break_even(scope: Scope) -> str:
    """The tokens per round above which speculation pays; its label `by` says whether rounds were timed for it."""
    rounds = scope.rate("spec_decode_committed_tokens_per_round", suffix="count")
    return _timed_or_modelled(scope, f"{_timed_need(scope)} / {rounds}", _modelled_break_even(scope))


def speed_up(scope: Scope) -> str:
    """Decoding speed over the speed at k = 0, timed at the start or modelled: the label `by` says which."""
    committed = scope.rate("spec_decode_committed_tokens_per_round", suffix="sum")
    modelled = f"({committed_per_round(scope)}) / ({_modelled_break_even(scope)})"
    return _timed_or_modelled(scope, f"{committed} / {_timed_need(scope)}", modelled)


def _timed_need(scope: Scope) -> str:
    """Tokens that rounds had to commit, a second; no series where none were timed or none ran."""
    return f"({scope.rate('spec_decode_break_even_tokens_total')} > 0)"


def _modelled_break_even(scope: Scope) -> str:
    """Time of a round over that of its plain part: as if k + 1 rows cost what one costs."""
    whole = scope.rate("round_seconds", 'phase!="prefill"', suffix="sum")
    return f"{whole} / {scope.rate('round_seconds', PLAIN_PHASES, suffix='sum')}"


def _timed_or_modelled(scope: Scope, timed: str, modelled: str) -> str:
    named = (f'label_replace({it}, "by", "{by}", "", "")' for it, by in ((timed, "timed rounds"), (modelled, "model")))
    return f" or on({', '.join(scope.by)}) ".join(named)


def tokens_per_second(scope: Scope) -> str:
    return scope.rate("generation_tokens_total")


def plain_tokens_per_second(scope: Scope) -> str:
    """What the same load would give at k = 0, by timed rounds or by the model."""
    return f"{tokens_per_second(scope)} / on({', '.join(scope.by)}) group_right() ({speed_up(scope)})"


def graph_share(scope: Scope) -> str:
    """Share of rounds that replayed a captured graph."""
    replayed = scope.rate("rounds_total", 'path="graph"')
    return f"{replayed} / {rounds_per_second(scope)}"


def hit_share(scope: Scope) -> str:
    """Share of prompt tokens that were not read, because the prefix cache had them."""
    return f"{scope.rate('prefix_cache_hits_total')} / {scope.rate('prefix_cache_queries_total')}"


def mean_wait(scope: Scope) -> str:
    """Waiting requests per place, what an autoscaler looks at."""
    return f"{scope.gauge('num_requests_waiting')} / {scope.gauge('max_num_seqs')}"
