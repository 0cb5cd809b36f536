"""The buffers of every slot: histories against a Python twin, bans, commits, offers."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pilotfish.engine.link.messages import Grammar, SamplingParams, ThinkingBudget
from pilotfish.engine.round.batch_state import BatchState
from pilotfish.spec import accept, rules, sampling, slots
from pilotfish.spec.accept import Verdict
from pilotfish.spec.rules import Rows
from pilotfish.spec.slots import ANY, EVERYTHING, MAX_STOP_IDS, NEVER, NO_TOKEN, Admission, flags_of, stop_ids_of

VOCAB, SLOTS, DEPTH = 12, 5, 4
PENALISED = SamplingParams(temperature=0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5)
GREEDY = SamplingParams(temperature=0)


def make_state():
    return BatchState(SLOTS, DEPTH, VOCAB, torch.device("cpu"))


def admit(state, slot, prompt, params=GREEDY, limit=100, own_k=DEPTH):
    """A slot as after its prompt's prefill."""
    state.admit(slot, prompt, params, limit, own_k)
    state.length[slot] = len(prompt)


def commit(state, slots, chosen, counts, pending=True, done=None):
    counts = torch.tensor(counts)
    flags = torch.zeros(len(slots), dtype=torch.bool) if done is None else torch.tensor(done)
    verdict = Verdict(counts, counts, flags, flags)
    accept.commit(state.fields, torch.tensor(slots), torch.tensor(chosen), verdict, state.flags_of(slots), pending)


def rows_of(state, slots, first_positions, drafts, width):
    """Rows of windows of `width`, the last of drafts + 1 rows."""
    positions = torch.tensor(first_positions)[:, None] + torch.arange(width)
    drafts = torch.tensor(drafts, dtype=torch.int64).view(len(slots), -1)
    return Rows(state.fields, torch.tensor(slots), positions, drafts)


def bans_of(state, slots, *window):
    return sampling.banned_rows(rows_of(state, slots, *window), state.flags_of(slots))


def assert_history(rows, row, prompt, output):
    counts, seen = rules.history(rows)
    wanted = Counter(output)
    assert counts[row].tolist() == [wanted[token] for token in range(VOCAB)], row
    assert seen[row].tolist() == [token in prompt or token in output for token in range(VOCAB)], row


@pytest.mark.parametrize("seed", range(5))
def test_histories_equal_a_twin_s_through_random_rounds(seed):
    generator = random.Random(seed)
    state, slots = make_state(), [1, 3, 4]
    prompts = {slot: generator.choices(range(VOCAB), k=generator.randint(1, 6)) for slot in slots}
    outputs = {slot: [] for slot in slots}
    for slot in slots:
        admit(state, slot, prompts[slot], PENALISED)
    for _ in range(6):
        depth = generator.randint(0, DEPTH)
        drafts = [generator.choices(range(VOCAB), k=depth) for _ in slots]
        # a verified window: row j has the sequence's tokens and drafts 0 .. j-1
        rows = rows_of(state, slots, [0] * 3, drafts, depth + 1)
        for b, slot in enumerate(slots):
            for j in range(depth + 1):
                assert_history(rows, b * (depth + 1) + j, prompts[slot], outputs[slot] + drafts[b][:j])
        # a drafted row: one row with all the drafts so far
        rows = rows_of(state, slots, [0] * 3, drafts, 1)
        for b, slot in enumerate(slots):
            assert_history(rows, b, prompts[slot], outputs[slot] + drafts[b])
        chosen = [generator.choices(range(VOCAB), k=depth + 1) for _ in slots]
        counts = [generator.randint(0, depth + 1) for _ in slots]
        commit(state, slots, chosen, counts)
        for b, slot in enumerate(slots):
            outputs[slot] += chosen[b][: counts[b]]


def test_the_token_that_prefill_chose_counts_as_output():
    state = make_state()
    admit(state, 2, [1, 1, 5], PENALISED)
    commit(state, [2], [[7]], [1], pending=False)
    assert_history(rows_of(state, [2], [4], [[]], 1), 0, [1, 5], [7])


def test_a_new_request_starts_without_its_slot_s_old_history():
    state = make_state()
    admit(state, 2, [1, 2], PENALISED)
    commit(state, [2], [[3, 4]], [2])
    admit(state, 2, [6], PENALISED)
    assert_history(rows_of(state, [2], [1], [[]], 1), 0, [6], [])


