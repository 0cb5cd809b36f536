"""How a runner uses a draft head: with a head that knows the trunk's hidden states every draft is accepted.

Then drafts are drawn as the trunk draws: by the request's own rule, noise of the right position, and a history that
holds the drafts before. A head that knows them one position late shows that the test can fail.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from pilotfish.draft_heads.head import Drafts
from pilotfish.engine.runner import Runner
from pilotfish.kernels.linear import padded_rows
from tests.support.rounds import MODES, Driver, make_engine, random_prompt

PROMPTS = {1: (21, 0), 2: (40, 2)}
NUM_TOKENS = 30


@cache
def trunk_hidden(mode, slot):
    """The tokens of a sequence alone at k = 0, and the trunk's hidden state of every position it decoded."""
    driver = Driver(make_engine(depth=0))
    hidden, verify = {}, driver.runner.verify

    def watch(batch):
        start = driver.length(slot)
        verified = verify(batch)
        hidden[start] = verified.hidden[0].clone()
        return verified

    driver.runner.verify = watch
    driver.start(slot, random_prompt(*PROMPTS[slot]), [slot], MODES[mode], max_tokens=NUM_TOKENS, depth=0)
    while not bool(driver.state.done[slot]):
        driver.round([slot])
    return driver.tokens[slot], hidden


class KnowingHead:
    """Proposes from known hidden states; `late` positions off. Keeps what `repair` was given."""

    def __init__(self, hidden, late=0):
        self.hidden, self.late, self.repaired = hidden, late, []

    caches, reads_history = (), False

    def fill(self, next_tokens, hidden, span):
        return hidden

    def repair(self, next_tokens, hidden, window):
        self.repaired.append((next_tokens[: window.num_rows].tolist(), list(window.starts), window.width))
        return hidden

    def propose(self, frontier, num_drafts, choose, step_window):
        slots, lengths, hidden = frontier.slots.tolist(), frontier.positions, frontier.hidden
        assert step_window(1).slots.tolist() == slots and step_window(1).starts == lengths
        drafts = []
        for step in range(num_drafts):
            rows = torch.zeros(padded_rows(len(slots)), hidden.shape[1], dtype=hidden.dtype)
            for b, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
                known = self.hidden[slot].get(length + step + self.late)
                if known is not None:
                    rows[b] = known
            drafts.append(choose(rows, step))
        return Drafts(torch.stack(drafts, dim=1))


def run(mode, depth, late=0):
    """Both sequences to their end; the driver, the head, and drafted and accepted totals."""
    engine = make_engine()
    head = KnowingHead({slot: trunk_hidden(mode, slot)[1] for slot in PROMPTS}, late)
    runner = Runner(dataclasses.replace(engine.runner.model, head=head), engine.runner.state, head_on=True)
    driver = Driver(dataclasses.replace(engine, runner=runner))
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


def test_repair_gets_the_trunk_s_own_tokens_for_every_row():
    driver, head, _, _ = run("greedy", 3)
    for tokens, starts, width in head.repaired:
        for b, (start, slot) in enumerate(zip(starts, PROMPTS, strict=True)):
            first = start - PROMPTS[slot][0] + 1
            right = driver.tokens[slot][first : first + width]
            assert tokens[b * width : b * width + len(right)] == right
