"""docs/SECURITY.md states the limits that hold."""

import re
from pathlib import Path

from pilotfish.engine.grammar import bounds, library, steps, threads, trial, worker
from pilotfish.engine.requests import round_times

TEXT = (Path(__file__).resolve().parents[4] / "docs" / "SECURITY.md").read_text()
SECTION = TEXT[TEXT.index("## Grammars") : TEXT.index("## The way in")]
PROSE = " ".join(SECTION.split())


def test_sizes_stand_in_the_tables():
    rows = dict(re.findall(r"^\| ([^|]+) \| (\d+) \|$", SECTION, re.MULTILINE))
    for limits in (bounds.SCHEMA_LIMITS, bounds.REGEX_LIMITS, bounds.GRAMMAR_LIMITS):
        assert {what: int(rows[what]) for what in limits} == limits
    assert int(rows["bytes"]) == bounds.MAX_SOURCE_BYTES
    assert f"at most {bounds.CHOICE_LIMITS['choices']}" in PROSE and f"{bounds.MAX_CALLS_BYTES} bytes" in PROSE


def test_times_and_memory_stand_there():
    quick, slow = worker.QUICK, worker.SLOW
    for words in (
        f"{quick.cpu_seconds:g} s at nice {quick.nice} (one at a time)",
        f"{slow.cpu_seconds:g} s at nice {slow.nice} (one at a time)",
        f"{worker.MEMORY_BYTES >> 20} MiB and {worker.STACK_BYTES >> 20} MiB",
        f"{quick.wall_seconds:g} s, then {slow.wall_seconds:g} s",
        f"up to {library.MAX_KEPT_BYTES >> 22} MiB; {library.MAX_KEPT_BYTES >> 20} MiB and {library.MAX_KEPT} sources",
        f"stack of {threads.STACK_BYTES >> 20} MiB",
        f"({1e3 * steps.SLOW_SECONDS:g} ms of CPU time)",
        f"{steps.LIMIT_SECONDS:g} s; a round waits for it for an eighth of its own time",
    ):
        assert words in PROSE, words
    assert round_times.PATIENCE_SHARE == 8
    assert quick.num_places == slow.num_places == 1
    assert (trial.NUM_WALKS, trial.WALK_TOKENS) == (2, 12) and "walks two texts of twelve tokens" in PROSE
