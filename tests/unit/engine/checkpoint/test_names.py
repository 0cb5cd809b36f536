"""Nesting of names: wrapper, text-only, MLX, vision, the head."""

import pytest

from pilotfish.engine.checkpoint.names import is_mlx, is_tolerated, normalise, split


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("model.language_model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.gate_proj.weight"),
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.0.linear_attn.A_log", "model.layers.0.linear_attn.A_log"),
        ("lm_head.weight", "lm_head.weight"),
        ("mtp.fc.weight", "mtp.fc.weight"),
        ("model.mtp.fc.weight", "mtp.fc.weight"),
        ("model.language_model.mtp.fc.weight", "mtp.fc.weight"),
        ("model.visual.blocks.0.attn.qkv.weight", None),
        ("visual.patch_embed.proj.bias", None),
        ("model.visually.weight", "model.visually.weight"),
    ],
)
def test_normalise(name, wanted):
    assert normalise(name) == wanted


def test_mlx_nesting_is_told_apart():
    assert is_mlx("language_model.model.layers.0.mlp.gate_proj.weight") and is_mlx("vision_tower.blocks.0.weight")
    assert not is_mlx("model.language_model.layers.0.mlp.gate_proj.weight") and not is_mlx("model.visual.x")


@pytest.mark.parametrize(
    ("name", "module", "suffix"),
    [
        ("lm_head.weight", "lm_head", ".weight"),
        ("x.q_proj.weight_packed", "x.q_proj", ".weight_packed"),
        ("x.q_proj.weight_scale", "x.q_proj", ".weight_scale"),
        ("x.q_proj.weight_scale_2", "x.q_proj", ".weight_scale_2"),
        ("x.q_proj.weight_scale_inv", "x.q_proj", ".weight_scale_inv"),
        ("x.q_proj.weight_global_scale", "x.q_proj", ".weight_global_scale"),
        ("x.q_proj.input_global_scale", "x.q_proj", ".input_global_scale"),
        ("x.q_proj.weight.packed", "x.q_proj", ".weight.packed"),
        ("x.experts.gate_up_proj.packed", "x.experts.gate_up_proj", ".packed"),
        ("x.experts.gate_up_proj", "x.experts.gate_up_proj", ""),
        ("x.linear_attn.A_log", "x.linear_attn.A_log", ""),
        ("x.q_proj.bias", "x.q_proj.bias", ""),
        (".weight", ".weight", ""),
    ],
)
def test_split(name, module, suffix):
    assert split(name) == (module, suffix)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.self_attn.k_scale",
        "model.layers.3.self_attn.v_scale",
        "model.layers.3.self_attn.k_proj.k_scale",
        "model.layers.3.self_attn.v_proj.v_scale",
        "model.layers.3.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
    ],
)
def test_unused_extras_are_tolerated(name):
    assert is_tolerated(name)


@pytest.mark.parametrize(
    "name", ["model.layers.3.mlp.k_scale", "model.layers.3.self_attn.k_proj.weight_scale", "k_scale"]
)
def test_other_scales_are_not_tolerated(name):
    assert not is_tolerated(name)
