"""Choosing a token: filters and penalties against plain references, the distribution, and neutral rows left alone."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from pilotfish.spec import sampling
from pilotfish.spec.slots import BIASED, MIN_P, PENALISED, SAMPLED, TOP_K
from tests.support.slots import rows_of

LOGITS = [1.2, -0.3, 0.9, 2.0, 0.1, -1.5, 0.9]
"""Two of these tie; the fourth is the most likely."""
VOCAB = len(LOGITS)


USED = {"temperature": SAMPLED, "min_p": MIN_P, "top_k": TOP_K, "repetition": PENALISED, "bias": BIASED}


def choose(logits, rows, positions):
    """Tokens of rows that each have a slot of their own with these fields; `banned` are the rows' own."""
    flags = sum(flag for name, flag in USED.items() if name in rows)
    fields = {name: value for name, value in rows.items() if name != "banned"}
    if "seen" in fields:
        fields["seen"] = fields["seen"].to(torch.uint8)
    given = rows_of(positions, logits.shape[1], **fields)
    return sampling.choose(logits, given, flags, rows.get("banned"))


def make_rows(count, vocab=VOCAB, *, temperature=1.0, seed=0, **features):
    """Fields of `count` equal rows; a feature that is not named is not used."""

    def column(value, dtype):
        return value if isinstance(value, torch.Tensor) else torch.full((count,), value, dtype=dtype)

    fields = {name: column(features[name], torch.float32) for name in ("min_p",) if name in features}
    if "top_k" in features or "top_p" in features:
        fields["top_k"] = column(features.get("top_k", vocab), torch.int64)
        fields["top_p"] = column(features.get("top_p", 1.0), torch.float32)
    if temperature is not None:
        fields["temperature"] = column(temperature, torch.float32)
        fields["seed"], fields["choice"] = column(seed, torch.int64), torch.zeros(count, dtype=torch.int64)
    return fields


def filtered_softmax(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """The exact distribution in vLLM's order: temperature, min_p, top_k, top_p; ties to the lower id."""
    weights = [math.exp(value / temperature) for value in logits]
    kept = [i for i, w in enumerate(weights) if w >= min_p * max(weights)]
    kept = sorted(kept, key=lambda i: (-weights[i], i))[: top_k or None]
    total, before, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if nucleus and before >= top_p:
            break
        nucleus.append(i)
        before += weights[i] / total
    total = sum(weights[i] for i in nucleus)
    return {i: weights[i] / total for i in nucleus}


FILTERS = (
    {},
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.25},
    {"top_k": 4, "top_p": 0.7},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.15},
)


@pytest.mark.parametrize("temperature", (0.7, 1.6))
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_sampled_tokens_have_the_filtered_softmax_s_distribution(filters, temperature):
    count = 20_000
    index = torch.arange(count)
    rows = make_rows(count, temperature=temperature, seed=index // 200, **filters)
    chosen = choose(torch.tensor([LOGITS]).repeat(count, 1), rows, index % 200)
    seen, wanted = Counter(chosen.tolist()), filtered_softmax(LOGITS, temperature, **filters)
    assert set(seen) <= set(wanted)
    statistic = sum((seen[i] - count * p) ** 2 / (count * p) for i, p in wanted.items())
    # chi-square with at most 6 degrees of freedom: above 30 in less than one of 20 000 seeds
    assert statistic < 30


def test_greedy_ties_go_to_the_lower_id():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    assert choose(logits, {}, torch.zeros(2)).tolist() == [1, 0]


def test_top_k_ties_go_to_the_lower_id():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0]]).repeat(2000, 1)
    chosen = choose(logits, make_rows(2000, 4, top_k=2), torch.arange(2000))
    assert set(chosen.tolist()) == {1, 2}


def test_ties_of_a_large_vocabulary_go_to_the_lower_id():
    logits = torch.zeros(500, 1009)
    logits[:, [700, 55]] = 1.0
    assert set(choose(logits, {}, torch.arange(500)).tolist()) == {55}
    chosen = choose(logits, make_rows(500, 1009, temperature=2.0, top_k=4), torch.arange(500))
    assert set(chosen.tolist()) == {0, 1, 55, 700}


