"""Prefix repair against its alternatives: after any accepted count, every state is exactly the accepted prefix's.

The round leaves its rows pending and the next one replays them. Here the same state comes about in three other ways:
the window run one row at a time with a snapshot after each, the accepted prefix run again from the state before, and
plain decoding from the prompt. All agree bit for bit, as do the head's keys and values.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from pilotfish.engine.model.window import Window
from pilotfish.kernels.linear import padded_rows
from tests.support.rounds import MODELS, Driver, make_engine, transcript

SLOT, TABLE = 2, [5, 1, 3]
PROMPT_LENGTH = 21
NAN = float("nan")


class Scene:
    """A sequence some rounds into its text, two rows of the last round accepted and pending."""

    def __init__(self, kind, dtype):
        self.reference = transcript(kind, dtype, PROMPT_LENGTH)
        self.driver = Driver(make_engine(kind, dtype))
        self.driver.start(SLOT, self.reference.prompt, TABLE)
        self.driver.force(SLOT, self.reference.drafts(1, 4, 3))
        self.driver.round([SLOT], depth=4)
        self.driver.force(SLOT, self.reference.drafts(5, 3, 1))
        self.driver.round([SLOT], depth=3, next_depth=8)
        self.memory = self.driver.memory()
        self.pending = int(self.driver.state.pending_count[SLOT])
        self.start = self.driver.length(SLOT)
        assert (self.pending, self.start) == (2, PROMPT_LENGTH + 6)

    def forced_round(self, depth, accepted, next_depth=2):
        """The drafts of a round from the base that accepts this many, and its report."""
        self.driver.restore(self.memory)
        drafts = self.reference.drafts(len(self.driver.tokens[SLOT]), depth, accepted)
        self.driver.force(SLOT, drafts)
        (report,) = self.driver.round([SLOT], depth, next_depth)
        return drafts, report

    def replay(self):
        """S and convolution inputs as the next round would read them."""
        counts = [int(self.driver.state.pending_count[SLOT])]
        states = self.driver.trunk.state.replay(torch.tensor([SLOT]), counts)
        return tuple(state[:, 0].clone() for state in states)

    @torch.inference_mode()
    def window(self, tokens, start, pending):
        """The trunk over one window of `tokens`; logits of its rows."""
        rows = torch.zeros(padded_rows(len(tokens)), dtype=torch.int64)
        rows[: len(tokens)] = torch.tensor(tokens)
        model = self.driver.runner.model
        window = Window.build(len(tokens), torch.tensor([SLOT]), [start], [TABLE], model.inv_freq)
        return model.trunk.logits(model.trunk.rows(rows, window, [pending]))[: len(tokens)].clone()

    def commit_pending(self, count):
        return tuple(s[:, 0].clone() for s in self.driver.trunk.state.replay(torch.tensor([SLOT]), [count]))

    def snapshots(self, tokens):
        """From the base, one row at a time: logits of every row and the state after it."""
        self.driver.restore(self.memory)
        pending, logits, states = self.pending, [], []
        for offset, token in enumerate(tokens):
            logits.append(self.window([token], self.start + offset, pending)[0])
            states.append(self.commit_pending(1))
            pending = 0
        return logits, states

    def rerun(self, tokens):
        """From the base, the accepted prefix as one window: the state after it."""
        self.driver.restore(self.memory)
        self.window(tokens, self.start, self.pending)
        return self.commit_pending(len(tokens))


@cache
def scene(kind, dtype):
    return Scene(kind, dtype)


def assert_same(got, wanted, what):
    for name, one, other in zip(("S", "conv"), got, wanted, strict=True):
        assert torch.equal(one, other), (name, what)


models = pytest.mark.parametrize(("kind", "dtype"), MODELS)
depths = pytest.mark.parametrize("depth", range(9))


@models
@depths
def test_the_replayed_state_is_that_of_snapshots_of_a_rerun_and_of_plain_decoding(kind, dtype, depth):
    base = scene(kind, dtype)
    for accepted in range(depth + 1):
        drafts, report = base.forced_round(depth, accepted)
        assert (report.num_drafted, report.num_accepted) == (depth, accepted)
        last = base.driver.tokens[SLOT][-accepted - 2]
        state = base.replay()
        _, snapshots = base.snapshots([last, *drafts])
        assert_same(state, snapshots[accepted], ("snapshot", accepted))
        assert_same(state, base.rerun([last, *drafts[:accepted]]), ("rerun", accepted))
        assert_same(state, base.reference.states[base.start + accepted + 1], ("plain", accepted))


@models
@depths
def test_every_row_of_a_window_has_the_logits_of_that_row_alone(kind, dtype, depth):
    base = scene(kind, dtype)
    for accepted in {0, depth // 2, depth}:
        drafts, report = base.forced_round(depth, accepted)
        rows = dict(base.driver.logits[SLOT])
        last = base.driver.tokens[SLOT][-accepted - 2]
        # the rejected rows too: what they hold is as well defined
        alone, _ = base.snapshots([last, *drafts])
        for offset, logits in enumerate(alone):
            assert torch.equal(rows[base.start + offset], logits), (accepted, offset)
        for offset in range(accepted + 1):
            assert torch.equal(rows[base.start + offset], base.reference.logits[base.start + offset])
        assert report.token_ids == base.reference.tokens[6 + 1 : 6 + 1 + accepted + 1]


@models
@depths
def test_keys_and_values_of_trunk_and_head_are_those_of_plain_decoding(kind, dtype, depth):
    base = scene(kind, dtype)
    (full,) = base.driver.trunk.kv
    head = base.driver.runner.model.head.cache
    for accepted in range(depth + 1):
        base.forced_round(depth, accepted, next_depth=depth)
        end = base.driver.length(SLOT)
        assert end == base.start + accepted + 1
        assert torch.equal(base.driver.entries(full, SLOT, end), base.reference.kv[:, :, :end]), accepted
        assert torch.equal(base.driver.entries(head, SLOT, end), base.reference.head_kv[:, :, :end]), accepted


@models
@pytest.mark.parametrize("accepted", range(9))
def test_k_may_change_every_round(kind, dtype, accepted):
    """8, 1, 0, 5 on one runner, two sequences of different lengths that accept different counts."""
    references = {1: transcript(kind, dtype, 5, seed=3), 3: transcript(kind, dtype, PROMPT_LENGTH)}
    driver = Driver(make_engine(kind, dtype))
    for slot, table in ((1, [2, 4]), (3, [6, 1])):
        driver.start(slot, references[slot].prompt, table)
    head, (full,) = driver.runner.model.head.cache, driver.trunk.kv
    depths = (8, 1, 0, 5, 0)
    for depth, next_depth in zip(depths, (*depths[1:], 0), strict=True):
        counts = {1: min(accepted, depth), 3: (depth + 8 - accepted) % (depth + 1)}
        for slot, count in counts.items():
            driver.force(slot, references[slot].drafts(len(driver.tokens[slot]), depth, count))
        reports = driver.round([1, 3], depth, next_depth)
        assert {report.slot: report.num_accepted for report in reports} == counts
        for slot, reference in references.items():
            end = driver.length(slot)
            assert driver.tokens[slot] == reference.tokens[: len(driver.tokens[slot])]
            for position in range(len(reference.prompt), end):
                assert torch.equal(driver.logits[slot][position], reference.logits[position]), (depth, slot, position)
            stored = end - counts[slot] - 1
            if stored in reference.states:
                state = driver.trunk.state
                assert_same((state.s[:, slot], state.conv[:, slot]), reference.states[stored], (depth, slot))
            assert torch.equal(driver.entries(full, slot, end), reference.kv[:, :, :end])
            assert torch.equal(driver.entries(head, slot, end), reference.head_kv[:, :, :end])


@models
@pytest.mark.parametrize("junk", (NAN, 1e30))
def test_what_rejected_rows_left_behind_is_never_read(kind, dtype, junk):
    base = scene(kind, dtype)
    for accepted in (0, 3, 6):
        base.forced_round(6, accepted)
        end, state = base.driver.length(SLOT), base.driver.trunk.state
        plant_junk(base.driver, end, junk)
        for buffer in vars(state.pending).values():
            buffer[:, SLOT, accepted + 1 :] = junk
        base.driver.force(SLOT, base.reference.drafts(len(base.driver.tokens[SLOT]), 3, 2))
        base.driver.round([SLOT], depth=3, next_depth=4)
        base.driver.round([SLOT], depth=0, next_depth=4)
        tokens = base.driver.tokens[SLOT]
        assert tokens == base.reference.tokens[: len(tokens)]
        for position in range(end, base.driver.length(SLOT)):
            assert torch.equal(base.driver.logits[SLOT][position], base.reference.logits[position])
        now = base.driver.length(SLOT)
        head = base.driver.entries(base.driver.runner.model.head.cache, SLOT, now)
        assert torch.equal(head, base.reference.head_kv[:, :, :now])


def plant_junk(driver, end, junk):
    """Overwrites keys and values past `end` in the sequence's pages, and every page that is not its own."""
    for cache_ in (*driver.trunk.kv, driver.runner.model.head.cache):
        for tensor in (cache_.k, cache_.v):
            tensor[[page for page in range(len(tensor)) if page not in TABLE]] = junk
            tensor[TABLE[0], :, end:] = junk
            tensor[TABLE[1:]] = junk


@models
def test_drafts_do_not_depend_on_what_rejected_rows_left_behind(kind, dtype):
    base = scene(kind, dtype)
    drawn = []
    for junk in (0.0, NAN):
        base.driver.restore(base.memory)
        plant_junk(base.driver, base.start, junk)
        base.driver.force(SLOT, base.reference.drafts(len(base.driver.tokens[SLOT]), 6, 2))
        base.driver.round([SLOT], depth=6, next_depth=8)
        drawn.append(base.driver.state.drafts[SLOT].tolist())
    assert drawn[0] == drawn[1]


@models
def test_other_slots_keep_every_bit(kind, dtype):
    base = scene(kind, dtype)
    base.driver.restore(base.memory)
    state = base.driver.trunk.state
    others = [slot for slot in range(state.s.shape[1]) if slot != SLOT]
    buffers = (state.s, state.conv, *vars(state.pending).values())
    for buffer in buffers:
        buffer[:, others] = 0.125
    base.driver.force(SLOT, base.reference.drafts(len(base.driver.tokens[SLOT]), 8, 5))
    base.driver.round([SLOT], depth=8, next_depth=3)
    base.driver.round([SLOT], depth=0)
    assert all((buffer[:, others] == 0.125).all() for buffer in buffers)
