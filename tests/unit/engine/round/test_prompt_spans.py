"""Pieces of prompts in a few numbers of rows: padding leaves no trace, what is captured gives the bits of what is not,
and a piece that pauses those of one that does not. The tables are those of a CPU; tests/gpu has the kernels'."""

from __future__ import annotations

import pytest
import torch

from pilotfish.engine.round.graphs import Graphs
from pilotfish.engine.round.prompt import PromptPass
from pilotfish.engine.round.spans import LENGTHS, padded_length, padded_tokens
from pilotfish.kernels.attention import PAGE
from tests.support.fixed_shapes import PaddedPrompts
from tests.support.rounds import CPU, make_engine, random_prompt

PIECES = ((0, 70), (70, 9), (79, 1))
TABLE = [5, 3]


@pytest.fixture(scope="module", params=["hv_gt_hk", "moe"])
def model(request):
    return make_engine(request.param).executor.model


@pytest.fixture(autouse=True)
def no_grad():
    with torch.inference_mode():
        yield


def memory(model):
    caches = [*model.trunk.kv, model.head.cache]
    return [*(part for cache in caches for part in (cache.k, cache.v)), model.trunk.state.s, model.trunk.state.conv]


def read(model, prompt, slot=2, table=TABLE, pause=None, ids=None):
    """The hidden rows of all pieces, and the memory afterwards; before, what nobody has written is NaN. The null page,
    which nobody reads, has taken the keys of padding."""
    ids = ids or random_prompt(PIECES[-1][0] + PIECES[-1][1], 3)
    for part in memory(model):
        part.fill_(float("nan"))
    model.trunk.state.reset(slot)
    found = []
    for start, length in PIECES:
        rows, span = prompt.take(slot, start, ids[start : start + length], table)
        for step in prompt.steps(rows, span):
            assert step is None
            if pause is not None:
                pause()
        found.append(rows.hidden[:length].clone())
        prompt.end_spans([(rows, span)], head_on=True)
    written = [part.clone() for part in memory(model)]
    padded = written[0][0].isfinite().any()
    for part in written[:-2]:
        part[0] = float("nan")
    return found, written, padded


def same_bits(one, other):
    return all(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in zip(one, other, strict=True))


def static(model, captured=True):
    prompt = PromptPass(model, PaddedPrompts())
    prompt.reserve(128, 2 * PAGE)
    if captured:
        prompt.capture(Graphs(CPU), head_on=True, progress=False)
    return prompt


def test_the_numbers_of_rows_follow_from_the_length_alone():
    lengths = (1, 64, 65, 300, 2048, 2049, 5000)
    assert [padded_length(length) for length in lengths] == [64, 64, 128, 384, 2048, 3072, 5120]
    assert all(padded_length(length) < 2 * length for length in range(65, 5000))
    assert all(padded_length(length) <= 1.5 * length for length in range(257, 5000))
    assert all(length % 64 == 0 for length in LENGTHS)


def test_padding_is_the_text_over_and_over():
    assert padded_tokens([7, 8, 9], 8) == [7, 8, 9, 7, 8, 9, 7, 8] and padded_tokens([7], 1) == [7]


