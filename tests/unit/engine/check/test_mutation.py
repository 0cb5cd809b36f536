"""Small faults in spec/, the round, caches, rules, grammars and heads are named by the audit: some here, all by
`make mutation`."""

import random
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FunctionType
from unittest.mock import patch

import pytest
import torch

from pilotfish.draft_heads.mtp.head import MtpHead
from pilotfish.engine.grammar.constraint import Constraint
from pilotfish.spec.accept import accept
from pilotfish.spec.rules import banned_words, early_stops
from tests.mutation.campaign import judge
from tests.mutation.mutants import AREAS, generate, with_code
from tests.mutation.subject import Subject, quiet
from tests.mutation.survivors import SURVIVORS

NUM_JUDGED = {"spec": 5, "round": 12, "caches": 4, "rules": 5, "grammar": 2, "heads": 2}
SEED = 5


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    torch.set_num_threads(1)
    with quiet():
        return Subject(tmp_path_factory.mktemp("subject"))


@pytest.fixture(scope="module")
def mutants(subject):
    with quiet():
        return generate(subject.lines())


def test_the_sound_engine_is_not_named_and_writes_the_same_texts(subject):
    with quiet():
        assert subject.named() is None and subject.changes_text() is None


def test_there_are_mutants_of_every_area_and_no_stale_survivor(mutants):
    assert {mutant.area for mutant in mutants} == set(AREAS) == set(NUM_JUDGED)
    assert sum(NUM_JUDGED.values()) >= 30 and len(mutants) > 120
    assert set(SURVIVORS) <= {mutant.name for mutant in mutants}
    assert all(reason for reason in SURVIVORS.values())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("area", AREAS)
def test_what_changes_a_token_is_named_and_survivors_are_listed(subject, mutants, area):
    draw = random.Random(SEED)
    own = [mutant for mutant in mutants if mutant.area == area]
    listed = [mutant for mutant in own if mutant.name in SURVIVORS]
    others = [mutant for mutant in own if mutant.name not in SURVIVORS]
    chosen = draw.sample(listed, min(1, len(listed)))
    chosen += draw.sample(others, min(len(others), NUM_JUDGED[area] - len(chosen)))
    with quiet():
        complaints = [judge(subject, mutant).complaint for mutant in chosen]
    assert not any(complaints), "\n".join(filter(None, complaints))


# -- planted: what the audit once passed


def past_the_stop(chosen_BW, drafts_BK, num_offered_B, stop_ids_BS, remaining_B, done_B):
    """Commits what was accepted behind a stop, and ends then."""
    verdict = sound_past_the_stop(chosen_BW, drafts_BK, num_offered_B, stop_ids_BS * 0 - 1, remaining_B, done_B)  # noqa: F821
    committed = torch.arange(chosen_BW.shape[1]) < verdict.num_committed[:, None]
    stopped = ((chosen_BW[:, :, None] == stop_ids_BS[:, None, :]).any(-1) & committed).any(1)
    return replace(verdict, stopped=stopped, done=verdict.done | stopped)


def without_drafts(rows):
    """Bans that see what was committed alone."""
    return sound_without_drafts(replace(rows, drafts=rows.drafts * 0 - 2))  # noqa: F821


def by_the_first_row(rows):
    """min_tokens as the window's first row has it."""
    return sound_by_the_first_row(replace(rows, positions=rows.positions[:, :1].expand_as(rows.positions)))  # noqa: F821


def with_the_first_mask(self, drafts, bits):
    """A window of the mask of its first row."""
    sound_with_the_first_mask(self, drafts, bits)  # noqa: F821
    bits[1:] = bits[:1]


@contextmanager
def instead(function, fault):
    """`fault` runs in the function's place, for all who have imported it, and finds it as `sound_` and its own name."""
    sound = FunctionType(function.__code__, function.__globals__)
    names = {f"sound_{fault.__name__}": sound, "replace": replace, "torch": torch}
    with patch.dict(function.__globals__, names), with_code(function, fault.__code__):
        yield


STOPPED = {"stop-1", "stop-3", "min-tokens-1", "min-tokens-2", "thinking-prompt", "grammar-end", "grammar-least"}
GRAMMARS = {"regex", "forced-run", "grammar-end", "grammar-least", "grammar-after"}
PLANTED = {
    "stop": (accept, past_the_stop, STOPPED),
    "grammar": (Constraint.mask_rows, with_the_first_mask, GRAMMARS),
    "bad words": (banned_words, without_drafts, {"bad-words-1", "thinking-prompt"}),
    "min tokens": (early_stops, by_the_first_row, {"min-tokens-1", "min-tokens-2", "thinking-prompt"}),
}


@pytest.mark.parametrize(
    "faults", [*((name,) for name in PLANTED), ("stop", "bad words", "min tokens")], ids=" and ".join
)
def test_planted_faults_are_named_at_3_and_8(subject, faults):
    allowed = set().union(*(PLANTED[fault][2] for fault in faults))
    with quiet(), ExitStack() as stack:
        auditor = subject.auditor()
        for fault in faults:
            stack.enter_context(instead(*PLANTED[fault][:2]))
        assert auditor.run_reference().findings == []
        for depth in (3, 8):
            found = {finding.request for finding in auditor.run(depth, 4, forced=True).findings}
            assert found <= allowed
            assert all(found & PLANTED[fault][2] for fault in faults), (depth, found)


def test_drafts_of_a_wrong_hidden_state_are_named_and_change_no_text(subject):
    def rows(self, round, tokens, hidden, count, width, out, chosen=None):
        real(self, round, tokens, hidden if chosen is not None else hidden * 0, count, width, out, chosen)

    real = MtpHead.rows
    with quiet(), patch.object(MtpHead, "rows", rows):
        assert subject.changes_text() is None
        assert "draft 2" in subject.named()


def test_a_prompt_off_by_one_in_the_head_is_named_and_changes_no_text(subject):
    def enter(self, prompt, next_tokens, hidden, span):
        real(self, prompt, next_tokens.roll(1), hidden, span)

    real = MtpHead.enter
    with quiet(), patch.object(MtpHead, "enter", enter):
        assert subject.changes_text() is None
        assert "draft 1" in subject.named()
