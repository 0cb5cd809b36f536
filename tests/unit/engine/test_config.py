"""config.json: what is accepted, what is derived, and that everything not computed is refused by name."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from pilotfish.engine.config import ModelConfig
from pilotfish.engine.errors import ConfigError
from pilotfish.kernels.rope import inverse_frequencies

DENSE: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "intermediate_size": 96,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 7,
    "dtype": "bfloat16",
}
MOE = {name: value for name, value in DENSE.items() if name != "intermediate_size"} | {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}


YARN = DENSE["rope_parameters"] | {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 262144,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}
"""As Qwen's model cards give it."""


def wrap(text: dict[str, Any], **outer: Any) -> dict[str, Any]:
    return {"model_type": text["model_type"].removesuffix("_text"), "text_config": text} | outer


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in names}


def test_flat_dense_fields_and_derived_sizes():
    config = ModelConfig.from_dict(DENSE)
    assert not config.is_moe and config.num_experts == config.moe_intermediate_size == 0
    assert config.layer_types == (("linear_attention",) * 3 + ("full_attention",)) * 2
    assert config.linear_layers == (0, 1, 2, 4, 5, 6) and config.full_layers == (3, 7)
    assert (config.key_dim, config.value_dim, config.conv_dim) == (32, 32, 96)
    assert (config.rotary_dim, config.rope_theta, config.rms_norm_eps) == (8, 1e7, 1e-6)
    assert (config.num_mtp_layers, config.eos_token_ids, config.dtype) == (1, (7,), "bfloat16")
    assert config.tie_word_embeddings is False


def test_flat_moe_fields():
    config = ModelConfig.from_dict(MOE)
    assert config.is_moe and config.intermediate_size == 0
    assert (config.num_experts, config.num_experts_per_tok) == (8, 2)
    assert (config.moe_intermediate_size, config.shared_expert_intermediate_size) == (32, 48)


@pytest.mark.parametrize("text", [DENSE, MOE], ids=["dense", "moe"])
def test_wrapper_gives_the_same_sizes_as_flat(text):
    wrapped = ModelConfig.from_dict(wrap(text))
    flat = ModelConfig.from_dict(text)
    assert wrapped.model_type + "_text" == flat.model_type
    assert {**vars(wrapped), "model_type": ""} == {**vars(flat), "model_type": ""}


@pytest.mark.parametrize(
    ("outer", "inner", "wanted"),
    [(True, False, True), (False, True, False), (None, True, True), (None, None, False)],
)
def test_outer_tie_flag_governs(outer, inner, wanted):
    raw = wrap(DENSE | {"tie_word_embeddings": inner}, tie_word_embeddings=outer)
    assert ModelConfig.from_dict(raw).tie_word_embeddings is wanted


def test_input_is_not_changed():
    raw = wrap(DENSE)
    before = copy.deepcopy(raw)
    ModelConfig.from_dict(raw)
    assert raw == before


def test_interval_places_full_attention():
    config = ModelConfig.from_dict(DENSE | {"full_attention_interval": 2})
    assert config.full_layers == (1, 3, 5, 7)


def test_explicit_layer_types_win_over_the_interval():
    kinds = ["full_attention"] + ["linear_attention"] * 7
    assert ModelConfig.from_dict(DENSE | {"layer_types": kinds, "full_attention_interval": 2}).full_layers == (0,)


def test_rope_fields_of_older_files_stand_at_the_top():
    raw = without(DENSE, "rope_parameters") | {"rope_theta": 5e6, "partial_rotary_factor": 0.5}
    config = ModelConfig.from_dict(raw)
    assert (config.rope_theta, config.rotary_dim) == (5e6, 16)


def test_rotary_share_defaults_to_a_quarter_but_theta_is_required():
    raw = without(DENSE, "rope_parameters")
    assert ModelConfig.from_dict(raw | {"rope_parameters": {"rope_theta": 1e4}}).rotary_dim == 8
    with pytest.raises(ConfigError, match="rope_theta: want a number above 0"):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"factor": 2.0, "original_max_position_embeddings": 4096},
        {"beta_fast": 16, "beta_slow": 2, "truncate": False},
        {"attention_factor": 1.5},
        {"mscale": 0.7, "mscale_all_dim": 0.4},
        {"factor": None},
        {"factor": 1.0},
        {"rope_theta": 1e4, "original_max_position_embeddings": 64},
    ],
)
def test_yarn_is_what_transformers_computes(change):
    """At the released models' sizes, 64 of 256 dimensions, bit for bit or within two roundings."""
    from transformers import Qwen3_5TextConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = YARN | change
    raw = DENSE | {"head_dim": 256, "max_position_embeddings": 1048576, "rope_parameters": rope}
    config = ModelConfig.from_dict(raw)
    assert config.yarn is not None
    fields = {name: raw[name] for name in ("head_dim", "max_position_embeddings", "hidden_size", "num_attention_heads")}
    theirs = Qwen3_5TextConfig(**fields, rope_parameters=dict(rope))
    wanted, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    got = inverse_frequencies(config.rotary_dim, config.rope_theta, ramp=config.yarn.ramp)
    torch.testing.assert_close(got, wanted, rtol=3e-7, atol=0)
    assert config.yarn.attention_factor == pytest.approx(attention_factor, rel=1e-12)


