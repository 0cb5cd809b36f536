"""What an audit found, all of it: pytest shortens lists."""

from __future__ import annotations

from collections.abc import Iterable

from pilotfish.engine.check.audit.run import RunResult


def assert_nothing_found(results: Iterable[RunResult]) -> None:
    """Fails with every finding, one a line."""
    found = [str(finding) for result in results for finding in result.findings]
    assert not found, f"{len(found)} findings\n" + "\n".join(found)
