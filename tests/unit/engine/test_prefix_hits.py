"""A hit gives a cold run's bits: tokens, log-probabilities, acceptance, every row's tensors, drafts and caches."""

from __future__ import annotations

import msgspec
import pytest
import torch

from pilotfish.engine.link.messages import SamplingParams
from pilotfish.kernels.attention import PAGE
from tests.support.prefixes import LOGPROBS, Prefixes, same
from tests.support.rounds import MODELS, MODES, random_prompt

TEXT = random_prompt(3 * PAGE + 40, seed=11)


def sampling(mode, **fields):
    return msgspec.structs.replace(MODES[mode], **{"max_tokens": 6, "logprobs": 1} | fields)


@pytest.fixture(scope="module", params=[MODELS[1], MODELS[2]], ids=["dense", "moe"])
def two_engines(request):
    return Prefixes(*request.param)


@pytest.fixture(scope="module")
def one_engine():
    return Prefixes()


@pytest.fixture
def engine(one_engine):
    one_engine.loop.scheduler.prefix.forget()
    return one_engine


@pytest.mark.parametrize("mode", ["greedy", "every feature"])
def test_at_every_boundary_and_a_token_around_it(two_engines, mode):
    engine = two_engines
    engine.loop.scheduler.prefix.forget()
    lengths = [boundary + more for boundary in (PAGE, 2 * PAGE, 3 * PAGE) for more in (-1, 0, 1)]
    # each leaves the beginning of the next
    found = [engine.ask(TEXT[:length], sampling(mode)) for length in lengths]
    assert [shown.num_cached for shown in found] == [0, 0, PAGE, PAGE, PAGE, 2 * PAGE, 2 * PAGE, 2 * PAGE, 3 * PAGE]
    for length, shown in zip(lengths, found, strict=True):
        assert same(shown, engine.cold(TEXT[:length], sampling(mode))), length


@pytest.mark.parametrize("boundary", [PAGE, 2 * PAGE])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_prompt_that_was_found_whole(engine, boundary, k):
    prompt = TEXT[:boundary]
    engine.ask(prompt)
    before = engine.num_read
    hit = engine.ask(prompt, speculative_k=k)
    assert hit.num_cached == boundary and engine.num_read == before
    assert same(hit, engine.cold(prompt, speculative_k=k))


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_that_was_found_whole_and_hardly_goes_on(engine, max_tokens):
    prompt, params = TEXT[:PAGE], sampling("sampled", max_tokens=max_tokens)
    engine.ask(prompt)
    hit = engine.ask(prompt, params)
    assert hit.num_cached == PAGE and len(hit.tokens) == max_tokens and hit.outputs[-1].finish_reason == "length"
    assert same(hit, engine.cold(prompt, params))


def test_prompts_that_differ_in_their_last_token_alone(engine):
    """The head's last pair of a page stands in the next one."""
    for length in (PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1):
        one, other = TEXT[:length], [*TEXT[: length - 1], (TEXT[length - 1] + 1) % 320]
        engine.ask(one)
        hit = engine.ask(other)
        assert hit.num_cached == (length - 1) // PAGE * PAGE
        assert same(hit, engine.cold(other))
        assert same(engine.ask(one), engine.cold(one))


def test_another_is_read_between(engine):
    one, other = TEXT[: 2 * PAGE + 9], random_prompt(2 * PAGE + 30, seed=12)
    cold = engine.cold(one)
    assert [engine.ask(prompt).num_cached for prompt in (one, other)] == [0, 0]
    again = engine.ask(one)
    assert again.num_cached == 2 * PAGE and same(again, cold)


def test_a_conversation_goes_on_from_what_was_read_never_from_what_was_written(engine):
    prompt = TEXT[: PAGE - 20]
    for _ in range(2):
        before = len(prompt)
        shown = engine.ask(prompt, sampling("sampled", max_tokens=40))
        prompt = [*prompt, *shown.tokens, *random_prompt(PAGE - 50, seed=before)]
        hit = engine.ask(prompt)
        assert hit.num_cached == before // PAGE * PAGE
        assert same(hit, engine.cold(prompt))


def test_where_prompts_part(engine):
    engine.ask(TEXT)
    forks = [[*TEXT[: PAGE + 50], *random_prompt(PAGE, seed)] for seed in (1, 2, 3)]
    found = [engine.ask(fork) for fork in forks]
    assert [shown.num_cached for shown in found] == [0, PAGE, PAGE]
    assert all(same(shown, engine.cold(fork)) for shown, fork in zip(found, forks, strict=True))


def test_given_up_and_read_again():
    engine = Prefixes(num_snapshots=2)
    cold = engine.cold(TEXT)
    for _ in range(2):
        engine.ask(TEXT)
        for seed in range(6):
            engine.ask(random_prompt(PAGE + 3, seed=100 + seed), sampling("greedy", max_tokens=0))
        again = engine.ask(TEXT)
        assert again.num_cached == 0 and same(again, cold)
    again = engine.ask(TEXT)
    assert again.num_cached == 3 * PAGE and same(again, cold)


def test_an_aborted_prompt_leaves_its_chunks(engine):
    name = engine.submit(TEXT)
    engine.step()
    engine.step()
    engine.loop.abort(name)
    engine.run()
    hit = engine.ask(TEXT)
    assert hit.num_cached == 2 * PAGE and same(hit, engine.cold(TEXT))


