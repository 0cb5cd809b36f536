"""Random weights of any size, made on the device: to measure speed without a checkpoint. The text is noise.

Magnitudes are those of a trained model: a product keeps the variance of its input, decays lie in (0, 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from pilotfish.engine.checkpoint.fp8 import Fp8Weight, per_tensor
from pilotfish.engine.checkpoint.inventory import Expected, ExpertForm, Experts, Kind, mtp, trunk
from pilotfish.engine.checkpoint.load import Weight
from pilotfish.engine.checkpoint.names import is_mtp
from pilotfish.engine.checkpoint.nvfp4 import E2M1, GROUP, NvFp4Weight
from pilotfish.engine.checkpoint.recognise import Checkpoint
from pilotfish.engine.config import ModelConfig
from pilotfish.engine.options import DummyLayout

PLAIN = ("in_proj_a", "in_proj_b", "shared_expert_gate", "mtp.fc")
"""Matrices that released packs leave in BF16."""
FP32 = ("A_log", "dt_bias")
FP8_IN_MIXED = ("self_attn.", "in_proj_qkv", "in_proj_z", "out_proj")
CODE_RMS = math.sqrt(sum(value**2 for value in E2M1) / len(E2M1))
LOW_SCALE, HIGH_SCALE = 64, 128
"""The range of block scales, in whole numbers of which e4m3 holds eight."""


@dataclass(frozen=True)
class DummyCheckpoint(Checkpoint):
    """A folder of which config.json alone is read, and what its weights would take in a layout."""

    layout: DummyLayout = "nvfp4"

    @property
    def num_bytes(self) -> int:
        return stored_bytes(self.config, self.layout)

    def summary(self) -> str:
        return f"{self.path}: RANDOM WEIGHTS, {self.layout}, {self.num_bytes / 1e6:.1f} MB: the text is noise"


def dummy_checkpoint(folder: str | Path, layout: DummyLayout) -> DummyCheckpoint:
    """Raises ConfigError for a config.json that is not read."""
    config = ModelConfig.load(folder)
    return DummyCheckpoint(
        path=Path(folder),
        config=config,
        modules={},
        has_mtp=True,
        mtp_problem=None,
        dropped={},
        num_files=0,
        num_head_weights=0,
        layout=layout,
    )


def dummy_weights(
    config: ModelConfig, layout: DummyLayout, device: torch.device, with_head: bool = True, seed: int = 0
) -> dict[str, Weight]:
    """What a loader would give for such a checkpoint, by tensor name. The same seed and device give the same values."""
    experts = Experts(ExpertForm.SINGLE, config.num_experts)
    wanted = trunk(config, lambda _: experts) | (mtp(config, lambda _: experts) if with_head else {})
    generator = torch.Generator(device).manual_seed(seed)
    return {
        f"{name}{expected.suffix}": _weight(name, expected, layout, generator)
        for name, expected in tqdm(wanted.items(), desc="random weights", unit="tensor", disable=len(wanted) < 1000)
    }


def stored_bytes(config: ModelConfig, layout: DummyLayout) -> int:
    """Bytes of such a checkpoint's tensors, the head's included, without making any."""
    experts = Experts(ExpertForm.SINGLE, config.num_experts)
    wanted = trunk(config, lambda _: experts) | mtp(config, lambda _: experts)
    return sum(_stored_bytes(name, expected, layout) for name, expected in wanted.items())


def _stored_bytes(name: str, expected: Expected, layout: DummyLayout) -> int:
    count = math.prod(expected.shape)
    form = _form(name, layout) if _is_packed(name, expected) else "bf16"
    if form == "nvfp4":
        return count // 2 + count // GROUP
    return count if form == "fp8" else count * (4 if name.endswith(FP32) else 2)


def _is_packed(name: str, expected: Expected) -> bool:
    return expected.kind is Kind.LINEAR and not name.endswith(PLAIN) and expected.shape[1] % GROUP == 0


def _weight(name: str, expected: Expected, layout: DummyLayout, generator: torch.Generator) -> Weight:
    shape, device = expected.shape, generator.device
    if expected.kind is Kind.NORM:
        # only the gated norm's weight is a factor as it stands; the others are added to 1
        value = float(name.endswith("linear_attn.norm"))
        return torch.full(shape, value, dtype=torch.bfloat16, device=device)
    if name.endswith("A_log"):
        return torch.empty(shape, device=device).uniform_(1, 16, generator=generator).log_()
    if name.endswith("dt_bias"):
        steps = torch.empty(shape, device=device).uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp_()
        return steps.expm1_().log_()
    if _is_packed(name, expected):
        form = _form(name, layout)
        if form == "nvfp4":
            return _nvfp4(shape, generator)
        if form == "fp8":
            return _fp8(shape, generator)
    width = shape[-1] if len(shape) > 1 else 1
    values = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
    return values.mul_(1.0 if expected.kind is Kind.EMBEDDING else width**-0.5)


def _form(name: str, layout: DummyLayout) -> str:
    if layout == "bf16" or (is_mtp(name) and layout != "nvfp4"):
        return "bf16"
    return "fp8" if layout == "mixed" and any(part in name for part in FP8_IN_MIXED) else "nvfp4"


def _nvfp4(shape: tuple[int, ...], generator: torch.Generator) -> NvFp4Weight:
    rows, columns = shape
    device = generator.device
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device, generator=generator)
    scale = torch.randint(LOW_SCALE, HIGH_SCALE, (rows, columns // GROUP), device=device, generator=generator)
    divisor = CODE_RMS * (LOW_SCALE + HIGH_SCALE) / 2 * math.sqrt(columns)
    return NvFp4Weight(packed, scale.float().to(torch.float8_e4m3fn), divisor)


def _fp8(shape: tuple[int, ...], generator: torch.Generator) -> Fp8Weight:
    values = torch.randn(shape, dtype=torch.bfloat16, device=generator.device, generator=generator)
    return per_tensor(values.to(torch.float8_e4m3fn), torch.tensor(shape[1] ** -0.5, device=generator.device))
