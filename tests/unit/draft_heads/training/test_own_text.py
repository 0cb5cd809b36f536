"""What the trunk writes in lockstep is what it says when it reads that text again."""

from __future__ import annotations

import pytest
import torch

from pilotfish.draft_heads.training.own_text import write_on
from pilotfish.engine.round.prompt import read_text
from pilotfish.kernels.attention import PAGE
from tests.support.rounds import make_engine
from tests.support.tiny_models import VOCAB_SIZE

NUM_OWN = 9
# fp32 sums in another order, through every layer and a recurrence
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


@pytest.fixture(scope="module", params=["hv_gt_hk", "moe"])
def model(request):
    return make_engine(request.param, depth=0).executor.model


def pieces(count, length, seed=0):
    return torch.randint(0, VOCAB_SIZE, (count, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", [1, 40, PAGE, PAGE + 3])
def test_it_writes_what_reading_would_choose(model, length):
    texts = pieces(5, length)
    tokens, hidden = write_on(model, texts, NUM_OWN)
    assert tokens.shape == (5, length + NUM_OWN) and torch.equal(tokens[:, :length], texts)
    for row, written in zip(tokens, hidden, strict=True):
        read = read_text(model, row)
        torch.testing.assert_close(written, read, **CLOSE)
        chosen = model.trunk.lm_head.bulk(read[length - 1 : -1]).argmax(-1)
        assert torch.equal(row[length:], chosen)


def test_pieces_do_not_touch_each_other(model):
    texts = pieces(4, 30)
    tokens, hidden = write_on(model, texts, NUM_OWN)
    alone = [write_on(model, texts[i : i + 1], NUM_OWN) for i in range(4)]
    assert torch.equal(tokens, torch.cat([row for row, _ in alone]))
    torch.testing.assert_close(hidden, torch.cat([states for _, states in alone]), **CLOSE)