def test_another_salt(engine):
    engine.ask(TEXT, cache_salt="one")
    assert engine.ask(TEXT, cache_salt="other").num_cached == 0
    assert engine.ask(TEXT, cache_salt="one").num_cached == 3 * PAGE


def test_the_same_prompt_at_once(engine):
    """As n choices are: the first one reads, and all write what they would have alone."""
    names = [engine.submit(TEXT, sampling("sampled", choice=choice)) for choice in range(4)]
    before = engine.num_read
    engine.run()
    assert engine.num_read - before == len(TEXT) + 3 * (len(TEXT) - 3 * PAGE)
    for choice, name in enumerate(names):
        assert engine.shown[name].said == engine.cold(TEXT, sampling("sampled", choice=choice)).said


def test_log_probabilities_of_the_prompt_itself(engine):
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    engine.ask(TEXT)
    shown = engine.ask(TEXT, params)
    assert shown.num_cached == 0
    assert sum(len(output.prompt_logprobs or ()) for output in shown.outputs) == len(TEXT) - 1


def test_a_state_with_nan_is_not_kept(engine):
    snapshots, save = engine.loop.snapshots, engine.loop.snapshots.save

    def spoil(number, source):
        source[0][1, 0, 3, 5] = float("nan")
        save(number, source)

    engine.loop.snapshots = spoiled = type("Spoiled", (), {"load": snapshots.load, "save": staticmethod(spoil)})()
    assert spoiled is engine.loop.snapshots
    try:
        engine.ask(TEXT[: PAGE + 1])
    finally:
        engine.loop.snapshots = snapshots
    assert engine.ask(TEXT[: PAGE + 1]).num_cached == 0
    hit = engine.ask(TEXT[: PAGE + 1])
    assert hit.num_cached == PAGE and same(hit, engine.cold(TEXT[: PAGE + 1]))


@pytest.mark.parametrize("fixed", [False, True], ids=["plain", "fixed shapes"])
def test_rounds_run_ahead(fixed):
    engine = Prefixes(run_ahead=True, fixed=fixed, num_pages=12, num_snapshots=4)
    if fixed:
        # chunks pause for rounds
        engine.loop.pauses_after = 1
    prompts = [[*TEXT[: PAGE + 10 * number], *random_prompt(PAGE, number)] for number in range(6)]
    cold = [engine.cold(prompt, sampling("sampled", max_tokens=12)).said for prompt in prompts]
    names = [engine.submit(prompt, sampling("sampled", max_tokens=12)) for prompt in prompts]
    engine.run()
    assert [engine.shown[name].said for name in names] == cold
    assert sum(engine.shown[name].num_cached for name in names) > 0


def test_two_chunks_that_are_read_together_leave_what_each_leaves():
    """Snapshots, at the boundary between them too, pages, and what their sequence shows."""
    found = []
    for pairs in (False, True):
        engine = Prefixes("hv_gt_hk", fixed=True)
        assert engine.loop.scheduler.pairs
        engine.loop.scheduler.pairs = pairs
        steps = []
        begin = engine.loop._begin
        engine.loop._begin = lambda step, steps=steps, begin=begin: (steps.append(step.ends), begin(step))[1]
        shown, snapshots = engine.ask(TEXT[: 2 * PAGE + 5]), engine.loop.snapshots
        ends = [PAGE, 2 * PAGE, 2 * PAGE + 5]
        assert steps == ([ends[:2], ends[2:]] if pairs else [[end] for end in ends])
        kept = sorted((node.end, number) for number, node in engine.loop.scheduler.prefix.tree._kept.items())
        states = [part[number] for _, number in kept for part in (snapshots.s, snapshots.conv, snapshots.last_hidden)]
        assert all(state.isfinite().all() for state in states)
        hits = [engine.ask(TEXT[: PAGE * n + 1]) for n in (1, 2)]
        assert [hit.num_cached for hit in hits] == [PAGE, 2 * PAGE]
        found.append(([end for end, _ in kept], states, shown, hits))
    (ends, states, shown, hits), (same_ends, same_states, same_shown, same_hits) = found
    assert ends == same_ends == [PAGE, 2 * PAGE]
    assert all(torch.equal(one, other) for one, other in zip(states, same_states, strict=True))
    assert all(same(one, other) for one, other in zip([shown, *hits], [same_shown, *same_hits], strict=True))


def test_without_room_for_a_snapshot_nothing_is_kept():
    engine = Prefixes(num_snapshots=0)
    assert not engine.loop.ready.prefix_caching and engine.loop.snapshots is None
    assert [engine.ask(TEXT[: PAGE + 1]).num_cached for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("options", [{"depth": 0}, {"kv_dtype": torch.float8_e4m3fn}], ids=["no head", "fp8"])
def test_other_engines(options):
    engine = Prefixes(**options)
    engine.ask(TEXT)
    hit = engine.ask(TEXT, LOGPROBS)
    assert hit.num_cached == 3 * PAGE and same(hit, engine.cold(TEXT))


def test_what_is_kept_stands_in_the_ledger():
    ready, bare = (Prefixes(num_snapshots=number).loop.ready for number in (12, 0))
    assert ready.ledger["snapshots_bytes"] == 12 * ready.snapshot_bytes > 0 == bare.ledger["snapshots_bytes"]
    # as much as a slot's state, and a hidden row
    assert ready.snapshot_bytes == ready.ledger["recurrent_state_bytes"] // (ready.max_num_seqs + 1) + 64 * 4
