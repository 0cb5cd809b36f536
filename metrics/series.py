"""Counters and histograms written from one thread, many thousand times a second.

prometheus-client's own take a lock for each number they change, several microseconds a token in all: half of what the
HTTP process spent on a token. These are plain numbers that become prometheus-client's families when they are read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class Counter:
    """`labels` gives the child of these label values, made when first asked for; without labels it is its own."""

    def __init__(self, name: str, help: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name, self._help, self._labels = name.removesuffix("_total"), help, tuple(labels)
        self._children: dict[tuple[str, ...], Count] = {}
        if not labels:
            self.inc = self.labels().inc
        registry.register(self)

    def labels(self, *values: str, **named: str) -> Count:
        """Raises ValueError for other labels than the counter has."""
        key = _key(self._name, self._labels, values, named)
        return self._children.setdefault(key, Count())

    def describe(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._help, labels=self._labels)

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for key, child in self._children.items():
            family.add_metric(key, child.value)
        yield family


class Count:
    """One number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount


class Histogram:
    """See Counter. `buckets` rise; the last one, to infinity, is added."""

    def __init__(
        self, name: str, help: str, labels: Sequence[str], buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._help, self._labels, self._bounds = name, help, tuple(labels), tuple(buckets)
        self._names = [floatToGoString(bound) for bound in (*buckets, float("inf"))]
        self._children: dict[tuple[str, ...], Distribution] = {}
        if not labels:
            self.observe = self.labels().observe
        registry.register(self)

    def labels(self, *values: str, **named: str) -> Distribution:
        """Raises ValueError for other labels than the histogram has."""
        key = _key(self._name, self._labels, values, named)
        return self._children.setdefault(key, Distribution(self._bounds))

    def describe(self) -> Iterator[HistogramMetricFamily]:
        yield HistogramMetricFamily(self._name, self._help, labels=self._labels)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for key, child in self._children.items():
            total, cumulative = 0, []
            for name, count in zip(self._names, child.counts, strict=True):
                total += count
                cumulative.append((name, total))
            family.add_metric(key, buckets=cumulative, sum_value=child.sum)
        yield family


class Distribution:
    """Counts by bucket, and the sum of what was observed."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """A value, as often as said."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


def _key(name: str, labels: tuple[str, ...], values: Sequence[str], named: dict[str, str]) -> tuple[str, ...]:
    if named:
        values = tuple(named.get(label, "") for label in labels)
        if named.keys() != set(labels):
            raise ValueError(f"{name}: want labels {labels}, got {sorted(named)}")
    if len(values) != len(labels):
        raise ValueError(f"{name}: want {len(labels)} label values, got {len(values)}")
    return tuple(map(str, values))
