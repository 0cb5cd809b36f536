"""`pilotfish quantize --merge-lora`: against plain arithmetic and, where it is installed, against peft's own merge."""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.nvfp4 import NvFp4Weight, quantize
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.convert.quantize import quantize_folder, report_lines
from pilotfish.engine.convert.recipe import Recipe
from pilotfish.engine.errors import CheckpointError, ConfigError, LayoutError
from tests.support.tiny_models import build_tiny

OWN = Recipe(attention="bf16", lm_head="bf16", shared_scales=False)
TARGETS = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_a", "linear_attn.out_proj")


def weights_of(folder):
    return load_weights(open_checkpoint(folder), progress=False)


def write_adapter(folder, shapes, rank=3, extra=None, **config):
    """Random factors for modules as the checkpoint spells them -> [N, K]."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, (rows, columns) in shapes.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * 0.1
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.1
    folder.mkdir()
    save_file(tensors | (extra or {}), folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "bias": "none", "init_lora_weights": True} | config
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return tensors


def shapes_of(source, endings):
    tensors = load_file(source / "model.safetensors")
    return {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in tensors.items()
        if name.removesuffix(".weight").endswith(endings) and not name.startswith("mtp.")
    }


@pytest.mark.parametrize(
    ("config", "scaling"),
    [({}, 2.0), ({"use_rslora": True}, 6 / math.sqrt(3)), ({"alpha_pattern": {"layers.0.linear_attn.out_proj": 9}}, 2)],
)
@pytest.mark.parametrize("kind", ["dense", "vl_moe"])
def test_adds_the_product_before_rounding(built, tmp_path, kind, config, scaling):
    source = built(kind)
    endings = (*TARGETS, "q_proj", "shared_expert.up_proj", "mlp.down_proj", "lm_head")
    shapes = shapes_of(source, endings)
    factors = write_adapter(tmp_path / "adapter", shapes, **config)
    result = quantize_folder(source, tmp_path / "out", OWN, merge_lora=tmp_path / "adapter", progress=False)
    assert result.merged == len(shapes) > 10
    before, after = weights_of(source), weights_of(tmp_path / "out")
    changed = set()
    for name in shapes:
        own = 3 if "alpha_pattern" in config and name.endswith("layers.0.linear_attn.out_proj") else scaling
        a, b = (factors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        key = f"{name.replace('language_model.', '')}.weight"
        wanted = before[key].float() + (b * own) @ a
        got = after[key]
        changed.add(key)
        if isinstance(got, NvFp4Weight):
            assert torch.equal(got.packed, quantize(wanted).packed), name
        else:
            assert torch.equal(got, wanted.bfloat16()), name
    for key in before.keys() - changed:
        if isinstance(after[key], torch.Tensor):
            assert torch.equal(after[key], before[key]), key
        else:
            assert torch.equal(after[key].packed, quantize(before[key]).packed), key


@pytest.mark.filterwarnings("ignore")
def test_merges_as_peft_does(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is no dependency")
    from transformers import AutoModelForCausalLM

    source = build_tiny(tmp_path / "in", "dense")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(source)
    names = ["q_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "out_proj", "down_proj", "lm_head"]
    config = peft.LoraConfig(
        r=4,
        lora_alpha=10,
        target_modules=names,
        init_lora_weights=False,
        rank_pattern={"q_proj": 2},
        alpha_pattern={"layers.1.linear_attn.out_proj": 3},
    )
    wrapped = peft.get_peft_model(model, config)
    wrapped.save_pretrained(tmp_path / "adapter")
    result = quantize_folder(source, tmp_path / "out", OWN, merge_lora=tmp_path / "adapter", progress=False)
    wanted, got = wrapped.merge_and_unload().state_dict(), weights_of(tmp_path / "out")
    assert result.merged == 3 + 3 * 4 + 4 + 1
    for name, tensor in wanted.items():
        weight = got[name]
        if isinstance(weight, torch.Tensor):
            torch.testing.assert_close(weight, tensor, rtol=1e-5, atol=1e-6)
        else:
            # an ulp may carry a value over a boundary
            assert (weight.packed == quantize(tensor).packed).float().mean() > 0.999, name


REFUSED = {
    "dora": ({"use_dora": True}, {}, ConfigError, "use_dora True is not merged"),
    "biases": ({"bias": "all"}, {}, ConfigError, "bias 'all' is not merged"),
    "pissa": ({"init_lora_weights": "pissa"}, {}, ConfigError, "changes the base's weights"),
    "saved": ({"modules_to_save": ["norm"]}, {}, ConfigError, "modules_to_save"),
    "a list of alphas": ({"alpha_pattern": ["q_proj"]}, {}, ConfigError, "want alpha_pattern an object of numbers"),
    "no number": ({"alpha_pattern": {"q_proj": "9"}}, {}, ConfigError, "want alpha_pattern an object of numbers"),
    "no expression": ({"alpha_pattern": {"(q_proj": 9}}, {}, ConfigError, r"'\(q_proj' is no regular expression"),
    "ia3": ({"peft_type": "IA3"}, {}, ConfigError, "want peft_type 'LORA'"),
    "a convolution": ({}, {"model.layers.0.linear_attn.conv1d": (96, 4)}, LayoutError, "no such matrix to change"),
    "A_log": ({}, {"model.layers.0.linear_attn.A_log": (2, 1)}, LayoutError, "no such matrix to change"),
    "a norm": ({}, {"model.layers.0.input_layernorm": (64, 1)}, LayoutError, "no such matrix to change"),
    "an embedding": ({}, {"model.embed_tokens": (320, 64)}, LayoutError, "no such matrix to change"),
    "another model": ({}, {"model.layers.0.mlp.up_proj": (96, 32)}, CheckpointError, r"want factors \[r, 64\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_is_no_sum(built, tmp_path, case):
    config, shapes, error, message = REFUSED[case]
    write_adapter(tmp_path / "adapter", shapes or {"model.layers.0.mlp.up_proj": (96, 64)}, **config)
    with pytest.raises(error, match=message):
        quantize_folder(built("dense"), tmp_path / "out", OWN, merge_lora=tmp_path / "adapter", progress=False)
    assert [file.name for file in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("extra", ["lora_magnitude_vector", "lora_A.weight"])
def test_refuses_other_tensors(built, tmp_path, extra):
    more = {f"base_model.model.model.layers.0.mlp.gate_proj.{extra}": torch.ones(3, 64)}
    write_adapter(tmp_path / "adapter", {"model.layers.0.mlp.up_proj": (96, 64)}, extra=more)
    with pytest.raises(CheckpointError, match="want lora_A and lora_B"):
        quantize_folder(built("dense"), tmp_path / "out", OWN, merge_lora=tmp_path / "adapter", progress=False)


def test_refuses_a_folder_without_safetensors(built, tmp_path):
    write_adapter(tmp_path / "adapter", {"model.layers.0.mlp.up_proj": (96, 64)})
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"want adapter_model\.safetensors"):
        quantize_folder(built("dense"), tmp_path / "out", OWN, merge_lora=tmp_path / "adapter", progress=False)


def test_a_copy_of_the_base_must_be_the_source_s(built, tmp_path):
    """PEFT adds lm_head's to an adapter of it."""
    base = load_file(built("dense") / "model.safetensors")["lm_head.weight"]
    for name, values in (("same", base), ("other", base + 1)):
        more = {"base_model.model.lm_head.base_layer.weight": values}
        write_adapter(tmp_path / name, {"lm_head": (320, 64)}, extra=more)
    assert (
        quantize_folder(built("dense"), tmp_path / "a", OWN, merge_lora=tmp_path / "same", progress=False).merged == 1
    )
    with pytest.raises(CheckpointError, match="want the adapter's own base model"):
        quantize_folder(built("dense"), tmp_path / "b", OWN, merge_lora=tmp_path / "other", progress=False)


