"""`pilotfish quantize`: values, names, config, resumption and refusals, on tiny models of every kind."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotfish.engine.checkpoint.headers import read_header
from pilotfish.engine.checkpoint.layouts import Layout
from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.nvfp4 import NvFp4Weight, global_scale_for, quantize
from pilotfish.engine.checkpoint.recognise import census, open_checkpoint
from pilotfish.engine.convert import pack as packing
from pilotfish.engine.convert import quantize as command
from pilotfish.engine.convert.calibrate import collect
from pilotfish.engine.convert.fidelity import Fidelity, compare, read_tokens
from pilotfish.engine.convert.pack import together
from pilotfish.engine.convert.quantize import quantize_folder, report_lines
from pilotfish.engine.convert.recipe import Recipe
from pilotfish.engine.errors import CheckpointError, LayoutError, OptionError
from pilotfish.server import cli
from tests.support.packing import RECIPES, pack_checkpoint
from tests.support.tiny_models import KINDS, build_tiny, split_experts, write_tokenizer

FP8 = {recipe.name: recipe for recipe in RECIPES if "FP8" in recipe.name and "NVFP4" not in recipe.name}
DEFAULT = Recipe()


def values(folder):
    weights = load_weights(open_checkpoint(folder), progress=False)
    return weights, {
        name: weight if isinstance(weight, torch.Tensor) else weight.dequantize() for name, weight in weights.items()
    }


def assert_follows(source, out, recipe, loosely=None):
    """Each matrix is nvfp4.quantize of the source's, or its bytes, or FP8 rounded to BF16.

    Those whose names contain `loosely` may be wider, with the same sum with 1.
    """
    stored, wanted = values(source)
    got, _ = values(out)
    assert got.keys() == wanted.keys()
    for name, weight in got.items():
        module = name.removesuffix(".weight")
        if not (recipe.form(module) == "nvfp4" and name != module):
            wide = stored[name] if isinstance(stored[name], torch.Tensor) else wanted[name].bfloat16()
            near = loosely is not None and loosely in name and weight.dtype == torch.float32
            assert torch.equal(weight + 1, wide.float() + 1) if near else torch.equal(weight, wide), name
            continue
        names = together(module) if recipe.shared_scales else (module,)
        amax = torch.stack([wanted[f"{other}.weight"].float().abs().max() for other in names]).max()
        weights = torch.ones(wanted[name].shape[1]) if recipe.search_scales else None
        expected = quantize(wanted[name], global_scale_for(amax), weights)
        assert isinstance(weight, NvFp4Weight), name
        assert weight.global_scale == expected.global_scale, name
        assert torch.equal(weight.packed, expected.packed), name
        assert torch.equal(weight.scale.view(torch.uint8), expected.scale.view(torch.uint8)), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(built, tmp_path, kind):
    source, out = built(kind), tmp_path / "out"
    result = quantize_folder(source, out, DEFAULT, progress=False)
    assert_follows(source, out, DEFAULT)
    assert result.output.has_mtp
    assert result.errors
    assert all(0 < error["relative"] < 0.15 for error in result.errors.values())
    names = {info for file in out.glob("*.safetensors") for info in read_header(file).tensors}
    nested = any(name.startswith("model.language_model.") for name in names)
    assert nested == kind.startswith("vl")


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(attention="bf16"),
        Recipe(lm_head="bf16"),
        Recipe(head="nvfp4"),
        Recipe(attention="bf16", head="nvfp4", shared_scales=False),
        Recipe(head="nvfp4", search_scales=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_recipes(built, tmp_path, kind, recipe):
    out = tmp_path / "out"
    quantize_folder(built(kind), out, recipe, progress=False)
    assert_follows(built(kind), out, recipe)


def test_own_scales_are_plain_quantisation(built, tmp_path):
    quantize_folder(built("dense"), tmp_path / "out", Recipe(shared_scales=False), progress=False)
    _, wanted = values(built("dense"))
    got, _ = values(tmp_path / "out")
    name = "model.layers.0.linear_attn.in_proj_z.weight"
    assert got[name].global_scale == quantize(wanted[name]).global_scale
    assert torch.equal(got[name].packed, quantize(wanted[name]).packed)


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("form", FP8)
def test_fp8_sources(tmp_path, built, kind, form):
    config = json.loads((built(kind) / "config.json").read_text())
    tensors = split_experts(load_file(built(kind) / "model.safetensors"))
    source, _ = pack_checkpoint(tmp_path / "fp8", config, tensors, FP8[form])
    for recipe in (DEFAULT, Recipe(attention="bf16")):
        out = tmp_path / f"out-{recipe.attention}"
        quantize_folder(source, out, recipe, progress=False)
        assert_follows(source, out, recipe)
        assert not (out / "hf_quant_config.json").exists()
        assert not [layout for layout in census(open_checkpoint(out)) if "FP8" in layout]


def test_vision_and_side_files_are_carried_over(draft, tmp_path):
    some = draft("vl")
    head = some.take("mtp.")
    late = some.take("model.language_model.layers.3.")
    source = some.write(late=late, **{"mtp/head": head})
    vision = {name: tensor for name, tensor in some.tensors.items() if "visual" in name}
    assert vision
    for name in ("tokenizer.json", "chat_template.jinja", "pytorch_model.bin", "run.py", "LICENSE"):
        (source / name).write_text("{}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("x")
    out = tmp_path / "out"
    quantize_folder(source, out, DEFAULT, progress=False)
    assert {file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file()} == {
        "LICENSE", "additional_chat_templates/tools.jinja", "chat_template.jinja", "config.json", "late.safetensors",
        "model.safetensors", "model.safetensors.index.json", "mtp-head.safetensors", "quantization_report.json",
        "tokenizer.json",
    }  # fmt: skip
    written = load_file(out / "model.safetensors")
    for name, tensor in vision.items():
        assert torch.equal(written[name], tensor)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {name: file.name for file in out.glob("*.safetensors") for name in read_header(file).tensors}
    assert_follows(source, out, DEFAULT)


def test_config_names_what_stays_plain(built, tmp_path):
    out = tmp_path / "out"
    quantize_folder(built("vl_moe"), out, DEFAULT, progress=False)
    config = json.loads((out / "config.json").read_text())
    declared = config.pop("quantization_config")
    assert config == json.loads((built("vl_moe") / "config.json").read_text())
    # vLLM's output head is no Linear
    assert declared["config_groups"]["group_0"]["targets"] == ["Linear", "re:.*lm_head$"]
    ignored = declared["ignore"]
    assert not [name for name in ignored if name.startswith("re:")]
    layer = "model.language_model.layers.0."
    assert {f"{layer}mlp.gate", f"{layer}mlp.shared_expert_gate", f"{layer}linear_attn.in_proj_a"} <= set(ignored)
    assert {"mtp.fc", "mtp.layers.0.self_attn.q_proj", "mtp.layers.0.mlp.experts.7.up_proj"} <= set(ignored)
    assert any(name.startswith("model.visual.blocks.0.attn.") for name in ignored)
    packed = {name.removesuffix(".weight_packed") for name in read_header(out / "model.safetensors").tensors}
    assert not packed & set(ignored)
    assert f"{layer}mlp.experts.0.gate_proj" in packed
    assert "lm_head" in packed


def test_a_plain_lm_head_is_no_target(built, tmp_path):
    out = tmp_path / "out"
    quantize_folder(built("moe"), out, Recipe(lm_head="bf16"), progress=False)
    declared = json.loads((out / "config.json").read_text())["quantization_config"]
    assert declared["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert "lm_head" in declared["ignore"]


def test_rows_that_are_no_multiple_of_a_group_stay_plain(tmp_path):
    source = build_tiny(tmp_path / "in", "dense", dtype="bfloat16", intermediate_size=88)
    quantize_folder(source, tmp_path / "out", DEFAULT, progress=False)
    got, _ = values(tmp_path / "out")
    assert isinstance(got["model.layers.0.mlp.down_proj.weight"], torch.Tensor)
    assert isinstance(got["model.layers.0.mlp.up_proj.weight"], NvFp4Weight)


def test_large_matrices_go_in_parts(built, tmp_path, monkeypatch):
    quantize_folder(built("dense"), tmp_path / "whole", DEFAULT, progress=False)
    monkeypatch.setattr(packing, "BLOCK", 1)
    quantize_folder(built("dense"), tmp_path / "parts", DEFAULT, progress=False)
    assert same_files(tmp_path / "whole", tmp_path / "parts", but={"quantization_report.json"})


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_compressed_tensors_decompresses_it(built, tmp_path, kind):
    ct = pytest.importorskip("compressed_tensors", reason="compressed-tensors is no dependency")
    from compressed_tensors.compressors import NVFP4PackedCompressor

    out = tmp_path / "out"
    quantize_folder(built(kind), out, DEFAULT, progress=False)
    declared = json.loads((out / "config.json").read_text())["quantization_config"]
    scheme = ct.quantization.QuantizationConfig.model_validate(declared).config_groups["group_0"]
    tensors, (weights, _) = load_file(out / "model.safetensors"), values(out)
    names = [name for name, weight in weights.items() if isinstance(weight, NvFp4Weight)]
    assert len(names) > 20
    for name in names:
        module = name.removesuffix(".weight")
        parts = ("weight_packed", "weight_scale", "weight_global_scale")
        got = NVFP4PackedCompressor.decompress({part: tensors[f"{module}.{part}"] for part in parts}, scheme)["weight"]
        # it divides the scale first and rounds to bf16
        torch.testing.assert_close(got.float(), weights[name].dequantize(), rtol=2**-7, atol=0)


def packed_values(folder):
    """Of every packed matrix, fp32, and its layout."""
    checkpoint = open_checkpoint(folder)
    weights, plain = values(folder)
    return {
        name: (checkpoint.modules[name.removesuffix(".weight")].layout, plain[name])
        for name, weight in weights.items()
        if not isinstance(weight, torch.Tensor)
    }


MIXED = Recipe(attention="fp8", lm_head="fp8", head="fp8")


@pytest.mark.parametrize("kind", ["dense", "moe", "vl_moe"])
def test_fp8_beside_nvfp4_is_within_half_a_step(built, tmp_path, kind):
    out = tmp_path / "out"
    quantize_folder(built(kind), out, MIXED, progress=False)
    _, wanted = values(built(kind))
    found = packed_values(out)
    assert {layout for layout, _ in found.values()} == {Layout.CT_NVFP4, Layout.FP8_CHANNEL}
    for name, (layout, got) in found.items():
        assert layout is (Layout.FP8_CHANNEL if MIXED.form(name.removesuffix(".weight")) == "fp8" else Layout.CT_NVFP4)
        if layout is Layout.FP8_CHANNEL:
            row = wanted[name].abs().amax(1, keepdim=True)
            # e4m3 has three bits after the leading one, and steps of 2^-9 below 2^-6
            half_a_step = torch.maximum(wanted[name].abs() * 2**-4, row / 448 * 2**-10)
            assert bool(((got - wanted[name]).abs() <= half_a_step * 1.001).all()), name
    declared = json.loads((out / "config.json").read_text())["quantization_config"]
    assert declared["format"] == "mixed-precision" and len(declared["config_groups"]) == 2


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_compressed_tensors_takes_the_mixed_form(built, tmp_path, kind):
    """Its own scheme for each module, found by name, and its own decompressor."""
    ct = pytest.importorskip("compressed_tensors", reason="compressed-tensors is no dependency")
    from compressed_tensors.compressors import BaseCompressor

    out = tmp_path / "out"
    quantize_folder(built(kind), out, MIXED, progress=False)
    declared = json.loads((out / "config.json").read_text())["quantization_config"]
    config = ct.quantization.QuantizationConfig.model_validate(declared)
    tensors, ours = load_file(out / "model.safetensors"), packed_values(out)
    for name, (_, wanted) in ours.items():
        module = name.removesuffix(".weight")
        fits = [
            scheme
            for scheme in config.config_groups.values()
            if any(ct.utils.match_name(module, target) for target in scheme.targets)
        ]
        assert len(fits) == 1, module
        parts = {n.removeprefix(f"{module}."): t for n, t in tensors.items() if n.startswith(f"{module}.")}
        got = BaseCompressor.load_from_registry(fits[0].format).decompress(parts, fits[0])["weight"]
        torch.testing.assert_close(got.float(), wanted, rtol=2**-7, atol=0)
    assert not [name for name in config.ignore if f"{name}.weight" in ours]


# Calibration


@pytest.fixture(scope="module")
def calibration():
    return torch.randint(0, 256, (400,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_calibration_lowers_the_error_of_outputs(built, tmp_path, calibration, kind):
    recipe = Recipe(attention="fp8", head="nvfp4")
    result = quantize_folder(built(kind), tmp_path / "out", recipe, progress=False, calibration=calibration)
    assert open_checkpoint(tmp_path / "out").has_mtp
    seen = {name: error for name, error in result.errors.items() if "output" in error}
    assert len(seen) > 0.7 * len(result.errors)
    assert all(error["output"] <= error["output_uncalibrated"] for error in seen.values())
    nvfp4 = [error for name, error in seen.items() if recipe.form(name) == "nvfp4"]
    assert sum(e["output"] for e in nvfp4) < 0.95 * sum(e["output_uncalibrated"] for e in nvfp4)


@pytest.mark.parametrize("recipe", [Recipe(head="nvfp4"), Recipe(attention="fp8", head="fp8")], ids=str)
def test_what_a_text_does_not_reach_is_searched_by_its_weights(built, tmp_path, calibration, recipe):
    plain = quantize_folder(built("moe"), tmp_path / "plain", recipe, progress=False).errors
    few = quantize_folder(built("moe"), tmp_path / "few", recipe, progress=False, calibration=calibration[:15]).errors
    assert not [name for name, error in few.items() if "output" in error and ".experts." in name]
    assert all(few[name]["relative"] <= plain[name]["relative"] for name in plain)
    assert sum(few[name]["relative"] < plain[name]["relative"] for name in plain) > 0.9 * len(plain)


def test_what_calibration_sees_is_what_goes_in(tmp_path, calibration):
    """Against the inputs of transformers' own modules."""
    from transformers import Qwen3_5ForCausalLM

    folder = build_tiny(tmp_path, "dense")
    moments = collect(open_checkpoint(folder), calibration)
    model = Qwen3_5ForCausalLM.from_pretrained(folder).eval()
    inputs = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0][0]}))
    with torch.inference_mode():
        model(torch.tensor([calibration]))
    names = [name for name in inputs if name in moments]
    assert len(names) > 20
    for name in names:
        rows = inputs[name].float()
        assert moments[name].num_rows == len(calibration)
        torch.testing.assert_close(moments[name].importance, rows.square().mean(0), rtol=1e-3, atol=1e-6)
        assert moments[name].largest == pytest.approx(float(rows.abs().max()), rel=1e-3)


