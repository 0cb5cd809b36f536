"""One naming for every nesting that checkpoints of this family use.

Normalised names are those of a text-only export: `model.embed_tokens.weight`, `model.layers.N.*`,
`model.norm.weight`, `lm_head.weight`, `mtp.*`. Vision-language wrappers put `language_model.` after `model.`;
a few files write `model.mtp.` for `mtp.`.
"""

from __future__ import annotations

import re

VISION_PREFIXES = ("model.visual.", "visual.")

# MLX converters store norms as 1 + w and the convolution transposed: another format under like names.
MLX_PREFIXES = ("language_model.", "vision_tower.")

# The first that fits wins, so a longer suffix stands before a shorter one it ends in.
SUFFIXES = (
    ".weight.packed",
    ".weight.scale",
    ".weight.global_scale",
    ".weight_packed",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_scale",
    ".weight_global_scale",
    ".input_global_scale",
    ".input_scale",
    ".weight_zero_point",
    ".weight_shape",
    ".pre_quant_scale",
    ".weight_g_idx",
    ".weight_sf_rowmajor",
    ".weight_sf",
    ".weight_scales",
    ".weight_blocks",
    ".qweight",
    ".qzeros",
    ".scales",
    ".biases",
    ".g_idx",
    ".packed",
    ".global_scale",
    ".scale",
    ".weight",
)

_KV_SCALE = re.compile(r"\.self_attn\.(?:[qkv]_proj\.)?(?:[qkv]_scale|[qkv]_zero_point)$")
_KV_CACHE_SCALE = re.compile(r"^(?P<attention>.+\.self_attn)\.(?:[kv]_proj\.)?(?P<what>[kv]_(?:scale|zero_point))$")
_INV_FREQ = re.compile(r"\.rotary_emb\.inv_freq$|^rotary_emb\.inv_freq$")


def normalise(name: str) -> str | None:
    """The text-only name of a tensor or module, or None if it belongs to the vision tower."""
    if name.startswith(VISION_PREFIXES):
        return None
    if name.startswith("model.language_model."):
        name = "model." + name.removeprefix("model.language_model.")
    if name.startswith("model.mtp."):
        name = name.removeprefix("model.")
    return name


def is_mlx(name: str) -> bool:
    """Whether the name follows MLX's nesting, whose norms and convolutions are stored otherwise."""
    return name.startswith(MLX_PREFIXES)


def is_tolerated(name: str) -> bool:
    """Whether a tensor may be there without being used: a quantised KV cache's scales, cached rope frequencies."""
    return bool(_KV_SCALE.search(name) or _INV_FREQ.search(name))


def kv_scale(name: str) -> tuple[str, str] | None:
    """What a quantised KV cache's number is of: the attention module, and k_scale, v_scale, k_zero_point or
    v_zero_point."""
    found = _KV_CACHE_SCALE.match(name)
    return (found["attention"], found["what"]) if found else None


def split(name: str) -> tuple[str, str]:
    """A normalised tensor name as (module, suffix); bare parameters (A_log, dt_bias, fused experts) have suffix ""."""
    for suffix in SUFFIXES:
        if name.endswith(suffix) and len(name) > len(suffix):
            return name[: -len(suffix)], suffix
    return name, ""


def is_mtp(name: str) -> bool:
    return name.startswith("mtp.")
