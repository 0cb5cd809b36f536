"""The MTP head: repair by rows, recursion, prompt fill, and where each writes in its cache."""

from __future__ import annotations

import pytest
import torch

from pilotfish.engine.round.prompt import PromptPass
from pilotfish.kernels.attention import PAGE
from tests.support.rounds import MODELS, make_engine
from tests.support.windows import Windows

TABLES = ([3, 5], [2, 6], [4, 1])
models = pytest.mark.parametrize(("kind", "dtype"), MODELS)


class Head:
    """A head with a context of `lengths` pairs a sequence, and random pairs to go on with."""

    def __init__(self, kind, dtype, lengths):
        self.model = make_engine(kind, dtype).executor.model
        self.head, self.cache, self.lengths = self.model.head, self.model.head.cache, lengths
        self.generator = torch.Generator().manual_seed(0)
        self.prompt, self.windows = PromptPass(self.model), Windows(self.model)
        for b, length in enumerate(lengths):
            if length:
                self.fill(b, 0, *self.pairs(length))

    def pairs(self, *shape):
        """Random tokens and trunk hidden states."""
        tokens = torch.randint(0, self.model.config.vocab_size, shape, generator=self.generator)
        hidden = torch.randn(*shape, self.model.config.hidden_size, generator=self.generator)
        return tokens, hidden.to(self.model.dtype)

    @torch.inference_mode()
    def fill(self, b, start, tokens, hidden):
        return self.prompt.fill(tokens, hidden, self.prompt.span(b + 1, start, len(tokens), TABLES[b]))

    def repair(self, sequences, starts, tokens, hidden):
        """Head rows [B, W, H] of windows of pairs [B, W, ...]."""
        slots, tables = [b + 1 for b in sequences], [TABLES[b] for b in sequences]
        return self.windows.head(tokens, hidden, slots, starts, tables)

    def logits(self, hidden):
        return self.prompt.logits(hidden)

    def entries(self, b, start, end):
        places = slice(start + self.cache.lag, end + self.cache.lag)
        pages = [t[TABLES[b]].transpose(0, 1).flatten(1, 2)[:, places] for t in (self.cache.k, self.cache.v)]
        return torch.stack(pages).clone()

    def written(self):
        """Places in each sequence's pages whose entry is whole."""
        whole = self.cache.k.isfinite().all(-1).all(1) & self.cache.v.isfinite().all(-1).all(1)
        return [whole[table].flatten().nonzero().flatten().tolist() for table in TABLES]


@models
@pytest.mark.parametrize("length", (7, PAGE - 3))
def test_repaired_rows_have_the_bits_of_one_row_at_a_time(kind, dtype, length):
    width = 6
    head = Head(kind, dtype, (length,))
    tokens, hidden = head.pairs(1, width)
    together = head.repair([0], [length], tokens, hidden)
    entries = head.entries(0, length, length + width)
    for place in range(length + 1, length + 1 + width):
        head.cache.k[TABLES[0][place // PAGE], :, place % PAGE] = float("nan")
    for j in range(width):
        alone = head.repair([0], [length + j], tokens[:, j : j + 1], hidden[:, j : j + 1])
        assert torch.equal(alone[0, 0], together[0, j]), j
    assert torch.equal(head.entries(0, length, length + width), entries)


@models
def test_sequences_of_a_batch_are_repaired_as_each_alone(kind, dtype):
    lengths, width = (7, 40, 3), 4
    head = Head(kind, dtype, lengths)
    tokens, hidden = head.pairs(3, width)
    together = head.repair([0, 1, 2], list(lengths), tokens, hidden)
    entries = [head.entries(b, length, length + width) for b, length in enumerate(lengths)]
    for b, length in enumerate(lengths):
        alone = head.repair([b], [length], tokens[b : b + 1], hidden[b : b + 1])
        assert torch.equal(alone[0], together[b]), b
        assert torch.equal(head.entries(b, length, length + width), entries[b]), b


@models
def test_repair_overwrites_what_drafting_left(kind, dtype):
    head = Head(kind, dtype, (9,))
    tokens, hidden = head.pairs(1, 3)
    wanted = head.repair([0], [9], tokens, hidden)
    head.repair([0], [9], *head.pairs(1, 5))
    assert torch.equal(head.repair([0], [9], tokens, hidden), wanted)


@models
def test_fill_agrees_with_repair(kind, dtype):
    head = Head(kind, dtype, (5,))
    tokens, hidden = head.pairs(1, 6)
    rows = head.repair([0], [5], tokens, hidden)[0]
    by_rows = head.entries(0, 5, 11)
    bulk = head.fill(0, 5, tokens[0], hidden[0])
    # another product shape and another attention: equal up to the dtype's rounding
    tolerance = 0.06 if dtype == "bfloat16" else 1e-4
    torch.testing.assert_close(bulk, rows, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(head.entries(0, 5, 11), by_rows, rtol=tolerance, atol=tolerance)


def test_fill_writes_its_span_alone_one_place_late():
    head = Head("moe", "float32", (5, 0))
    head.fill(1, 0, *head.pairs(3))
    head.fill(1, PAGE - 2, *head.pairs(2))
    assert head.written() == [list(range(1, 6)), [1, 2, 3, PAGE - 1, PAGE], []]


def propose(head, lengths, num_drafts, hidden):
    """Greedy drafts, and the rows that each was chosen from."""
    sequences = range(len(lengths))
    slots, tables = [b + 1 for b in sequences], [TABLES[b] for b in sequences]
    return head.windows.propose(hidden, slots, lengths, tables, num_drafts)


@models
def test_drafts_come_by_recursion_over_the_head_s_own_hidden(kind, dtype):
    lengths = (7, 40)
    head = Head(kind, dtype, lengths)
    _, hidden = head.pairs(2)
    drafts, asked = propose(head, lengths, 4, hidden)
    assert len(asked) == 4 and torch.equal(asked[0], hidden)
    for step in range(1, 4):
        before = asked[step - 1]
        positions = [length + step - 1 for length in lengths]
        wanted = head.repair([0, 1], positions, drafts[:, step - 1 : step], before[:, None])
        assert torch.equal(asked[step], wanted[:, 0]), step
    chosen = [head.logits(rows).argmax(-1) for rows in asked]
    assert torch.equal(drafts, torch.stack(chosen, dim=1))


@pytest.mark.parametrize("num_drafts", (1, 2, 5))
def test_every_draft_but_the_last_appends_an_entry(num_drafts):
    lengths = (7, 40)
    head = Head("moe", "float32", lengths)
    _, hidden = head.pairs(2)
    drafts, _ = propose(head, lengths, num_drafts, hidden)
    assert drafts.shape == (2, num_drafts)
    assert [places[length:] for places, length in zip(head.written(), lengths, strict=False)] == [
        list(range(length + 1, length + num_drafts)) for length in lengths
    ]


@models
def test_fewer_drafts_are_the_first_of_more(kind, dtype):
    head = Head(kind, dtype, (7,))
    _, hidden = head.pairs(1)
    many, _ = propose(head, (7,), 5, hidden)
    few, _ = propose(head, (7,), 2, hidden)
    assert torch.equal(few, many[:, :2])


@models
def test_a_sequence_s_drafts_do_not_depend_on_its_neighbours(kind, dtype):
    lengths = (7, 40, 3)
    head = Head(kind, dtype, lengths)
    _, hidden = head.pairs(3)
    together, _ = propose(head, lengths, 4, hidden)
    alone, _ = propose(head, lengths[:1], 4, hidden[:1])
    assert torch.equal(alone[0], together[0])