def test_an_earlier_request_stays_neutral_when_a_later_one_brings_penalties():
    state = make_state()
    admit(state, 1, [1, 2])
    commit(state, [1], [[3, 3]], [2])
    admit(state, 2, [5, 5, 6], PENALISED)
    commit(state, [1, 2], [[4, 7], [5, 8]], [2, 1])
    rows = rows_of(state, [1, 2], [6, 4], [[9], [9]], 2)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    factors = (rows.each(state.fields.repetition), rows.each(state.presence), rows.each(state.frequency))
    penalised = sampling.penalise(logits, *rules.history(rows), *factors)
    assert torch.equal(penalised[:2], logits[:2])
    assert_history(rows, 2, [5, 6], [5])
    assert_history(rows, 3, [5, 6], [5, 9])


def test_bias_is_the_request_s_own_and_goes_with_it():
    state = make_state()
    admit(state, 1, [1], SamplingParams(temperature=0, logit_bias={2: 1.5, 11: -4.0}))
    admit(state, 2, [1])
    assert state.bias[1].nonzero().flatten().tolist() == [2, 11]
    assert state.bias[1, [2, 11]].tolist() == [1.5, -4.0]
    assert not state.bias[2].any()
    admit(state, 1, [1], SamplingParams(temperature=0, logit_bias={3: 1.0}))
    assert state.bias[1].nonzero().flatten().tolist() == [3]


def test_stop_ids_are_banned_before_min_tokens_and_not_after():
    state = make_state()
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(4,), eos_token_ids=(0, 9))
    admit(state, 1, [1, 2], params)
    admit(state, 2, [1, 2], SamplingParams(temperature=0, stop_token_ids=(5,)))
    # the prompt is positions 0 and 1: generated tokens 1, 2, 3 are positions 2, 3, 4
    found = bans_of(state, [1, 2], [2, 2], [[1] * 4, [1] * 4], 5)
    for j, banned in enumerate((True, True, True, False, False)):
        assert found[j].nonzero().flatten().tolist() == ([0, 4, 9] if banned else [])
    assert not found[5:].any()


def test_no_stop_ids_ban_nothing():
    state = make_state()
    admit(state, 1, [1], SamplingParams(temperature=0, min_tokens=3))
    assert not bans_of(state, [1], [1], [[]], 1).any()


def test_stop_ids_are_the_request_s_and_the_model_s_unless_it_ignores_them():
    params = {"stop_token_ids": (7, 3), "eos_token_ids": (3, 1)}
    assert stop_ids_of(SamplingParams(**params)) == [1, 3, 7]
    assert stop_ids_of(SamplingParams(**params, ignore_eos=True)) == [3, 7]


def test_too_many_stop_ids_are_refused():
    state = BatchState(2, 1, 1000, torch.device("cpu"))
    state.admit(1, [1], SamplingParams(stop_token_ids=tuple(range(MAX_STOP_IDS))), 9, 1)
    with pytest.raises(ValueError, match=f"at most {MAX_STOP_IDS}"):
        state.admit(1, [1], SamplingParams(stop_token_ids=tuple(range(MAX_STOP_IDS + 1))), 9, 1)


def test_a_new_request_starts_without_its_slot_s_old_stop_ids():
    state = make_state()
    admit(state, 1, [1], SamplingParams(stop_token_ids=(3, 4, 5)))
    admit(state, 1, [1], SamplingParams(stop_token_ids=(6,)))
    assert [token for token in state.stop_ids[1].tolist() if token >= 0] == [6]


def test_commit_moves_length_pending_and_last_token():
    state = make_state()
    for slot in (1, 2, 3):
        admit(state, slot, [1, 2, 3])
        state.last_token[slot] = 11
    commit(state, [1, 2, 3], [[4, 5, 6], [7, 8, 9], [10, 1, 2]], [3, 1, 0], done=[False, False, True])
    assert state.length[[1, 2, 3]].tolist() == [6, 4, 3]
    assert state.pending_count[[1, 2, 3]].tolist() == [3, 1, 0]
    assert state.last_token[[1, 2, 3]].tolist() == [6, 7, 11]
    assert state.done[[1, 2, 3]].tolist() == [False, False, True]