def test_yarn_stretches_the_most_positions():
    """A card's edit leaves max_position_embeddings as it is."""
    config = ModelConfig.from_dict(DENSE | {"max_position_embeddings": 262144, "rope_parameters": YARN})
    assert config.max_position_embeddings == 1048576
    longer = DENSE | {"max_position_embeddings": 2000000, "rope_parameters": YARN}
    assert ModelConfig.from_dict(longer).max_position_embeddings == 2000000
    assert ModelConfig.from_dict(DENSE).yarn is None


def test_yarn_in_older_spelling():
    raw = without(DENSE, "rope_parameters") | {"rope_theta": 1e7}
    older = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}
    new = ModelConfig.from_dict(DENSE | {"rope_parameters": YARN})
    assert ModelConfig.from_dict(raw | {"rope_scaling": older}) == new
    assert ModelConfig.from_dict(DENSE | {"rope_parameters": YARN, "rope_scaling": older}) == new


def test_scaling_that_nobody_reads_is_refused():
    """In a wrapper it belongs into text_config."""
    for name in ("rope_parameters", "rope_scaling"):
        with pytest.raises(ConfigError, match=f"^{name}: want it in text_config, where it counts"):
            ModelConfig.from_dict(wrap(DENSE, **{name: YARN}))
        assert ModelConfig.from_dict(wrap(DENSE, **{name: {"rope_type": "default"}})).yarn is None
        assert ModelConfig.from_dict(wrap(DENSE | {"rope_parameters": YARN}, **{name: YARN})).yarn is not None


def test_end_ids_are_those_of_wrapper_and_text_without_repeats():
    raw = wrap(DENSE | {"eos_token_id": 7}, eos_token_id=[9, 7])
    assert ModelConfig.from_dict(raw).eos_token_ids == (9, 7)
    assert ModelConfig.from_dict(without(DENSE, "eos_token_id")).eos_token_ids == ()


def test_dtype_has_an_older_name_and_a_default():
    raw = without(DENSE, "dtype")
    assert ModelConfig.from_dict(raw | {"torch_dtype": "float16"}).dtype == "float16"
    assert ModelConfig.from_dict(wrap(raw, dtype="float32")).dtype == "float32"
    assert ModelConfig.from_dict(raw).dtype == "bfloat16"


def test_harmless_fields_of_released_configs_are_accepted():
    rope = DENSE["rope_parameters"] | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    ModelConfig.from_dict(
        DENSE
        | {
            "rope_parameters": rope,
            "rope_scaling": None,
            "hidden_act": "silu",
            "output_gate_type": "swish",
            "mamba_ssm_dtype": "float32",
            "attention_bias": False,
            "attn_output_gate": True,
            "mtp_use_dedicated_embeddings": False,
            "initializer_range": 0.02,
            "mlp_only_layers": [],
        }
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_parameters": DENSE["rope_parameters"] | {"rope_type": "yarn"}},
            r"rope_parameters.factor: want a number above 0",
        ),
        *(
            (
                {"rope_scaling": {"type": kind, "factor": 2.0}},
                f"rope_scaling.type: want 'default' or 'yarn', got '{kind}'",
            )
            for kind in ("linear", "dynamic", "longrope", "llama3", "proportional", "su", "ntk")
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "factor": 4.0}},
            r"rope_parameters.rope_type: want 'yarn' with a factor, got None",
        ),
        ({"rope_parameters": YARN | {"factor": 0.5}}, r"rope_parameters.factor: want at least 1 for YaRN, got 0.5"),
        (
            {"rope_parameters": YARN | {"rope_theta": 1.0}},
            r"rope_parameters.rope_theta: want at least 1 for YaRN, got 1.0",
        ),
        (
            {"rope_parameters": YARN | {"attention_factor": -1.0}},
            r"rope_parameters.attention_factor: want a number above 0",
        ),
        ({"rope_parameters": YARN | {"beta_fast": "32"}}, r"rope_parameters.beta_fast: want a number above 0"),
        ({"rope_parameters": YARN | {"truncate": 1}}, r"rope_parameters.truncate: want true or false"),
        ({"rope_parameters": YARN | {"attn_factor": 2.0}}, r"rope_parameters.attn_factor: want 1, got 2.0"),
        ({"rope_scaling": YARN}, r"rope_scaling: want it in rope_parameters, which says otherwise"),
        ({"attention_bias": True}, r"attention_bias: want false, got True"),
        ({"hidden_act": "gelu"}, r"hidden_act: want 'silu', got 'gelu'"),
        ({"output_gate_type": "sigmoid"}, r"output_gate_type: want 'silu' or 'swish', got 'sigmoid'"),
        ({"mamba_ssm_dtype": "bfloat16"}, r"mamba_ssm_dtype: want 'float32', got 'bfloat16'"),
        ({"mtp_use_dedicated_embeddings": True}, r"mtp_use_dedicated_embeddings: want false, got True"),
        ({"attn_output_gate": False}, r"attn_output_gate: want true, got False"),
        ({"norm_topk_prob": False}, r"norm_topk_prob: want true, got False"),
        ({"use_sliding_window": True}, r"use_sliding_window: want false"),
        ({"decoder_sparse_step": 2}, r"decoder_sparse_step: want an integer in \[1, 1\], got 2"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers: want none, got \[0\]"),
        ({"mtp_num_hidden_layers": 2}, r"mtp_num_hidden_layers: want an integer in \[0, 1\], got 2"),
        ({"dtype": "float8_e4m3fn"}, r"dtype: want 'bfloat16' or 'float16' or 'float32'"),
    ],
)
def test_refuses_what_is_not_computed(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(DENSE | change)
    with pytest.raises(ConfigError, match=r"text_config\." + message):
        ModelConfig.from_dict(wrap(DENSE | change))


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("qwen3_next", "Qwen3-Next"),
        ("qwen4_exp", "Flash-Next"),
        ("llama", "got 'llama'"),
        (None, "got None"),
        (["qwen3_5"], "got"),
    ],
)
def test_refuses_other_models_by_name(model_type, said):
    with pytest.raises(ConfigError, match=f"model_type: want one of qwen3_5.*{said}"):
        ModelConfig.from_dict(DENSE | {"model_type": model_type})