def test_padding_leaves_no_trace(model):
    """Pages of others, places past the text and other slots stay as they were; what is written is what the torch
    table writes, but for the bits of products of other numbers of rows."""
    padded, plain = (read(model, PromptPass(model, table)) for table in (PaddedPrompts(), None))
    for mine, theirs in zip(padded[0], plain[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    assert padded[2] and not plain[2]
    for mine, theirs in zip(padded[1], plain[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4, equal_nan=True)


def test_what_is_captured_gives_the_bits_of_what_is_not(model):
    fresh, captured = PromptPass(model, PaddedPrompts()), static(model)
    for slot, table in ((2, TABLE), (1, [1, 6])):
        mine, theirs = (read(model, prompt, slot, table) for prompt in (captured, fresh))
        assert same_bits(mine[0], theirs[0]) and same_bits(mine[1], theirs[1])


def test_a_piece_that_pauses_gives_the_same_bits(model):
    """While another sequence is read, in memory of its own, and rows of other text have gone through what is shared."""
    prompt, other = static(model), PromptPass(model, PaddedPrompts())
    model.trunk.state.reset(1)

    def pause():
        other.trunk(torch.tensor(random_prompt(30, 5)), other.span(1, 0, 30, [7]))

    whole, paused = read(model, prompt), read(model, prompt, pause=pause)
    assert same_bits(whole[0], paused[0])
    # but for what the other one wrote, its page, its slot and the null page
    for mine, theirs in zip(whole[1], paused[1], strict=True):
        if mine.shape[2] == PAGE:
            mine, theirs = mine[[5, 3]], theirs[[5, 3]]
        else:
            mine, theirs = mine[:, 2], theirs[:, 2]
        assert same_bits([mine], [theirs])


@pytest.mark.parametrize("captured", [True, False])
def test_two_pieces_read_together_have_the_bits_of_one_after_the_other(model, captured):
    """Their rows, what they leave in pages and slot, and what stands between them; they may be padded, and pause."""
    prompt, other, state = static(model, captured), PromptPass(model, PaddedPrompts()), model.trunk.state
    ids, table = random_prompt(270, 3), [5, 3]
    for first, second in ((128, 128), (128, 70), (64, 64), (9, 3)):
        pieces, found = ((0, 6), (6, first), (6 + first, second)), []
        for together in (False, True):
            for part in (*memory(model), state.last_hidden):
                part.fill_(float("nan"))
            state.reset(2)
            taken = prompt.take(2, 0, ids[:6], table)
            list(prompt.steps(*taken))
            prompt.end_spans([taken], head_on=True)
            outs, between = [], []
            if together:
                both = prompt.take_pair(2, 6, 6 + first, ids[6 : 6 + first + second], table)
                for _ in prompt.steps(*both[0], both[1]):
                    other.trunk(torch.tensor(random_prompt(30, 5)), other.span(1, 0, 30, [7]))
                    for part in memory(model)[-2:]:
                        part[:, 1] = float("nan")
                prompt.end_spans(both, head_on=True)
                outs = [rows.hidden[: span.length].clone() for rows, span in both]
                kept = prompt.between
                between = [part.clone() for part in (kept.s, kept.conv, kept.last_hidden)]
            else:
                for start, length in pieces[1:]:
                    taken = prompt.take(2, start, ids[start : start + length], table)
                    list(prompt.steps(*taken))
                    prompt.end_spans([taken], head_on=True)
                    outs.append(taken[0].hidden[:length].clone())
                    between = between or [part.clone() for part in state.of_slot(2)]
            written = [part.clone() for part in memory(model)]
            for part in written[:-2]:
                # the null page, and the other's
                part[[0, 7]] = float("nan")
            found.append([*outs, *between, *written, state.last_hidden[2].clone()])
        assert same_bits(*found), (first, second)


def test_pairs_are_captured_of_the_pieces_that_come_in_pairs(model):
    prompt = static(model)
    # an MoE's experts are not written out
    assert prompt.reads_pairs == (not model.config.is_moe)
    assert prompt.pair_lengths() == ([64, 128] if prompt.reads_pairs else [])
    taken = prompt.take_pair(2, 0, 128, random_prompt(256, 1), TABLE)
    assert prompt._is_captured(((128, 128), 0), taken) == prompt.reads_pairs
    # what another piece went through is overwritten by the next
    prompt.take(2, 0, random_prompt(128, 1), TABLE)
    assert not prompt._is_captured(((128, 128), 0), taken)


def test_the_longest_prompt_may_be_shorter_than_what_it_is_padded_to(model):
    """And than a chunk: there are pages for so many tokens, and no more are read at the start."""
    prompt = PromptPass(model, PaddedPrompts())
    prompt.reserve(2048, 100)
    prompt.capture(Graphs(CPU), head_on=True, progress=False)
    assert prompt.lengths() == [64, 128] == sorted(prompt.step_seconds)
    ids = random_prompt(100, 4)
    found = []
    for reader in (prompt, PromptPass(model, PaddedPrompts())):
        model.trunk.state.reset(2)
        rows, span = reader.take(2, 0, ids, [5])
        for _ in reader.steps(rows, span):
            pass
        found.append(rows.hidden[:100].clone())
    assert torch.equal(*found)


def test_a_longer_piece_than_there_is_memory_for_has_its_own(model):
    prompt = static(model)
    rows, span = prompt.take(2, 0, random_prompt(150, 1), TABLE)
    assert span.num_rows == 256 and prompt.lengths() == [64, 128]
    for _ in prompt.steps(rows, span):
        pass
    assert rows.hidden[:150].isfinite().all()
