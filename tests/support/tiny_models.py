"""Tiny random checkpoints of the served family, made with transformers' own classes.

Every norm, A_log and dt_bias is random and away from its initial value, or a missing "+1" and the like would stay
invisible. transformers keeps no MTP head, so its tensors are added here: 15 for a dense model, 19 for an MoE with
fused experts. A build takes a few tens of milliseconds once transformers is imported.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pilotfish.engine.checkpoint.nvfp4 import NvFp4Weight, quantize

VOCAB_SIZE = 320
KINDS = ("dense", "moe", "hv_gt_hk", "tied", "vl", "vl_moe")
TWO_LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
"""Overrides of a config, for what takes long: one layer of each kind."""

BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
DENSE: dict[str, Any] = {"intermediate_size": 96}
MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "linear_num_value_heads": 4,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
VISION_IDS: dict[str, int] = {
    "image_token_id": 316,
    "video_token_id": 317,
    "vision_start_token_id": 318,
    "vision_end_token_id": 319,
}

# What packed conversions leave plain: the names end so, or lie in the vision tower.
NVFP4_PLAIN = (
    "lm_head",
    "mlp.gate",
    "shared_expert_gate",
    "in_proj_a",
    "in_proj_b",
    "conv1d",
    "embed_tokens",
    "mtp.fc",
)
NVFP4_IGNORE = [
    "lm_head",
    "mtp.fc",
    "re:.*mlp\\.gate$",
    "re:.*shared_expert_gate$",
    "re:.*in_proj_[ab]$",
    "re:.*visual.*",
]


def build_tiny(
    path: str | Path, kind: str, *, seed: int = 1, mtp: bool = True, nvfp4: bool = False, **config_overrides: Any
) -> Path:
    """Writes a checkpoint (config.json and model.safetensors) into the folder and returns it.

    kind: "dense", "moe", "hv_gt_hk" (dense, twice as many value heads as key heads), "tied", "vl" or "vl_moe"
    (vision-language wrapper). mtp=False leaves the head out of file and config. nvfp4=True packs every Linear but
    those of NVFP4_PLAIN. Other arguments override fields of the text config; `dtype` ("float32", the default, or
    "bfloat16") is that of the stored tensors, A_log and the gated norm staying float32 as in released files.
    """
    if kind not in KINDS:
        raise ValueError(f"want one of {KINDS}, got {kind!r}")
    path = Path(path)
    dtype = str(config_overrides.pop("dtype", "float32"))
    generator = torch.Generator().manual_seed(seed)
    model, text_config = _model(kind, config_overrides | {"mtp_num_hidden_layers": int(mtp)})
    _randomise(model, generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    if mtp:
        shapes = mtp_shapes(text_config, "moe" in kind)
        tensors |= {name: random_weight(name, shape, generator) for name, shape in shapes.items()}
    tensors = {name: _stored(name, tensor, dtype) for name, tensor in tensors.items()}
    raw = json.loads((path / "config.json").read_text())
    raw["dtype"] = dtype
    if "text_config" in raw:
        raw["text_config"]["dtype"] = dtype
    if nvfp4:
        tensors = pack_tensors(split_experts(tensors))
        raw["quantization_config"] = nvfp4_config()
    return write_checkpoint(path, raw, {"model.safetensors": tensors})


def write_checkpoint(
    path: str | Path, config: Mapping[str, Any], files: Mapping[str, Mapping[str, torch.Tensor]]
) -> Path:
    """A folder with this config.json and these safetensors files; sub-folders are made."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    for name, tensors in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in tensors.items()}, path / name, metadata={"format": "pt"})
    return path


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes, whose 256 ids every kind has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def mtp_shapes(config: Any, moe: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the head of a transformers text config, experts fused."""
    hidden, dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    modules: dict[str, tuple[int, ...]] = {
        "fc": (hidden, 2 * hidden),
        "norm": (hidden,),
        "pre_fc_norm_embedding": (hidden,),
        "pre_fc_norm_hidden": (hidden,),
        "layers.0.input_layernorm": (hidden,),
        "layers.0.post_attention_layernorm": (hidden,),
        "layers.0.self_attn.q_proj": (2 * heads * dim, hidden),
        "layers.0.self_attn.k_proj": (kv_heads * dim, hidden),
        "layers.0.self_attn.v_proj": (kv_heads * dim, hidden),
        "layers.0.self_attn.o_proj": (hidden, heads * dim),
        "layers.0.self_attn.q_norm": (dim,),
        "layers.0.self_attn.k_norm": (dim,),
    }
    mlp = "layers.0.mlp."
    if not moe:
        return _with_suffix(modules | _glu_shapes(mlp, config.intermediate_size, hidden))
    experts, width = config.num_experts, config.moe_intermediate_size
    modules |= {f"{mlp}gate": (experts, hidden), f"{mlp}shared_expert_gate": (1, hidden)}
    modules |= _glu_shapes(f"{mlp}shared_expert.", config.shared_expert_intermediate_size, hidden)
    fused = {
        f"mtp.{mlp}experts.gate_up_proj": (experts, 2 * width, hidden),
        f"mtp.{mlp}experts.down_proj": (experts, hidden, width),
    }
    return _with_suffix(modules) | fused


def random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """fp32 values under which every sub-layer matters and logits have about unit variance.

    A_log lies in [-3, -1], where a state remembers 3 to 25 tokens. With a shorter memory a head now and then reads
    almost nothing, and the norm that follows magnifies its rounding: fp32 logits would be good to 5e-4 only.
    """
    if name.endswith("A_log"):
        return torch.rand(shape, generator=generator) * 2 - 3
    values = torch.randn(shape, generator=generator)
    if name.endswith("dt_bias"):
        return values * 0.3
    if "norm" in name:
        return values * 0.2 + (1.0 if name.endswith("linear_attn.norm.weight") else 0.0)
    return values / math.sqrt(shape[-1])


def split_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights with fused experts as one matrix each, in the per-expert naming."""
    split: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith(".experts"):
            split[name] = tensor
            continue
        for i, matrix in enumerate(tensor):
            projections = zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
            named = dict(projections) if last == "gate_up_proj" else {"down_proj": matrix}
            split |= {f"{prefix}.{i}.{projection}.weight": part for projection, part in named.items()}
    return split


def fuse_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights with per-expert matrices stacked into 3-D tensors; what is fused stays so."""
    matches = {name: re.fullmatch(r"(.*\.experts)\.(\d+)\.\w+\.weight", name) for name in tensors}
    fused = {name: tensor for name, tensor in tensors.items() if not matches[name]}
    counts: dict[str, int] = {}
    for match in filter(None, matches.values()):
        counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    for prefix, count in counts.items():

        def stack(projection: str, prefix: str = prefix, count: int = count) -> torch.Tensor:
            return torch.stack([tensors[f"{prefix}.{i}.{projection}.weight"] for i in range(count)])

        fused[f"{prefix}.gate_up_proj"] = torch.cat([stack("gate_proj"), stack("up_proj")], 1)
        fused[f"{prefix}.down_proj"] = stack("down_proj")
    return fused


def is_packable(name: str, tensor: torch.Tensor) -> bool:
    module = name.removesuffix(".weight")
    if "visual" in name or module == name or tensor.dim() != 2 or tensor.shape[1] % 16:
        return False
    return not module.endswith(NVFP4_PLAIN)


def pack_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """compressed-tensors NVFP4 of every matrix that is packable, the rest as it is."""
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        packed |= (
            ct_parts(name.removesuffix(".weight"), quantize(tensor)) if is_packable(name, tensor) else {name: tensor}
        )
    return packed


def ct_parts(module: str, weight: NvFp4Weight) -> dict[str, torch.Tensor]:
    """The three tensors that compressed-tensors stores for one matrix."""
    return {
        f"{module}.weight_packed": weight.packed,
        f"{module}.weight_scale": weight.scale,
        f"{module}.weight_global_scale": torch.tensor([weight.global_scale], dtype=torch.float32),
    }


def nvfp4_config(**overrides: Any) -> dict[str, Any]:
    """A quantization_config as llm-compressor writes it for NVFP4A16, with the ignore list of NVFP4_PLAIN."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": "nvfp4-pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": NVFP4_IGNORE,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    } | overrides


