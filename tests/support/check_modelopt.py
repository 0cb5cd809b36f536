"""Reads checkpoints that NVIDIA's ModelOpt itself wrote, and holds their values against ModelOpt's own.

Not part of the test suite: nvidia-modelopt is no dependency. In an environment with nvidia-modelopt, transformers 5 and
this project, `python tests/support/check_modelopt.py` quantises tiny models in each way, exports them, opens the
export, and compares every packed weight with what ModelOpt's decoder makes of it (NVFP4), or with the original within
half a step (FP8). Last run with nvidia-modelopt 0.47.0, transformers 5.24.0, torch 2.13.0: every form below agrees.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [str(ROOT / "typings"), str(ROOT), *(entry for entry in sys.path if Path(entry).resolve() != ROOT)]

from pilotfish.engine.checkpoint.load import load_weights  # noqa: E402
from pilotfish.engine.checkpoint.recognise import census, open_checkpoint  # noqa: E402
from tests.support.tiny_models import VOCAB_SIZE, build_tiny  # noqa: E402

SIZES: dict[str, dict[str, Any]] = {"dense": {"intermediate_size": 256}, "moe": {}}
FORMS = ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MIXED_PRECISION")


def recipes() -> dict[str, Any]:
    import modelopt.torch.quantization as mtq

    mixed = copy.deepcopy(mtq.W4A16_NVFP4_CFG)
    w4 = next(rule for rule in mixed["quant_cfg"] if rule["quantizer_name"] == "*weight_quantizer")
    (at,) = [i for i, rule in enumerate(mixed["quant_cfg"]) if rule is w4]
    fp8 = [
        {"quantizer_name": f"*{part}*{kind}_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}}
        for part in ("self_attn", "linear_attn")
        for kind in ("weight", "input")
    ]
    mixed["quant_cfg"] = [*mixed["quant_cfg"][: at + 1], *fp8, *mixed["quant_cfg"][at + 1 :]]
    mixed["quant_cfg"].append({"quantizer_name": "*lm_head*weight_quantizer", "cfg": w4["cfg"]})
    configs = (
        mtq.NVFP4_DEFAULT_CFG,
        mtq.W4A16_NVFP4_CFG,
        mtq.FP8_DEFAULT_CFG,
        mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
        mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG,
        mixed,
    )
    return dict(zip(FORMS, configs, strict=True))


def quantize(source: Path, recipe: Any) -> Any:
    import modelopt.torch.quantization as mtq
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    ids = torch.randint(0, VOCAB_SIZE, (2, 32), generator=torch.Generator().manual_seed(0))
    return mtq.quantize(model, copy.deepcopy(recipe), lambda quantized: quantized(ids))


def decoded(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """NVFP4 weights of an export, decoded by ModelOpt."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    values = {}
    for name in [name for name in stored if name.endswith(".weight_scale_2")]:
        packed = stored[f"{name.removesuffix('_scale_2')}"]
        tensor = NVFP4QTensor((packed.shape[0], packed.shape[1] * 2), torch.float32, packed)
        scales = {"scale": stored[name.removesuffix("_2")], "double_scale": stored[name]}
        values[name.removesuffix("_scale_2")] = tensor.dequantize(torch.float32, **scales, block_sizes={-1: 16})
    return values


def check(kind: str, form: str, recipe: Any) -> str:
    from modelopt.torch.export import export_hf_checkpoint

    with tempfile.TemporaryDirectory() as scratch:
        source = build_tiny(Path(scratch, "source"), kind, dtype="bfloat16", **SIZES[kind])
        model = quantize(source, recipe)
        out = Path(scratch, "out")
        export_hf_checkpoint(model, export_dir=out)
        original = load_weights(open_checkpoint(source), progress=False)
        by_modelopt = decoded(load_file(out / "model.safetensors"))
        checkpoint = open_checkpoint(out)
        weights = load_weights(checkpoint, progress=False)
    packed = {name: weight.dequantize(torch.float32) for name, weight in weights.items() if is_packed(weight)}
    for name, values in by_modelopt.items():
        # ModelOpt multiplies the two scales first, which rounds once more
        torch.testing.assert_close(packed[name], values, rtol=1e-6, atol=0)
    for name in packed.keys() - by_modelopt.keys():
        # half a step of e4m3, three bits after the leading one
        torch.testing.assert_close(packed[name], original[name].float(), rtol=0.07, atol=1e-3)
    layouts = ", ".join(f"{row['modules']} {layout}" for layout, row in census(checkpoint).items())
    return f"{kind} {form}: {len(packed)} packed weights agree; {layouts}"


def is_packed(weight: Any) -> bool:
    return not isinstance(weight, torch.Tensor)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for kind in ("dense", "moe"):
        for form, recipe in recipes().items():
            print(check(kind, form, recipe), flush=True)


if __name__ == "__main__":
    main()