def test_what_prefill_commits_waits_for_no_replay():
    state = make_state()
    admit(state, 1, [1, 2, 3])
    commit(state, [1], [[4]], [1], pending=False)
    assert (int(state.length[1]), int(state.pending_count[1]), int(state.last_token[1])) == (3, 0, 4)


@pytest.mark.parametrize(("own_k", "limit", "offered"), ((4, 100, 4), (2, 100, 2), (0, 100, 0), (4, 9, 2), (4, 7, 0)))
def test_offers_are_bound_by_the_request_s_k_and_by_what_it_may_still_commit(own_k, limit, offered):
    state = make_state()
    # 5 tokens in the caches and one committed beyond them: limit - 6 may come, one of them without a draft
    admit(state, 1, [1] * 5, limit=limit, own_k=own_k)
    state.set_drafts(torch.tensor([1]), torch.tensor([[3, 4, 5, 6]]))
    assert int(state.num_offered[1]) == offered
    assert state.drafts[1].tolist() == [3, 4, 5, 6]


def test_fewer_drafts_than_k_are_offered_as_they_are():
    state = make_state()
    admit(state, 1, [1])
    state.set_drafts(torch.tensor([1]), torch.tensor([[3, 4]]))
    assert int(state.num_offered[1]) == 2


def test_drafts_that_the_head_does_not_mean_are_not_offered():
    state, slots = make_state(), torch.tensor([1, 2, 3])
    for slot, own_k in ((1, DEPTH), (2, DEPTH), (3, 1)):
        admit(state, slot, [1], own_k=own_k)
    state.set_drafts(slots, torch.tensor([[3, 4]] * 3), torch.tensor([0, 1, 2]))
    assert state.num_offered[slots].tolist() == [0, 1, 1]


def test_the_tokens_by_position_follow_prompt_and_commits():
    generator = random.Random(0)
    state = BatchState(SLOTS, DEPTH, VOCAB, torch.device("cpu"), history_length=80)
    texts = {slot: generator.choices(range(VOCAB), k=5 * slot) for slot in (1, 3)}
    for slot, prompt in texts.items():
        admit(state, slot, list(prompt))
    for number in range(6):
        # prefill chooses one token; then windows commit some of their rows
        width = generator.randint(1, DEPTH + 1) if number else 1
        chosen = [generator.choices(range(VOCAB), k=width) for _ in texts]
        counts = [generator.randint(1, width) for _ in texts]
        commit(state, list(texts), chosen, counts, pending=number > 0)
        for slot, tokens, count in zip(texts, chosen, counts, strict=True):
            texts[slot] += tokens[:count]
            assert state.history[slot, : len(texts[slot])].tolist() == texts[slot]
            assert int(state.length[slot]) == len(texts[slot]) - 1


def test_a_done_sequence_is_offered_nothing():
    state = make_state()
    admit(state, 1, [1])
    state.done[1] = True
    state.set_drafts(torch.tensor([1]), torch.tensor([[3, 4]]))
    assert int(state.num_offered[1]) == 0


FLAGS = (
    ({}, 0),
    ({"temperature": 1.0}, slots.SAMPLED),
    ({"temperature": 1.0, "top_k": 5}, slots.SAMPLED | slots.TOP_K),
    ({"temperature": 1.0, "top_p": 0.9}, slots.SAMPLED | slots.TOP_P),
    ({"temperature": 1.0, "min_p": 0.1}, slots.SAMPLED | slots.MIN_P),
    ({"temperature": 1e-40, "top_k": 5}, 0),
    ({"top_k": 5, "top_p": 0.9, "min_p": 0.1}, 0),
    ({"top_k": -1}, 0),
    ({"presence_penalty": -0.1}, slots.PENALISED),
    ({"frequency_penalty": 0.1}, slots.PENALISED),
    ({"repetition_penalty": 0.9}, slots.PENALISED),
    ({"logit_bias": {1: 1.0}}, slots.BIASED),
    ({"min_tokens": 1}, slots.MIN_TOKENS),
    ({"allowed_token_ids": (1,)}, slots.BIASED),
    ({"bad_words_token_ids": ((1,),)}, slots.BIASED),
    ({"bad_words_token_ids": ((1, 2),)}, slots.BAD_SEQUENCES),
    ({"grammar": Grammar(kind="regex", source="x")}, slots.MASKED),
    (
        {"thinking": ThinkingBudget(num_tokens=1, start_token_id=None, end_token_id=2, closing=(2,))},
        slots.THINKING,
    ),
)


