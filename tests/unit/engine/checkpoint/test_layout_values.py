"""Every layout that is read: a packed checkpoint equals, bit for bit in fp32, the plain one that holds its values."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from pilotfish.engine.checkpoint import fp8
from pilotfish.engine.checkpoint.fp8 import Fp8Weight, per_block
from pilotfish.engine.checkpoint.layouts import Layout
from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.nvfp4 import LynnWeight, NvFp4Weight
from pilotfish.engine.checkpoint.recognise import census, open_checkpoint
from pilotfish.engine.errors import CheckpointError, LayoutError
from pilotfish.engine.model.build import CacheSizes, build_model
from pilotfish.engine.round.prompt import PromptPass
from tests.support.packing import (
    RECIPES,
    Recipe,
    ct_config,
    ct_nvfp4,
    fp8_block,
    fp8_channel,
    fp8_tensor,
    lynn,
    modelopt_nvfp4,
    pack_checkpoint,
)
from tests.support.tiny_models import build_tiny, fuse_experts, split_experts, write_checkpoint

SIZES = {"dense": {"intermediate_size": 288}, "moe": {"shared_expert_intermediate_size": 144}}
"""Rows and columns of several blocks of 128, the last ones cut off."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """config.json and fp32 tensors of each kind."""
    found = {}
    for kind in ("dense", "moe", "vl_moe"):
        folder = build_tiny(tmp_path_factory.mktemp(kind), kind, **SIZES[kind.removeprefix("vl_")])
        found[kind] = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    return found


def packed(sources, kind, recipe, folder):
    config, tensors = sources[kind]
    tensors = fuse_experts(tensors) if recipe.fused_experts else split_experts(tensors)
    return pack_checkpoint(folder, config, tensors, recipe)


def values(weights):
    return {
        name: weight if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float32)
        for name, weight in weights.items()
    }


def read(folder):
    return load_weights(open_checkpoint(folder), progress=False)


def recipe_named(name) -> Recipe:
    return next(recipe for recipe in RECIPES if recipe.name == name)


EACH = [(kind, recipe) for kind in ("dense", "moe") for recipe in RECIPES] + [("vl_moe", r) for r in RECIPES[::2]]


@pytest.mark.parametrize(("kind", "recipe"), EACH, ids=lambda value: getattr(value, "name", value))
def test_packed_weights_equal_a_plain_checkpoint_of_their_values(sources, tmp_path, kind, recipe):
    folder, plain = packed(sources, kind, recipe, tmp_path / "packed")
    wanted = read(write_checkpoint(tmp_path / "plain", sources[kind][0], {"model.safetensors": plain}))
    weights = read(folder)
    got = values(weights)
    assert set(got) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name
    assert any(not isinstance(weight, torch.Tensor) for weight in weights.values())
    for name, weight in weights.items():
        if not isinstance(weight, torch.Tensor):
            assert weight.shape == wanted[name].shape and weight.device == torch.device("cpu"), name
            assert weight.num_bytes < wanted[name].nbytes / 3 or min(weight.shape) == 1, name
            assert torch.equal(weight.to("cpu").dequantize(torch.bfloat16), wanted[name].bfloat16()), name


FORMS = {
    "fp8 block": fp8_block(),
    "fp8 4-D block": fp8_block(".weight_scale", torch.float32, True),
    "fp8 tensor": fp8_tensor(),
    "fp8 channel": fp8_channel(),
    "ct nvfp4": ct_nvfp4,
    "modelopt nvfp4": modelopt_nvfp4(),
    "lynn": lynn,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [range(128, 256), [*range(128, 256), *range(0, 128)], range(64, 192), [3, 1, 1, 255]])
def test_taken_rows_keep_their_values(sources, tmp_path, form, rows):
    config, tensors = sources["dense"]
    recipe = Recipe("one", ((r"layers\.3\.self_attn\.q_proj", FORMS[form]),), lambda names, kept: (None, {}))
    _, plain = pack_checkpoint(tmp_path, config, tensors, recipe)
    weight = direct(form, tensors["model.layers.3.self_attn.q_proj.weight"])
    taken = weight.take_rows(torch.tensor(list(rows)))
    assert torch.equal(taken.dequantize(torch.float32), plain["model.layers.3.self_attn.q_proj.weight"][list(rows)])


def direct(form, matrix):
    parts, _ = FORMS[form](matrix)
    if form == "lynn":
        return LynnWeight(parts[".packed"], parts[".scale"], 1.0)
    if "nvfp4" in form:
        scale = parts.get(".weight_global_scale", parts.get(".weight_scale_2"))
        codes = parts.get(".weight_packed", parts.get(".weight"))
        return NvFp4Weight(codes, parts[".weight_scale"], float(scale), form == "modelopt nvfp4")
    scale = parts.get(".weight_scale", parts.get(".weight_scale_inv"))
    make = {"fp8 tensor": fp8.per_tensor, "fp8 channel": fp8.per_channel}.get(form, fp8.per_block)
    return make(parts[".weight"], scale)


def test_whole_blocks_of_rows_stay_blocks():
    weight = per_block(torch.zeros(384, 256).to(torch.float8_e4m3fn), torch.rand(3, 2))
    assert weight.take_rows(torch.arange(128, 384)).block == (128, 128)
    assert weight.take_rows(torch.arange(64, 192)).block == (1, 128)


def test_parts_of_a_fused_matrix_keep_their_own_scales(sources, tmp_path):
    """Gate and up of one expert differ by 2^10 in size: one scale for both would drown one of them."""
    config, tensors = sources["dense"]
    tensors = dict(tensors)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name] / 1024
    recipe = recipe_named("ModelOpt NVFP4")
    folder, plain = pack_checkpoint(tmp_path, config, tensors, recipe)
    assert torch.equal(values(read(folder))[name], plain[name])
    assert (plain[name] - tensors[name]).abs().max() < tensors[name].abs().max() / 4


@torch.no_grad()
def computed(folder):
    """Hidden states of trunk and head for a text, fp32."""
    checkpoint = open_checkpoint(folder)
    cpu, sizes = torch.device("cpu"), CacheSizes(2, 2, 2)
    model = build_model(load_weights(checkpoint, progress=False), checkpoint.config, sizes, torch.float32, cpu)
    tokens = torch.arange(3, 23)
    model.trunk.state.reset(1)
    prompt = PromptPass(model)
    span = prompt.span(1, 0, len(tokens), [1])
    hidden = prompt.trunk(tokens, span)
    return hidden, prompt.logits(hidden[:8]), prompt.fill(tokens.roll(-1), hidden, span)


MODELS = (
    "compressed-tensors NVFP4, every Linear",
    "FP8 block, BF16 weight_scale_inv",
    "compressed-tensors FP8 per channel",
    "ModelOpt MIXED_PRECISION",
    "lynn-engine native",
)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_model_of_packed_weights_computes_what_one_of_their_values_does(sources, tmp_path, kind, name):
    folder, plain = packed(sources, kind, recipe_named(name), tmp_path / "packed")
    wanted = computed(write_checkpoint(tmp_path / "plain", sources[kind][0], {"model.safetensors": plain}))
    for got, values in zip(computed(folder), wanted, strict=True):
        assert got.isfinite().all() and torch.equal(got, values)


def without_experts(tensors, layer, kept):
    """The first `kept` experts of a layer, its router's rows with them."""
    names = [
        f"model.layers.{layer}.mlp.{name}" for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    ]
    return tensors | {name: tensors[name][:kept].clone() for name in names}


