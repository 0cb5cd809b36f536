"""What a prompt leaves up to a boundary of its grid depends on the tokens before that boundary alone: keys and values
of trunk and head, recurrent state, and the hidden row that the next pair begins with."""

from __future__ import annotations

import pytest
import torch

from pilotfish.kernels.attention import PAGE
from tests.support.rounds import MODELS, Driver, make_engine, random_prompt

CHUNK, SLOT, TABLE = 64, 2, [5, 1, 3]
TEXT = random_prompt(PAGE + CHUNK + 9, seed=3)
BOUNDARIES = range(CHUNK, len(TEXT), CHUNK)
two_models = pytest.mark.parametrize(("kind", "dtype"), (MODELS[1], MODELS[2]))


def read(driver, prompt):
    """By boundary: keys and values at the places before it, once the whole prompt was read and drafts were made, and
    the state as it was there."""
    state, states = driver.trunk.state, {}
    end_spans = driver.executor.prompt.end_spans

    def watched(taken, head_on):
        end_spans(taken, head_on)
        ((_, span),) = taken
        states[span.start + span.length] = [
            t.clone() for t in (state.s[:, SLOT], state.conv[:, SLOT], state.last_hidden[SLOT])
        ]

    driver.executor.prompt.end_spans = watched
    driver.start(SLOT, prompt, TABLE, depth=4)
    driver.executor.prompt.end_spans = end_spans
    caches = [*driver.trunk.kv, driver.executor.model.head.cache]
    return {
        boundary: [driver.entries(cache, SLOT, boundary - cache.lag) for cache in caches] + states[boundary]
        for boundary in BOUNDARIES
        if boundary <= len(prompt)
    }


@two_models
def test_what_stands_before_a_boundary_does_not_depend_on_what_comes_after(kind, dtype):
    driver = Driver(make_engine(kind, dtype, prefill_chunk=CHUNK))
    wanted = read(driver, TEXT)
    assert list(wanted) == list(BOUNDARIES)
    for boundary in BOUNDARIES:
        for more in (0, 1, CHUNK + 3):
            got = read(driver, TEXT[:boundary] + random_prompt(more, seed=boundary + more))
            for end in range(CHUNK, boundary + 1, CHUNK):
                for tensor, same in zip(got[end], wanted[end], strict=True):
                    assert torch.equal(tensor, same), (boundary, more, end)


def test_what_comes_after_changes_the_entry_at_the_boundary():
    """Or the test above compares nothing: the pair with the token at the boundary is the first that differs."""
    driver = Driver(make_engine(prefill_chunk=CHUNK))
    cache, found = driver.executor.model.head.cache, []
    for seed in (1, 2):
        read(driver, TEXT[:CHUNK] + random_prompt(5, seed))
        found.append(driver.entries(cache, SLOT, CHUNK))
    differ = (found[0] != found[1]).any(-1).any(1).any(0)
    assert differ.nonzero().flatten().tolist() == [CHUNK - 1]
