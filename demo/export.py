"""Write the shipped model: compressed-tensors NVFP4 (W4A16) from the trained bf16 weights.

    python demo/export.py --weights WORK/run            # into demo/model
    python demo/export.py --weights WORK/run --check    # reads it back and compares every matrix

Experts, shared experts, attention, the delta rule's large projections and the head's matrices are NVFP4, one matrix an
expert; embeddings, router, gates, small projections, convolution, norms and mtp.fc stay bf16; A_log and the gated norm
are fp32. Shards stay under 16 MiB.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# under PYTHONSAFEPATH, which tests/gpu/legs.py sets, a program's own folder is not there
sys.path.append(str(Path(__file__).resolve().parent))

from nvfp4 import LEVELS, is_quantised, matrices, quantise

MODEL = Path(__file__).resolve().parent / "model"
SHARD = 15_500_000  # bytes
CONFIG = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "eos_token_id": None,
    "full_attention_interval": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 384,
    "initializer_range": 0.02,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 64,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 256,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": None,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [4, 2, 2],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 256,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 8192,
}
QUANTISATION = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "symmetric": True,
                "dynamic": False,
                "scale_dtype": "torch.float8_e4m3fn",
            },
            "input_activations": None,
            "output_activations": None,
            "format": "nvfp4-pack-quantized",
        }
    },
    "ignore": [
        "lm_head",
        "mtp.fc",
        r"re:.*\.mlp\.gate$",
        r"re:.*\.mlp\.shared_expert_gate$",
        r"re:.*\.linear_attn\.in_proj_[ab]$",
        r"re:.*\.linear_attn\.conv1d$",
    ],
}
GENERATION = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the even column in the low nibble."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)


def unpack(packed: torch.Tensor, scale: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """The matrix that the three shipped tensors stand for, in fp32."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    signed = torch.cat([LEVELS, -LEVELS])[codes]
    return (signed.view(len(codes), -1, 16) * (scale.float() / divisor)[..., None]).view_as(signed)


def single_matrices(name: str, w: torch.Tensor):
    """(module, matrix) for every linear in this parameter; fused experts are taken apart."""
    stack = matrices(w.float(), name)
    if ".experts." not in name:
        yield name.removesuffix(".weight"), stack[0]
        return
    base, kind = name.rsplit(".", 1)
    if kind == "gate_up_proj":
        for i, matrix in enumerate(stack):
            yield f"{base}.{i // 2}.{('gate_proj', 'up_proj')[i % 2]}", matrix
    else:
        for i, matrix in enumerate(stack):
            yield f"{base}.{i}.{kind}", matrix


def shipped_tensors(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {}
    for name, w in weights.items():
        if not is_quantised(name):
            out[name] = w
            continue
        for module, matrix in single_matrices(name, w):
            codes, scale, glob, _ = quantise(matrix[None])
            out[f"{module}.weight_packed"] = pack(codes[0])
            out[f"{module}.weight_scale"] = scale[0].to(torch.float8_e4m3fn)
            out[f"{module}.weight_global_scale"] = glob.view(1)
    return out


def write_shards(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    shards, size = [{}], 0
    for name in sorted(tensors):
        if size + tensors[name].nbytes > SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = tensors[name].contiguous()
        size += tensors[name].nbytes
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": {}}
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(shard, file)
    index["weight_map"] = dict(sorted(index["weight_map"].items()))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def load_shipped(folder: Path = MODEL) -> dict[str, torch.Tensor]:
    """The shipped model in transformers' fused names, NVFP4 matrices dequantised to fp32."""
    raw = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        raw |= load_file(path)
    out, experts = {}, {}
    for name, tensor in raw.items():
        if not name.endswith(".weight_packed"):
            if not name.endswith((".weight_scale", ".weight_global_scale")):
                out[name] = tensor
            continue
        module = name.removesuffix(".weight_packed")
        w = unpack(tensor, raw[f"{module}.weight_scale"], raw[f"{module}.weight_global_scale"])
        if ".experts." in module:
            base, number, kind = module.rsplit(".", 2)
            experts.setdefault(base, {})[int(number), kind] = w
        else:
            out[f"{module}.weight"] = w
    for base, parts in experts.items():
        count = 1 + max(number for number, _ in parts)
        pairs = [torch.cat([parts[i, "gate_proj"], parts[i, "up_proj"]]) for i in range(count)]
        out[f"{base}.gate_up_proj"] = torch.stack(pairs)
        out[f"{base}.down_proj"] = torch.stack([parts[i, "down_proj"] for i in range(count)])
    return out


def load_trained(folder: Path) -> dict[str, torch.Tensor]:
    weights = {}
    for path in sorted(folder.glob("weights-*.safetensors")):
        weights |= load_file(path)
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=MODEL)
    parser.add_argument("--check", action="store_true", help="compare with what --out holds instead of writing")
    args = parser.parse_args()
    weights = load_trained(args.weights)
    if not args.check:
        args.out.mkdir(exist_ok=True)
        vocabulary = json.loads((MODEL / "tokenizer.json").read_text())["added_tokens"]
        ids = {token["content"]: token["id"] for token in vocabulary}
        ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
        config = CONFIG | {"eos_token_id": ends[1], "pad_token_id": ends[1], "quantization_config": QUANTISATION}
        (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        generation = GENERATION | {"eos_token_id": ends, "pad_token_id": ends[1]}
        (args.out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        write_shards(shipped_tensors(weights), args.out)
    loaded = load_shipped(args.out)
    assert loaded.keys() == weights.keys(), loaded.keys() ^ weights.keys()
    for name, w in weights.items():
        wanted = quantise(matrices(w.float(), name))[3].view_as(w) if is_quantised(name) else w
        assert torch.equal(loaded[name].float(), wanted.float()), name
    total = sum(p.stat().st_size for p in args.out.glob("model-*.safetensors"))
    print(f"{len(loaded)} parameters agree, {total / 2**20:.1f} MiB of weights")


if __name__ == "__main__":
    main()