@pytest.mark.parametrize("packs", [True, False], ids=["packed", "plain"])
def test_layers_may_have_fewer_experts_in_lynn_engine_s_folders(sources, tmp_path, packs):
    config, tensors = sources["moe"]
    tensors = without_experts(without_experts(fuse_experts(tensors), 1, 5), 3, 2)
    recipe = recipe_named("lynn-engine native")
    folder, plain = pack_checkpoint(tmp_path / "packed", config, tensors, recipe)
    if not packs:
        folder = write_checkpoint(tmp_path / "plain", config, {"model.safetensors": plain})
        with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.\S+: want shape \[8, .*, got \[5, "):
            open_checkpoint(folder)
        (folder / "lynn_engine_variable_expert_spec.json").write_text("{}")
    weights = read(folder)
    for layer, count in enumerate((8, 5, 8, 2)):
        assert weights[f"model.layers.{layer}.mlp.gate.weight"].shape == (count, 64)
        assert f"model.layers.{layer}.mlp.experts.{count - 1}.down_proj.weight" in weights
        assert f"model.layers.{layer}.mlp.experts.{count}.down_proj.weight" not in weights
    assert all(rows.isfinite().all() for rows in computed(folder))


def test_a_layer_needs_as_many_experts_as_a_token_uses(sources, tmp_path):
    config, tensors = sources["moe"]
    tensors = without_experts(fuse_experts(tensors), 1, 1)
    folder, _ = pack_checkpoint(tmp_path, config, tensors, recipe_named("lynn-engine native"))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.gate: want at least num_experts_per_tok 2 .* got 1"):
        open_checkpoint(folder)


@pytest.mark.parametrize("trunk", ["ModelOpt NVFP4", "FP8 block, BF16 weight_scale_inv", None])
@pytest.mark.parametrize("head", [fp8_block(), fp8_tensor(), fp8_channel(), modelopt_nvfp4(), ct_nvfp4, None])
def test_trunk_and_head_are_decided_apart(sources, tmp_path, trunk, head):
    """A head in any layout beside a trunk in any other: the config speaks of the trunk alone."""
    config, tensors = sources["moe"]
    tensors = split_experts(tensors)
    forms = () if head is None else ((r"^mtp\..*(_proj|fc)$", head),)
    if trunk is not None:
        forms += tuple((rf"^model\..*{pattern}", form) for pattern, form in recipe_named(trunk).forms)
    make = recipe_named(trunk).config if trunk else lambda names, kept: (None, {})
    folder, plain = pack_checkpoint(tmp_path, config, tensors, Recipe("apart", forms, make))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.has_mtp
    assert checkpoint.modules["mtp.fc"].layout is not Layout.PLAIN or head is None
    got = values(load_weights(checkpoint, progress=False))
    assert all(torch.equal(got[name], plain[name]) for name in plain)


def test_fp8_packs_may_leave_lm_head_out_of_their_list(sources, tmp_path):
    folder, _ = packed(sources, "dense", recipe_named("FP8 block, BF16 weight_scale_inv"), tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["modules_to_not_convert"].remove("lm_head")
    config["quantization_config"]["modules_to_not_convert"].remove("lm_head")
    path.write_text(json.dumps(config))
    assert open_checkpoint(folder).modules["lm_head"].layout is Layout.PLAIN


def test_fp8_packs_need_no_second_config_for_activation_scales(sources, tmp_path):
    folder, _ = packed(sources, "dense", recipe_named("ModelOpt FP8"), tmp_path)
    checkpoint = open_checkpoint(folder)
    count = census(checkpoint)["FP8 per tensor"]["modules"]
    assert checkpoint.dropped["activation scales"] == (count, 4 * count)
    assert f"{count} activation scales tensors" in checkpoint.summary()


# Disagreement between headers and config, and damage, are refused.

DISAGREEMENTS = [
    ("FP8 block, BF16 weight_scale_inv", ct_config("nvfp4"), "stored as Qwen/DeepSeek FP8 block"),
    ("ModelOpt NVFP4", ct_config("nvfp4"), "stored as ModelOpt NVFP4"),
    ("compressed-tensors NVFP4", ct_config("channel"), "stored as compressed-tensors NVFP4"),
    ("compressed-tensors FP8 per channel", ct_config("block"), "stored as FP8 per output channel"),
    ("compressed-tensors FP8 block", ct_config("channel"), "stored as .*FP8"),
]


@pytest.mark.parametrize(("name", "config", "message"), DISAGREEMENTS)
def test_another_layout_than_declared_is_refused(sources, tmp_path, name, config, message):
    recipe = Recipe(name, recipe_named(name).forms, config)
    folder, _ = packed(sources, "dense", recipe, tmp_path)
    with pytest.raises(LayoutError, match=rf"^model\.layers\.0\.\S+: {message}.*, but config.json has it as"):
        open_checkpoint(folder)


def test_modelopt_homes_must_agree(sources, tmp_path):
    folder, _ = packed(sources, "dense", recipe_named("ModelOpt NVFP4"), tmp_path)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(LayoutError, match=r"quant_algo is 'NVFP4', in hf_quant_config.json it is 'FP8'"):
        open_checkpoint(folder)


@pytest.mark.parametrize("file", ["hf_quant_config.json", "lynn_quant_manifest.json"])
def test_a_second_writers_mark_is_refused(sources, tmp_path, file):
    folder, _ = packed(sources, "dense", recipe_named("compressed-tensors NVFP4"), tmp_path)
    mark = {"quantization": {"quant_algo": "NVFP4"}, "schema_version": "lynn-variable-nvfp4-pack-v1"}
    (folder / file).write_text(json.dumps(mark | {"quantized_tensors": {}}))
    with pytest.raises(LayoutError, match=rf"{file} marks the checkpoint as .*quant_method is 'compressed-tensors'"):
        open_checkpoint(folder)


def test_lynn_manifest_must_name_what_is_packed(sources, tmp_path):
    folder, _ = packed(sources, "dense", recipe_named("lynn-engine native"), tmp_path)
    path = folder / "lynn_quant_manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["quantized_tensors"]["model.layers.1.mlp.up_proj.weight"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(LayoutError, match=r"model\.layers\.1\.mlp\.up_proj: stored as Lynn.*leaves it unquantised"):
        open_checkpoint(folder)


def test_lynn_packs_folded_for_another_path_are_refused(sources, tmp_path):
    folder, _ = packed(sources, "dense", recipe_named("lynn-engine native"), tmp_path)
    path = folder / "lynn_quant_manifest.json"
    contract = {"runtime_contract": {"inference_path_required": "w4a8", "fallback_path_allowed": False}}
    path.write_text(json.dumps(json.loads(path.read_text()) | contract))
    with pytest.raises(LayoutError, match="folded for the 'w4a8' path"):
        open_checkpoint(folder)


def test_lynn_is_refused_on_a_gpu_by_name(sources, tmp_path):
    folder, _ = packed(sources, "dense", recipe_named("lynn-engine native"), tmp_path)
    with pytest.raises(LayoutError, match=r"model\.layers\.0\..*: stored as Lynn native NVFP4, .* CPU only"):
        load_weights(open_checkpoint(folder), "cuda", progress=False)


@pytest.mark.parametrize(
    ("name", "suffix", "message"),
    [
        ("FP8 block, BF16 weight_scale_inv", "weight_scale_inv", "want finite scales"),
        ("compressed-tensors FP8 per channel", "weight_scale", "want finite scales"),
        ("ModelOpt FP8", "weight_scale", "want finite scales"),
        ("ModelOpt W4A16_NVFP4", "weight_scale_2", "want a finite factor above 0"),
        ("lynn-engine native", "weight.scale", "want finite scales"),
        ("lynn-engine native", "weight.global_scale", "want a finite factor above 0"),
    ],
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_scales_must_be_numbers_of_one_sign(sources, tmp_path, name, suffix, message, bad):
    folder, _ = packed(sources, "dense", recipe_named(name), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensor = f"model.layers.0.mlp.up_proj.{suffix}"
    tensors[tensor].view(-1)[-1:] = bad
    write_checkpoint(folder, json.loads((folder / "config.json").read_text()), {"model.safetensors": tensors})
    with pytest.raises(CheckpointError, match=f"{tensor}: {message}"):
        read(folder)


# Numbers that the tools themselves give.


def worked_example():
    """model.md 4.9: [2, 32], largest magnitude 2.4 at row 0, column 8; the second group's is 0.5."""
    codes = [0x1, 0xB, 0x0, 0x6, 0xF, 0x2, 0x4, 0x9, 0x7, 0xD, 0x3, 0x0, 0x9, 0x6, 0xC, 0x1]
    packed_row = torch.tensor([[codes[2 * j] | codes[2 * j + 1] << 4 for j in range(8)]], dtype=torch.uint8)
    assert packed_row[0].tolist() == [0xB1, 0x60, 0x2F, 0x94, 0xD7, 0x03, 0x69, 0x1C]
    return packed_row


def test_one_byte_in_three_layouts():
    """Byte 0xB1 with block scale 448: 0.2 and -0.6 (ModelOpt's and compressed-tensors' bytes are the same)."""
    row = worked_example()
    scale = torch.tensor([[0x7E]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    by_ct = NvFp4Weight(row, scale, 1120.0).dequantize()
    by_modelopt = NvFp4Weight(row, scale, 0.000892857, multiplies=True).dequantize()
    by_lynn = LynnWeight(row, torch.tensor([[0.39990234]]).half(), 1.0).dequantize()
    assert by_ct[0, :2].tolist() == pytest.approx([0.2, -0.6], rel=1e-7)
    assert by_modelopt[0, :2].tolist() == pytest.approx([0.2, -0.6], rel=1e-6)
    assert by_lynn[0, :2].tolist() == [0.199951171875, -0.599853515625]


def test_fp8_weight_refuses_parts_that_do_not_fit():
    weight = torch.zeros(130, 200).to(torch.float8_e4m3fn)
    for bad in (
        (weight.float(), torch.ones(2, 2), (128, 128)),
        (weight[0], torch.ones(2, 2), (128, 128)),
        (weight, torch.ones(2, 1), (128, 128)),
        (weight, torch.ones(2, 2).half(), (128, 128)),
        (weight, torch.ones(130, 1), (1, 128)),
    ):
        with pytest.raises(ValueError, match="want"):
            Fp8Weight(*bad)
