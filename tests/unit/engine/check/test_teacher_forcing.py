"""Acceptance along a text is what rounds along that text accept."""

import json
from pathlib import Path

import pytest
import torch

from pilotfish.engine.check.teacher_forcing import Agreement, agreement
from pilotfish.engine.link.messages import SamplingParams, Submit
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.options import EngineOptions
from pilotfish.engine.start import start_engine

DEMO = Path(__file__).resolve().parents[4] / "demo" / "model"
PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
T, F = True, False


def test_rounds_run_along_the_text():
    found = Agreement([[T, T], [T, F], [F, T], [T, T], [T, T], [F, F]], trunk_top1=1.0)
    assert found.rounds(1) == [2, 1, 2, 1]
    assert found.rounds(2) == [3, 3]
    assert found.rounds(2, first=1) == [2, 3]
    assert found.shares() == pytest.approx([4 / 6, 4 / 6])


@pytest.fixture(scope="module")
def demo():
    """fp32, so that a chunk of a prompt and a row of a round hardly differ."""
    torch.set_num_threads(1)
    options = EngineOptions(
        model=str(DEMO), num_speculative_tokens=3, max_model_len=600, dtype="float32", num_threads=1, head_check="off"
    )
    return start_engine(options)


def written(engine, num_tokens, k):
    """The model's own text after the prompt, and the tokens that each round of depth k committed."""
    from tokenizers import Tokenizer

    prompt = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(PROMPT).ids
    loop = EngineLoop(engine)
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    loop.submit(Submit(request_id="r", prompt_token_ids=prompt, sampling=sampling, speculative_k=k))
    tokens, rounds = [], []
    while loop.has_work():
        for output in loop.step().outputs:
            tokens += output.token_ids
            rounds += [len(output.token_ids)] if output.round else []
    return prompt, tokens, rounds


def test_the_models_own_text_is_accepted_as_it_was_served(demo):
    """More than a page long, so that places of the second one are drafted from too. Rounds near the end are cut."""
    prompt, tokens, served = written(demo, 260, 2)
    found = agreement(demo.executor.model, prompt + tokens, 3)
    along = found.rounds(2, first=len(prompt) - 1)
    assert len(served) > 80 and max(served) == 3 and min(served) == 1
    assert along[:-3] == served[: len(along) - 3]


def test_the_text_decides_not_the_trunk(demo):
    """A text that the trunk cannot tell: agreement is with the trunk's choice, whatever the text goes on with."""
    ids = torch.randint(0, 8192, (80,), generator=torch.Generator().manual_seed(0)).tolist()
    found = agreement(demo.executor.model, ids, 3)
    assert found.num_places == 80 - 1 - 3 and found.trunk_top1 < 0.1
    assert 0.1 < found.shares()[0] < 0.9


def test_progress_is_told_place_by_place(demo):
    told = []
    found = agreement(demo.executor.model, list(range(100, 140)), 2, told.append)
    assert sum(told) == found.num_places == 37
    assert json.dumps(found.agrees)
