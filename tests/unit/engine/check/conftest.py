"""What timed rounds are looked at with."""

from __future__ import annotations

import pytest

from pilotfish.engine.check import driver
from pilotfish.engine.loop import EngineLoop


@pytest.fixture
def steps(monkeypatch):
    """Every step from here on: (loop, its report). Time passes by one second for each look at the clock."""
    seen, step, clock = [], EngineLoop.step, iter(range(10**6))

    def watched(loop):
        report = step(loop)
        seen.append((loop, report))
        return report

    monkeypatch.setattr(EngineLoop, "step", watched)
    monkeypatch.setattr(driver, "perf_counter", lambda: float(next(clock)))
    return seen