def test_modelopts_mixed_form(built, tmp_path, calibration):
    recipe = Recipe(attention="fp8", writer="modelopt")
    with pytest.raises(OptionError, match="--calibrate: want a text"):
        quantize_folder(built("moe"), tmp_path / "out", recipe, progress=False)
    quantize_folder(built("moe"), tmp_path / "out", recipe, progress=False, calibration=calibration)
    quantize_folder(built("moe"), tmp_path / "ct", Recipe(attention="bf16"), progress=False, calibration=calibration)
    ours, by_ct = packed_values(tmp_path / "out"), packed_values(tmp_path / "ct")
    assert {layout for layout, _ in ours.values()} == {Layout.MODELOPT_NVFP4, Layout.FP8_TENSOR}
    for name, (_, wanted) in by_ct.items():
        # a factor in place of a divisor rounds elsewhere
        torch.testing.assert_close(ours[name][1], wanted, rtol=1e-6, atol=0)
    moments = collect(open_checkpoint(built("moe")), calibration)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.3.self_attn.o_proj"
    assert float(tensors[f"{name}.input_scale"]) == pytest.approx(moments[name].largest / 448)
    for home in ("config.json", "hf_quant_config.json"):
        content = json.loads((tmp_path / "out" / home).read_text())
        declared = content.get("quantization_config") or content["quantization"]
        assert declared["quant_algo"] == "MIXED_PRECISION"
        assert declared["quantized_layers"][name] == {"quant_algo": "FP8"}
        experts = declared["quantized_layers"]["model.layers.0.mlp.experts"]
        assert experts == {"quant_algo": "W4A16_NVFP4", "group_size": 16}


