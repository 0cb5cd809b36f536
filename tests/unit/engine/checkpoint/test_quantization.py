"""quantization_config: what it declares, and that it must agree with the headers."""

from __future__ import annotations

import json
import random
import re
from fnmatch import fnmatchcase
from time import process_time

import pytest

from pilotfish.engine.checkpoint.inventory import Kind
from pilotfish.engine.checkpoint.layouts import FP8, NVFP4_CT, NVFP4_MODELOPT, Layout
from pilotfish.engine.checkpoint.quantization import read_rules
from pilotfish.engine.checkpoint.rules import QuantGroup, QuantRules, Style, matches
from pilotfish.engine.errors import ConfigError, LayoutError
from tests.support.tiny_models import nvfp4_config


def group(**change):
    return nvfp4_config()["config_groups"]["group_0"] | change


def fp8_group(**change):
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False} | change
    return {"config_groups": {"g": group(format="float-quantized", weights=weights)}}


def config(**change):
    return {"quantization_config": nvfp4_config(**change)}


def test_no_declaration_means_no_rules():
    assert read_rules({}) is None
    assert read_rules({"quantization_config": None, "text_config": {}}) is None


def test_declaration_may_sit_in_the_text_config():
    assert read_rules({"text_config": config()}) == read_rules(config())


def test_rules_hold_targets_of_all_groups():
    groups = {"a": group(targets=["re:.*mlp.*"]), "b": group(targets=["lm_head"], strategy="group")}
    rules = read_rules(config(config_groups=groups, ignore=["x"], format="mixed-precision"))
    assert rules == QuantRules((QuantGroup(("re:.*mlp.*",), NVFP4_CT), QuantGroup(("lm_head",), NVFP4_CT)), ("x",))


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("model.layers.0.linear_attn.in_proj_a", True),
        ("model.layers.0.linear_attn", False),  # a container: exact names, not prefixes
        ("re:.*in_proj_a$", True),
        ("re:in_proj_a", False),  # from the start of the name
        ("re:.*layers.0.*", True),
        ("Linear", False),
    ],
)
def test_patterns(pattern, fits):
    assert matches([pattern], ["model.layers.0.linear_attn.in_proj_a"]) is fits


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("mtp*", "mtp.layers.0.mlp.up_proj", True),
        ("*lm_head*", "lm_head", True),
        ("*linear_attn.in_proj_a", "model.layers.0.linear_attn.in_proj_a", True),
        ("model.layers.1.mlp.experts", "model.layers.1.mlp.experts.7.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("lm_head", "model.lm_head", False),
    ],
)
def test_globs(pattern, name, fits):
    assert matches([pattern], [name], Style.GLOB) is fits


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("lm_head", "lm_head", True),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("model.layers.0.linear_attn.in_proj_a", "model.layers.0.linear_attn.in_proj_a", True),
        ("visual", "model.visual.blocks.0.qkv", True),
        (r"model\.layers\.\d+\.linear_attn\.in_proj_[ab]", "model.layers.7.linear_attn.in_proj_a", True),
        (r"model\.layers\.1", "model.layers.11.mlp.up_proj", False),
    ],
)
def test_parts_of_names(pattern, name, fits):
    assert matches([pattern], [name], Style.PART) is fits


def fits_by_hand(pattern, name, style):
    if style is Style.EXACT and pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    if style is Style.GLOB:
        return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
    if style is Style.PART:
        return f".{pattern}." in f".{name}." or re.match(rf"(?:{pattern})(?:\.|$)", name) is not None
    return pattern == name


WORDS = {
    Style.EXACT: ["a", "mlp", "1", "10", "", "re:.*", "re:a", "re:1"],
    Style.GLOB: ["a", "mlp", "1", "10", "", "*", "a?", "[1a]"],
    Style.PART: ["a", "mlp", "1", "10", "", ".*", r"\d+", "(a|1)"],
}


@pytest.mark.parametrize("style", Style, ids=lambda style: style.name)
def test_looking_patterns_up_finds_what_trying_them_does(style):
    """The group is the first of which a pattern fits."""
    choices = random.Random(0)

    def dotted(words, most):
        return ".".join(choices.choice(words) for _ in range(choices.randint(1, most)))

    found = 0
    for _ in range(20_000):
        name = dotted(["a", "mlp", "1", "10", "", "a*"], 5)
        targets = [tuple(dotted(WORDS[style], 3) for _ in range(choices.randint(0, 2))) for _ in range(3)]
        tried = [(wanted, i) for wanted in (name, "Linear") for i in range(3)]
        fitting = [i for wanted, i in tried if any(fits_by_hand(p, wanted, style) for p in targets[i])]
        groups = tuple(QuantGroup(some, frozenset({layout})) for some, layout in zip(targets, Layout, strict=False))
        wanted = groups[fitting[0]].layouts if fitting else None
        assert QuantRules(groups, style=style).layouts([name], Kind.LINEAR) == wanted, (name, targets)
        found += bool(fitting)
    assert 2000 < found < 18_000


