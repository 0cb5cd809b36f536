"""What goes to the device before a round, and what comes back from it."""

from __future__ import annotations

import pytest
import torch

from pilotfish.engine.round.pinned import PinnedRing, Placement
from pilotfish.engine.round.reports import RowLogprobs, likeliest

CPU = torch.device("cpu")


def test_a_batch_is_placed_where_it_is_another_one(monkeypatch):
    slots, tables, sent = torch.full((4,), 9), torch.full((5, 3), 9), []
    placement, send = Placement(slots, tables), PinnedRing.send
    monkeypatch.setattr(PinnedRing, "send", lambda *args: (sent.append(args[1]), send(*args)))
    pages = {1: [7], 3: [8, 5]}
    placement.place([3, 1], [pages[3], pages[1]], 3)
    assert slots.tolist() == [3, 1, 0, 9] and tables[3].tolist() == [8, 5, 0] and tables[1].tolist() == [7, 0, 0]
    placement.place([3, 1], [pages[3], pages[1]], 3)
    assert sent == [[8, 5, 0], [7, 0, 0], [3, 1, 0]]
    placement.place([1], [pages[1]], 1)
    placement.place([3, 1], [pages[3], [7, 6]], 3)
    assert slots.tolist() == [3, 1, 0, 9] and tables[1].tolist() == [7, 6, 0]
    assert sent[3:] == [[1], [7, 6, 0], [3, 1, 0]]


def test_a_copy_is_what_was_there_when_it_was_fetched():
    source, ring = torch.tensor([1, 2]), PinnedRing((2,), torch.int64, CPU)
    copies = []
    for value in range(4):
        source.fill_(value)
        copies.append(ring.fetch(source))
    assert [copy.read().tolist() for copy in copies] == [[value] * 2 for value in range(4)]


@pytest.mark.parametrize("wanted", [0, 2])
def test_log_probabilities_are_of_the_committed_rows_and_outlive_the_logits(wanted):
    logits, chosen = torch.tensor([[0.5, 2.0, 2.0], [1.0, 0.0, -1.0], [0.0, 0.0, 9.0]]), torch.tensor([2, 0, 1])
    table = logits.log_softmax(-1).tolist()
    rows = RowLogprobs(logits, chosen, wanted)
    logits.fill_(float("nan"))
    first, second = rows.read([2, 0])
    assert (first.token_id, first.logprob) == (2, table[0][2]) and (second.token_id, second.logprob) == (0, table[1][0])
    # of two that are equal the lower id comes first
    assert first.top == [(1, table[0][1]), (2, table[0][2])][:wanted]
    assert second.top == [(0, table[1][0]), (1, table[1][1])][:wanted]


def test_the_likeliest_are_sorted_the_first_of_equals_first():
    draw = torch.Generator().manual_seed(1)
    # few values, and some that are impossible: whole runs of equals
    logits = torch.randint(-3, 3, (5, 700), generator=draw).float()
    logits[1, :650] = float("-inf")
    table = logits.log_softmax(-1)
    for wanted in (0, 1, 20, 60):
        found = likeliest(table, wanted)
        assert torch.equal(found, table.sort(dim=-1, descending=True, stable=True).indices[:, :wanted])


def test_rows_of_several_sequences_are_read_apart():
    logits, chosen = torch.randn(6, 40, generator=torch.Generator().manual_seed(1)), torch.arange(6)
    together = RowLogprobs(logits, chosen, 3)
    for first in (0, 2, 4):
        alone = RowLogprobs(logits[first : first + 2], chosen[first : first + 2], 2)
        assert together.read([first], first, 2) == alone.read([first])
        assert together.read([first, first + 1], first, 3)[1].top[:2] == alone.read([first, first + 1])[1].top