@pytest.mark.parametrize("filters", ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}), ids=str)
def test_the_narrowest_filter_leaves_the_most_likely_token(filters):
    chosen = choose(
        torch.tensor([LOGITS]).repeat(500, 1), make_rows(500, temperature=5.0, **filters), torch.arange(500)
    )
    assert set(chosen.tolist()) == {3}


def test_temperature_zero_in_a_sampled_batch_is_greedy():
    logits = torch.tensor([LOGITS]).repeat(500, 1)
    rows = make_rows(500, temperature=torch.tensor([0.0, 2.0]).repeat(250), top_k=3, min_p=0.1)
    chosen = choose(logits, rows, torch.arange(500))
    assert set(chosen[::2].tolist()) == {3}
    assert len(set(chosen[1::2].tolist())) > 1


def test_a_token_depends_on_its_own_row_alone():
    count, vocab = 300, 333
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(0))
    temperature = torch.linspace(0.0, 2.0, count)
    features = {
        "top_k": torch.arange(count) % vocab + 1,
        "top_p": torch.linspace(0.1, 1.0, count),
        "min_p": torch.linspace(0, 0.2, count),
    }
    seed, positions = torch.arange(count) * 7, torch.arange(count) * 3
    together = choose(logits, make_rows(count, vocab, temperature=temperature, seed=seed, **features), positions)
    for i in range(0, count, 7):
        own = {name: values[i : i + 1] for name, values in features.items()}
        rows = make_rows(1, vocab, temperature=temperature[i : i + 1], seed=seed[i : i + 1], **own)
        assert choose(logits[i : i + 1], rows, positions[i : i + 1])[0] == together[i], i


def test_seed_choice_and_position_each_change_what_is_drawn():
    count = 64
    logits = torch.zeros(count, 100)
    zeros, index = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    ones = torch.ones(count)
    draws = [
        choose(logits, {"temperature": ones, "seed": seed, "choice": choice}, position).tolist()
        for seed, choice, position in ((zeros, zeros, index), (zeros, index, zeros), (index, zeros, zeros))
    ]
    assert all(len(set(draw)) > 30 for draw in draws)
    assert draws[0] != draws[1] != draws[2] != draws[0]


def test_the_logits_stay_as_they_are():
    logits = torch.tensor([LOGITS])
    before = logits.clone()
    rows = make_rows(1, top_k=2, min_p=0.1)
    history = {
        "repetition": torch.tensor([1.3]),
        "presence": torch.tensor([0.4]),
        "frequency": torch.tensor([0.2]),
        "seen": torch.ones(1, VOCAB, dtype=torch.bool),
        "counts": torch.ones(1, VOCAB, dtype=torch.int32),
    }
    full = rows | history | {"bias": torch.ones(1, VOCAB)}
    choose(logits, full, torch.zeros(1, dtype=torch.int64))
    assert torch.equal(logits, before)


def penalised(logits, prompt, output, repetition, presence, frequency):
    """vLLM's definitions, token by token: repetition over prompt and output, the other two over output."""
    result = []
    for token, value in enumerate(logits):
        if token in prompt or token in output:
            value = value / repetition if value > 0 else value * repetition
        times = output.count(token)
        result.append(value - frequency * times - (presence if times else 0.0))
    return result


def as_arguments(rows):
    return {name if name in ("counts", "seen") else f"{name}_R": value for name, value in rows.items()}


def filtered(logits, rows):
    scaled = sampling.keep_probable(logits, rows["min_p"])
    return sampling.keep_first(scaled, rows["top_k"], rows["top_p"])