@pytest.mark.parametrize("style", Style, ids=lambda style: style.name)
def test_a_config_may_name_every_expert(style):
    """In time that grows with their number, not with its square (which took minutes)."""
    names = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(40) for j in range(256)]
    rules = QuantRules(tuple(QuantGroup((name,), FP8) for name in names), tuple(f"{name}.x" for name in names), style)
    began = process_time()
    assert all(rules.layouts([name], Kind.LINEAR) == FP8 for name in names)
    assert rules.layouts([f"{names[-1]}.x"], Kind.LINEAR) is None
    assert process_time() - began < 5


def test_layouts_of_a_module():
    rules = QuantRules(
        (QuantGroup(("Linear",), FP8), QuantGroup(("re:.*experts.*",), NVFP4_CT)), ("lm_head", "re:.*gate$")
    )
    assert rules.layouts(["model.layers.0.mlp.up_proj"], Kind.LINEAR) == FP8
    assert rules.layouts(["model.layers.0.mlp.experts.3.up_proj"], Kind.LINEAR) == NVFP4_CT  # name before class
    assert rules.layouts(["lm_head"], Kind.LINEAR) is None
    assert rules.layouts(["model.layers.0.mlp.gate"], Kind.ROUTER) is None
    assert rules.layouts(["model.norm"], Kind.NORM) is None
    assert rules.layouts(["model.layers.0.mlp.experts.norm"], Kind.NORM) is None


# What nvidia-modelopt 0.47.0 wrote for a tiny model: hf_quant_config.json, and the same in config.json.
MODELOPT_FILE = {
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head", "model.embed_tokens", "model.layers.0.linear_attn.in_proj_a"],
    },
}
MODELOPT_CONFIG = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head", "model.embed_tokens", "model.layers.0.linear_attn.in_proj_a"],
    "quant_algo": "NVFP4",
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quant_method": "modelopt",
}


def test_modelopts_two_homes_say_the_same(tmp_path):
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(MODELOPT_FILE))
    beside = read_rules({}, tmp_path)
    assert beside == read_rules({"quantization_config": MODELOPT_CONFIG}) is not None
    assert beside == read_rules({"quantization_config": MODELOPT_CONFIG}, tmp_path)
    assert beside.layouts(["model.layers.0.mlp.up_proj"], Kind.LINEAR) == NVFP4_MODELOPT
    assert beside.layouts(["model.layers.0.linear_attn.in_proj_a"], Kind.LINEAR) is None


def test_modelopt_mixed_keys_cover_what_lies_in_them():
    layers = {
        "model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
    }
    rules = read_rules(
        {
            "quantization_config": {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": layers,
            }
        }
    )
    assert rules.layouts(["model.layers.0.mlp.experts.3.up_proj"], Kind.LINEAR) == NVFP4_MODELOPT
    assert rules.layouts(["model.layers.0.self_attn.q_proj"], Kind.LINEAR) == {Layout.FP8_TENSOR}
    assert rules.layouts(["model.layers.0.self_attn.k_proj"], Kind.LINEAR) is None


def test_modelopt_of_the_kv_cache_alone_declares_nothing(tmp_path):
    content = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    assert read_rules({}, tmp_path) is None


def test_fp8_of_qwen():
    declared = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "mlp.gate"],
    }
    rules = read_rules({"quantization_config": declared})
    assert Layout.FP8_BLOCK_INV in rules.layouts(["model.layers.0.mlp.up_proj"], Kind.LINEAR)
    assert rules.layouts(["lm_head"], Kind.LINEAR) is None
    whole = read_rules({"quantization_config": {"quant_method": "fp8"}})
    assert Layout.FP8_TENSOR in whole.layouts(["lm_head"], Kind.LINEAR)


