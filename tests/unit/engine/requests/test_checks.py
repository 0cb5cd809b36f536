"""Word bans and thinking budgets: tables against a Python twin, and text that is the same for every k."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest
import torch

from pilotfish.engine.errors import RequestError
from pilotfish.engine.link.messages import SamplingParams, ThinkingBudget
from pilotfish.engine.requests.checks import check_rules
from pilotfish.engine.round.batch_state import BatchState
from pilotfish.spec import accept, rules, sampling
from pilotfish.spec.accept import Verdict
from pilotfish.spec.rules import Rows
from pilotfish.spec.slots import MAX_BAD_LENGTH, MAX_BAD_SEQUENCES
from tests.support.loops import LoopDriver, assert_alone
from tests.support.rounds import MODES, Transcript, random_prompt
from tests.support.tiny_models import VOCAB_SIZE

VOCAB, SLOTS, DEPTH, START, END = 6, 4, 4, 4, 5
CLOSINGS = ((END,), (END, 1, 0), (2, END), (3, 2, 1, END))


def banned_twin(words, output):
    """vLLM's rule, by the letter: the last id of every word whose other ids end the output."""
    return {word[-1] for word in words if not word[:-1] or output[-len(word) + 1 :] == list(word[:-1])}


def forced_twin(rule, output):
    """What must come after `output`, or None. Looks at every prefix anew."""
    begin = 0 if rule.start_token_id is None else None
    if begin is None:
        if rule.start_token_id not in output:
            return None
        begin = output.index(rule.start_token_id) + 1
    deadline = begin + rule.num_tokens
    if len(output) < deadline or rule.end_token_id in output[:deadline]:
        return None
    step = len(output) - deadline
    return rule.closing[step] if step < len(rule.closing) else None


def draw_params(generator):
    words = tuple(tuple(generator.choices(range(VOCAB), k=generator.randint(1, 4))) for _ in range(5))
    start = generator.choice((None, START))
    rule = ThinkingBudget(
        num_tokens=generator.randint(0, 8), start_token_id=start, end_token_id=END, closing=generator.choice(CLOSINGS)
    )
    return SamplingParams(
        temperature=0,
        bad_words_token_ids=words if generator.random() < 0.8 else (),
        thinking=rule if generator.random() < 0.8 else None,
    )


class Found:
    """What the rules say of rows: banned bool [R, V] or None, bias [R, V], forced [R]."""

    def __init__(self, state, slots, positions, drafts):
        rows = Rows(state.fields, torch.tensor(slots), positions, drafts)
        self.banned = sampling.banned_rows(rows, state.flags_of(slots))
        self.bias, self.forced = rows.each(state.bias), rules.forced(rows)


def assert_row(rows, row, params, output):
    banned = set() if rows.banned is None else set(rows.banned[row].nonzero().flatten().tolist())
    banned |= set(rows.bias[row].isneginf().nonzero().flatten().tolist())
    assert banned == banned_twin(params.bad_words_token_ids, output), (params.bad_words_token_ids, output)
    forced = int(rows.forced[row])
    wanted = forced_twin(params.thinking, output) if params.thinking else None
    assert (forced if forced >= 0 else None) == wanted, (params.thinking, output)


def commit(state, slots, chosen, counts, pending=True):
    counts, flags = torch.tensor(counts), torch.zeros(len(slots), dtype=torch.bool)
    verdict = Verdict(counts, counts, flags, flags)
    accept.commit(state.fields, torch.tensor(slots), torch.tensor(chosen), verdict, state.flags_of(slots), pending)


