"""Folders written by compressed-tensors itself, in every format of it that is read, against its own decompressor.

Skipped where compressed-tensors is not installed: it is no dependency. Last run with 0.20.1 and transformers 5.24.0.
"""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.recognise import census, open_checkpoint
from tests.support.tiny_models import build_tiny

IGNORE = ["lm_head", "re:.*in_proj_[ab]$", "re:.*conv1d$"]
ATTENTION, MLP = ["re:.*self_attn.*", "re:.*linear_attn.*"], ["re:.*mlp.*"]
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
CHANNEL, TENSOR = ({"num_bits": 8, "type": "float", "strategy": strategy} for strategy in ("channel", "tensor"))

FORMS = {
    "NVFP4": ({"all": (["Linear"], FP4)}, {"compressed-tensors NVFP4 (W4A16)"}),
    "FP8 per tensor": ({"all": (["Linear"], TENSOR)}, {"FP8 per tensor"}),
    "FP8 per channel": ({"all": (["Linear"], CHANNEL)}, {"FP8 per output channel"}),
    "FP8 block": ({"all": (["Linear"], BLOCK)}, {"compressed-tensors FP8 block", "FP8 per tensor"}),
    "mixed": (
        {"attention": (ATTENTION, CHANNEL), "mlp": (MLP, FP4)},
        {"FP8 per output channel", "compressed-tensors NVFP4 (W4A16)"},
    ),
    "mixed block": (
        {"attention": (ATTENTION, BLOCK), "mlp": (MLP, FP4)},
        {"compressed-tensors FP8 block", "FP8 per tensor", "compressed-tensors NVFP4 (W4A16)"},
    ),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("source"), "dense", dtype="bfloat16", mtp=False, intermediate_size=288)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FORMS)
def test_folder_written_by_compressed_tensors(source, tmp_path, name):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not a dependency; RECIPES follow its files")
    groups, layouts = FORMS[name]
    model, compressor = quantised(source, groups)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert raw["quant_method"] == "compressed-tensors"
    checkpoint = open_checkpoint(tmp_path)
    assert {layout for layout in census(checkpoint) if not layout.startswith("plain")} == layouts
    weights = load_weights(checkpoint, progress=False)
    compressor.decompress_model(model)
    packed = {key: weight for key, weight in weights.items() if not isinstance(weight, torch.Tensor)}
    assert len(packed) == 25
    for key, weight in packed.items():
        # the library rounds to bf16, and divides or multiplies there
        torch.testing.assert_close(
            weight.dequantize(torch.float32), model.get_parameter(key).float(), rtol=2**-7, atol=0
        )


def quantised(source, groups):
    """The model with a scheme and observed scales on every target, and its compressor."""
    import compressed_tensors as ct
    from compressed_tensors.quantization import apply_quantization_config
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    config = ct.quantization.QuantizationConfig(
        config_groups={name: {"targets": targets, "weights": args} for name, (targets, args) in groups.items()},
        ignore=IGNORE,
        quantization_status="frozen",
    )
    apply_quantization_config(model, config)
    helpers = ct.quantization.utils.helpers
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            _observe(module, scheme.weights, helpers)
    return model, ct.ModelCompressor.from_pretrained_model(model)


def _observe(module, args, helpers):
    weight, strategy = module.weight.data.float(), args.strategy
    if strategy == "tensor_group":
        module.weight_global_scale.data.copy_(helpers.generate_gparam(weight.min(), weight.max()))
        groups, more = weight.unflatten(1, (-1, 16)), {"global_scale": module.weight_global_scale.data}
        low, high = groups.amin(-1), groups.amax(-1)
    else:
        more = {}
        low, high = (_reduce(weight, strategy, kind) for kind in ("amin", "amax"))
    scale, _ = helpers.calculate_qparams(low, high, args, **more)
    module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))


def _reduce(weight, strategy, kind):
    if strategy == "tensor":
        return getattr(weight, kind)().reshape(1)
    if strategy == "channel":
        return getattr(weight, kind)(1, keepdim=True)
    rows, columns = (-(-size // 128) for size in weight.shape)
    blocks = [
        [getattr(weight[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128], kind)() for j in range(columns)]
        for i in range(rows)
    ]
    return torch.tensor(blocks)