@pytest.mark.parametrize(("fields", "used"), FLAGS, ids=[str(fields) for fields, _ in FLAGS])
def test_flags_of_a_request(fields, used):
    params = SamplingParams(**{"temperature": 0} | fields)
    assert flags_of(Admission([1], params, 9, 1, VOCAB)) == used


def test_every_flag_has_a_bit_of_its_own_and_a_request_that_it_stands_for():
    bits = list(slots.USES)
    assert sum(bits) == EVERYTHING and all(bit & (bit - 1) == 0 for bit in bits)
    assert {bit for bit in bits if any(used & bit for _, used in FLAGS)} == set(bits)


def test_a_batch_runs_what_any_of_its_requests_uses():
    state = make_state()
    admit(state, 1, [1], SamplingParams(temperature=1.0, top_k=3))
    admit(state, 2, [1], PENALISED)
    admit(state, 3, [1])
    assert state.flags_of([1, 2, 3]) == slots.SAMPLED | slots.TOP_K | slots.PENALISED
    assert state.flags_of([3]) == 0
    assert state.flags[[1, 2, 3]].tolist() == [state.flags_of([slot]) for slot in (1, 2, 3)]


def test_a_temperature_too_small_to_divide_by_is_greedy_beside_sampled_requests_too():
    state = make_state()
    admit(state, 1, [1], SamplingParams(temperature=1e-40))
    admit(state, 2, [1], SamplingParams(temperature=0.5))
    rows = rows_of(state, [1, 2], [1, 1], [[], []], 1)
    assert rows.each(state.temperature).tolist() == [0, 0.5]
    logits = torch.tensor([[1.0, 3.0, 2.0] + [0.0] * (VOCAB - 3)]).repeat(2, 1)
    assert int(sampling.choose(logits, rows, state.flags_of([1, 2]))[0]) == 1


def test_parameters_repeat_for_every_row_of_their_sequence():
    state = make_state()
    admit(state, 1, [1], SamplingParams(temperature=0.5, seed=-3, choice=2, top_k=4, top_p=0.9, min_p=0.1))
    admit(state, 2, [1], SamplingParams(temperature=0.25, seed=8, top_k=-1))
    rows = rows_of(state, [2, 1], [1, 1], [[1, 1], [1, 1]], 3)
    assert rows.each(state.temperature).tolist() == [0.25] * 3 + [0.5] * 3
    assert rows.each(state.seed).tolist() == [8] * 3 + [-3] * 3
    assert rows.each(state.choice).tolist() == [0] * 3 + [2] * 3
    assert rows.each(state.top_k).tolist() == [VOCAB] * 3 + [4] * 3
    assert rows.each(state.top_p).tolist() == pytest.approx([1.0] * 3 + [0.9] * 3)
    assert rows.each(state.min_p).tolist() == pytest.approx([0.0] * 3 + [0.1] * 3)


@pytest.mark.parametrize(
    ("forced", "own_k", "limit", "drafts", "offered"),
    (
        ([7, 8], 4, 100, [7, 8, 5, 6], 2),
        # the head drafted the same: what it drafted after that stays
        ([3, 4], 4, 100, [3, 4, 5, 6], 4),
        ([3, 4, 5, 6], 4, 100, [3, 4, 5, 6], 4),
        ([7, 8, 9, 10, 11, 1], 4, 100, [7, 8, 9, 10], 4),
        ([7, 8, 9], 2, 100, [7, 8, 9, 6], 2),
        ([7, 8, 9], 4, 9, [7, 8, 9, 6], 2),
        ([7, 8, 9], 0, 100, [7, 8, 9, 6], 0),
        ([], 4, 100, [3, 4, 5, 6], 4),
    ),
)
def test_forced_drafts_replace_the_first_ones_and_keep_the_limits(forced, own_k, limit, drafts, offered):
    state = make_state()
    admit(state, 1, [1] * 5, limit=limit, own_k=own_k)
    state.set_drafts(torch.tensor([1]), torch.tensor([[3, 4, 5, 6]]))
    state.force_drafts(1, forced)
    assert state.drafts[1].tolist() == drafts
    assert int(state.num_offered[1]) == offered


