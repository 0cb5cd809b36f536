"""Sizes of the family's released models, for random weights. Facts of their config.json."""

from __future__ import annotations

from typing import Any

from pilotfish.engine.config import ModelConfig

COMMON: dict[str, Any] = {
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "vocab_size": 248320,
}


def _dense(hidden: int, layers: int, heads: int, kv: int, width: int, value_heads: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": width,
        "linear_num_value_heads": value_heads,
        "tie_word_embeddings": tied,
    }


def _moe(
    hidden: int, layers: int, heads: int, experts: int, top_k: int, width: int, value_heads: int
) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
        "linear_num_value_heads": value_heads,
        "tie_word_embeddings": False,
    }


SIZES = {
    "0.8B": _dense(1024, 24, 8, 2, 3584, 16, True),
    "2B": _dense(2048, 24, 8, 2, 6144, 16, True),
    "4B": _dense(2560, 32, 16, 4, 9216, 32, True),
    "9B": _dense(4096, 32, 16, 4, 12288, 32, False),
    "27B": _dense(5120, 64, 24, 4, 17408, 48, False),
    "35B-A3B": _moe(2048, 40, 16, 256, 8, 512, 32),
    "122B-A10B": _moe(3072, 48, 32, 256, 8, 1024, 64),
    "397B-A17B": _moe(4096, 60, 32, 512, 10, 1024, 64),
}
"""Configs by the last part of a released name: Qwen3.5-27B, Qwen3.6-27B and Qwen3.8-27B have one size."""


def released_config(name: str) -> ModelConfig | None:
    """The config of `Qwen/Qwen3.6-35B-A3B`, `Qwen3.5-27B`, `27B`, ...; None for a name that is none of them."""
    size = name.rsplit("/")[-1].split("-", 1)[-1] if "Qwen" in name else name
    return ModelConfig.from_dict(COMMON | SIZES[size]) if size in SIZES else None
