"""Writes tiny checkpoints in every layout that is read, and says in plain arithmetic what their weights are worth.

A form packs one matrix: its tensors by suffix, and the fp32 values they stand for, worked out a second time here. A
recipe packs a checkpoint: a form for each module, and the config its writer would put beside it. The configs follow
what the real tools wrote for these tiny models (nvidia-modelopt 0.47.0, compressed-tensors 0.20.1) and the published
files of model.md 4.7.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pilotfish.engine.checkpoint.nvfp4 import NvFp4Weight, encode, pack, quantize
from tests.support.tiny_models import nvfp4_config, write_checkpoint

E4M3 = torch.float8_e4m3fn
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)

Parts = dict[str, torch.Tensor]
Form = Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]


# Forms: a matrix -> its tensors by suffix, and the values they stand for.


def fp8_block(suffix: str = ".weight_scale_inv", dtype: torch.dtype = torch.bfloat16, four_axes: bool = False) -> Form:
    def form(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        rows, columns = (-(-size // 128) for size in weight.shape)
        scale = torch.empty(rows, columns)
        full = torch.empty_like(weight)
        for i in range(rows):
            for j in range(columns):
                block = weight[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
                scale[i, j] = block.abs().max() / 448
                full[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] = scale[i, j].to(dtype).float()
        stored = scale.to(dtype)
        parts, values = _fp8(weight, full)
        return parts | {suffix: stored[:, None, :, None] if four_axes else stored}, values

    return form


def fp8_tensor(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (), static: bool = False) -> Form:
    def form(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        scale = (weight.abs().max() / 448).to(dtype)
        parts, values = _fp8(weight, scale.float().expand(weight.shape))
        activation = {".input_scale": torch.full(shape, 0.5, dtype=dtype)} if static else {}
        return parts | {".weight_scale": scale.reshape(shape)} | activation, values

    return form


def fp8_channel(dtype: torch.dtype = torch.bfloat16, flat: bool = False) -> Form:
    def form(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        scale = (weight.abs().amax(1, keepdim=True) / 448).to(dtype)
        parts, values = _fp8(weight, scale.float().expand(weight.shape))
        return parts | {".weight_scale": scale[:, 0] if flat else scale}, values

    return form


def ct_nvfp4(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    packed = quantize(weight)
    divisor = torch.tensor([packed.global_scale])
    parts = {".weight_packed": packed.packed, ".weight_scale": packed.scale, ".weight_global_scale": divisor}
    return parts, (_products(packed) / divisor.double()).float()


def ct_nvfp4_w4a4(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """With a scale of the inputs, which 16-bit activations do not need."""
    parts, values = ct_nvfp4(weight)
    return parts | {".input_global_scale": torch.tensor([300.0])}, values


def modelopt_nvfp4(static: bool = False) -> Form:
    def form(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        packed = quantize(weight)
        factor = torch.tensor(1 / packed.global_scale)
        parts = {".weight": packed.packed, ".weight_scale": packed.scale, ".weight_scale_2": factor}
        return parts | ({".input_scale": torch.tensor(0.1)} if static else {}), (
            _products(packed) * factor.double()
        ).float()

    return form


def lynn(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Leading axes flattened; scale = amax / 6 in fp16; the suffixes follow the full tensor's name."""
    flat = weight.reshape(-1, weight.shape[-1])
    groups = flat.view(len(flat), -1, 16)
    scale = groups.abs().amax(-1) / 6
    codes = encode(groups / scale.clamp(min=1e-8)[:, :, None]).view(flat.shape)
    stored = scale.half()
    values = E2M1[codes.long()] * stored.double().repeat_interleave(16, 1)
    parts = {".packed": pack(codes), ".scale": stored, ".global_scale": torch.ones(())}
    return parts, values.float().view(weight.shape)


