"""Reads checkpoints that llm-compressor itself wrote, and holds their values against the original within half a step.

Not part of the test suite: llmcompressor is no dependency. In an environment with llmcompressor, transformers 5 and
this project, `python tests/support/check_llm_compressor.py` quantises tiny models without calibration data, saves them
as its users do, and opens the folders. Last run with llmcompressor 0.14.0.1, compressed-tensors 0.19.0, transformers
5.17.0, torch 2.13.0: every form below agrees, and the head comes along in BF16 in a file of its own.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [str(ROOT / "typings"), str(ROOT), *(entry for entry in sys.path if Path(entry).resolve() != ROOT)]

from pilotfish.engine.checkpoint.fp8 import Fp8Weight  # noqa: E402
from pilotfish.engine.checkpoint.load import load_weights  # noqa: E402
from pilotfish.engine.checkpoint.recognise import census, open_checkpoint  # noqa: E402
from tests.support.tiny_models import build_tiny  # noqa: E402

FORMS = ("NVFP4A16", "FP8_DYNAMIC", "FP8_BLOCK", "mixed")
IGNORE = ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$", "re:.*in_proj_[ab]$"]


def recipe(form: str) -> Any:
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.modifiers.quantization import QuantizationModifier

    if form != "mixed":
        return QuantizationModifier(targets="Linear", scheme=form, ignore=IGNORE)
    groups = {
        "attention": preset_name_to_scheme("FP8_DYNAMIC", ["re:.*self_attn.*", "re:.*linear_attn.*"]),
        "mlp": preset_name_to_scheme("NVFP4A16", ["re:.*mlp.*"]),
    }
    return QuantizationModifier(config_groups=groups, ignore=IGNORE)


def check(kind: str, form: str) -> str:
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as scratch:
        source = build_tiny(Path(scratch, "source"), kind, dtype="bfloat16")
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        oneshot(model=model, recipe=recipe(form))
        out = Path(scratch, "out")
        model.save_pretrained(out)
        original = load_weights(open_checkpoint(source), progress=False)
        checkpoint = open_checkpoint(out)
        weights = load_weights(checkpoint, progress=False)
    count = 0
    for name, weight in weights.items():
        plain = original[name].float()
        if isinstance(weight, torch.Tensor):
            # it computes norms as 1 + w in bf16 and stores w = (1 + w) - 1, off by up to 2^-8; A_log comes in bf16
            torch.testing.assert_close(weight.float(), plain, rtol=0, atol=2**-7, msg=name)
            continue
        count += 1
        error = (weight.dequantize(torch.float32) - plain).abs()
        if isinstance(weight, Fp8Weight):
            # three bits after the leading one, and the smallest step of the smallest scale
            assert (error <= 0.07 * plain.abs() + 1e-3).all(), name
        else:
            # the widest gap is 4 to 6; the scale itself is rounded to three bits
            largest = plain.unflatten(1, (-1, 16)).abs().amax(-1, keepdim=True)
            assert (error.unflatten(1, (-1, 16)) <= largest / 6 * 1.1).all(), name
    layouts = ", ".join(f"{row['modules']} {layout}" for layout, row in census(checkpoint).items())
    return f"{kind} {form}: {count} packed weights agree; head {checkpoint.has_mtp}; {layouts}"


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for kind in ("dense", "moe"):
        for form in FORMS:
            print(check(kind, form), flush=True)


if __name__ == "__main__":
    main()