def test_modelopt_decodes_it(built, tmp_path, calibration):
    pytest.importorskip("modelopt", reason="nvidia-modelopt is no dependency")
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    recipe = Recipe(attention="fp8", writer="modelopt")
    quantize_folder(built("moe"), tmp_path / "out", recipe, progress=False, calibration=calibration)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, (layout, ours) in packed_values(tmp_path / "out").items():
        scale = tensors[name.replace(".weight", ".weight_scale")]
        if layout is Layout.FP8_TENSOR:
            got = FP8QTensor(ours.shape, torch.float32, tensors[name]).dequantize(torch.float32, scale=scale)
        else:
            scales = {"scale": scale, "double_scale": tensors[f"{name}_scale_2"]}
            packed = NVFP4QTensor(ours.shape, torch.float32, tensors[name])
            got = packed.dequantize(torch.float32, **scales, block_sizes={-1: 16})
        # it multiplies the two scales first
        torch.testing.assert_close(got, ours, rtol=1e-6, atol=0)


# Interruption


def same_files(one, other, but=frozenset()):
    def files(folder):
        return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    left, right = files(one), files(other)
    return {name: data for name, data in left.items() if name not in but} == {
        name: data for name, data in right.items() if name not in but
    }


@pytest.fixture
def sharded(draft):
    some = draft("moe")
    shards = {f"model-{i}": some.take(f"model.layers.{i}.") for i in range(4)}
    return some.write(**shards)


