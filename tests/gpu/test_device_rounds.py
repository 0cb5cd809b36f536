"""Device rounds on a GPU: the audit over fused kernels, graphs against launches, and no compiling once captured."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

from pilotfish.engine.audit import _parse, audit, make_auditor
from pilotfish.engine.batch_state import BatchState
from pilotfish.engine.bench.measure import random_prompts
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.messages import SamplingParams, Submit, ThinkingBudget
from pilotfish.engine.start import assemble
from pilotfish.kernels.cuda.linear import PackedLinear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEMO = str(Path(__file__).parents[2] / "demo" / "model")
MODES = {
    "greedy": SamplingParams(temperature=0, max_tokens=96, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.9, top_k=40, top_p=0.95, max_tokens=96, ignore_eos=True, seed=5),
}


@pytest.fixture(scope="module", params=["auto", "fp8"])
def auditor(request):
    args = ["--device", "cuda", "--kernels", "fused", "--num-prompts", "4", "--max-tokens", "64", "--max-batch", "16"]
    return make_auditor(_parse([DEMO, *args, "--kv-cache-dtype", request.param]))


def loop_of(auditor, depth, batch, captured=True, pdl=True):
    plan = dataclasses.replace(auditor.plan, depth=depth, max_num_seqs=batch, captured=False)
    loop = EngineLoop(assemble(auditor.model, plan, 64, 0, 0.0))
    loop.rounds.body.ops.use_pdl(pdl)
    if captured:
        loop.rounds.capture(progress=False)
    return loop


def decode(loop, mode, batch, lengths=(5, 130, 40, 64)):
    """The tokens of a batch of random prompts, and how many rounds accepted how many drafts."""
    texts, accepted, graphs = {}, Counter(), Counter()
    for number in range(batch):
        prompt = random_prompts(1, lengths[number % len(lengths)], 8000)[0]
        name = str(number)
        texts[name] = []
        loop.submit(Submit(request_id=name, prompt_token_ids=prompt, sampling=MODES[mode]))
    while loop.has_work():
        report = loop.step()
        for output in report.outputs if report else ():
            assert output.error is None, output.error
            texts[output.request_id] += output.token_ids
            if output.round:
                accepted[output.num_accepted] += 1
        if report and "wait" in report.stats.phases:
            graphs[report.stats.graph] += 1
    return texts, accepted, graphs


def test_an_admission_is_the_cpu_s_and_waits_for_nothing():
    thinking = ThinkingBudget(num_tokens=5, start_token_id=None, end_token_id=2, closing=(4, 2))
    params = SamplingParams(
        temperature=0.7, top_k=7, top_p=0.9, seed=-5, presence_penalty=0.5, logit_bias={2: 1.5, 9: -1.0}, min_tokens=3,
        bad_words_token_ids=((3,), (1, 2, 3)), stop_token_ids=(8, 6), thinking=thinking,
    )  # fmt: skip
    found = []
    for device in ("cpu", "cuda"):
        state = BatchState(5, 4, 500, torch.device(device), history_length=300, complete=True)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for slot, length in ((2, 100), (3, 7)):
                state.admit(slot, list(range(length)), params, length + 40, slot)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        owners = (state, state.bad_sequences, state.thinking)
        values = [value for owner in owners for value in vars(owner).values() if isinstance(value, torch.Tensor)]
        found.append([value.cpu() for value in values])
    assert len(found[0]) == len(found[1]) > 20
    assert all(torch.equal(wanted, got) for wanted, got in zip(*found, strict=True))


@torch.inference_mode()
def test_a_look_up_drafts_in_the_graph_and_changes_no_token():
    config = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    args = ["--device", "cuda", "--kernels", "fused", "--num-prompts", "4", "--max-tokens", "64"]
    auditor = make_auditor(_parse([DEMO, *args, "--speculative-config", config]))
    results = list(audit(auditor, [2, 4], [1, 4]))
    assert [finding for result in results for finding in result.findings] == []
    texts, accepted, graphs = decode(loop_of(auditor, 4, 3), "greedy", 3)
    assert texts == decode(loop_of(auditor, 0, 3), "greedy", 3)[0]
    assert sum(number * count for number, count in accepted.items()) > 0 and set(graphs) == {True}


def test_weights_are_packed(auditor):
    layer = auditor.model.trunk.layers[0]
    assert isinstance(layer.mixer.in_proj.packed, PackedLinear)
    assert isinstance(auditor.model.trunk.layers[3].mixer.qkvg.packed, PackedLinear)


def test_keys_and_values_are_held_in_what_was_asked_for(auditor):
    caches = [*auditor.model.trunk.kv, auditor.model.head.cache]
    assert {t.dtype for cache in caches for t in (cache.k, cache.v)} == {auditor.plan.kv_dtype}


@torch.inference_mode()
def test_tokens_and_bits_do_not_depend_on_k_or_batch(auditor):
    results = list(audit(auditor, [1, 3, 8], [1, 2, 4]))
    assert [finding for result in results for finding in result.findings] == []
    assert all(result.num_rows > 1000 for result in results)


@pytest.fixture(scope="module")
def plain(auditor):
    """What k = 0 writes, one sequence at a time."""
    return cache(lambda mode: decode(loop_of(auditor, 0, 1), mode, 16)[0])


# k = 3 first: what is served
@pytest.mark.parametrize("depth", (3, 1, 8, 2, 5))
@pytest.mark.parametrize("mode", MODES)
@torch.inference_mode()
def test_every_k_and_batch_writes_what_k_0_writes(auditor, plain, mode, depth):
    for batch in (1, 2, 3, 5, 8, 16) if depth == 3 else (1, 5, 16):
        texts, accepted, graphs = decode(loop_of(auditor, depth, batch), mode, 16)
        assert texts == plain(mode), batch
        assert graphs[False] == 0 and graphs[True] > 0
    assert sum(accepted.values()) > 0


@torch.inference_mode()
def test_dependent_launch_and_graphs_change_nothing(auditor):
    texts = [
        decode(loop_of(auditor, 3, 4, captured, pdl), "sampled", 8)[0]
        for captured in (True, False)
        for pdl in (True, False)
    ]
    assert all(text == texts[0] for text in texts)


@torch.inference_mode()
def test_nothing_compiles_once_rounds_are_captured(auditor):
    from pilotfish.kernels.cuda.warm import Compilations

    loop = loop_of(auditor, 3, 4)
    decode(loop, "greedy", 1)
    before = Compilations.now()
    for batch in (1, 2, 3, 4):
        decode(loop, "sampled", batch)
    assert (Compilations.now() - before).compiled == 0
    assert loop.rounds.num_missed == 0
