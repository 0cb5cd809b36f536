"""What the requests at the start are seen to run, and that they leave nothing behind."""

import dataclasses

import pytest
import torch

from pilotfish.engine.check import probe
from pilotfish.engine.link.messages import SamplingParams, Submit
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.options import EngineOptions
from pilotfish.engine.round.executor import RoundExecutor
from pilotfish.engine.start import make_core, start_engine
from pilotfish.kernels import linear
from tests.support.rounds import make_engine
from tests.support.tiny_models import build_tiny

PACKED, PLAIN = "mkldnn::_linear_pointwise bfloat16", "aten::linear {}"
needs_bf16 = pytest.mark.skipif(not linear.cpu_multiplies_bf16(), reason="this CPU has no bf16 products")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    return build_tiny(tmp_path_factory.mktemp("tiny"), "moe")


def options(folder, **fields):
    fields = {"num_speculative_tokens": 2, "max_model_len": 128, "num_threads": 1, "dtype": "float32"} | fields
    return EngineOptions(model=str(folder), **fields)


def parts(engine, head=True):
    layers = [f"layers.{i}" for i in range(engine.ready.execution.num_layers)]
    return {*layers, "lm_head", "prefill", *(["head"] if head else [])}


@pytest.mark.parametrize("k", [0, 2])
def test_every_part_of_the_model_is_seen(folder, k):
    core = make_core(options(folder, num_speculative_tokens=k))
    assert set(core.ready.execution.routes[PLAIN.format("float32")]) == parts(core, head=k > 0)
    assert core.ready.execution.kv_dtype == core.ready.execution.state_dtype == "float32"
    loaded, whole = core.ready.execution.head_weights
    assert loaded == (whole if k else 0) and whole > 10


@needs_bf16
def test_one_layer_on_another_kernel_is_seen(folder):
    """A fallback that no option speaks of: one layer's output product is the library's plain one."""
    engine = start_engine(options(folder, dtype="bfloat16"))
    product = engine.executor.model.trunk.layers[1].mixer.output
    product.packed, product._weights = False, [torch.randn(product.out_features, product.in_features).bfloat16()]
    routes = probe.routes(EngineLoop(engine))
    assert routes[PLAIN.format("bfloat16")] == ["layers.1", "prefill"]
    assert set(routes[PACKED]) == parts(engine)


def test_nothing_is_left_behind(folder):
    """A client's answer is the one of an engine that was never probed, and the pools are whole."""

    def answer(loop):
        sampling = SamplingParams(temperature=0.8, max_tokens=12, seed=3, ignore_eos=True)
        loop.submit(Submit(request_id="r", prompt_token_ids=list(range(5, 40)), sampling=sampling))
        tokens = []
        while loop.has_work():
            for output in loop.step().outputs:
                tokens += output.token_ids
        return tokens

    probed = make_core(options(folder, audit_rate=1.0))
    assert not probed.has_work() and not probed.executor.observers
    assert (probed.scheduler.pages.num_used, probed.scheduler.slots.num_used) == (0, 0)
    engine = dataclasses.replace(start_engine(options(folder)))
    assert answer(probed) == answer(EngineLoop(engine))


@pytest.mark.parametrize(
    ("longest", "chunk", "lengths"),
    [(2048, 64, [16, 64, 80]), (2048, 300, [16, 64, 256, 300, 316]), (90, 64, [16, 64, 80]), (40, 64, [16, 33])],
)
def test_prompts_of_several_lengths_are_read_before_any_client_s(longest, chunk, lengths):
    """The last one in a chunk and its rest, where the context has room for it."""
    loop = EngineLoop(make_engine("moe", depth=2, max_model_len=longest, prefill_chunk=chunk))
    read, prefill = [], loop.executor.prefill

    def seen(slot, table, prompt, start, end, *more):
        read.append((len(prompt), start, end))
        return prefill(slot, table, prompt, start, end, *more)

    loop.executor.prefill = seen
    probe.warm_up(loop)
    assert [length for length, start, _ in read if start == 0] == lengths
    assert all(end - start == min(chunk, length - start) for length, start, end in read)
    assert not loop.has_work()
    loop.scheduler.check()


def test_rounds_without_graphs_are_compiled_before_any_request(folder, monkeypatch):
    done = []
    monkeypatch.setattr(RoundExecutor, "compile", lambda self: done.append("compiled"))
    monkeypatch.setattr(probe, "routes", lambda loop: done.append("asked") or {})
    make_core(options(folder))
    assert done == ["compiled", "asked"]


def test_a_context_too_short_for_a_prompt_is_not_probed(folder):
    assert make_core(options(folder, max_model_len=4)).ready.execution.routes == {}