@pytest.mark.parametrize("calls", [0, 3, 40, 90])
def test_an_interrupted_run_goes_on(sharded, tmp_path, monkeypatch, calls):
    whole, out, partial = (tmp_path / name for name in ("whole", "out", "out.partial"))
    quantize_folder(sharded, whole, DEFAULT, progress=False)
    pack, left = command.pack, calls

    def pack_until_killed(*args):
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        return pack(*args)

    with monkeypatch.context() as patch:
        patch.setattr(command, "pack", pack_until_killed)
        with pytest.raises(KeyboardInterrupt):
            quantize_folder(sharded, out, DEFAULT, progress=False)
    assert not out.exists()
    (partial / "model.safetensors.partial").write_bytes(b"half")  # as a killed process leaves it
    finished = {file: file.stat().st_mtime_ns for file in partial.glob("*.safetensors")}
    assert bool(finished) == (calls > 3)
    result = quantize_folder(sharded, out, DEFAULT, progress=False)
    assert same_files(whole, out)
    assert not partial.exists()
    assert all((out / file.name).stat().st_mtime_ns == time for file, time in finished.items())
    assert len(result.errors) == len(json.loads((whole / "quantization_report.json").read_text())["errors"])


def interrupt(source, out, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(command, "_write_rest", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            quantize_folder(source, out, DEFAULT, progress=False)


def test_another_recipe_does_not_go_on(built, tmp_path, monkeypatch):
    out = tmp_path / "out"
    interrupt(built("dense"), out, monkeypatch)
    with pytest.raises(OptionError, match="another source or other options"):
        quantize_folder(built("dense"), out, Recipe(head="nvfp4"), progress=False)
    assert not out.exists()


def test_a_failing_disk_is_reported_and_leaves_no_output(built, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "_write_rest", full)
    with pytest.raises(CheckpointError, match="No space left on device; what is finished stays there"):
        quantize_folder(built("dense"), tmp_path / "out", DEFAULT, progress=False)
    assert not (tmp_path / "out").exists()


# Refusals


def test_refuses_an_output_that_is_there(built, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(OptionError, match="is there already"):
        quantize_folder(built("dense"), tmp_path / "out", DEFAULT, progress=False)


def test_refuses_a_foreign_partial_folder(built, tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine.txt").write_text("x")
    with pytest.raises(OptionError, match="is in the way"):
        quantize_folder(built("dense"), tmp_path / "out", DEFAULT, progress=False)


def test_refuses_a_packed_source(built, tmp_path):
    with pytest.raises(LayoutError, match="already stored as compressed-tensors NVFP4"):
        quantize_folder(built("dense", True), tmp_path / "out", DEFAULT, progress=False)
    assert not list(tmp_path.iterdir())


def test_refuses_a_disk_that_is_too_small(built, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1000))
    with pytest.raises(OptionError, match=r"GB of free space, got 0\.00 GB"):
        quantize_folder(built("dense"), tmp_path / "out", DEFAULT, progress=False)
    assert not (tmp_path / "out").exists()


def test_refuses_values_that_are_not_finite(draft, tmp_path):
    some = draft("dense")
    some.tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = math.inf
    with pytest.raises(CheckpointError, match=r"model.layers.0.mlp.up_proj: want finite values"):
        quantize_folder(some.write(), tmp_path / "out", DEFAULT, progress=False)


def test_a_second_run_waits_for_nobody(built, tmp_path):
    with (
        command._hold(tmp_path / "out.partial", "{}"),
        pytest.raises(OptionError, match="another run is writing it"),
        command._hold(tmp_path / "out.partial", "{}"),
    ):
        pass


# A head from elsewhere


def absolute(head):
    """As MLX and GGUF files hold norms."""
    return {name: tensor.float() + 1 if "norm" in name else tensor for name, tensor in head.items()}


def mlx_experts(head):
    """Three stacked tensors, under the names of MLX's converters."""
    found = {}
    for name, tensor in head.items():
        stem, _, last = name.rpartition(".experts.")
        if last == "gate_up_proj":
            gate, up = tensor.chunk(2, 1)
            found |= {f"{stem}.switch_mlp.gate_proj.weight": gate, f"{stem}.switch_mlp.up_proj.weight": up}
        else:
            found[f"{stem}.switch_mlp.{last}.weight" if stem else name] = tensor
    return found


CONTAINERS = {
    "as released": lambda head: (head, "pt"),
    "single experts": lambda head: (split_experts(head), "pt"),
    "MLX": lambda head: ({f"language_model.{n}": t for n, t in mlx_experts(absolute(head)).items()}, "mlx"),
}


@pytest.mark.parametrize("form", ["bf16", "nvfp4"])
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("kind", ["dense", "vl_moe"])
@pytest.mark.parametrize("own", [False, True])
def test_grafts_a_head(draft, built, tmp_path, kind, container, form, own):
    some = draft(kind)
    head = some.take("mtp.")
    if own:
        some.tensors |= {name: tensor * 2 for name, tensor in head.items()}
    some.text["mtp_num_hidden_layers"] = int(own)
    source = some.write()
    tensors, writer = CONTAINERS[container](head)
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "head.safetensors", {"format": writer})
    out, recipe = tmp_path / "out", Recipe(head=form)
    result = quantize_folder(source, out, recipe, tmp_path / "head.safetensors", progress=False)
    assert (result.output.has_mtp, result.output.mtp_problem) == (True, None)
    assert result.output.config.num_mtp_layers == 1
    # the trunk's head is the base's: the same as if it had never been taken out
    assert_follows(built(kind), out, recipe, loosely="norm")
    names = list(read_header(out / "model-mtp.safetensors").tensors)
    assert names
    assert all(name.startswith("mtp.") for name in names)


def test_grafts_from_a_packed_checkpoint_as_bf16(draft, built, tmp_path):
    some = draft("moe")
    some.take("mtp.")
    source = some.write()
    quantize_folder(source, tmp_path / "out", DEFAULT, built("moe", True), progress=False)
    _, wanted = values(built("moe", True))
    got, _ = values(tmp_path / "out")
    for name, weight in wanted.items():
        if name.startswith("mtp."):
            assert torch.equal(got[name], weight.bfloat16()), name
    with pytest.raises(LayoutError, match="already stored as"):
        quantize_folder(source, tmp_path / "again", Recipe(head="nvfp4"), built("moe", True), progress=False)


def test_grafting_is_in_the_censuses(draft, built, tmp_path, capsys):
    some = draft("dense")
    some.take("mtp.")
    source = some.write()
    assert cli.main(["quantize", str(source), str(tmp_path / "out"), "--graft-head", str(built("dense"))]) == 0
    before, after = capsys.readouterr().out.split("output: ")
    assert "without MTP head" in before
    assert "with MTP head" in after
    assert cli.main(["quantize", str(source), str(tmp_path / "no"), "--graft-head", str(built("moe"))]) == 2
    assert "no head for this model" in capsys.readouterr().err


# The command


def test_command_reports(built, tmp_path, capsys):
    assert cli.main(["quantize", str(built("moe")), str(tmp_path / "out"), "--attention", "bf16"]) == 0
    printed = capsys.readouterr().out
    assert "compressed-tensors NVFP4 (W4A16)" in printed
    assert "experts        mean 0." in printed
    assert cli.main(["quantize", str(built("moe")), str(tmp_path / "out")]) == 2
    assert "is there already" in capsys.readouterr().err


def test_fidelity_is_of_transformers_logits(draft, tmp_path):
    from transformers import Qwen3_5ForCausalLM

    text = "The harbour lies at the mouth of the river. " * 7
    source = build_tiny(tmp_path / "in", "dense")
    write_tokenizer(source)
    quantize_folder(source, tmp_path / "out", DEFAULT, progress=False)
    (tmp_path / "text").write_text(text)
    ids = read_tokens(source, tmp_path / "text", 300)
    found = compare(source, tmp_path / "out", ids)
    assert found.num_tokens == 300  # more than one page
    _, weights = values(tmp_path / "out")
    tokens, logits = torch.tensor([ids]), []
    for changed in ({}, weights):
        model = Qwen3_5ForCausalLM.from_pretrained(source).eval()
        model.load_state_dict({k: v for k, v in changed.items() if not k.startswith("mtp.")}, strict=bool(changed))
        with torch.inference_mode():
            logits.append(model(tokens).logits[0].double().log_softmax(1))
    p, q = logits
    assert found.divergence == pytest.approx(float((p.exp() * (p - q)).sum(1).mean()), rel=1e-3)
    for mine, theirs in ((found.source_perplexity, p), (found.output_perplexity, q)):
        mean = -theirs[:-1].gather(1, tokens[0, 1:, None]).mean()
        assert mine == pytest.approx(float(mean.exp()), rel=1e-3)
    same = compare(source, source, ids[:100])
    assert (same.divergence, same.agreement) == (0, 1)
    assert same.source_acceptance == same.output_acceptance


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "mtp.fc.weight", "model.layers.0.mlp.up_proj.weight"])
def test_values_that_are_not_finite_are_named_wherever_they_lie(draft, tmp_path, name):
    """Also in what would only be copied."""
    spoiled = draft("dense")
    spoiled.tensors[name][3, 3] = float("nan")
    with pytest.raises(CheckpointError, match=f"(NaN or infinite values in {name}|{name[:-7]}: want finite values)"):
        quantize_folder(spoiled.write(), tmp_path / "out", DEFAULT, progress=False)
    assert not (tmp_path / "out").exists()