def test_nothing_is_forced_where_nothing_is_drafted():
    state = BatchState(2, 0, VOCAB, torch.device("cpu"))
    admit(state, 1, [1], own_k=0)
    state.force_drafts(1, [3, 4])
    assert int(state.num_offered[1]) == 0


# -- admission: one copy, and what it writes

ADMITTED = (
    {},
    {"temperature": 0.7, "seed": -(1 << 63), "choice": 3, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1e-40, "top_k": -1, "seed": (1 << 63) - 1},
    {"presence_penalty": 0.1, "frequency_penalty": -0.3, "repetition_penalty": 1.7},
    {"logit_bias": {2: 1.1, 11: -4.0}, "bad_words_token_ids": ((2,), (7,), (1, 2, 3), (4, 5))},
    {"allowed_token_ids": (1, 2, 5), "logit_bias": {2: 0.3, 9: 8.0}, "bad_words_token_ids": ((5,),)},
    {"min_tokens": 4, "stop_token_ids": (8, 3), "eos_token_ids": (0, 9)},
    {"thinking": ThinkingBudget(num_tokens=5, start_token_id=None, end_token_id=2, closing=(4, 2, 6))},
    {"thinking": ThinkingBudget(num_tokens=0, start_token_id=3, end_token_id=2, closing=(2,))},
    {"grammar": Grammar(kind="regex", source="x"), "ignore_eos": True, "eos_token_ids": (1,)},
)


def admit_field_by_field(state, slot, prompt, params, limit, own_k):
    """What an admission means: every field of a slot, one by one."""
    values = {
        "flags": flags_of(Admission(prompt, params, limit, own_k, state.vocab_size)), "length": 0, "limit": limit,
        "pending_count": 0, "own_k": own_k, "num_offered": 0,
        "min_until": len(prompt) + params.min_tokens, "done": False, "seed": params.seed, "choice": params.choice,
        "temperature": params.temperature if params.temperature >= 1e-5 else 0,
        "top_k": params.top_k if params.top_k > 0 else state.vocab_size, "top_p": params.top_p, "min_p": params.min_p,
        "repetition": params.repetition_penalty, "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
    }  # fmt: skip
    for name, value in values.items():
        getattr(state, name)[slot] = value
    state.stop_ids[slot] = -1
    for place, token in enumerate(stop_ids_of(params)):
        state.stop_ids[slot, place] = token
    state.history[slot, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
    state.counts[slot] = 0
    state.seen[slot] = torch.tensor([token in prompt for token in range(state.vocab_size)])
    state.bias[slot] = 0
    if params.allowed_token_ids is not None:
        state.bias[slot] = float("-inf")
        state.bias[slot, list(params.allowed_token_ids)] = 0
    for token, value in params.logit_bias.items():
        state.bias[slot, token] += value
    for token in slots.banned_tokens(params):
        state.bias[slot, token] = float("-inf")
    rule = params.thinking
    state.bad_prefixes[slot], state.bad_lasts[slot], state.recent[slot] = ANY, NO_TOKEN, NO_TOKEN
    for row, (*before, last) in enumerate(slots.banned_sequences(params)):
        state.bad_lasts[slot, row] = last
        state.bad_prefixes[slot, row, -len(before) :] = torch.tensor(before)
    state.think_opened[slot] = state.think_closed[slot] = state.think_budget[slot] = NEVER
    state.think_start[slot] = state.think_end[slot] = state.closing[slot] = NO_TOKEN
    state.num_closing[slot] = 0
    if rule is not None:
        state.think_budget[slot], state.think_end[slot] = rule.num_tokens, rule.end_token_id
        state.think_start[slot] = NO_TOKEN if rule.start_token_id is None else rule.start_token_id
        if rule.start_token_id is None:
            state.think_opened[slot] = len(prompt) - 1
        state.num_closing[slot] = len(rule.closing)
        state.closing[slot, : len(rule.closing)] = torch.tensor(rule.closing)


def read_of(state, slot, flags):
    """What a slot's request with these flags reads, in the definition or a kernel: of a batch where others use it all,
    too."""
    read = {name: tensor[slot] for name, tensor in state.fields._asdict().items()}
    lasts = read["bad_lasts"]
    read["bad_prefixes"] = read["bad_prefixes"][lasts != NO_TOKEN]
    for names, used in ((("counts", "seen"), slots.PENALISED), (("recent",), slots.BAD_SEQUENCES)):
        for name in names if not flags & used else ():
            del read[name]
    if not flags & slots.THINKING:
        del read["closing"]
    return read


def test_an_admission_writes_every_field_that_its_slot_reads_and_no_other_slot():
    generator = random.Random(0)
    state, twin = (BatchState(SLOTS, DEPTH, VOCAB, torch.device("cpu"), history_length=40) for _ in range(2))
    for number in range(60):
        fields = {"temperature": 0} | generator.choice(ADMITTED)
        slot, prompt = generator.randrange(1, SLOTS), generator.choices(range(VOCAB), k=generator.randint(1, 20))
        request = (slot, prompt, SamplingParams(**fields), 20 + number, number % (DEPTH + 1))
        before = {name: tensor.clone() for name, tensor in state.fields._asdict().items()}
        state.admit(*request)
        admit_field_by_field(twin, *request)
        flags = state.host_flags[slot]
        wanted = read_of(twin, slot, flags)
        for name, value in read_of(state, slot, flags).items():
            assert torch.equal(value, wanted[name]), (number, name, fields)
        for name, tensor in state.fields._asdict().items():
            others = [other for other in range(SLOTS) if other != slot]
            assert torch.equal(tensor[others], before[name][others]), (number, name)
        for each in (state, twin):
            # what decoding leaves behind must not stay
            each.pending_count[slot], each.num_offered[slot], each.done[slot] = 3, 2, True
            each.counts[slot, 1], each.think_closed[slot], each.recent[slot] = 4, 5, 6


def test_what_a_request_does_not_use_changes_no_token_though_its_slot_had_another_before():
    generator = random.Random(1)
    for number in range(40):
        state = BatchState(SLOTS, DEPTH, VOCAB, torch.device("cpu"))
        fresh = BatchState(SLOTS, DEPTH, VOCAB, torch.device("cpu"))
        for _ in range(3):
            admit(state, 1, [1, 2], SamplingParams(**{"temperature": 0.5} | generator.choice(ADMITTED)))
            commit(state, [1], [generator.choices(range(VOCAB), k=3)], [3])
        params = SamplingParams(**{"temperature": 0} | generator.choice(ADMITTED))
        logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(number))
        chosen = []
        for each in (state, fresh):
            admit(each, 1, [3, 4], params)
            rows = rows_of(each, [1], [2], [[5]], 2)
            # a neighbour may use whatever there is
            chosen.append(sampling.choose(logits, rows, EVERYTHING & ~slots.MASKED).tolist())
        assert chosen[0] == chosen[1], (number, params)


