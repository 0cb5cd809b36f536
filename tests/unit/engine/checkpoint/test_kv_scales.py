"""Scales that a checkpoint brings for an FP8 key-value cache: under either name, and refused where one number a layer
cannot stand for them. Without FP8 they are left alone."""

import pytest
import torch
from safetensors.torch import save_file

from pilotfish.engine.checkpoint.kv_scales import load_kv_scales
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.checkpoint.sidecar import attach_head
from pilotfish.engine.errors import CheckpointError, LayoutError
from pilotfish.engine.options import EngineOptions
from pilotfish.engine.plan import make_plan
from pilotfish.engine.start import start_engine

TRUNK, HEAD = "model.layers.3.self_attn", "mtp.layers.0.self_attn"
CT = {f"{TRUNK}.k_scale": torch.tensor([0.25]), f"{TRUNK}.v_scale": torch.tensor([3.0])}
MODELOPT = {f"{TRUNK}.k_proj.k_scale": torch.tensor(0.25), f"{TRUNK}.v_proj.v_scale": torch.tensor(3.0)}


def scales_of(draft, tensors):
    made = draft("dense")
    made.tensors |= tensors
    return load_kv_scales(open_checkpoint(made.write()))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("tensors", (CT, MODELOPT), ids=("compressed-tensors", "ModelOpt"))
def test_both_spellings_are_read(draft, tensors, dtype):
    assert scales_of(draft, {name: value.to(dtype) for name, value in tensors.items()}) == {TRUNK: (0.25, 3.0)}


def test_a_wrapper_s_names_and_the_head_s_too(draft):
    tensors = {name.replace("model.", "model.language_model."): value for name, value in CT.items()}
    tensors |= {f"{HEAD}.k_scale": torch.tensor(0.5), f"{HEAD}.v_scale": torch.tensor(2.0)}
    assert scales_of(draft, tensors) == {TRUNK: (0.25, 3.0), HEAD: (0.5, 2.0)}


def test_a_query_s_scale_and_rope_tables_are_not_of_the_cache(draft):
    others = {f"{TRUNK}.q_scale": torch.tensor(0.5), f"{TRUNK}.rotary_emb.inv_freq": torch.ones(4)}
    assert scales_of(draft, others) == {}


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        ({f"{TRUNK}.k_scale": torch.ones(2)}, LayoutError, r"want one scale for a layer's KV cache, got F32 \[2\]"),
        (CT | {f"{TRUNK}.k_zero_point": torch.zeros(1)}, LayoutError, "k_zero_point: want .* without zero points"),
        (CT | MODELOPT, LayoutError, f"want one [kv]_scale for {TRUNK}, got two"),
        ({f"{TRUNK}.v_scale": torch.ones(1)}, LayoutError, "want k_scale and v_scale, got v_scale alone"),
        (CT | {f"{TRUNK}.k_scale": torch.zeros(1)}, CheckpointError, "want a finite scale above 0, got 0.0"),
        (CT | {f"{TRUNK}.v_scale": torch.tensor([float("nan")])}, CheckpointError, "finite scale above 0, got nan"),
    ],
)
def test_what_is_no_scale_of_a_layer_is_named(draft, tensors, error, words):
    made = draft("dense")
    made.tensors |= tensors
    folder = made.write()
    options = {"model": str(folder), "device": "cpu", "dtype": "float32"}
    assert make_plan(EngineOptions(**options), open_checkpoint(folder)).kv_scales == {}
    with pytest.raises(error, match=words):
        make_plan(EngineOptions(**options, kv_cache_dtype="fp8"), open_checkpoint(folder))


def test_an_attached_head_does_not_get_its_predecessor_s_scales(draft, tmp_path):
    made = draft("dense")
    head = {name: tensor for name, tensor in made.tensors.items() if name.startswith("mtp.")}
    made.tensors |= CT | {f"{HEAD}.k_scale": torch.tensor(0.5), f"{HEAD}.v_scale": torch.tensor(2.0)}
    save_file(head, tmp_path / "head.safetensors")
    checkpoint = attach_head(open_checkpoint(made.write()), tmp_path / "head.safetensors")
    assert load_kv_scales(checkpoint) == {TRUNK: (0.25, 3.0)}


@pytest.mark.parametrize("name", ("fp8", "auto"))
def test_they_reach_the_caches_of_their_layers_alone(draft, name, caplog):
    caplog.set_level("INFO")
    made = draft("dense")
    made.tensors |= CT
    engine = start_engine(
        EngineOptions(model=str(made.write()), device="cpu", dtype="float32", max_model_len=512, kv_cache_dtype=name)
    )
    model = engine.executor.model
    (cache,) = model.trunk.kv
    wanted = (0.25, 3.0) if name == "fp8" else (1.0, 1.0)
    assert (cache.k_scale, cache.v_scale) == wanted
    assert (model.head.cache.k_scale, model.head.cache.v_scale) == (1.0, 1.0)
    assert ("the checkpoint's scales for 1 layers" in caplog.text) == (name == "fp8")