def test_matrices_of_zeros_are_told(draft, tmp_path):
    empty = draft("dense")
    empty.tensors["mtp.fc.weight"].zero_()
    result = quantize_folder(empty.write(), tmp_path / "out", DEFAULT, progress=False)
    assert "in the source: zeros alone in mtp.fc.weight" in list(report_lines(result))
    assert quantize_folder(draft("dense").write(), tmp_path / "other", DEFAULT, progress=False).zeros is None


@pytest.mark.parametrize(
    ("perplexity", "known"), [(12.0, True), (79.0, True), (80.0, False), (1e300, False), (float("nan"), False)]
)
def test_a_source_that_knows_nothing_is_told(perplexity, known):
    found = Fidelity(10, perplexity, perplexity, 0.0, 1.0, vocab_size=320)
    assert any("THE SOURCE DOES NOT KNOW THIS TEXT" in line for line in found.lines()) is not known


def test_a_source_of_absurd_logits_has_a_perplexity(draft, tmp_path):
    """Whose exponential would be no number any more."""
    absurd = draft("dense")
    absurd.tensors["lm_head.weight"] *= 1e4
    folder = absurd.write()
    write_tokenizer(folder)
    found = compare(folder, folder, list(range(20)))
    assert found.source_perplexity > 1e300
    assert "THE SOURCE DOES NOT KNOW THIS TEXT" in "\n".join(found.lines())