class Copies(TorchDispatchMode):
    """Counts what goes from the host to a device that computes nothing; there a wait for a value is an error."""

    def __init__(self):
        super().__init__()
        self.copied = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = [value for value in args if isinstance(value, torch.Tensor)]
        to = [value for value in (*given, out) if isinstance(value, torch.Tensor) and value.device.type == "meta"]
        if to and any(value.device.type == "cpu" for value in given):
            self.copied.append(func)
        return out


@pytest.mark.parametrize("fields", ADMITTED, ids=range(len(ADMITTED)))
def test_an_admission_is_one_copy_to_the_device_and_no_wait(fields):
    state = BatchState(SLOTS, DEPTH, VOCAB, torch.device("meta"), history_length=40)
    with Copies() as copies:
        state.admit(2, [1, 2, 3], SamplingParams(**{"temperature": 0} | fields), 30, 2)
    assert len(copies.copied) == 1, copies.copied


def test_copies_are_seen_one_by_one():
    state = BatchState(SLOTS, DEPTH, VOCAB, torch.device("meta"))
    with Copies() as copies:
        state.stop_ids[1, :2] = torch.tensor([3, 4])
        torch.tensor([3, 4]).to("meta")
        state.seed[1].fill_(3)
    assert len(copies.copied) == 2


def test_tables_of_many_fields_keep_each_one_whole_and_aligned():
    state = BatchState(7, DEPTH, VOCAB, torch.device("cpu"))
    for name in ("length", "limit", "seed", "top_k", "temperature", "frequency"):
        field = getattr(state, name)
        assert field.shape == (7,) and field.is_contiguous() and field.data_ptr() % 16 == 0, name
    assert all(field.data_ptr() % 16 == 0 for field in state.fields if field is not None)
