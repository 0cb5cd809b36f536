"""Every panel can be drawn from what Prometheus sends, gaps, NaN and nothing at all included."""

import math

import pytest

from pilotfish.deploy.grafana import render
from pilotfish.deploy.grafana.panels import ROWS, Query
from pilotfish.deploy.prometheus.api import Series
from pilotfish.deploy.sweep import plots

pytestmark = pytest.mark.skipif(not plots.available(), reason="matplotlib is not installed (extra `plots`)")


class Scripted:
    """Two series for every query, one with a gap and a NaN; buckets for the heat map; or nothing."""

    def __init__(self, empty=False):
        self.empty = empty
        self.asked = []

    def over(self, expression, start, end, step):
        self.asked.append(expression)
        if self.empty:
            return []
        if "_bucket" in expression and "quantile" not in expression:
            bounds = ("1.0", "2.0", "4.0", "+Inf")
            return [self._series({"le": le}, start, step, scale) for scale, le in enumerate(bounds, 1)]
        labels = dict.fromkeys(("position", "path", "phase", "limit", "finish_reason", "reason", "key", "part"), "x")
        return [self._series(labels, start, step, scale) for scale in (1, 2)]

    def instant(self, expression, at=None):
        return [Series(one.labels, one.points[-1:]) for one in self.over(expression, 0, 10, 1)]

    def _series(self, labels, start, step, scale):
        values = [1.0 * scale, math.nan, 2.0 * scale, 3.0 * scale]
        points = tuple((start + i * step, value) for i, value in enumerate(values) if not (scale == 2 and i == 2))
        return Series(
            labels, points if "le" not in labels else tuple((start + i * step, scale * 1.0) for i in range(4))
        )


@pytest.mark.parametrize("empty", [False, True])
def test_every_row_becomes_a_small_picture(tmp_path, empty):
    source = Scripted(empty)
    paths = render.render(source, 0.0, 100.0, tmp_path)
    assert [path.name for path in paths][:3] == ["now.png", "acceptance.png", "is-speculation-paying.png"]
    assert len(paths) == len(ROWS)
    for path in paths:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) < 200_000
    assert not any("$" in expression for expression in source.asked)


def test_legends_are_filled_from_labels():
    series = Series({"position": "2"}, ())
    assert render._legend(Query("x", "position {{position}}{{absent}}"), series) == "position 2"