def _model(kind: str, overrides: Mapping[str, Any]) -> tuple[Any, Any]:
    """The transformers model of a kind, and its text config."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    moe = "moe" in kind
    family = "Qwen3_5Moe" if moe else "Qwen3_5"
    fields = BASE | (MOE if moe else DENSE)
    fields |= {"linear_num_value_heads": 4} if kind == "hv_gt_hk" else {}
    fields |= {"tie_word_embeddings": True} if kind == "tied" else {}
    fields |= overrides
    text_config = getattr(transformers, f"{family}TextConfig")(**fields)
    if not kind.startswith("vl"):
        return getattr(transformers, f"{family}ForCausalLM")(text_config).eval(), text_config
    wrapper = getattr(transformers, f"{family}Config")(
        text_config=text_config.to_dict(),
        vision_config=VISION,
        tie_word_embeddings=text_config.tie_word_embeddings,
        **VISION_IDS,
    )
    return getattr(transformers, f"{family}ForConditionalGeneration")(wrapper).eval(), wrapper.text_config


@torch.no_grad()
def _randomise(model: Any, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(random_weight(name, tuple(parameter.shape), generator))


def _stored(name: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    keeps_float32 = name.endswith(("A_log", "linear_attn.norm.weight"))
    return tensor if keeps_float32 else tensor.to(getattr(torch, dtype))


def _glu_shapes(prefix: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj": (width, hidden),
        f"{prefix}up_proj": (width, hidden),
        f"{prefix}down_proj": (hidden, width),
    }


def _with_suffix(modules: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"mtp.{name}.weight": shape for name, shape in modules.items()}
