"""Our counters and histograms against prometheus-client's own: the same text for the same history."""

from __future__ import annotations

import random

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest

from pilotfish.metrics.series import Counter, Histogram

BUCKETS = (0.001, 0.5, 1.0, 2.5, 10.0)


@pytest.fixture
def pair():
    """The same two metrics in two registries: ours and theirs."""
    disable_created_metrics()
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    made = (
        (Counter("a_total", "A.", ("x", "y"), ours), Histogram("b_seconds", "B.", ("x",), BUCKETS, ours)),
        (
            prometheus_client.Counter("a_total", "A.", ("x", "y"), registry=theirs),
            prometheus_client.Histogram("b_seconds", "B.", ("x",), buckets=BUCKETS, registry=theirs),
        ),
    )
    return made, (ours, theirs)


def test_the_exposition_is_theirs(pair):
    made, registries = pair
    walk = random.Random(0)
    for _ in range(500):
        x, y, value = walk.choice("pq"), walk.choice("rs"), walk.choice((0.001, 0.0005, 1.0, 3.0, 99.0, walk.random()))
        for counter, histogram in made:
            counter.labels(x=x, y=y).inc(value)
            histogram.labels(x).observe(value)
    texts = [generate_latest(registry) for registry in registries]
    assert texts[0] == texts[1] and b'b_seconds_bucket{le="+Inf",x="p"}' in texts[0]


def test_without_labels_the_metric_is_its_own_child():
    registry = CollectorRegistry()
    counter, histogram = Counter("c_total", "C.", (), registry), Histogram("d", "D.", (), BUCKETS, registry)
    assert registry.get_sample_value("c_total") == 0.0 and registry.get_sample_value("d_count") == 0
    counter.inc(2)
    histogram.observe(0.7, times=3)
    assert registry.get_sample_value("c_total") == 2
    assert registry.get_sample_value("d_sum") == pytest.approx(2.1)
    assert registry.get_sample_value("d_bucket", {"le": "0.5"}) == 0
    assert registry.get_sample_value("d_bucket", {"le": "1.0"}) == 3


@pytest.mark.parametrize(("values", "named"), [(("p",), {}), ((), {"x": "p", "z": "q"}), ((), {"x": "p"})])
def test_other_labels_are_refused(pair, values, named):
    counter = pair[0][0][0]
    with pytest.raises(ValueError, match="want"):
        counter.labels(*values, **named)


def test_a_name_is_taken_once():
    registry = CollectorRegistry()
    Counter("c_total", "C.", (), registry)
    with pytest.raises(ValueError, match="uplicated"):
        Counter("c_total", "C.", (), registry)
