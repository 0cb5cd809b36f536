"""Device rounds put together from reference operators: the composition, the batches, the reports, without a GPU."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest
import torch

from pilotfish.draft_heads.lookup.head import LookupHead
from pilotfish.engine.assemble import assemble
from pilotfish.engine.batch_state import BatchState
from pilotfish.engine.cache.tensors import KvCache
from pilotfish.engine.device_round.start import make_rounds
from pilotfish.engine.link.messages import Grammar, SamplingParams, Submit
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.plan import FAST_ROWS, Plan
from pilotfish.kernels.cuda.slots import FILTERED
from tests.support.device_operators import ReferenceOperators
from tests.support.grammars import MadeGrammars
from tests.support.loops import LoopDriver
from tests.support.rounds import CPU, MAX_DEPTH, MODES, make_engine, random_prompt
from tests.support.tiny_models import VOCAB_SIZE

KINDS = ("hv_gt_hk", "moe")


def device_engine(kind, depth, max_num_seqs=4, captured=True, look_up=None, draft_ids=None, kv_dtype=None):
    """An engine whose rounds run over static buffers, in fp32."""
    engine = make_engine(kind, depth=depth, max_num_seqs=max_num_seqs, draft_ids=draft_ids, kv_dtype=kv_dtype)
    model = engine.runner.model
    vocab, seqs, longest = model.config.vocab_size, engine.ready.max_num_seqs, engine.ready.max_model_len
    history_length = 0
    if look_up is not None:
        model, history_length = dataclasses.replace(model, head=look_up), longest + MAX_DEPTH + 1
    state = BatchState(seqs + 1, max(1, depth), vocab, CPU, history_length, complete=True)
    rounds = make_rounds(model, state, depth, seqs, longest, FAST_ROWS, ReferenceOperators(state))
    buffers = rounds.body.buffers
    if model.config.is_moe:
        buffers.experts = dataclasses.replace(buffers.experts, out=buffers.experts.out.float())
    if captured:
        with torch.inference_mode():
            rounds.capture(progress=False)
    return dataclasses.replace(engine, runner=rounds.runner, rounds=rounds)


class DeviceDriver(LoopDriver):
    def __init__(self, kind, depth, *, agreeing=None, seed=0, observed=True, captured=True, **options):
        super().__init__(kind, depth=depth, agreeing=agreeing, seed=seed, **options)
        self.loop = EngineLoop(device_engine(kind, depth, captured=captured, **options))
        if observed:
            self.loop.runner.observers.append(self._observe)


def assert_near_alone(request, tolerance=1e-4):
    """Tokens are those of the eager path; logits too, but for the router's other rounding."""
    reference = request.reference
    assert request.tokens == reference.tokens[: len(request.tokens)]
    for position, row in request.logits.items():
        if position in reference.logits and position < len(reference.prompt) + len(request.tokens) - 1:
            torch.testing.assert_close(row, reference.logits[position], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", (0, 1, 3, MAX_DEPTH))
def test_it_is_the_eager_round(kind, depth):
    driver = DeviceDriver(kind, depth, seed=depth)
    requests = [
        driver.ask("greedy", 21),
        driver.ask("sampled", 40, seed=2, mode="sampled"),
        driver.ask("every feature", 63, seed=3, mode="every feature"),
    ]
    driver.run()
    for request in requests:
        assert_near_alone(request)
        assert request.finish == "length"
    if depth:
        assert sum(output.num_accepted for request in requests for output in request.outputs) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_eager_round_over_fp8_pages(kind):
    """The same tokens; logits but for keys and values that other roundings put on the other side of a step."""
    driver = DeviceDriver(kind, 3, seed=3, kv_dtype=torch.float8_e4m3fn)
    requests = [driver.ask("greedy", 21), driver.ask("sampled", 250, seed=2, mode="sampled")]
    driver.run()
    model = driver.loop.runner.model
    assert {t.dtype for c in (*model.trunk.kv, model.head.cache) for t in (c.k, c.v)} == {torch.float8_e4m3fn}
    for request in requests:
        assert_near_alone(request, 1e-3)
    assert sum(output.num_accepted for request in requests for output in request.outputs) > 0


def assert_idle(driver):
    scheduler = driver.loop.scheduler
    scheduler.check()
    assert not driver.loop.has_work() and not scheduler.retired
    assert scheduler.pages.num_used == scheduler.slots.num_used == 0


@pytest.mark.parametrize("captured", (True, False), ids=("captured", "not captured"))
def test_more_requests_than_places_run_ahead_with_the_head_s_own_drafts(captured):
    """Slots and their page tables are used again and again; the batch is filled up with the null slot."""
    driver = DeviceDriver("moe", 3, agreeing="own", observed=False, captured=captured, max_num_seqs=5)
    requests = [
        driver.ask(str(i), (21, 40, 63)[i % 3], seed=(0, 2, 3)[i % 3], mode=mode, max_tokens=3 + i)
        for i, mode in enumerate(("greedy", "sampled", "every feature") * 3)
    ]
    assert driver.loop.rounds.asynchronous
    driver.run()
    for request in requests:
        assert_near_alone(request)
        assert len(request.tokens) == request.submit.sampling.max_tokens
    assert_idle(driver)
    graphs = {report.stats.graph for report in driver.reports if "wait" in report.stats.phases}
    assert graphs == {captured}
    assert (driver.loop.rounds.num_missed == 0) == captured


@pytest.mark.parametrize("draft_ids", (None, range(0, VOCAB_SIZE, 2)), ids=("all ids", "half of the ids"))
def test_the_head_s_drafts_are_those_of_the_eager_round(draft_ids):
    options = {"agreeing": "own", "draft_ids": draft_ids}
    eager, device = LoopDriver("hv_gt_hk", depth=4, **options), DeviceDriver("hv_gt_hk", 4, **options)
    counts = []
    for driver in (eager, device):
        requests = [driver.ask("a", 21), driver.ask("b", 40, seed=2, mode="sampled", k=2)]
        driver.run()
        counts.append([[(o.num_drafted, o.num_accepted) for o in request.outputs] for request in requests])
    assert counts[0] == counts[1]


def test_each_request_keeps_its_own_k_and_those_with_none_run_without_the_head():
    driver = DeviceDriver("moe", 3, agreeing=3)
    alone = driver.ask("alone", 21, k=0, max_tokens=6)
    driver.run()
    requests = {k: driver.ask(f"k = {k}", 21, k=k, max_tokens=13) for k in (0, 1, None)}
    driver.run()
    assert_near_alone(alone)
    for k, request in requests.items():
        assert_near_alone(request)
        assert max(len(output.token_ids) for output in request.outputs) == (3 if k is None else k) + 1


def test_log_probabilities_are_those_of_the_round_s_own_rows():
    eager = LoopDriver("hv_gt_hk", depth=3, agreeing=2)
    device = DeviceDriver("hv_gt_hk", 3, agreeing=2, observed=False)
    found = []
    for driver in (eager, device):
        request = driver.ask("a", 21, logprobs=2, max_tokens=11)
        driver.ask("b", 40, seed=2, mode="sampled")
        driver.run()
        found.append([entry for output in request.outputs for entry in output.logprobs])
    for wanted, got in zip(*found, strict=True):
        assert got.token_id == wanted.token_id and got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert [i for i, _ in got.top] == [i for i, _ in wanted.top]


def test_a_nan_ends_its_request_alone():
    driver = DeviceDriver("moe", 3, agreeing=1, observed=False)
    good, bad = driver.ask("good", 21), driver.ask("bad", 40, seed=2)
    driver.run(3)
    slot = next(s.slot for s in driver.loop.scheduler.running if s.request_id == "bad")
    driver.loop.runner.model.trunk.state.s[:, slot] = float("nan")
    driver.run()
    assert bad.finish == "error" and bad.last.error_code == "nan"
    assert_near_alone(good)
    assert_idle(driver)


class Multiples:
    """Stands for a grammar: the first five ids are multiples of 3, the others of 4."""

    def __init__(self):
        self.taken, self.error = 0, None

    def mask_rows(self, drafts, bits):
        for row in range(len(drafts) + 1):
            step = 4 if (self.taken + row) >= 5 else 3
            bits[row] = 0
            for token in range(0, VOCAB_SIZE, step):
                bits[row, token // 32] |= np.int64(1 << token % 32).astype(np.int32)

    def advance(self, tokens):
        self.taken += len(tokens)

    def forced(self):
        return []


def test_masks_of_a_grammar_meet_their_rows_and_no_others():
    texts = []
    for driver in (LoopDriver("moe", depth=3, agreeing="own"), DeviceDriver("moe", 3, agreeing="own", observed=False)):
        driver.loop.grammars = MadeGrammars(Multiples)
        plain = driver.ask("plain", 21)
        masked = driver.ask("masked", 40, seed=2, grammar=Grammar(kind="regex", source="x"))
        driver.run()
        assert_near_alone(plain)
        assert all(token % (4 if i >= 5 else 3) == 0 for i, token in enumerate(masked.tokens))
        assert len(masked.tokens) == 20
        texts.append(masked.tokens)
        assert_idle(driver)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("captured", (True, False), ids=("captured", "not captured"))
def test_a_look_up_drafts_in_the_round_what_it_drafts_in_the_eager_one(captured):
    """Two ids are all that may come, so text repeats itself; rounds run ahead, and slots are used again."""
    few = {5: 60.0, 6: 60.0}
    engine = make_engine("hv_gt_hk", depth=4, max_num_seqs=2)
    plan = Plan(CPU, torch.float32, 4, None, 2048, 2, "configured", 12, 64)
    eager = assemble(dataclasses.replace(engine.runner.model, head=LookupHead(4, 2)), plan, 8, 0, 0.0)
    device = device_engine("hv_gt_hk", 4, max_num_seqs=2, captured=captured, look_up=LookupHead(4, 2))
    found = []
    for core in (EngineLoop(eager), EngineLoop(device)):
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
    assert device.rounds.asynchronous and (device.rounds.num_missed == 0) == captured
    assert found[0] == found[1]
    assert sum(accepted for rounds in found[1].values() for _, _, accepted in rounds) > 10


def test_the_heads_that_draft_are_told_apart_at_the_prompt_s_end():
    """The first round has the look-up's drafts already."""
    core = EngineLoop(device_engine("hv_gt_hk", 3, look_up=LookupHead(4, 2)))
    period = random_prompt(9, 1)
    prompt, following = (period * 5)[:40], (period * 5)[40:44]
    sampling = SamplingParams(temperature=0, max_tokens=9, logit_bias={following[0]: 99.0})
    core.submit(Submit(request_id="a", prompt_token_ids=prompt, sampling=sampling))
    core.step()
    state, slot = core.runner.state, core.scheduler.running[0].slot
    assert int(state.num_offered[slot]) == 3 and state.drafts[slot, :3].tolist() == following[1:4]


def test_a_layer_s_scales_reach_its_attention():
    driver = DeviceDriver("moe", 3, captured=False, observed=False, kv_dtype=torch.float8_e4m3fn)
    model, ops, seen = driver.loop.runner.model, driver.loop.rounds.body.ops, []
    plain = model.trunk.kv[0]
    model.trunk.kv[0] = KvCache(plain.k, plain.v, 0.25, 3.0)
    real = ops.attention_window

    def watched(*args):
        given = inspect.signature(real).bind(*args).arguments
        seen.append((given["k_cache"] is plain.k, given["k_scale"], given["v_scale"]))
        real(*args)

    ops.attention_window = watched
    driver.submit("a", random_prompt(9), MODES["greedy"])
    driver.run(4)
    assert set(seen) == {(True, 0.25, 3.0), (False, 1.0, 1.0)}


def test_launches_for_filters_are_left_out_of_rounds_that_have_none():
    """Which graph a batch takes, by what its slots ask for; all of them were captured."""
    driver = DeviceDriver("hv_gt_hk", 3, agreeing="own", observed=False)
    loop, taken, launched = driver.loop, [], []
    loop.grammars = MadeGrammars(Multiples)
    rounds, state = loop.rounds, loop.runner.state
    replay, choose = rounds.graphs.replay, rounds.body.ops.choose

    def watched(key):
        slots = rounds.body.buffers.slots[: key[0].num_sequences].long()
        taken.append((key[1], bool((state.flags[slots] & FILTERED).any())))
        launched.clear()
        replay(key)
        assert set(launched) == ({key[1] != "plain"} if key[1] != "verify" else set())

    rounds.graphs.replay = watched
    rounds.body.ops.choose = lambda *args, **options: (launched.append(options["filters"]), choose(*args, **options))
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
