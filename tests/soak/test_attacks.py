"""A share of `make soak`'s attacks, on the scripted engine: none of them ends the victim's stream or leaves anything.

How long the victim waits is `make soak`'s to judge: this machine may be busy.
"""

import asyncio

from tests.soak import attacks

SHARE = ["4 MB to count", "1 MB of lists", "arguments of many lists", "n = 56", "scrapes", "half-sent bodies"]


def test_attacks_leave_the_victim_and_the_server_whole():
    rows = []
    faults = asyncio.run(attacks.campaign(SHARE, 1.0, None, rows.append))
    assert [fault for fault in faults if "a gap of" not in fault] == []
    # each of them was answered, or is held still
    assert len(rows) == 3 + len(SHARE)