def history_rows(histories, penalties, vocab=VOCAB):
    """Fields of (prompt, output) pairs and (repetition, presence, frequency) triples."""
    seen = torch.zeros(len(histories), vocab, dtype=torch.bool)
    counts = torch.zeros(len(histories), vocab, dtype=torch.int32)
    for row, (prompt, output) in enumerate(histories):
        seen[row, prompt + output] = True
        for token in output:
            counts[row, token] += 1
    repetition, presence, frequency = (torch.tensor(column) for column in zip(*penalties, strict=True))
    factors = {"repetition": repetition, "presence": presence, "frequency": frequency}
    return {"counts": counts, "seen": seen} | factors


HISTORIES = [([0, 3], [3, 3, 2]), ([5], []), ([1, 1, 4], [0, 0, 0, 6]), ([], [2])]
PENALTIES = [(1.3, 0.5, 0.25), (2.0, 1.0, 1.0), (0.7, -0.5, -0.25), (1.0, 0.0, 0.5)]


def test_penalties_match_the_reference():
    rows = history_rows(HISTORIES, PENALTIES)
    got = sampling.penalise(torch.tensor([LOGITS]).repeat(4, 1), **as_arguments(rows))
    wanted = [penalised(LOGITS, *history, *penalty) for history, penalty in zip(HISTORIES, PENALTIES, strict=True)]
    torch.testing.assert_close(got.double(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_penalties_decide_the_greedy_token():
    logits = [[2.0, 1.9, 0.0], [-1.0, -1.1, -9.0], [2.0, 1.9, 0.0]]
    histories = [([0], []), ([0], []), ([], [0])]
    rows = history_rows(histories, [(1.5, 0.0, 0.0), (1.5, 0.0, 0.0), (1.0, 0.0, 0.2)], vocab=3)
    assert choose(torch.tensor(logits), rows, torch.zeros(3)).tolist() == [1, 1, 1]


def test_bias_is_added_and_a_banned_token_is_never_drawn():
    logits = torch.tensor([LOGITS]).repeat(500, 1)
    bias, banned = torch.zeros(500, VOCAB), torch.zeros(500, VOCAB, dtype=torch.bool)
    bias[:, 5], bias[:, 3], banned[:, 3] = 9.0, 100.0, True
    fields = make_rows(500) | {"bias": bias, "banned": banned}
    chosen = Counter(choose(logits, fields, torch.arange(500)).tolist())
    assert chosen[3] == 0
    assert chosen[5] > 450
    greedy = {"bias": bias[:1], "banned": banned[:1]}
    assert choose(logits[:1], greedy, torch.zeros(1)).tolist() == [5]


def test_bias_comes_before_penalties():
    # 0.5 + 1 is positive, so repetition divides; the other order would give 0.25 + 1
    rows = history_rows([([0], [])], [(2.0, 0.0, 0.0)], 2) | {"bias": torch.tensor([[1.0, 0.0]])}
    assert choose(torch.tensor([[0.5, 0.8]]), rows, torch.zeros(1)).tolist() == [1]


def neutral_logits():
    logits = torch.randn(2, 333, generator=torch.Generator().manual_seed(1)) * 5
    logits[:, 7], logits[:, 9] = float("-inf"), -0.0
    return logits


def same_bits(one, other):
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_a_row_without_penalties_keeps_its_bits_beside_one_with():
    histories = [([1, 2, 9], [9, 9, 40]), ([3], [3])]
    rows = history_rows(histories, [(1.0, 0.0, 0.0), (1.7, 0.5, 0.3)], vocab=333)
    logits = neutral_logits()
    penalised_logits = sampling.penalise(logits, **as_arguments(rows))
    assert same_bits(penalised_logits[0], logits[0])
    assert not same_bits(penalised_logits[1], logits[1])


def test_a_row_without_filters_keeps_its_bits_beside_one_with():
    rows = make_rows(
        2,
        top_k=torch.tensor([333, 5]),
        top_p=torch.tensor([1.0, 0.4]),
        min_p=torch.tensor([0.0, 0.3]),
    )
    logits = neutral_logits()
    scores = filtered(logits, rows)
    assert same_bits(scores[0], logits[0])
    assert not same_bits(scores[1], logits[1])


def test_a_row_without_bans_keeps_its_bits_beside_one_with():
    banned = torch.zeros(2, 333, dtype=torch.bool)
    banned[1, :5] = True
    logits = neutral_logits()
    assert same_bits(sampling.bias(logits, None, banned)[0], logits[0])


def test_a_row_without_bias_keeps_its_tokens_beside_one_with():
    # x + 0 is x, but for -0.0, which compares as equal
    logits = neutral_logits()
    bias = torch.zeros(2, 333)
    bias[1, :5] = 3.0
    assert torch.equal(sampling.bias(logits, bias, None)[0], logits[0])


def scores_with_equals(kind, generator):
    """Scores [6, 1000] of which some are equal, or banned, or no numbers."""
    scaled = torch.randn(6, 1000, generator=generator) * 3
    if kind == "rounded":
        return scaled.bfloat16().float()
    if kind == "equal in hundreds":
        return scaled.round() + 0.0
    if kind == "most banned":
        return scaled.masked_fill(torch.rand(6, 1000, generator=generator) < 0.99, float("-inf"))
    if kind == "zeros of both signs":
        return scaled.clamp(max=0.0) * torch.tensor([1.0, -0.0]).repeat(500)
    if kind == "NaN":
        return scaled.masked_fill(torch.rand(6, 1000, generator=generator) < 0.01, float("nan"))
    return scaled


@pytest.mark.parametrize(
    "kind", ("unequal", "rounded", "equal in hundreds", "most banned", "zeros of both signs", "NaN")
)
def test_first_tokens_found_without_a_sort_are_those_of_the_sort(kind, monkeypatch):
    scaled = scores_with_equals(kind, torch.Generator().manual_seed(3))
    top_p = torch.tensor([1.0, 0.9, 0.5, 0.2, 1.0, 0.99])
    for top_k in (torch.arange(1, 7) * 10, torch.tensor([1, 128, 129, 400, 20, 20]), torch.full((6,), 20)):
        quick = sampling.keep_first(scaled, top_k, top_p)
        monkeypatch.setattr(sampling, "_first_in_order", lambda scaled, most: sampling._in_order(scaled))
        assert torch.equal(quick.view(torch.int32), sampling.keep_first(scaled, top_k, top_p).view(torch.int32))
        monkeypatch.undo()


def test_a_small_top_k_sorts_no_vocabulary(monkeypatch):
    widths = []
    sort = sampling._in_order
    monkeypatch.setattr(sampling, "_in_order", lambda scores: (widths.append(scores.shape[1]), sort(scores))[1])
    scaled = torch.randn(4, 1000, generator=torch.Generator().manual_seed(3))
    kept = sampling.keep_first(scaled, torch.tensor([1, 2, 100, 128]), torch.ones(4))
    assert widths == [256]
    assert (kept > float("-inf")).sum(1).tolist() == [1, 2, 100, 128]


def test_a_filtered_row_keeps_its_bits_beside_any_others():
    logits = torch.randn(40, 333, generator=torch.Generator().manual_seed(2)) * 3
    top_k, top_p = torch.arange(40) * 8 + 1, torch.linspace(0.05, 1.0, 40)
    together = filtered(logits, make_rows(40, top_k=top_k, top_p=top_p, min_p=0.01))
    for i in range(40):
        own = make_rows(1, top_k=top_k[i : i + 1], top_p=top_p[i : i + 1], min_p=0.01)
        assert same_bits(filtered(logits[i : i + 1], own)[0], together[i]), i


def test_rows_of_the_null_slot_alone_keep_nothing_and_change_no_other():
    scaled = torch.randn(3, 900, generator=torch.Generator().manual_seed(3))
    top_k, top_p = torch.tensor([0, 900, 5]), torch.tensor([0.0, 0.9, 1.0])
    kept = sampling.keep_first(scaled, top_k, top_p)
    for row in (1, 2):
        assert torch.equal(kept[row], sampling.keep_first(scaled[row, None], top_k[row, None], top_p[row, None])[0])
    sampling.keep_first(scaled[:1], top_k[:1], top_p[:1])
    sampling.keep_first(scaled[:2], top_k[:2], top_p[:2])