def test_acceptance_is_told_before_and_after_a_graft(tmp_path, capsys):
    """The trunk says each token again, and the grafted head drafts just that."""
    bare, text = build_tiny(tmp_path / "bare", "tied", mtp=False), tmp_path / "text"
    with_head = build_tiny(tmp_path / "with_head", "tied")
    text.write_text("".join(chr(97 + i % 8) for i in range(300)))
    weights = load_file(with_head / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.zero_()
    hidden = weights["mtp.fc.weight"].shape[0]
    # the embedding passes, the hidden state does not
    weights["mtp.fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    for norm in ("model.norm.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight"):
        weights[norm].zero_()
    save_file(weights, with_head / "model.safetensors", metadata={"format": "pt"})
    trunk = {name: tensor for name, tensor in weights.items() if not name.startswith("mtp.")}
    save_file(trunk, bare / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(bare)
    graft = ["--graft-head", str(with_head), "--text", str(text)]
    assert cli.main(["quantize", str(bare), str(tmp_path / "out"), *graft]) == 0
    printed = capsys.readouterr().out
    assert "acceptance at k = 3, greedy, source: no MTP head" in printed
    assert "acceptance at k = 3, greedy, output: 4.000 tokens a round (drafts accepted: 100.0%" in printed


def test_a_text_that_cannot_be_read_is_told_before_the_work(built, draft, tmp_path, capsys):
    (tmp_path / "text").write_text("a")
    source = draft("dense").write()
    run = ["quantize", str(source), str(tmp_path / "out"), "--text"]
    for file, message in (
        ("text", "tokenizer.json does not exist"),
        ("none", "cannot be read"),
        ("text", "2 tokens of it"),
    ):
        assert cli.main([*run, str(tmp_path / file)]) == 2
        assert message in capsys.readouterr().err
        write_tokenizer(source)
    assert not list(tmp_path.glob("out*"))