@pytest.mark.parametrize("seed", range(40))
def test_tables_equal_a_twin_s_through_random_rounds(seed):
    generator = random.Random(seed)
    state, slots = BatchState(SLOTS, DEPTH, VOCAB, torch.device("cpu")), [1, 2, 3]
    # slots are used again: nothing of the first request may remain
    for _ in range(2):
        params, prompts, outputs = {}, {}, {}
        for slot in slots:
            params[slot], outputs[slot] = draw_params(generator), []
            prompts[slot] = generator.choices(range(VOCAB), k=generator.randint(1, 6))
            state.admit(slot, prompts[slot], params[slot], 100, DEPTH)
            state.length[slot] = len(prompts[slot])
        for number in range(6):
            depth = generator.randint(0, DEPTH) if number else 0
            drafts = [generator.choices(range(VOCAB), k=depth) for _ in slots]
            first = torch.tensor([[len(prompts[slot]) + len(outputs[slot])] for slot in slots])
            # a verified window, then a drafted row that has all the drafts before it
            for width in {depth + 1, 1}:
                positions = first + torch.arange(depth + 1)[-width:]
                given = torch.tensor(drafts, dtype=torch.int64).view(len(slots), -1)
                rows = Found(state, slots, positions, given)
                for (b, slot), j in itertools.product(enumerate(slots), range(width)):
                    seen = drafts[b][: depth + 1 - width + j]
                    assert_row(rows, b * width + j, params[slot], outputs[slot] + seen)
            chosen = [generator.choices(range(VOCAB), k=depth + 1) for _ in slots]
            counts = [generator.randint(1, depth + 1) for _ in slots]
            commit(state, slots, chosen, counts, pending=number > 0)
            for b, slot in enumerate(slots):
                outputs[slot] += chosen[b][: counts[b]]


@pytest.mark.parametrize("split", range(4))
def test_a_word_is_known_wherever_the_round_s_border_cuts_it(split):
    state = BatchState(2, DEPTH, 50, torch.device("cpu"))
    # in the prompt it does not count
    state.admit(1, [11, 12, 13], SamplingParams(temperature=0, bad_words_token_ids=((11, 12, 13, 14),)), 100, DEPTH)
    state.length[1] = 3
    before, after = [11, 12, 13][:split], [11, 12, 13][split:]
    if before:
        commit(state, [1], [before], [len(before)])
    position = int(state.length[1]) + torch.arange(len(after) + 1)[None] + 1
    drafts = torch.tensor([after], dtype=torch.int64).view(1, -1)
    rows = Found(state, [1], position, drafts)
    banned = [row.nonzero().flatten().tolist() for row in rows.banned]
    assert banned == [[]] * len(after) + [[14]]


def test_others_of_the_batch_are_left_alone():
    state = BatchState(3, DEPTH, VOCAB, torch.device("cpu"))
    state.admit(1, [1, 2], SamplingParams(temperature=0), 100, DEPTH)
    rule = ThinkingBudget(num_tokens=0, start_token_id=None, end_token_id=END, closing=(END,))
    state.admit(2, [1, 2], SamplingParams(temperature=0, bad_words_token_ids=((3, 3), (2,)), thinking=rule), 100, DEPTH)
    rows = Found(state, [1, 2], torch.tensor([[2, 3]] * 2), torch.tensor([[3], [3]]))
    assert not rows.banned[:2].any() and not rows.bias[:2].any()
    assert rows.forced.tolist() == [-2, -2, END, -2]
    assert rows.banned[3].nonzero().flatten().tolist() == [3]


