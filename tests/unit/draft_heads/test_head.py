"""How a round uses a draft head: with a head that knows the trunk's hidden states every draft is accepted.

Then drafts are drawn as the trunk draws: by the request's own rule, noise of the right position, and a history that
holds the drafts before. A head that knows them one position late shows that the test can fail.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

from pilotfish.engine.plan import FAST_ROWS
from pilotfish.engine.round.executor import make_executor
from tests.support.rounds import MAX_DEPTH, MODES, Driver, make_engine, random_prompt

PROMPTS = {1: (21, 0), 2: (40, 2)}
NUM_TOKENS = 30


@cache
def trunk_hidden(mode, slot):
    """The tokens of a sequence alone at k = 0, and the trunk's hidden state of every position it decoded."""
    driver = Driver(make_engine(depth=0))
    body, hidden = driver.executor.body, {}
    driver.start(slot, random_prompt(*PROMPTS[slot]), [slot], MODES[mode], max_tokens=NUM_TOKENS, depth=0)
    while not bool(driver.state.done[slot]):
        start = driver.length(slot)
        driver.round([slot])
        hidden[start] = body.buffers.hidden[0].clone()
    return driver.tokens[slot], hidden


class KnowingHead:
    """Proposes from known hidden states; `late` positions off. Keeps what it was given to repair with."""

    def __init__(self, hidden, late=0):
        self.hidden, self.late, self.repaired = hidden, late, []

    caches, reads_history = (), False

    def fill(self, prompt, next_tokens, hidden, span):
        return hidden

    def enter(self, prompt, next_tokens, hidden, span):
        pass

    def record(self, round, count, width, depth, flags):
        tokens = round.buffers.chosen[: count * width].tolist()
        slots = round.buffers.slots[:count]
        # the tokens end with the last one that is committed
        places = [
            int(round.state.length[slot]) - int(row) % width
            for slot, row in zip(slots, round.buffers.verdicts(count).head_row, strict=True)
        ]
        self.repaired.append((tokens, slots.tolist(), places, width))
        self.propose(round, count, depth, flags)

    def propose(self, round, count, depth, flags):
        slots = round.buffers.slots[:count].tolist()
        lengths = round.state.length[slots].tolist()
        for step in range(depth):
            for b, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
                known = self.hidden[slot].get(length + step + self.late)
                round.buffers.head_hidden[b] = 0 if known is None else known
            round.choose_draft(count, step, flags)


def run(mode, depth, late=0):
    """Both sequences to their end; the driver, the head, and drafted and accepted totals."""
    engine = make_engine()
    head = KnowingHead({slot: trunk_hidden(mode, slot)[1] for slot in PROMPTS}, late)
    model = dataclasses.replace(engine.executor.model, head=head)
    executor = make_executor(model, engine.executor.state, MAX_DEPTH, 4, 2048, FAST_ROWS)
    driver = Driver(dataclasses.replace(engine, executor=executor))
    for slot, prompt in PROMPTS.items():
        driver.start(slot, random_prompt(*prompt), [slot], MODES[mode], max_tokens=NUM_TOKENS, depth=depth)
    drafted = accepted = 0
    while not driver.state.done[list(PROMPTS)].all():
        for report in driver.round(list(PROMPTS), depth, depth):
            drafted, accepted = drafted + report.num_drafted, accepted + report.num_accepted
    return driver, head, drafted, accepted


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", (1, 5, 8))
def test_a_head_that_knows_is_always_right(mode, depth):
    driver, _, drafted, accepted = run(mode, depth)
    assert drafted == accepted > 0
    for slot in PROMPTS:
        assert driver.tokens[slot] == trunk_hidden(mode, slot)[0]


@pytest.mark.parametrize("mode", MODES)
def test_a_head_that_knows_one_position_late_is_not(mode):
    driver, _, drafted, accepted = run(mode, 5, late=-1)
    assert accepted < drafted / 2
    for slot in PROMPTS:
        assert driver.tokens[slot] == trunk_hidden(mode, slot)[0]


def test_a_head_gets_the_trunk_s_own_tokens_for_every_row():
    driver, head, _, _ = run("greedy", 3)
    assert {len(slots) for _, slots, _, _ in head.repaired} == {1, len(PROMPTS)}
    for tokens, slots, places, width in head.repaired:
        for b, (place, slot) in enumerate(zip(places, slots, strict=True)):
            first = place - PROMPTS[slot][0]
            right = driver.tokens[slot][first : first + width]
            assert tokens[b * width : b * width + len(right)] == right
