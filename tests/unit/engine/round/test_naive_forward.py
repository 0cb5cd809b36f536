"""The round's own body, over the torch table, against the model written out: prompts, windows, the head.

The kernels' table is held to the same in tests/gpu/test_device_rounds.py.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from pilotfish.engine.round.prompt import PromptPass
from tests.support.naive_forward import naive_forward, naive_head
from tests.support.rounds import checkpoint_of, make_engine, random_prompt
from tests.support.windows import Windows

KINDS = ("hv_gt_hk", "moe")
SLOT, TABLE, PROMPT, LENGTH = 2, [5, 1], 21, 45
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


@cache
def written_out(kind):
    """Ids, hidden and logits of a text, and the head's hidden."""
    config, weights = checkpoint_of(kind, "float32")
    ids = random_prompt(LENGTH, 8)
    hidden, logits = naive_forward(config, weights, ids)
    return ids, hidden.float(), logits.float(), naive_head(config, weights, hidden[:-1], ids[1:]).float()


@pytest.fixture(params=KINDS)
def read(request):
    """A model that has read the prompt, its head too, and what the formulas give for the whole text."""
    ids, *wanted = written_out(request.param)
    model = make_engine(request.param).executor.model
    prompt = PromptPass(model)
    model.trunk.state.reset(SLOT)
    with torch.inference_mode():
        span = prompt.span(SLOT, 0, PROMPT, TABLE)
        hidden = prompt.trunk(torch.tensor(ids[:PROMPT]), span)
        rows = prompt.fill(torch.tensor(ids[1 : PROMPT + 1]), hidden, span)
    return model, torch.tensor(ids), (hidden, rows), wanted


def test_a_prompt_is_what_the_formulas_give(read):
    model, _, (hidden, rows), (wanted, logits, head) = read
    torch.testing.assert_close(hidden, wanted[:PROMPT], **CLOSE)
    torch.testing.assert_close(rows, head[:PROMPT], **CLOSE)
    with torch.inference_mode():
        torch.testing.assert_close(PromptPass(model).logits(hidden), logits[:PROMPT], **CLOSE)


def test_windows_of_any_width_are_what_the_formulas_give(read):
    """Rows past the accepted ones are noise, in the trunk and in the head, and leave no trace."""
    model, ids, _, (wanted, logits, head) = read
    windows, at, pending = Windows(model), PROMPT, 0
    for width, accepted in ((9, 4), (1, 1), (4, 4), (6, 2), (3, 3), (8, 8)):
        tokens = torch.randint(0, 300, (1, width), generator=torch.Generator().manual_seed(width))
        tokens[0, :accepted] = ids[at : at + accepted]
        hidden = windows.trunk(tokens, [SLOT], [at], [TABLE], [pending])
        kept = slice(at, at + accepted)
        torch.testing.assert_close(hidden[:accepted], wanted[kept], **CLOSE)
        torch.testing.assert_close(windows.logits[:accepted], logits[kept], **CLOSE)
        following = torch.cat((ids[at + 1 : at + accepted + 1], tokens[0, accepted:]))
        rows = windows.head(following[None], hidden[None], [SLOT], [at], [TABLE])[0]
        torch.testing.assert_close(rows[:accepted], head[kept], **CLOSE)
        at, pending = at + accepted, accepted