OTHER_WRITERS = [
    ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "quant_algo: 'MXFP8' is not read"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo: 'NVFP4_AWQ' is not read"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size: want 16, got 32"),
    (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a": {"quant_algo": "W4A8"}},
        },
        r"quantized_layers.a.quant_algo: 'W4A8' is not read",
    ),
    ({"quant_method": "fp8", "weight_block_size": [64, 128]}, r"weight_block_size: want \[128, 128\], got \[64, 128\]"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt: want 'e4m3', got 'e5m2'"),
    ({"quant_method": "lynn_native", "format": "other"}, "format: want 'nvfp4_e2m1_rowwise_per_16'"),
    ({"quant_method": "gptq"}, "quant_method: 'gptq' is not read"),
    ({"quant_method": "awq"}, "quant_method: 'awq' is not read"),
    ({"quant_method": "mxfp4"}, "quant_method: 'mxfp4' is not read"),
]


@pytest.mark.parametrize(("declared", "message"), OTHER_WRITERS)
def test_refuses_what_other_writers_declare(declared, message):
    with pytest.raises(LayoutError, match=message):
        read_rules({"quantization_config": declared})


@pytest.mark.parametrize(
    ("file", "content", "error", "message"),
    [
        ("hf_quant_config.json", {"quantization": 3}, ConfigError, "want quantization, an object, got 3"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "W8A8"}}, LayoutError, "'W8A8' is not read"),
        ("lynn_quant_manifest.json", {"schema_version": "v2"}, LayoutError, "want schema_version .*, got 'v2'"),
        (
            "lynn_quant_manifest.json",
            {"schema_version": "lynn-variable-nvfp4-pack-v1", "quantized_tensors": []},
            ConfigError,
            "want quantized_tensors, an object",
        ),
    ],
)
def test_refuses_files_beside_the_config(tmp_path, file, content, error, message):
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(error, match=message):
        read_rules({}, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "quark"}, "quant_method: 'quark' is not read; want plain"),
        ({"quant_method": None}, "quant_method: None is not read"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: 'sparse-24-bitmask' is not read"),
        ({"transform_config": {"config_groups": {}}}, "transform_config: transformed weights are not read"),
        ({"quantization_status": "frozen"}, "quantization_status: want 'compressed', got 'frozen'"),
        ({"config_groups": {"g": group(format="int-quantized")}}, "config_groups.g: format 'int-quantized' for"),
        ({"config_groups": {"g": group(format="float-quantized")}}, "config_groups.g.weights.num_bits: want 8, got 4"),
        (fp8_group(strategy="group"), "strategy: want 'tensor' or 'channel' or 'block', got 'group'"),
        (fp8_group(strategy="block", block_structure=[64, 64]), r"block_structure: want \[128, 128\], got \[64, 64\]"),
        (fp8_group(dynamic=True), "dynamic: want False or None, got True"),
        ({"format": "pack-quantized", "config_groups": {"g": group(format=None)}}, "format 'pack-quantized' for"),
        (
            {"config_groups": {"g": group(weights=group()["weights"] | {"group_size": 32})}},
            "group_size: want 16, got 32",
        ),
        ({"config_groups": {"g": group(weights=group()["weights"] | {"num_bits": 8})}}, "num_bits: want 4, got 8"),
        (
            {"config_groups": {"g": group(weights=group()["weights"] | {"type": "int"})}},
            "type: want 'float', got 'int'",
        ),
        ({"config_groups": {"g": group(weights=group()["weights"] | {"symmetric": False})}}, "symmetric: want True"),
    ],
)
def test_refuses_what_is_not_read(change, message):
    with pytest.raises(LayoutError, match=message):
        read_rules(config(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config_groups": {}}, "config_groups: want an object with groups"),
        ({"config_groups": {"g": None}}, "config_groups.g.weights: want an object"),
        ({"config_groups": {"g": group(weights=None)}}, "config_groups.g.weights: want an object"),
        ({"config_groups": {"g": group(targets="Linear")}}, "targets: want a list of strings"),
        ({"ignore": [1]}, "ignore: want a list of strings"),
        ({"ignore": ["re:("]}, r"ignore: 're:\(' is no regular expression"),
        # a string is no list of its letters, an object none of its keys
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": "lm_head"},
            "exclude_modules: want a list",
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": 5}, "quantization_config.ignore: want a list"),
        ({"quant_method": "fp8", "ignored_layers": {"lm_head": 1}}, "ignored_layers: want a list of strings"),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["("]},
            r"modules_to_not_convert: '\(' is no regular expression",
        ),
    ],
)
def test_refuses_malformed_declarations(change, message):
    with pytest.raises(ConfigError, match=message):
        read_rules(config(**change))


def test_refuses_a_declaration_that_is_no_object():
    with pytest.raises(ConfigError, match="want an object, got str"):
        read_rules({"quantization_config": "nvfp4"})
