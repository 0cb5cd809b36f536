"""Scales that no model's weights come from are refused, whatever the layout, and sound packs are not."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotfish.engine.checkpoint.load import ModuleReader, load_weights
from pilotfish.engine.checkpoint.nvfp4 import NvFp4Weight
from pilotfish.engine.checkpoint.plausible import LARGEST
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.convert import recipe
from pilotfish.engine.convert.quantize import quantize_folder
from pilotfish.engine.errors import CheckpointError
from tests.support.packing import RECIPES, pack_checkpoint
from tests.support.tiny_models import build_tiny, split_experts

DEMO = Path(__file__).resolve().parents[4] / "demo" / "model"
MODULE = "model.layers.3.mlp.down_proj"
NUMBERS = (".weight_global_scale", ".weight_scale_2")
SCALES = (".weight_scale", ".weight_scale_inv", ".weight.scale")
BY_NAME = {one.name: one for one in RECIPES}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = build_tiny(tmp_path_factory.mktemp("source"), "dense")
    return json.loads((folder / "config.json").read_text()), split_experts(load_file(folder / "model.safetensors"))


def packed(source, tmp_path, name, change):
    """A folder in a layout, with the tensors of MODULE changed."""
    folder, _ = pack_checkpoint(tmp_path / "packed", *source, BY_NAME[name])
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for full in [full for full in tensors if full.startswith(MODULE)]:
        tensors[full] = change(full.removeprefix(MODULE), tensors[full])
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def inverted(suffix, tensor):
    """The other convention: of the one number where there is one, else of the scales, in the dtype they have."""
    return 1 / tensor if suffix in NUMBERS else tensor


def inverted_scales(suffix, tensor):
    return (1 / tensor.float()).to(tensor.dtype) if suffix in SCALES else tensor


NVFP4 = [name for name in BY_NAME if "NVFP4" in name]
FP8 = [name for name in BY_NAME if "FP8" in name and "NVFP4" not in name and "MIXED" not in name]


@pytest.mark.parametrize("name", NVFP4)
def test_inverted_global_scales_are_named(source, tmp_path, name):
    folder = packed(source, tmp_path, name, inverted)
    got, wanted = ("divisor", "factor") if "ModelOpt" in name else ("factor", "divisor")
    says = rf"{MODULE}: weights up to \S+ by its scales, want at most 1000: .* is a {got}, where .* has a {wanted}"
    with pytest.raises(CheckpointError, match=says) as caught:
        load_weights(open_checkpoint(folder), progress=False)
    assert "\n" not in str(caught.value)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=says):
        ModuleReader().read(checkpoint.modules[MODULE])


@pytest.mark.parametrize("name", FP8)
def test_inverted_fp8_scales_are_named(source, tmp_path, name):
    folder = packed(source, tmp_path, name, inverted_scales)
    with pytest.raises(CheckpointError, match=rf"{MODULE}: weights up to .* seem to be divisors, where"):
        load_weights(open_checkpoint(folder), progress=False)


@pytest.mark.parametrize("name", [*NVFP4, *FP8, "lynn-engine native"])
def test_scales_of_zero_are_named_where_codes_are_not_zero(source, tmp_path, name, caplog):
    def without_scales(suffix, tensor):
        return torch.zeros_like(tensor) if suffix in SCALES else tensor

    folder = packed(source, tmp_path, name, without_scales)
    with pytest.raises(CheckpointError, match=rf"{MODULE}.*: all of its \S*scale\S* are 0 and its codes are not"):
        load_weights(open_checkpoint(folder), progress=False)


@pytest.mark.parametrize("name", ["compressed-tensors NVFP4", "FP8 block, BF16 weight_scale_inv"])
def test_a_matrix_of_zeros_is_loaded_and_told(source, tmp_path, name, caplog):
    """Some released models have dead experts."""

    def zeros(suffix, tensor):
        return tensor if suffix in NUMBERS else torch.zeros_like(tensor)

    folder = packed(source, tmp_path, name, zeros)
    with caplog.at_level(logging.WARNING):
        weights = load_weights(open_checkpoint(folder), progress=False)
    assert not weights[f"{MODULE}.weight"].dequantize().any()
    assert f"packed matrices that are 0 throughout: 1, the first is {MODULE}" in caplog.text


@pytest.mark.parametrize("factor", [1e-3, 30.0])
def test_models_of_unusual_size_are_loaded(source, tmp_path, factor):
    config, tensors = source
    scaled = {name: tensor * (factor if name.startswith(MODULE) else 1.0) for name, tensor in tensors.items()}
    for number, one in enumerate(RECIPES):
        folder, _ = pack_checkpoint(tmp_path / str(number), config, scaled, one)
        load_weights(open_checkpoint(folder), progress=False)


def test_the_shipped_pack_is_far_from_the_bound():
    weights = load_weights(open_checkpoint(DEMO), progress=False)
    largest = [float(w.dequantize().abs().max()) for w in weights.values() if isinstance(w, NvFp4Weight)]
    assert len(largest) > 100 and max(largest) < LARGEST / 100


def test_quantize_says_it_of_its_source(source, tmp_path):
    folder = packed(source, tmp_path, "FP8 block, BF16 weight_scale_inv", inverted_scales)
    with pytest.raises(CheckpointError, match=f"{MODULE}: weights up to .* seem to be divisors"):
        quantize_folder(folder, tmp_path / "out", recipe.Recipe(), progress=False)
    assert not (tmp_path / "out").exists()