@pytest.mark.parametrize(
    ("factor", "config", "why"),
    [
        (0.0, {}, "each lora_A or lora_B is 0, as before any training"),
        (1.0, {"lora_alpha": 0}, "lora_alpha is 0"),
        (1e-12, {}, "lost in the rounding of 1 matrices to 16 bits"),
    ],
)
def test_an_adapter_that_changes_nothing_is_refused(built, tmp_path, factor, config, why):
    source = built("dense")
    factors = write_adapter(tmp_path / "adapter", shapes_of(source, "layers.3.mlp.down_proj"), **config)
    scaled = {name: tensor * (factor if "lora_B" in name else 1.0) for name, tensor in factors.items()}
    save_file(scaled, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=f"changes nothing: {why}"):
        quantize_folder(source, tmp_path / "out", OWN, merge_lora=tmp_path / "adapter", progress=False)
    assert not (tmp_path / "out").exists()


def test_pairs_that_change_nothing_are_counted(built, tmp_path):
    source = built("dense")
    shapes = shapes_of(source, "mlp.down_proj")
    factors = write_adapter(tmp_path / "adapter", shapes)
    first = next(iter(shapes))
    factors[f"base_model.model.{first}.lora_B.weight"].zero_()
    save_file(factors, tmp_path / "adapter" / "adapter_model.safetensors")
    result = quantize_folder(source, tmp_path / "out", OWN, merge_lora=tmp_path / "adapter", progress=False)
    assert (result.merged, result.adapted) == (3, 4)
    assert "the adapter changed 3 matrices; 1 of those it names stay as they were" in list(report_lines(result))
