"""Rounds of fixed shapes, as on a GPU, over the torch table: batches, graphs, reports, running ahead."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

from pilotfish.draft_heads.lookup.head import LookupHead
from pilotfish.engine.assemble import assemble
from pilotfish.engine.cache.tensors import KvCache
from pilotfish.engine.link.messages import Grammar, SamplingParams, Submit
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.plan import Plan
from pilotfish.spec.slots import FILTERED
from tests.support.fixed_shapes import FixedDriver, fixed_engine
from tests.support.grammars import MadeGrammars, Multiples
from tests.support.loops import LoopDriver, assert_seen_alone
from tests.support.rounds import CPU, MAX_DEPTH, MODES, make_engine, random_prompt
from tests.support.tiny_models import VOCAB_SIZE

KINDS = ("hv_gt_hk", "moe")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", (0, 1, 3, MAX_DEPTH))
def test_every_request_is_as_alone(kind, depth):
    driver = FixedDriver(kind, depth, seed=depth)
    requests = [
        driver.ask("greedy", 21),
        driver.ask("sampled", 40, seed=2, mode="sampled"),
        driver.ask("every feature", 63, seed=3, mode="every feature"),
    ]
    driver.run()
    for request in requests:
        assert_seen_alone(request)
        assert request.finish == "length"
    if depth:
        assert sum(output.num_accepted for request in requests for output in request.outputs) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_is_as_alone_over_fp8_pages(kind):
    driver = FixedDriver(kind, 3, seed=3, kv_dtype=torch.float8_e4m3fn)
    requests = [driver.ask("greedy", 21), driver.ask("sampled", 250, seed=2, mode="sampled")]
    driver.run()
    model = driver.loop.executor.model
    assert {t.dtype for c in (*model.trunk.kv, model.head.cache) for t in (c.k, c.v)} == {torch.float8_e4m3fn}
    for request in requests:
        assert_seen_alone(request)
    assert sum(output.num_accepted for request in requests for output in request.outputs) > 0


def assert_idle(driver):
    scheduler = driver.loop.scheduler
    scheduler.check()
    assert not driver.loop.has_work() and not scheduler.retired
    assert scheduler.pages.num_used == scheduler.slots.num_used == 0


@pytest.mark.parametrize("captured", (True, False), ids=("captured", "not captured"))
def test_more_requests_than_places_run_ahead_with_the_head_s_own_drafts(captured):
    """Slots and their page tables are used again and again; the batch is filled up with the null slot."""
    driver = FixedDriver("moe", 3, agreeing="own", observed=False, captured=captured, max_num_seqs=5)
    requests = [
        driver.ask(str(i), (21, 40, 63)[i % 3], seed=(0, 2, 3)[i % 3], mode=mode, max_tokens=3 + i)
        for i, mode in enumerate(("greedy", "sampled", "every feature") * 3)
    ]
    assert driver.loop.executor.asynchronous
    driver.run()
    for request in requests:
        assert_seen_alone(request)
        assert len(request.tokens) == request.submit.sampling.max_tokens
    assert_idle(driver)
    graphs = {report.stats.graph for report in driver.reports if "wait" in report.stats.phases}
    assert graphs == {captured}
    assert (driver.loop.executor.num_missed == 0) == captured


@pytest.mark.parametrize("draft_ids", (None, range(0, VOCAB_SIZE, 2)), ids=("all ids", "half of the ids"))
def test_the_head_s_drafts_are_those_of_rounds_of_any_shape(draft_ids):
    options = {"agreeing": "own", "draft_ids": draft_ids}
    free, fixed = LoopDriver("hv_gt_hk", depth=4, **options), FixedDriver("hv_gt_hk", 4, **options)
    counts = []
    for driver in (free, fixed):
        requests = [driver.ask("a", 21), driver.ask("b", 40, seed=2, mode="sampled", k=2)]
        driver.run()
        counts.append([[(o.num_drafted, o.num_accepted) for o in request.outputs] for request in requests])
    assert counts[0] == counts[1]


def test_each_request_keeps_its_own_k_and_those_with_none_run_without_the_head():
    driver = FixedDriver("moe", 3, agreeing=3)
    alone = driver.ask("alone", 21, k=0, max_tokens=6)
    driver.run()
    requests = {k: driver.ask(f"k = {k}", 21, k=k, max_tokens=13) for k in (0, 1, None)}
    driver.run()
    assert_seen_alone(alone)
    for k, request in requests.items():
        assert_seen_alone(request)
        assert max(len(output.token_ids) for output in request.outputs) == (3 if k is None else k) + 1


def test_log_probabilities_are_those_of_the_round_s_own_rows():
    free = LoopDriver("hv_gt_hk", depth=3, agreeing=2)
    fixed = FixedDriver("hv_gt_hk", 3, agreeing=2, observed=False)
    found = []
    for driver in (free, fixed):
        request = driver.ask("a", 21, logprobs=2, max_tokens=11)
        driver.ask("b", 40, seed=2, mode="sampled")
        driver.run()
        found.append([entry for output in request.outputs for entry in output.logprobs])
    for wanted, got in zip(*found, strict=True):
        assert got.token_id == wanted.token_id and got.logprob == wanted.logprob
        assert [i for i, _ in got.top] == [i for i, _ in wanted.top]


def test_a_nan_ends_its_request_alone():
    driver = FixedDriver("moe", 3, agreeing=1, observed=False)
    good, bad = driver.ask("good", 21), driver.ask("bad", 40, seed=2)
    driver.run(3)
    slot = next(s.slot for s in driver.loop.scheduler.running if s.request_id == "bad")
    driver.loop.executor.model.trunk.state.s[:, slot] = float("nan")
    driver.run()
    assert bad.finish == "error" and bad.last.error_code == "nan"
    assert_seen_alone(good)
    assert_idle(driver)


def test_masks_of_a_grammar_meet_their_rows_and_no_others():
    texts = []
    for driver in (LoopDriver("moe", depth=3, agreeing="own"), FixedDriver("moe", 3, agreeing="own", observed=False)):
        driver.loop.grammars = MadeGrammars(Multiples)
        plain = driver.ask("plain", 21)
        masked = driver.ask("masked", 40, seed=2, grammar=Grammar(kind="regex", source="x"))
        driver.run()
        assert_seen_alone(plain)
        assert all(token % (4 if i >= 5 else 3) == 0 for i, token in enumerate(masked.tokens))
        assert len(masked.tokens) == 20
        texts.append(masked.tokens)
        assert_idle(driver)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("captured", (True, False), ids=("captured", "not captured"))
def test_a_look_up_drafts_what_it_drafts_in_rounds_of_any_shape(captured):
    """Two ids are all that may come, so text repeats itself; rounds run ahead, and slots are used again."""
    few = {5: 60.0, 6: 60.0}
    engine = make_engine("hv_gt_hk", depth=4, max_num_seqs=2)
    plan = Plan(CPU, torch.float32, 4, None, 2048, 2, "configured", 12, 64)
    free = assemble(dataclasses.replace(engine.executor.model, head=LookupHead(4, 2)), plan, 8, 0, 0.0)
    fixed = fixed_engine("hv_gt_hk", 4, max_num_seqs=2, captured=captured, look_up=LookupHead(4, 2))
    found = []
    for core in (EngineLoop(free), EngineLoop(fixed)):
        for i, (mode, k) in enumerate((("greedy", 4), ("sampled", 4), ("every feature", 2), ("greedy", 0))):
            values = {name: getattr(MODES[mode], name) for name in SamplingParams.__struct_fields__}
            sampling = SamplingParams(**values | {"max_tokens": 24 + i, "logit_bias": few, "stop_token_ids": ()})
            prompt = random_prompt(20 + 9 * i, i)
            core.submit(Submit(request_id=str(i), prompt_token_ids=prompt, sampling=sampling, speculative_k=k))
        outputs = {}
        while core.has_work():
            report = core.step()
            for output in report.outputs if report else ():
                assert output.error is None
                counts = (output.token_ids, output.num_drafted, output.num_accepted) if output.token_ids else ()
                outputs.setdefault(output.request_id, []).append(counts)
        core.scheduler.check()
        found.append({name: [counts for counts in rounds if counts] for name, rounds in outputs.items()})
    assert fixed.executor.asynchronous and (fixed.executor.num_missed == 0) == captured
    assert found[0] == found[1]
    assert sum(accepted for rounds in found[1].values() for _, _, accepted in rounds) > 10


def test_the_heads_that_draft_are_told_apart_at_the_prompt_s_end():
    """The first round has the look-up's drafts already."""
    core = EngineLoop(fixed_engine("hv_gt_hk", 3, look_up=LookupHead(4, 2)))
    period = random_prompt(9, 1)
    prompt, following = (period * 5)[:40], (period * 5)[40:44]
    sampling = SamplingParams(temperature=0, max_tokens=9, logit_bias={following[0]: 99.0})
    core.submit(Submit(request_id="a", prompt_token_ids=prompt, sampling=sampling))
    core.step()
    state, slot = core.executor.state, core.scheduler.running[0].slot
    assert int(state.num_offered[slot]) == 3 and state.drafts[slot, :3].tolist() == following[1:4]


