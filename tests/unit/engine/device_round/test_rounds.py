"""Device rounds put together from reference operators: the composition, the batches, the reports, without a GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from pilotfish.engine.batch_state import BatchState
from pilotfish.engine.device_round.start import make_rounds
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.messages import Grammar
from pilotfish.engine.start import FAST_ROWS
from tests.support.device_operators import ReferenceOperators
from tests.support.loops import LoopDriver
from tests.support.rounds import CPU, MAX_DEPTH, make_engine
from tests.support.tiny_models import VOCAB_SIZE

KINDS = ("hv_gt_hk", "moe")


def device_engine(kind, depth, max_num_seqs=4, captured=True, draft_ids=None, kv_dtype=None):
    """An engine whose rounds run over static buffers, in fp32."""
    engine = make_engine(kind, depth=depth, max_num_seqs=max_num_seqs, draft_ids=draft_ids, kv_dtype=kv_dtype)
    model = engine.runner.model
    vocab, seqs = model.config.vocab_size, engine.ready.max_num_seqs
    state = BatchState(seqs + 1, max(1, depth), vocab, CPU, complete=True)
    rounds = make_rounds(model, state, depth, seqs, engine.ready.max_model_len, FAST_ROWS, ReferenceOperators(state))
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


def assert_near_alone(request):
    """Tokens are those of the eager path; logits too, but for the router's other rounding."""
    reference = request.reference
    assert request.tokens == reference.tokens[: len(request.tokens)]
    for position, row in request.logits.items():
        if position in reference.logits and position < len(reference.prompt) + len(request.tokens) - 1:
            torch.testing.assert_close(row, reference.logits[position], rtol=1e-4, atol=1e-4)


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
        driver.loop._constraint = lambda params: Multiples() if params.grammar else None
        plain = driver.ask("plain", 21)
        masked = driver.ask("masked", 40, seed=2, grammar=Grammar(kind="regex", source="x"))
        driver.run()
        assert_near_alone(plain)
        assert all(token % (4 if i >= 5 else 3) == 0 for i, token in enumerate(masked.tokens))
        assert len(masked.tokens) == 20
        texts.append(masked.tokens)
        assert_idle(driver)
    assert texts[0] == texts[1]