def closing(budget, *ids, start=None):
    return ThinkingBudget(num_tokens=budget, start_token_id=start, end_token_id=ids[0], closing=ids)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"bad_words_token_ids": ((),)}, "bad_words"),
        ({"bad_words_token_ids": (tuple(range(MAX_BAD_LENGTH + 1)),)}, "bad_words"),
        ({"bad_words_token_ids": ((1, 2),) * (MAX_BAD_SEQUENCES + 1)}, "bad_words"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (3, 4), "bad_words_token_ids": ((3,), (4,))}, "allowed_token_ids"),
        ({"allowed_token_ids": (7,), "min_tokens": 1}, "allowed_token_ids"),
        ({"thinking": closing(-1, 5)}, "budget"),
        ({"thinking": closing(1, *range(80))}, "closing"),
        ({"thinking": ThinkingBudget(num_tokens=1, start_token_id=None, end_token_id=5, closing=(6,))}, "closing"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused_by_name(fields, word):
    with pytest.raises(RequestError, match=word):
        check_rules(SamplingParams(**fields), stop_ids=[7])


# -- text --------------------------------------------------------------------------------------------------------------

LENGTH, TOKENS = 21, 24


def write(params, *, k, agreeing=None, reference=None, seed=0):
    driver = LoopDriver(depth=k, agreeing=agreeing, seed=seed)
    request = driver.submit("x", random_prompt(LENGTH), params, reference=reference)
    driver.run()
    return request


def text_of(params):
    return write(params, k=0).tokens


def make_params(mode, **rules):
    base = {name: getattr(MODES[mode], name) for name in SamplingParams.__struct_fields__}
    return SamplingParams(**base | {"max_tokens": TOKENS, "stop_token_ids": ()} | rules)


@cache
def rules_for(mode):
    """Rules that the free text would break, at several lengths."""
    free = text_of(make_params(mode))
    words = ((free[2],), tuple(free[5:7]), tuple(free[8:11]), (1, 2, 3))
    unused = next(token for token in range(VOCAB_SIZE) if token not in free)
    return {
        "words": {"bad_words_token_ids": words},
        "sequences": {"bad_words_token_ids": words[1:]},
        "allowed": {"allowed_token_ids": tuple(range(40, 90)), "bad_words_token_ids": ((45,), (46, 46))},
        "budget": {"thinking": closing(5, unused, 7, 9)},
        "budget after a start": {"thinking": closing(4, unused, 7, start=free[3])},
        "no budget": {"thinking": closing(0, unused)},
        "everything": {
            "bad_words_token_ids": (*words[1:], (7, 9), (unused,)),
            "allowed_token_ids": tuple(range(0, VOCAB_SIZE, 2)),
            "thinking": closing(6, unused, 7, 9),
        },
    }


NAMES = ("words", "sequences", "allowed", "budget", "budget after a start", "no budget", "everything")


@pytest.mark.parametrize("mode", ("greedy", "every feature"))
@pytest.mark.parametrize("name", NAMES)
def test_the_text_obeys_and_is_the_same_for_every_k(name, mode):
    params = make_params(mode, **rules_for(mode)[name])
    plain = write(params, k=0)
    assert plain.tokens != text_of(make_params(mode)), "the rule must bite"
    forced = set()
    for index, token in enumerate(plain.tokens):
        due = forced_twin(params.thinking, plain.tokens[:index]) if params.thinking else None
        if due is not None:
            assert token == due, index
            forced.add(index)
            continue
        assert token not in banned_twin(params.bad_words_token_ids, plain.tokens[:index]), index
        assert params.allowed_token_ids is None or token in params.allowed_token_ids
    assert bool(forced) == (params.thinking is not None)
    reference = Transcript(random_prompt(LENGTH), plain.tokens, plain.logits)
    for k in range(1, 6):
        # right for a drawn number of drafts, then the head's own
        request = write(params, k=k, reference=reference, seed=k)
        assert_alone(request)
        assert len(request.tokens) == TOKENS
        assert sum(output.num_accepted for output in request.outputs) > 0
        if k in (1, 4):
            assert write(params, k=k, agreeing="own").tokens == plain.tokens


def test_greedy_text_is_the_best_token_that_the_rules_leave():
    params = make_params("greedy", **rules_for("greedy")["words"])
    plain = write(params, k=0)
    assert len(plain.logits) == TOKENS - 1
    for position, logits in plain.logits.items():
        output = plain.tokens[: position + 1 - LENGTH]
        left = logits.clone()
        for token in banned_twin(params.bad_words_token_ids, output):
            left[token] = float("-inf")
        assert int(left.argmax()) == plain.tokens[len(output)]


def test_a_request_whose_bans_leave_nothing_ends_in_an_error_of_its_own():
    params = make_params("greedy", allowed_token_ids=(5,), bad_words_token_ids=((5, 5),))
    request = write(params, k=3, agreeing="own")
    assert request.tokens[0] == 5
    assert (request.finish, request.last.error_code) == ("error", "invalid")
    assert "allowed_token_ids" in request.last.error


@pytest.mark.parametrize(
    "fields",
    (
        {"allowed_token_ids": (VOCAB_SIZE,)},
        {"bad_words_token_ids": ((1, -1),)},
        {"thinking": closing(3, VOCAB_SIZE)},
    ),
)
def test_ids_beyond_the_vocabulary_are_refused(fields):
    request = write(make_params("greedy", **fields), k=0)
    assert (request.finish, request.last.error_code) == ("error", "invalid")
