"""A share of `make soak`'s attacks, on the scripted engine: none of them ends the victim's stream or leaves anything.

How long the victim waits is `make soak`'s to judge: this machine may be busy.
"""

import asyncio
from collections import Counter

from tests.soak import attacks

SHARE = ["4 MB to count", "1 MB of lists", "arguments of many lists", "n = 56", "scrapes", "half-sent bodies"]


def test_attacks_leave_the_victim_and_the_server_whole():
    rows = []
    faults = asyncio.run(attacks.campaign(SHARE, 1.0, None, rows.append))
    assert [fault for fault in faults if "a gap of" not in fault] == []
    # each of them was answered, or is held still
    assert len(rows) == 3 + len(SHARE)


def test_a_run_of_all_legs_is_told_as_the_docs_have_it():
    alone, slow, *rest = (
        attacks.Outcome(name, [0.01, 0.02, longest], [], Counter())
        for name, longest in (("nothing else", 0.04), ("slow masks", 0.2), ("probes", 0.05), ("scrapes", 0.06))
    )
    assert attacks.documented(alone, [slow, *rest], 0.15).splitlines() == [
        "The stream alone: 40 ms, median 20; so the bound is 150 ms; of 3 legs 1 are over it (slow masks 200); "
        "the median of all longest gaps is 60 ms.",
        "",
        "| beside | longest gap, ms | median |",
        "|---|---|---|",
        "| slow masks | 200 | 20 |",
        "",
        "| beside | longest gap, ms | median |",
        "|---|---|---|",
        "| probes; scrapes | 50; 60 | 20; 20 |",
    ]
