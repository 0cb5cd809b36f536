"""The look-up head: what it copies, and that text with it is the text without it."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from pilotfish.draft_heads.lookup.head import LookupHead
from pilotfish.draft_heads.lookup.match import look_up
from pilotfish.engine.assemble import assemble
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.errors import OptionError
from pilotfish.engine.link.messages import SamplingParams, Submit
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.options import EngineOptions
from pilotfish.engine.plan import Plan, make_plan
from pilotfish.engine.start import start_engine
from pilotfish.server.cli import build_parser, engine_options
from tests.support.rounds import MODES, make_engine, random_prompt
from tests.support.tiny_models import VOCAB_SIZE, build_tiny


def drafts(tokens, k=4, longest=3, shortest=2, rest=(7, 7, 7)):
    """Of one sequence; `rest` is noise behind its newest token."""
    history = torch.tensor([[*tokens, *rest]], dtype=torch.int32)
    (found,), (count,) = look_up(history, torch.tensor([len(tokens) - 1]), k, longest, shortest)
    assert int(count) in (0, k)
    return found.tolist() if count else None


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ([1, 2, 3, 4, 5, 6, 9, 1, 2], [3, 4, 5, 6]),
        ([1, 2, 3, 8, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2]),  # of equal matches the latest
        ([5, 1, 2, 3, 9, 6, 1, 2, 4, 9, 5, 1, 2], [3, 9, 6, 1]),  # a longer match before a later one
        ([1, 2, 1, 2, 1, 2], [1, 2, 1, 2]),  # read on in a circle
        ([4, 4, 4], [4, 4, 4, 4]),
        ([1, 2, 3, 4], None),
        ([1, 9, 2, 9], None),  # one token is too short a match
        ([5], None),
        ([5, 5], None),
        ([7, 7, 1, 2], None),
    ],
)
def test_copies_what_followed_the_longest_match(tokens, wanted):
    assert drafts(tokens) == wanted


def test_noise_behind_the_newest_token_is_not_read():
    assert drafts([3, 1, 2, 9, 1, 2], rest=(9, 1, 2, 5)) == [9, 1, 2, 9]
    assert drafts([1, 2, 3], rest=(1, 2, 3, 1, 2, 3)) is None


def test_one_token_is_enough_where_the_bounds_say_so():
    assert drafts([1, 9, 2, 9], k=2, longest=1, shortest=1) == [2, 9]


def test_a_batch_is_as_each_alone():
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(0, 4, (9, 40), generator=generator, dtype=torch.int32)
    last = torch.randint(0, 40, (9,), generator=generator)
    together, counts = look_up(history, last, 5, 4, 2)
    assert 0 < int((counts > 0).sum()) < 9
    for b in range(9):
        alone, count = look_up(history[b : b + 1, : int(last[b]) + 1], last[b : b + 1], 5, 4, 2)
        assert torch.equal(alone[0], together[b]) and count[0] == counts[b]


def slow(tokens, k, longest, shortest):
    """Written out: every place, every length, one token at a time."""
    newest = len(tokens) - 1
    best, place = 0, 0
    for end in range(newest):
        length = 0
        while length < longest and length <= end and tokens[end - length] == tokens[newest - length]:
            length += 1
        if length >= max(best, 1):
            best, place = length, end
    if best < shortest:
        return None
    text = list(tokens)
    for step in range(k):
        text.append(text[place + 1 + step])
    return text[len(tokens) :]


def test_equals_a_slow_search():
    generator = torch.Generator().manual_seed(1)
    found = 0
    for _ in range(300):
        length = int(torch.randint(1, 30, (), generator=generator))
        tokens = torch.randint(0, 3, (length,), generator=generator).tolist()
        wanted = slow(tokens, 4, 3, 2)
        assert drafts(tokens) == wanted
        found += wanted is not None
    assert 100 < found < 300


@pytest.mark.parametrize("bounds", [(0, 0), (2, 3), (3, 0), (1, -1)])
def test_refuses_bounds_that_cannot_be(bounds):
    with pytest.raises(ValueError, match="want 1 <= shortest <= longest"):
        LookupHead(*bounds)


# Behind the engine.

MAX_TOKENS = 24


def loop(depth: int, kind: str = "hv_gt_hk") -> EngineLoop:
    """An engine that looks up; depth 0 decodes plainly."""
    engine = make_engine(kind)
    model = dataclasses.replace(engine.executor.model, head=LookupHead(4, 2) if depth else None)
    plan = Plan(model.device, model.dtype, depth, None, 512, 4, "configured", 12, 64)
    return EngineLoop(assemble(model, plan, 8, 0, 0.0))


def run(core: EngineLoop, requests: list[tuple[list[int], SamplingParams]]) -> tuple[list[list[int]], int, int]:
    """Tokens of each request, and all drafts offered and accepted."""
    for i, (prompt, params) in enumerate(requests):
        core.submit(Submit(request_id=str(i), prompt_token_ids=prompt, sampling=params))
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(requests))}
    drafted = accepted = 0
    while core.has_work():
        report = core.step()
        assert report is not None
        for output in report.outputs:
            assert output.error is None
            tokens[output.request_id] += output.token_ids
            drafted += output.num_drafted
            accepted += output.num_accepted
    return list(tokens.values()), drafted, accepted


def params(mode: str, **change: object) -> SamplingParams:
    fields = {name: getattr(MODES[mode], name) for name in SamplingParams.__struct_fields__}
    return SamplingParams(**(fields | {"max_tokens": MAX_TOKENS, "stop_token_ids": ()} | change))


FEW = {5: 60.0, 6: 60.0, 7: 60.0}
"""Three tokens are all that may come: text that repeats itself now and then."""
REQUESTS = [
    (random_prompt(40, 1), params("greedy", logit_bias=FEW)),
    (random_prompt(70, 2), params("sampled", logit_bias=FEW)),
    (random_prompt(21, 3), params("every feature", logit_bias=FEW)),
]


@pytest.fixture(scope="module")
def plain():
    return [run(loop(0), [request])[0][0] for request in REQUESTS]


@pytest.mark.parametrize("depth", range(1, 6))
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_tokens_are_those_of_plain_decoding(plain, depth, batch):
    tokens, drafted, accepted = run(loop(depth), REQUESTS[:batch])
    assert tokens == plain[:batch]
    assert 0 < accepted < drafted


def test_a_prompt_that_repeats_itself_is_drafted_at_once():
    """Bias makes the next token the one that goes on with it: then the first round has drafts."""
    period = random_prompt(9, 1)
    prompt, following = (period * 5)[:40], (period * 5)[40:44]
    core = loop(3)
    going_on = params("greedy", logit_bias={following[0]: 99.0})
    core.submit(Submit(request_id="0", prompt_token_ids=prompt, sampling=going_on))
    core.step()
    state, slot = core.executor.state, core.scheduler.running[0].slot
    assert int(state.num_offered[slot]) == 3
    assert state.drafts[slot, :3].tolist() == following[1:4]


def test_nothing_is_drafted_where_nothing_is_found():
    """All tokens of the prompt differ, and so does what follows."""
    prompt = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))[:20].tolist()
    once = params("greedy", max_tokens=2)
    assert run(loop(3), [(prompt, once)])[1] == 0


def test_a_slot_s_earlier_text_is_forgotten():
    core = loop(4)
    first, _, _ = run(core, [REQUESTS[0]])
    again, _, _ = run(core, [REQUESTS[2]])
    assert again == run(loop(0), [REQUESTS[2]])[0]
    assert first == run(core, [REQUESTS[0]])[0]


# From the flags on.


@pytest.fixture(scope="module")
def headless(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("headless"), "dense", mtp=False)


def options(folder, **config) -> EngineOptions:
    config = {"method": "ngram", "num_speculative_tokens": 3} | config
    flags = ["--speculative-config", json.dumps(config), "--max-model-len", "256", "--num-threads", "1"]
    return engine_options(build_parser().parse_args(["serve", str(folder), *flags]))


def test_a_model_without_a_head_is_served_with_look_up(headless):
    engine = start_engine(options(headless, prompt_lookup_max=4, prompt_lookup_min=2))
    assert (engine.ready.num_speculative_tokens, engine.ready.speculation_disabled_reason) == (3, None)
    assert engine.executor.model.head == LookupHead(4, 2)
    tokens, drafted, accepted = run(EngineLoop(engine), REQUESTS[:2])
    plain_engine = start_engine(options(headless, num_speculative_tokens=0))
    assert not plain_engine.executor.head_on
    assert run(EngineLoop(plain_engine), REQUESTS[:2])[0] == tokens
    assert 0 < accepted < drafted


def test_a_model_with_a_head_can_be_served_with_look_up(tmp_path):
    engine = start_engine(options(build_tiny(tmp_path, "dense")))
    assert engine.executor.model.head == LookupHead(5, 5)


@pytest.mark.parametrize(
    ("bounds", "wanted"),
    [((None, None), (5, 5)), ((4, None), (4, 4)), ((None, 2), (2, 2)), ((4, 2), (4, 2))],
)
def test_a_missing_bound_is_the_other_one(headless, bounds, wanted):
    names = dict(zip(("prompt_lookup_max", "prompt_lookup_min"), bounds, strict=True))
    assert start_engine(options(headless, **names)).executor.model.head == LookupHead(*wanted)


def test_refuses_bounds_by_name(headless):
    with pytest.raises(OptionError, match="prompt_lookup_min, prompt_lookup_max: want 1 <= min <= max <= 64, got 4, 2"):
        start_engine(options(headless, prompt_lookup_max=2, prompt_lookup_min=4))
    with pytest.raises(OptionError, match="with the method 'ngram' alone"):
        start_engine(EngineOptions(model=str(headless), prompt_lookup_max=3))
    with pytest.raises(OptionError, match="draft_head: want it with the method 'mtp' alone"):
        make_plan(EngineOptions(model="m", speculative_method="ngram", draft_head="h"), open_checkpoint(headless))
    with pytest.raises(SystemExit):
        options(headless, method="mtp", prompt_lookup_max=3)