def test_refuses_a_wrapper_around_another_text_model():
    with pytest.raises(ConfigError, match=r"text_config.model_type: want 'qwen3_5' or 'qwen3_5_text', got 'llama'"):
        ModelConfig.from_dict(wrap(DENSE) | {"text_config": DENSE | {"model_type": "llama"}})
    with pytest.raises(ConfigError, match="text_config: want an object, got NoneType"):
        ModelConfig.from_dict(wrap(DENSE) | {"text_config": None})


SIZES = [
    name
    for name, value in DENSE.items()
    if type(value) is int and name not in ("mtp_num_hidden_layers", "eos_token_id")
]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("bad", [0, -1, 1.5, "64", True, 1 << 40, [4]], ids=repr)
def test_refuses_sizes_out_of_type_or_range(name, bad):
    with pytest.raises(ConfigError, match=f"{name}: want"):
        ModelConfig.from_dict(DENSE | {name: bad})


@pytest.mark.parametrize("name", [name for name in SIZES if name != "linear_conv_kernel_dim"])
def test_requires_every_size(name):
    with pytest.raises(ConfigError, match=f"{name}: want an integer .*got None"):
        ModelConfig.from_dict(without(DENSE, name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads: want a multiple of num_key_value_heads 3, got 4"),
        ({"linear_num_key_heads": 3}, "linear_num_value_heads: want a multiple of linear_num_key_heads 3, got 4"),
        ({"head_dim": 6}, "partial_rotary_factor: want an even, positive share of head_dim 6"),
        ({"head_dim": 20}, "partial_rotary_factor: want an even, positive share of head_dim 20"),
        ({"layer_types": ["full_attention"]}, "layer_types: want a list of 8 names"),
        ({"layer_types": ["mamba"] * 8}, r"layer_types\[0\]: want 'linear_attention' or 'full_attention', got 'mamba'"),
        ({"layer_types": [[]] * 8}, r"layer_types\[0\]: want"),
        ({"eos_token_id": 320}, r"eos_token_id: want token ids in \[0, 320\), got 320"),
        ({"eos_token_id": ["a"]}, "eos_token_id: want token ids"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: want a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: want a number above 0"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta: want a number above 0"),
        ({"rope_parameters": [1]}, "rope_parameters: want an object"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: want true or false, got 'yes'"),
    ],
)
def test_refuses_inconsistent_values(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(DENSE | change)


def test_refuses_more_chosen_experts_than_there_are():
    with pytest.raises(ConfigError, match="num_experts_per_tok: want at most num_experts 8, got 9"):
        ModelConfig.from_dict(MOE | {"num_experts_per_tok": 9})


def test_more_experts_than_can_be_listed_are_refused():
    """Each is a row of the inventory: a config of a few bytes took minutes and gigabytes."""
    with pytest.raises(
        ConfigError, match="num_experts: want at most 262144 in all layers together, got 262144 in each"
    ):
        ModelConfig.from_dict(MOE | {"num_experts": 1 << 18})


def test_load_names_the_file(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        ModelConfig.load(tmp_path)
    path = tmp_path / "config.json"
    for text, message in (
        ("{", "not readable as JSON"),
        ('{"a": ["\\ud83d"]}', "not readable as JSON: .* surrogates not allowed"),
        ("[]", "want a JSON object, got list"),
        ("[" * 100_000, "not readable as JSON"),
        ('{"model_type": "qwen3_5_text"}', "config.json: num_hidden_layers: want"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            ModelConfig.load(tmp_path)
    path.write_text(json.dumps(DENSE))
    assert ModelConfig.load(tmp_path) == ModelConfig.from_dict(DENSE)


def test_imports_no_torch():
    code = "import sys, pilotfish.engine.checkpoint.recognise; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
