"""A whole round of fused kernels, wired as it is served, compiles for a GPU where there is none; and each of them
waits for the one before it before it touches what another writes."""

from __future__ import annotations

import dataclasses
import types
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from pilotfish.engine.checkpoint.dummy import dummy_weights
from pilotfish.engine.checkpoint.nvfp4 import LynnWeight
from pilotfish.engine.config import ModelConfig
from pilotfish.engine.errors import LayoutError
from pilotfish.engine.ledger import tensor_bytes
from pilotfish.engine.model.build import CacheSizes, build_model
from pilotfish.engine.round import cuda_table
from pilotfish.engine.round.batch_state import BatchState
from pilotfish.engine.round.executor import FINISH, PLAIN, VERIFY, WHOLE, make_executor
from pilotfish.engine.round.shapes import Shape
from pilotfish.spec.slots import EVERYTHING, FILTERED
from tests.support.compiled import Code, compiling
from tests.support.dependent_launch import Waits, argument_names
from tests.support.kernel_references import dequantized
from tests.support.launches import launches_of
from tests.support.rounds import CPU

DEMO = Path(__file__).parents[4] / "demo" / "model"
LAUNCHES = {
    *("_embed_rows_kernel", "_add_norm_kernel", "_pair_norm_kernel", "_route_kernel", "_choose_kernel"),
    *("_accept_commit_kernel", "_rows_kernel", "experts_kernel", "combine_kernel", "plan_kernel", "items_kernel"),
    *("merge_kernel", "_steps_kernel", "_finish_kernel"),
}


EARLY = {
    *("data", "block_scale", "place", "number", "scale", "norm_scale", "embedding_scale", "hidden_scale", "qk_norm"),
    *("gate_norm", "decay_rate", "dt_bias", "inv_freq", "plain_data", "plain_place", "plain_number"),
    "slots",  # written by copies from the host alone, which are in no chain
}
"""Arguments that no kernel of a round writes."""
BEFORE = {"counts", "history", "pending", "conv_weight", "state"}
"""Arguments of GatedDeltaNet's kernels that nothing between a round's first kernels and theirs writes."""
OWN = {("st", frozenset({"state"}))}
"""What a program of GatedDeltaNet's first kernel stores ahead of its wait: cells that nothing else of a round reads or
writes."""
SETTLED = {"items", "positions", "cos", "sin", "tables", "k_cache", "v_cache"}
"""Arguments of the trunk's attention that nothing writes so that it would see it, between a round's first kernels and
it: of the caches the window's own cells alone."""


@pytest.fixture(scope="module", params=["nvfp4", "mixed"])
def launched(request):
    """The kernels of a whole round, launch by launch: of 8 rows, and of 24, where experts are listed."""
    config = ModelConfig.load(DEMO)
    model = build_model(
        dummy_weights(config, request.param, CPU), config, CacheSizes(8, 9, 0), torch.bfloat16, CPU, fused=True
    )
    # fewer slots than the model has, as in an audit
    state = BatchState(7, 3, config.vocab_size, CPU)
    rounds = make_executor(model, state, 3, 6, 512, 16)
    with torch.inference_mode(), compiling() as kernels:
        for shape in (Shape(2, 3), Shape(6, 3)):
            rounds._work(rounds._work_of(shape), WHOLE)
    return kernels


@cache
def waits_of(kernel):
    """Both layouts share most kernels."""
    return Waits(kernel)


def test_the_demo_model_s_round(launched):
    names = {kernel.metadata.name for kernel in launched}
    assert names >= LAUNCHES, LAUNCHES - names
    # experts of the second round's 24 rows, and of the drafts' few
    assert names >= {"list_groups_kernel", "listed_kernel"}
    # of the drafts down reads logits, of the first round's 8 rows ids
    read = {name for kernel in launched for _, origin in waits_of(kernel).early for name in origin}
    assert read >= {"logits", "ids", "lists"}
    order = [kernel.metadata.name for kernel in launched]
    assert all(order[at + 1 : at + 3] == ["listed_kernel"] * 2 for at, n in enumerate(order) if n.startswith("list_"))
    assert any("plain_data" in argument_names(kernel) for kernel in launched)
    # twice the launches of eight layers, the head three times, lm_head four times
    assert len(launched) > 200