def _fp8(weight: torch.Tensor, scale: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    stored = (weight / scale).clamp(-448, 448).to(E4M3)
    return {".weight": stored}, (stored.double() * scale.double()).float()


def _products(packed: NvFp4Weight) -> torch.Tensor:
    codes = torch.stack((packed.packed % 16, packed.packed // 16), -1).flatten(1).long()
    return E2M1[codes] * packed.scale.double().repeat_interleave(16, 1)


# Recipes: a form for each module, and the config beside it.


@dataclass(frozen=True)
class Recipe:
    """`forms`: the first pattern found in a module's name decides; a module that fits none stays plain.

    `config(names by form's index)` gives config.json's quantization_config and the files written beside it.
    """

    name: str
    forms: tuple[tuple[str, Form], ...]
    config: Callable[[list[list[str]], list[str]], tuple[dict[str, Any] | None, dict[str, Any]]]
    fused_experts: bool = False

    def form_of(self, module: str) -> int | None:
        return next((i for i, (pattern, _) in enumerate(self.forms) if re.search(pattern, module)), None)


USUAL = r"(qkv|in_proj_z|out_proj|[qkvo]_proj|gate_proj|up_proj|down_proj)$"
ATTENTION = r"(qkv|in_proj_z|out_proj|self_attn\.[qkvo]_proj)$"
MLP = r"(mlp\..*(gate|up|down)_proj|lm_head)$"
EVERY_LINEAR = r"(_proj|qkv|in_proj_[abz]|mlp\.gate|shared_expert_gate|mtp\.fc)$"


def pack_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], recipe: Recipe
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Writes the folder; also returns the tensors of a plain checkpoint that is worth the same."""
    packed: Parts = {}
    plain: Parts = {}
    names: list[list[str]] = [[] for _ in recipe.forms]
    kept = []
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        is_matrix = (tensor.dim() == 2 and name.endswith(".weight")) or (tensor.dim() == 3 and "experts" in name)
        index = recipe.form_of(module) if is_matrix and "visual" not in name else None
        if index is None:
            packed[name] = plain[name] = tensor
            kept += [module] if is_matrix else []
            continue
        form = recipe.forms[index][1]
        parts, values = form(tensor.float())
        stem = name if form is lynn else module
        packed |= {f"{stem}{suffix}": part for suffix, part in parts.items()}
        plain[name] = values
        names[index].append(module)
    quantization, files = recipe.config(names, kept)
    written = dict(config) | ({"quantization_config": quantization} if quantization else {})
    write_checkpoint(folder, written, {"model.safetensors": packed})
    for file_name, content in files.items():
        (folder / file_name).write_text(json.dumps(content))
    return folder, plain


def _ct_weights(strategy: str, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
        "group_size": None,
        "block_structure": [128, 128] if strategy == "block" else None,
    } | more


def ct_config(*strategies: str) -> Callable[[list[list[str]], list[str]], Any]:
    """compressed-tensors; several groups make the outer format "mixed-precision"."""

    def config(names: list[list[str]], kept: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        groups = {}
        for i, (strategy, modules) in enumerate(zip(strategies, names, strict=True)):
            fp4 = nvfp4_config()["config_groups"]["group_0"]
            fp8 = fp4 | {"weights": _ct_weights(strategy), "format": "float-quantized"}
            group = fp4 if strategy == "nvfp4" else fp8
            only = len(strategies) == 1
            groups[f"group_{i}"] = group | {
                "targets": ["Linear"] if only else [f"re:^{re.escape(m)}$" for m in modules]
            }
        outer = "mixed-precision" if len(strategies) > 1 else groups["group_0"]["format"]
        return nvfp4_config(format=outer, config_groups=groups, ignore=kept), {}

    return config


def fp8_config(names: list[list[str]], kept: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The official Qwen FP8 packs."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "visual", *kept],
    }, {}


def modelopt_config(algorithm: str, homes: str = "both") -> Callable[[list[list[str]], list[str]], Any]:
    def config(names: list[list[str]], kept: list[str]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        excluded = ["lm_head", "*embed_tokens", "*linear_attn.in_proj_a", "*linear_attn.in_proj_b", "model.visual*"]
        excluded += ["*mlp.gate", "*mlp.shared_expert_gate", "mtp*"]
        beside = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": excluded}
        inner = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": excluded, "kv_cache_scheme": None}
        file = {"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": beside}}
        return (inner if homes != "file" else None), (file if homes != "config" else {})

    return config


def modelopt_mixed(names: list[list[str]], kept: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """FP8 attention, NVFP4 the rest; the experts of a layer are one key, as ModelOpt writes them."""
    layers: dict[str, Any] = {name: {"quant_algo": "FP8"} for name in names[0]}
    for name in names[1]:
        key = re.sub(r"\.experts\..*", ".experts", name)
        layers[key] = {"quant_algo": "NVFP4" if "experts" in key else "W4A16_NVFP4", "group_size": 16}
    quantization = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers}
    inner = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": []}
    return inner, {"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": quantization}}


def modelopt_excluding_lm_head(names: list[list[str]], kept: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """As NVIDIA's 35B pack is reported to be: lm_head is stored packed, and excluded in both homes."""
    inner, files = modelopt_mixed([[n for n in part if n != "lm_head"] for part in names], kept)
    quantization = files["hf_quant_config.json"]["quantization"] | {"exclude_modules": ["lm_head*", "model.visual*"]}
    return inner | {"ignore": ["lm_head*", "model.visual*"]}, {"hf_quant_config.json": {"quantization": quantization}}


def lynn_config(names: list[list[str]], kept: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    quantized = {
        name if "experts.gate_up" in name or "experts.down" in name else f"{name}.weight": {} for name in names[0]
    }
    manifest = {"schema_version": "lynn-variable-nvfp4-pack-v1", "quantized_tensors": quantized, "kept_tensors": {}}
    inner = {"quant_method": "lynn_native", "format": "nvfp4_e2m1_rowwise_per_16"}
    return inner, {"lynn_quant_manifest.json": manifest}


_F32, _BF16 = torch.float32, torch.bfloat16
RECIPES = (
    Recipe("compressed-tensors NVFP4", ((USUAL, ct_nvfp4),), ct_config("nvfp4")),
    Recipe("compressed-tensors NVFP4, W4A4", ((USUAL, ct_nvfp4_w4a4),), ct_config("nvfp4")),
    Recipe("compressed-tensors NVFP4, every Linear", ((EVERY_LINEAR, ct_nvfp4),), ct_config("nvfp4")),
    Recipe("FP8 block, BF16 weight_scale_inv", ((USUAL, fp8_block()),), fp8_config),
    Recipe("FP8 block, F32 weight_scale_inv", ((USUAL, fp8_block(dtype=_F32)),), fp8_config),
    Recipe("compressed-tensors FP8 block", ((USUAL, fp8_block(".weight_scale", _F32)),), ct_config("block")),
    Recipe("compressed-tensors FP8 per tensor", ((USUAL, fp8_tensor(_BF16, (1,), True)),), ct_config("tensor")),
    Recipe("compressed-tensors FP8 per channel", ((USUAL, fp8_channel()),), ct_config("channel")),
    Recipe(
        "compressed-tensors mixed: FP8 per channel, NVFP4",
        ((ATTENTION, fp8_channel()), (MLP, ct_nvfp4)),
        ct_config("channel", "nvfp4"),
    ),
    Recipe(
        "compressed-tensors mixed: FP8 block, NVFP4",
        ((ATTENTION, fp8_block(".weight_scale", _F32)), (MLP, ct_nvfp4)),
        ct_config("block", "nvfp4"),
    ),
    Recipe(
        "compressed-tensors mixed: FP8 per tensor, NVFP4",
        ((ATTENTION, fp8_tensor(_BF16, (1,), True)), (MLP, ct_nvfp4)),
        ct_config("tensor", "nvfp4"),
    ),
    Recipe("ModelOpt NVFP4", ((USUAL, modelopt_nvfp4(True)),), modelopt_config("NVFP4")),
    Recipe("ModelOpt W4A16_NVFP4", ((USUAL, modelopt_nvfp4()),), modelopt_config("W4A16_NVFP4", "file")),
    Recipe("ModelOpt FP8", ((USUAL, fp8_tensor(static=True)),), modelopt_config("FP8", "config")),
    Recipe("ModelOpt FP8_PB_WO", ((USUAL, fp8_block(".weight_scale", _F32, True)),), modelopt_config("fp8_pb_wo")),
    Recipe(
        "ModelOpt FP8_PER_CHANNEL_PER_TOKEN",
        ((USUAL, fp8_channel(_F32, flat=True)),),
        modelopt_config("FP8_PER_CHANNEL_PER_TOKEN"),
    ),
    Recipe("ModelOpt MIXED_PRECISION", ((ATTENTION, fp8_tensor(static=True)), (MLP, modelopt_nvfp4())), modelopt_mixed),
    Recipe(
        "ModelOpt MIXED_PRECISION, lm_head packed and excluded",
        ((ATTENTION, fp8_tensor(static=True)), (MLP, modelopt_nvfp4(True))),
        modelopt_excluding_lm_head,
    ),
    Recipe(
        "lynn-engine native",
        ((r"^(?!.*(embed_tokens|lm_head|norm|mlp\.gate$)).*", lynn),),
        lynn_config,
        fused_experts=True,
    ),
)


def refused_layouts(weight: torch.Tensor) -> dict[str, Parts]:
    """A matrix in the layouts that are recognised and not read: name -> its tensors by suffix, without the dot."""
    rows, columns = weight.shape
    packed = quantize(weight)
    fp8 = weight.to(E4M3)
    return {
        "FP8 without a scale": {"weight": fp8},
        "compressed-tensors pack-quantized integers": {
            "weight_packed": torch.zeros(rows, columns // 8, dtype=torch.int32),
            "weight_scale": torch.ones(rows, 1),
            "weight_shape": torch.tensor([rows, columns]),
        },
        "GPTQ or AWQ integers": {
            "qweight": torch.zeros(columns // 8, rows, dtype=torch.int32),
            "qzeros": torch.zeros(1, rows // 8, dtype=torch.int32),
            "scales": torch.ones(1, rows).half(),
        },
        "MXFP4 or MXFP8 (shared exponents)": {
            "weight_packed": packed.packed,
            "weight_scale": torch.zeros(rows, columns // 32, dtype=torch.uint8),
        },
        "transformers' own nvfp4": {
            "weight": packed.packed,
            "weight_sf": packed.scale,
            "weight_scale_2": torch.ones(()),
        },
        "MLX affine-quantised integers": {
            "weight": torch.zeros(rows, columns // 8, dtype=torch.uint32),
            "scales": torch.ones(rows, columns // 64),
            "biases": torch.ones(rows, columns // 64),
        },
        "an unknown combination of tensors": {"weight": fp8, "weight_scale": torch.ones(3, 5)},
        "unquantised, of a dtype that is not BF16, F16 or F32": {"weight": weight.double()},
    }
