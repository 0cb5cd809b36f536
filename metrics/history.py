"""The last minutes of a server's numbers: a point each few seconds, made from what the collector has counted since.

What happened between two samples is a rate, a ratio of counts or a quantile of a histogram's growth, as a Prometheus
query over the same seconds would give. A point costs nothing while tokens are written: sampling reads totals.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from pilotfish.metrics.collectors import Collector, Totals

INTERVAL_SECONDS = 2.0
NUM_POINTS = 300
MEDIAN, SLOW = 0.5, 0.95
DIGITS = 4
"""After the point: what a picture shows. Latencies have two more."""


class Latency(msgspec.Struct, frozen=True):
    """Seconds: half of them took at most `median`, 95 % at most `p95`."""

    median: float
    p95: float


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """`time` is Unix time, at the end of the interval, and after the one before's in any case. None: nothing happened
    of which it could be said.

    `acceptance_length`: committed tokens a round and sequence, of rounds that offered drafts; `accepted` by the draft's
    place: the share of the drafts offered there. `break_even`: tokens that a round with drafts had to commit to a
    sequence to be as fast as k = 0, by the rounds timed at the start; `speedup`: what all rounds committed over what
    they had to. There a sequence without drafts counts, too: in a round with drafts it waits and gains nothing.
    `cached_share` of the prompts' tokens that were passed over: those that the cache had, the others were read.
    """

    time: float
    tokens_per_second: float
    prompt_tokens_per_second: float
    acceptance_length: float | None
    accepted: list[float | None]
    break_even: float | None
    speedup: float | None
    num_running: int
    num_waiting: int
    kv_pages_used: int
    state_slots_used: int
    cached_share: float | None
    first_token: Latency | None
    inter_token: Latency | None


class History:
    """The newest `num_points` points. `sample` makes one; between two calls the collector counts."""

    def __init__(
        self,
        collector: Collector,
        *,
        num_points: int = NUM_POINTS,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.points: deque[Point] = deque(maxlen=num_points)
        self.seconds = num_points * INTERVAL_SECONDS
        self._collector, self._clock, self._wall_clock = collector, clock, wall_clock
        self._sampled, self._before = clock(), collector.totals()

    def sample(self) -> None:
        now, totals = self._clock(), self._collector.totals()
        seconds = now - self._sampled
        if seconds > 0:
            at = self._wall_clock()
            if self.points:
                # who asks for what came after a point must miss none, though clocks are set back
                at = max(at, self.points[-1].time + 0.001)
            self.points.append(_point(self._before, totals, seconds, at))
            self._sampled, self._before = now, totals


def _point(before: Totals, after: Totals, seconds: float, at: float) -> Point:
    num_rounds = after.num_drafts - before.num_drafts
    num_needed = after.num_needed - before.num_needed
    num_read = after.num_prompt_tokens - before.num_prompt_tokens
    num_cached = after.num_cached - before.num_cached
    offered, accepted = _growth(before.drafted_at, after.drafted_at), _growth(before.accepted_at, after.accepted_at)
    return Point(
        time=round(at, 3),
        tokens_per_second=round((after.num_tokens - before.num_tokens) / seconds, DIGITS),
        prompt_tokens_per_second=round(num_read / seconds, DIGITS),
        acceptance_length=_share(num_rounds + sum(accepted), num_rounds),
        accepted=[_share(*pair) for pair in zip(accepted, offered, strict=True)],
        break_even=_share(
            after.num_needed_drafting - before.num_needed_drafting, after.num_drafting - before.num_drafting
        ),
        speedup=_share(after.num_committed - before.num_committed, num_needed),
        num_running=after.num_running,
        num_waiting=after.num_waiting,
        kv_pages_used=after.kv_pages_used,
        state_slots_used=after.state_slots_used,
        cached_share=_share(num_cached, num_cached + num_read),
        first_token=_latency(after.first_token_bounds, _growth(before.first_token, after.first_token)),
        inter_token=_latency(after.inter_token_bounds, _growth(before.inter_token, after.inter_token)),
    )


def _growth(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """What was added; positions and buckets that are new began at 0."""
    return [value - (before[index] if index < len(before) else 0) for index, value in enumerate(after)]


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, DIGITS) if whole else None


def _latency(bounds: Sequence[float], counts: Sequence[float]) -> Latency | None:
    if not any(counts):
        return None
    median, p95 = (round(quantile(bounds, counts, share), DIGITS + 2) for share in (MEDIAN, SLOW))
    return Latency(median, p95)


def quantile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float:
    """Prometheus' histogram_quantile: values lie evenly in their bucket; past the last bound, that bound.

    `counts` has one entry more than `bounds`, for values beyond them, and not only zeros.
    """
    wanted, below, lower = share * sum(counts), 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= wanted:
            return lower + (bound - lower) * (wanted - below) / count
        below, lower = below + count, bound
    return lower
