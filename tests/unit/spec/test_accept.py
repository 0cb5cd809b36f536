"""Accept: every small case against a plain loop."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from pilotfish.spec.accept import accept

VOCAB = 3
STOP_IDS = ((-1, -1), (0, -1), (2, 1))


def twin(chosen, drafts, offered, stop_ids, remaining, done):
    """(num_accepted, num_committed, stopped, done) of one sequence."""
    accepted = 0
    while accepted < min(offered, len(drafts)) and drafts[accepted] == chosen[accepted]:
        accepted += 1
    if done:
        return accepted, 0, False, True
    committed, stopped = 0, False
    for token in chosen[: accepted + 1]:
        if stopped or committed == remaining:
            break
        committed += 1
        stopped = token in stop_ids
    return accepted, committed, stopped, stopped or committed == remaining


def verdicts(cases):
    columns = [torch.tensor(column) for column in zip(*cases, strict=True)]
    chosen, drafts, offered, stop_ids, remaining, done = columns
    verdict = accept(chosen, drafts.long().view(len(cases), -1), offered, stop_ids, remaining, done)
    fields = (verdict.num_accepted, verdict.num_committed, verdict.stopped, verdict.done)
    return list(zip(*(field.tolist() for field in fields), strict=True))


def all_cases(width):
    tokens = range(VOCAB)
    for chosen, drafts in product(product(tokens, repeat=width), product(tokens, repeat=width - 1)):
        for offered, stop_ids, remaining in product(range(width), STOP_IDS, range(1, width + 2)):
            yield chosen, drafts, offered, stop_ids, remaining, False
        yield chosen, drafts, width - 1, STOP_IDS[1], 0, True


@pytest.mark.parametrize("width", (1, 2, 3, 4))
def test_every_small_case_equals_a_plain_loop(width):
    cases = list(all_cases(width))
    for case, got in zip(cases, verdicts(cases), strict=True):
        assert got == twin(*case), case


def test_a_long_window_accepts_all_eight():
    chosen = tuple(range(9))
    (verdict,) = verdicts([(chosen, chosen[:8], 8, (-1,), 100, False)])
    assert verdict == (8, 9, False, False)


def test_sequences_do_not_see_one_another():
    cases = [
        ((1, 2, 1), (1, 2), 2, (0, -1), 9, False),
        ((1, 0, 1), (1, 0), 2, (0, -1), 9, False),
        ((1, 2, 1), (1, 2), 2, (-1, -1), 2, False),
        ((1, 2, 1), (1, 2), 1, (-1, -1), 9, False),
        ((1, 2, 1), (1, 2), 2, (-1, -1), 5, True),
    ]
    assert verdicts(cases) == [verdicts([case])[0] for case in cases] == [twin(*case) for case in cases]


def test_a_token_after_the_first_mismatch_never_counts():
    (verdict,) = verdicts([((5, 6, 7, 8), (9, 6, 7), 3, (-1,), 9, False)])
    assert verdict == (0, 1, False, False)