def test_a_layer_s_scales_reach_its_attention():
    driver = FixedDriver("moe", 3, captured=False, observed=False, kv_dtype=torch.float8_e4m3fn)
    model, ops, seen = driver.loop.executor.model, driver.loop.executor.body.ops, []
    plain = model.trunk.kv[0]
    model.trunk.kv[0] = KvCache(plain.k, plain.v, 0.25, 3.0)
    real = ops.attention_window

    def watched(*args):
        cache = inspect.signature(real).bind(*args).arguments["cache"]
        seen.append((cache.k is plain.k, cache.k_scale, cache.v_scale))
        real(*args)

    ops.attention_window = watched
    driver.submit("a", random_prompt(9), MODES["greedy"])
    driver.run(4)
    assert set(seen) == {(True, 0.25, 3.0), (False, 1.0, 1.0)}


def test_launches_for_filters_are_left_out_of_rounds_that_have_none():
    """Which graph a batch takes, by what its slots ask for; all of them were captured."""
    driver = FixedDriver("hv_gt_hk", 3, agreeing="own", observed=False)
    loop, taken, launched = driver.loop, [], []
    loop.grammars = MadeGrammars(Multiples)
    rounds, state = loop.executor, loop.executor.state
    replay, choose = rounds.graphs.replay, rounds.body.ops.choose

    def watched(key):
        slots = rounds.body.buffers.slots[: key[0].num_sequences].long()
        taken.append((key[1], bool((state.flags[slots] & FILTERED).any())))
        launched.clear()
        replay(key)
        assert set(launched) == ({key[1] != "plain"} if key[1] != "verify" else set())

    rounds.graphs.replay = watched
    rounds.body.ops.choose = lambda *args, **options: (
        launched.append(bool(args[6] & FILTERED)),
        choose(*args, **options),
    )
    assert rounds.num_graphs == 4 * len(list(rounds.shapes))
    driver.ask("greedy", 21, top_k=5, top_p=0.5)
    driver.ask("sampled", 40, seed=2, temperature=0.9)
    driver.run()
    assert set(taken) == {("plain", False)}
    for name, fields in {"top_k": {"top_k": 5}, "top_p": {"top_p": 0.5}, "min_p": {"min_p": 0.1}}.items():
        taken.clear()
        driver.ask(name, 21, temperature=0.9, max_tokens=8, **fields)
        driver.ask(f"beside {name}", 40, seed=2)
        driver.run()
        assert set(taken) == {("plain", False), ("round", True)}, name
    taken.clear()
    driver.ask("masked", 21, grammar=Grammar(kind="regex", source="x"))
    driver.run()
    assert {part for part, _ in taken} == {"verify", "finish"}
    assert rounds.num_missed == 0
