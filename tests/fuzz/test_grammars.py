"""Five thousand drawn grammars: each becomes a constraint or a refusal, no worker is lost. `make fuzz` draws more."""

import random
from collections import Counter

from tests.fuzz.grammars import Campaign, grammar

SEED, COUNT = 20260101, 5000


def test_every_grammar_ends_as_a_constraint_or_a_refusal():
    campaign = Campaign(SEED)
    try:
        campaign.run(COUNT)
    finally:
        campaign.library.close()
    tally = campaign.tally
    # of all kinds, and some of every end
    assert len(tally.kinds) == 4 and min(tally.kinds.values()) > COUNT // 50
    assert sum(tally.ends.values()) == COUNT
    for end in ("passed", "refused by its size", "refused in the library's words"):
        assert tally.ends[end] > COUNT // 20


def test_the_same_seed_draws_the_same_grammars():
    first, second = ([grammar(draw) for _ in range(50)] for draw in (random.Random(7), random.Random(7)))
    assert first == second and max(Counter(first).values()) < 10
