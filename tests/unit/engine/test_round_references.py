"""Prefix repair against its alternatives: after any accepted count, every state is exactly the accepted prefix's.

The round leaves its rows pending and the next one replays them. Here the same state comes about in three other ways:
the window run one row at a time with a snapshot after each, the accepted prefix run again from the state before, and
plain decoding from the prompt. All agree bit for bit, as do the head's keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from pilotfish.engine.round.reports import SequenceReport
from tests.support.rounds import MODELS, Driver, make_engine, transcript
from tests.support.windows import Windows

SLOT, TABLE = 2, [5, 1, 3]
PROMPT_LENGTH = 21
NUM_TOKENS = 24
NAN = float("nan")


@dataclass(frozen=True)
class Outcome:
    """What one forced round left: the states as the next round reads them, keys and values of trunk and head."""

    drafts: list[int]
    report: SequenceReport
    end: int
    logits: dict[int, torch.Tensor]
    state: tuple[torch.Tensor, ...]
    kv: torch.Tensor
    head_kv: torch.Tensor
    next_drafts: list[int]


class Scene:
    """A sequence some rounds into its text, two rows of the last round accepted and pending."""

    def __init__(self, kind, dtype):
        self.reference = transcript(kind, dtype, PROMPT_LENGTH, num_tokens=NUM_TOKENS)
        self.driver = Driver(make_engine(kind, dtype))
        self.windows = Windows(self.driver.executor.model)
        self.driver.start(SLOT, self.reference.prompt, TABLE)
        self.driver.force(SLOT, self.reference.drafts(1, 4, 3))
        self.driver.round([SLOT], depth=4)
        self.driver.force(SLOT, self.reference.drafts(5, 3, 1))
        self.driver.round([SLOT], depth=3, next_depth=8)
        self.memory = self.driver.memory()
        self.pending = int(self.driver.state.pending_count[SLOT])
        self.start = self.driver.length(SLOT)
        self.last = self.driver.tokens[SLOT][-1]
        self.outcomes: dict[tuple[int, int], Outcome] = {}
        assert (self.pending, self.start) == (2, PROMPT_LENGTH + 6)

    @property
    def head_cache(self):
        return self.driver.executor.model.head.cache

    def force(self, depth, agreeing):
        drafts = self.reference.drafts(len(self.driver.tokens[SLOT]), depth, agreeing)
        self.driver.force(SLOT, drafts)
        return drafts

    def outcome(self, depth, accepted):
        """From the base, a round of `depth` drafts of which this many agree; run once."""
        if (depth, accepted) not in self.outcomes:
            driver = self.driver
            driver.restore(self.memory)
            drafts = self.force(depth, accepted)
            (report,) = driver.round([SLOT], depth, next_depth=min(depth, 3))
            end, (full,) = driver.length(SLOT), driver.trunk.kv
            entries = [driver.entries(cache_, SLOT, end) for cache_ in (full, self.head_cache)]
            state = self.replay(int(driver.state.pending_count[SLOT]))
            drawn = driver.state.drafts[SLOT, : min(depth, 3)].tolist()
            logits = dict(driver.logits[SLOT])
            self.outcomes[depth, accepted] = Outcome(drafts, report, end, logits, state, *entries, drawn)
        return self.outcomes[depth, accepted]

    def replay(self, count):
        """S and convolution inputs as the next round would read and store them."""
        states = self.driver.trunk.state.replay(torch.tensor([SLOT]), [count])
        return tuple(state[:, 0].clone() for state in states)

    @torch.inference_mode()
    def window(self, tokens, start, pending):
        """The trunk over one window of `tokens`; logits of its rows."""
        self.windows.trunk(torch.tensor([tokens]), [SLOT], [start], [TABLE], [pending])
        return self.windows.logits

    def one_at_a_time(self, tokens):
        """From the base, one row a window: logits of every row, and a snapshot of the state after it."""
        self.driver.restore(self.memory)
        pending, logits, states = self.pending, [], []
        for offset, token in enumerate(tokens):
            logits.append(self.window([token], self.start + offset, pending)[0])
            states.append(self.replay(1))
            pending = 0
        return logits, states

    def rerun(self, tokens):
        """From the base, these tokens as one window, all of them kept: the state after it."""
        self.driver.restore(self.memory)
        self.window(tokens, self.start, self.pending)
        return self.replay(len(tokens))


@cache
def scene(kind, dtype):
    return Scene(kind, dtype)


def assert_same(got, wanted, what):
    for name, one, other in zip(("S", "conv"), got, wanted, strict=True):
        assert torch.equal(one, other), (name, what)


models = pytest.mark.parametrize(("kind", "dtype"), MODELS)
two_models = pytest.mark.parametrize(("kind", "dtype"), (MODELS[1], MODELS[2]))
depths = pytest.mark.parametrize("depth", range(9))


@models
@depths
def test_a_round_commits_what_agrees_and_one_more(kind, dtype, depth):
    base = scene(kind, dtype)
    for accepted in range(depth + 1):
        report = base.outcome(depth, accepted).report
        assert (report.num_drafted, report.num_accepted) == (depth, accepted)
        assert report.token_ids == base.reference.tokens[7 : 7 + accepted + 1]


@models
@depths
def test_the_replayed_state_is_plain_decoding_s(kind, dtype, depth):
    base = scene(kind, dtype)
    for accepted in range(depth + 1):
        outcome = base.outcome(depth, accepted)
        assert_same(outcome.state, base.reference.states[outcome.end], accepted)


@models
def test_the_replayed_state_is_the_snapshot_after_the_last_accepted_row(kind, dtype):
    base = scene(kind, dtype)
    # right drafts: after n of them a snapshot is that of any window that accepts n
    _, snapshots = base.one_at_a_time([base.last, *base.outcome(8, 8).drafts])
    for depth in range(9):
        for accepted in range(depth + 1):
            assert_same(base.outcome(depth, accepted).state, snapshots[accepted], (depth, accepted))


@models
@pytest.mark.parametrize("accepted", range(9))
def test_the_replayed_state_is_that_of_the_accepted_prefix_run_again(kind, dtype, accepted):
    base = scene(kind, dtype)
    wanted = base.rerun([base.last, *base.outcome(8, accepted).drafts[:accepted]])
    for depth in range(accepted, 9):
        assert_same(base.outcome(depth, accepted).state, wanted, depth)


@models
@depths
def test_keys_and_values_of_trunk_and_head_are_plain_decoding_s(kind, dtype, depth):
    base = scene(kind, dtype)
    for accepted in range(depth + 1):
        outcome = base.outcome(depth, accepted)
        assert outcome.end == base.start + accepted + 1
        assert torch.equal(outcome.kv, base.reference.kv[:, :, : outcome.end]), accepted
        assert torch.equal(outcome.head_kv, base.reference.head_kv[:, :, : outcome.end]), accepted


@models
@depths
def test_the_head_drafts_on_from_the_last_accepted_row(kind, dtype, depth):
    base = scene(kind, dtype)
    for accepted in range(depth + 1):
        outcome = base.outcome(depth, accepted)
        assert outcome.next_drafts[:1] == [base.reference.first_drafts[outcome.end]][:depth], accepted
        # the others follow from the first, however many rows were rejected
        assert outcome.next_drafts == base.outcome(3, accepted).next_drafts[:depth] or accepted > 3


@models
@depths
def test_accepted_rows_have_plain_decoding_s_logits(kind, dtype, depth):
    base = scene(kind, dtype)
    for accepted in range(depth + 1):
        outcome = base.outcome(depth, accepted)
        for position in range(base.start, outcome.end):
            assert torch.equal(outcome.logits[position], base.reference.logits[position]), (accepted, position)


@models
@pytest.mark.parametrize(("depth", "accepted"), ((3, 0), (8, 2)))
def test_rejected_rows_too_have_the_logits_of_that_row_alone(kind, dtype, depth, accepted):
    base = scene(kind, dtype)
    outcome = base.outcome(depth, accepted)
    alone, _ = base.one_at_a_time([base.last, *outcome.drafts])
    for offset, logits in enumerate(alone):
        assert torch.equal(outcome.logits[base.start + offset], logits), offset


@two_models
@pytest.mark.parametrize("accepted", range(9))
def test_k_may_change_every_round(kind, dtype, accepted):
    """8, 1, 0, 5 on one runner, two sequences of different lengths that accept different counts."""
    references = {
        1: transcript(kind, dtype, 5, seed=3, num_tokens=NUM_TOKENS),
        3: transcript(kind, dtype, PROMPT_LENGTH, num_tokens=NUM_TOKENS),
    }
    driver = Driver(make_engine(kind, dtype))
    for slot, table in ((1, [2, 4]), (3, [6, 1])):
        driver.start(slot, references[slot].prompt, table)
    head, (full,), state = driver.executor.model.head.cache, driver.trunk.kv, driver.trunk.state
    depths = (8, 1, 0, 5, 0)
    for depth, next_depth in zip(depths, (*depths[1:], 0), strict=True):
        counts = {1: min(accepted, depth), 3: (depth + 8 - accepted) % (depth + 1)}
        for slot, count in counts.items():
            driver.force(slot, references[slot].drafts(len(driver.tokens[slot]), depth, count))
        stored = {slot: driver.length(slot) for slot in references}
        reports = driver.round([1, 3], depth, next_depth)
        assert {report.slot: report.num_accepted for report in reports} == counts
        for slot, reference in references.items():
            assert driver.tokens[slot] == reference.tokens[: len(driver.tokens[slot])]
            assert_same((state.s[:, slot], state.conv[:, slot]), reference.states[stored[slot]], (depth, slot))
            if next_depth:
                assert int(driver.state.drafts[slot, 0]) == reference.first_drafts[driver.length(slot)]
    for slot, reference in references.items():
        end = driver.length(slot)
        for position in range(len(reference.prompt), end):
            assert torch.equal(driver.logits[slot][position], reference.logits[position]), (slot, position)
        assert torch.equal(driver.entries(full, slot, end), reference.kv[:, :, :end])
        assert torch.equal(driver.entries(head, slot, end), reference.head_kv[:, :, :end])


@two_models
@pytest.mark.parametrize(("junk", "accepted"), ((NAN, 0), (1e30, 3), (NAN, 5)))
def test_what_rejected_rows_left_behind_is_never_read(kind, dtype, junk, accepted):
    base = scene(kind, dtype)
    driver = base.driver
    driver.restore(base.memory)
    base.force(6, accepted)
    driver.round([SLOT], depth=6, next_depth=2)
    end = driver.length(SLOT)
    plant_junk(driver, end, junk)
    for buffer in vars(driver.trunk.state.pending).values():
        buffer[:, SLOT, accepted + 1 :] = junk
    base.force(3, 2)
    driver.round([SLOT], depth=3, next_depth=4)
    driver.round([SLOT], depth=0, next_depth=1)
    now, tokens = driver.length(SLOT), driver.tokens[SLOT]
    assert tokens == base.reference.tokens[: len(tokens)]
    for position in range(end, now):
        assert torch.equal(driver.logits[SLOT][position], base.reference.logits[position])
    assert torch.equal(driver.entries(base.head_cache, SLOT, now), base.reference.head_kv[:, :, :now])


def plant_junk(driver, end, junk):
    """Overwrites keys and values past `end` in the sequence's pages, the place that a lagging cache leaves free, and
    every page that is not the sequence's own."""
    for kv in (*driver.trunk.kv, driver.executor.model.head.cache):
        for tensor in (kv.k, kv.v):
            tensor[[page for page in range(len(tensor)) if page != TABLE[0]]] = junk
            tensor[TABLE[0], :, : kv.lag] = junk
            tensor[TABLE[0], :, end + kv.lag :] = junk


@two_models
def test_drafts_do_not_depend_on_what_rejected_rows_left_behind(kind, dtype):
    base = scene(kind, dtype)
    drawn = []
    for junk in (0.0, NAN):
        base.driver.restore(base.memory)
        plant_junk(base.driver, base.start, junk)
        base.force(6, 2)
        base.driver.round([SLOT], depth=6, next_depth=8)
        drawn.append(base.driver.state.drafts[SLOT].tolist())
    assert drawn[0] == drawn[1]


@two_models
def test_a_round_touches_no_other_slot(kind, dtype):
    base = scene(kind, dtype)
    base.driver.restore(base.memory)
    state = base.driver.trunk.state
    others = [slot for slot in range(state.s.shape[1]) if slot != SLOT]
    buffers = (state.s, state.conv, *vars(state.pending).values())
    for buffer in buffers:
        buffer[:, others] = 0.125
    base.force(8, 5)
    base.driver.round([SLOT], depth=8, next_depth=3)
    base.driver.round([SLOT], depth=0)
    assert all((buffer[:, others] == 0.125).all() for buffer in buffers)