@pytest.mark.parametrize("arch", [80, 120])
def test_the_round_assembles_for_devices_that_it_has_not_run_on(arch, monkeypatch):
    """ptxas takes each kernel: below 9.0 it has no instruction for programmatic dependent launch."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(arch, 10))
    supported = cuda_table.has_dependent_launch(torch.device("cuda"))
    monkeypatch.setattr(cuda_table, "has_dependent_launch", lambda device: supported)
    config = ModelConfig.load(DEMO)
    model = build_model(
        dummy_weights(config, "mixed", CPU), config, CacheSizes(8, 9, 0), torch.bfloat16, CPU, fused=True
    )
    rounds = make_executor(model, BatchState(7, 3, config.vocab_size, CPU), 3, 6, 512, 16)
    with torch.inference_mode(), compiling(arch) as kernels:
        rounds._work(rounds._work_of(Shape(2, 3)), WHOLE)
    assert {kernel.metadata.name for kernel in kernels} >= LAUNCHES
    assert {kernel.metadata.target.arch for kernel in kernels} == {arch}
    assert {kernel.metadata.launch_pdl for kernel in kernels} == {arch >= 90}


def is_settled(kernel):
    """Whether it is the trunk's attention, which reads SETTLED early: windows of few query rows, others, and programs
    that have nothing to do wait each on their way."""
    return kernel.metadata.name == "items_kernel" and waits_of(kernel).num_waits == 3


def test_no_kernel_touches_what_another_writes_before_it_has_waited(launched):
    for kernel in {kernel.hash: kernel for kernel in launched}.values():
        name, waits, code = kernel.metadata.name, waits_of(kernel), Code(kernel)
        # gate_up waits for the router before down may start: so down may read what the router wrote
        down = name in ("experts_kernel", "listed_kernel") and waits.triggers_early
        allowed = EARLY | ({"logits", "ids", "lists"} if down else set())
        if name in ("_steps_kernel", "_finish_kernel"):
            allowed |= BEFORE | ({"projected"} if name == "_finish_kernel" else set())
        # another way through, with a wait of its own: b and a of GatedDeltaNet; programs of down that write what was
        # chosen; of the trunk's attention two more
        writes = down and any("logits" in origin for _, origin in waits.early)
        ways = 3 if is_settled(kernel) else 1 + ("plain_data" in argument_names(kernel) or writes)
        allowed |= SETTLED if is_settled(kernel) else set()
        assert kernel.metadata.launch_pdl and waits.num_waits == ways and waits.num_triggers == 1, name
        early = waits.early - (OWN if name == "_steps_kernel" else set())
        assert all(op in ("ld", "cp") and origin and origin <= allowed for op, origin in early), (name, early)
        # programs of down that have nothing to do leave at once; the first one's expert is no other's
        assert waits.leaves_early == down, name
        stores = [op for op in ("STG", "ST.", "ATOM", "RED.") if code.before(op, "ACQBULK")]
        assert stores == (["STG"] if name == "_steps_kernel" else []), name


def test_what_is_read_early_is_complete(launched):
    """A kernel runs when the one before it has let it start; where that one had waited, all before it was done."""
    names = [kernel.metadata.name for kernel in launched]
    waited_first = {name for kernel, name in zip(launched, names, strict=True) if not waits_of(kernel).triggers_early}
    # the round before, for the first linear layer of the round and for all after it
    rounds = [place for place, name in enumerate(names) if name == "_embed_rows_kernel"]
    assert len(rounds) == 2 and "_embed_rows_kernel" in waited_first
    assert "_steps_kernel" not in names[: rounds[0]] and "_steps_kernel" not in names[rounds[1] - 1 : rounds[1]]
    # a layer's projection, for its second launch
    assert "_steps_kernel" in waited_first
    assert all(names[place - 1] == "_steps_kernel" for place, name in enumerate(names) if name == "_finish_kernel")
    # the trunk's plan, for its attention; a head's is read behind the wait
    settled = [place for place, kernel in enumerate(launched) if is_settled(kernel)]
    assert settled and len(settled) < names.count("items_kernel")
    for place in settled:
        plan = max(before for before in range(place) if names[before] == "plan_kernel")
        assert "_embed_rows_kernel" in names[plan:place]


def test_a_kernel_without_its_wait_is_found(launched):
    kernel = next(kernel for kernel in launched if kernel.metadata.name == "_add_norm_kernel")
    wait = "griddepcontrol.wait;"
    ptx = kernel.asm["ptx"]
    assert ptx.count(wait) == 1
    planted = {
        "no wait": ptx.replace(wait, ""),
        "after the stores": ptx.replace(wait, "").replace("ret;", wait + "ret;"),
        "on one way": ptx.replace(wait, "@%p1 bra $L__AFTER;\n" + wait + "\n$L__AFTER:\n"),
    }
    for name, faulty in planted.items():
        waits = Waits(types.SimpleNamespace(asm={"ptx": faulty}, src=kernel.src))
        assert {"x", "h_out"} <= {argument for op, origin in waits.early for argument in origin}, name
        assert ("st", frozenset(["h_out"])) in waits.early, name


@pytest.mark.parametrize(
    ("blocks", "dense", "depth", "launches"),
    [(10, False, 0, 379), (10, False, 3, 466), (16, True, 0, 531), (16, True, 3, 614)],
    ids=["35B-A3B k=0", "35B-A3B k=3", "27B k=0", "27B k=3"],
)
def test_launches_of_a_round(monkeypatch, blocks, dense, depth, launches):
    """As docs/kernels.md has them: of models with the layers of these, with filters; and no operator but kernels."""
    layers = ("linear_attention", "linear_attention", "linear_attention", "full_attention") * blocks
    change = {"num_experts": 0, "intermediate_size": 512} if dense else {}
    config = dataclasses.replace(ModelConfig.load(DEMO), num_hidden_layers=len(layers), layer_types=layers, **change)
    model = build_model(
        dummy_weights(config, "nvfp4", CPU), config, CacheSizes(8, 3, 0), torch.bfloat16, CPU, fused=True
    )
    rounds = make_executor(model, BatchState(3, 3, config.vocab_size, CPU), 3, 2, 512, 16)
    names, operators = [], []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            aliases = [returned.alias_info for returned in function._schema.returns]
            if not all(alias is not None and not alias.is_write for alias in aliases):
                operators.append(str(function))
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: names.append(self.fn.__name__))
    with torch.inference_mode(), Watch():
        rounds._work(rounds._work_of(Shape(1, depth)), WHOLE)
    assert len(names) == launches and not operators


def test_a_tied_embedding_is_held_once():
    config = ModelConfig.load(DEMO)
    weights = dummy_weights(config, "nvfp4", CPU)
    matrix = weights["model.embed_tokens.weight"]
    model = build_model(weights, config, CacheSizes(8, 3, 0), torch.bfloat16, CPU, fused=True)
    lm_head = model.trunk.lm_head
    assert config.tie_word_embeddings and lm_head.num_bytes < 1.01 * matrix.nbytes
    assert tensor_bytes([model.trunk.embedding, lm_head]) == lm_head.num_bytes
    tokens = torch.tensor([[0, 5], [config.vocab_size - 1, 17]])
    assert torch.equal(model.trunk.embedding[tokens].float(), matrix[tokens].float())
    assert torch.equal(dequantized(lm_head), matrix.float())


@pytest.mark.parametrize(
    ("change", "words"),
    [({"head_dim": 48}, "head_dim: the GPU kernels want"), ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim")],
)
def test_sizes_that_kernels_do_not_hold_are_named(change, words):
    config = dataclasses.replace(ModelConfig.load(DEMO), **change)
    with pytest.raises(LayoutError, match=words):
        build_model({}, config, CacheSizes(8, 3, 0), torch.bfloat16, CPU, fused=True)


def test_weights_that_kernels_do_not_hold_are_named():
    config = ModelConfig.load(DEMO)
    weights = dummy_weights(config, "nvfp4", CPU)
    name = "model.layers.0.linear_attn.out_proj.weight"
    packed = weights[name]
    weights[name] = LynnWeight(packed.packed, packed.scale.half(), 1.0)
    with pytest.raises(LayoutError, match=r"e4m3 scales.*--kernels torch"):
        build_model(weights, config, CacheSizes(8, 3, 0), torch.bfloat16, CPU, fused=True)


def test_all_that_a_batch_may_launch_is_compiled_before_any(monkeypatch):
    """Products for 9 to 16 rows are kernels of their own: neither a sequence alone nor eight have them compiled."""
    config = ModelConfig.load(DEMO)
    model = build_model(
        dummy_weights(config, "nvfp4", CPU), config, CacheSizes(8, 9, 0), torch.bfloat16, CPU, fused=True
    )
    rounds = make_executor(model, BatchState(9, 3, config.vocab_size, CPU), 3, 8, 512, 16)
    # compiled for a device that is not there
    rounds.ops.on_device = True

    def compiled(shapes=None):
        found = []
        monkeypatch.setattr(cuda_table, "compile_all", lambda launch, load: found.extend(launches_of(launch)))
        rounds.compile(shapes)
        return {launch.hash for launch in found}

    def launched(work):
        return {launch.hash for launch in launches_of(work)}

    everything = compiled()
    body = rounds.body
    for depth, count, part in product((0, 3), range(1, 9), (WHOLE, PLAIN, VERIFY, FINISH)):
        shape = rounds.shapes.fit(count, depth)
        assert shape is not None
        assert launched(lambda s=shape, p=part: rounds._work(rounds._work_of(s), p)) <= everything, (shape, part)
    # what follows a prompt: its first token, its last pair and the first drafts
    for flags in (EVERYTHING, EVERYTHING & ~FILTERED):
        assert launched(lambda f=flags: body.choose_first(3, f)) <= everything
        assert launched(lambda f=flags: body.start_head(3, f)) <= everything
    ends = compiled([Shape(1, 3), Shape(8, 3)])
    missing = [
        launch.kernel
        for launch in launches_of(lambda: rounds._work(rounds._work_of(Shape(3, 3)), WHOLE))
        if launch.hash not in ends
    ]
    assert "linear._rows_kernel" in missing
