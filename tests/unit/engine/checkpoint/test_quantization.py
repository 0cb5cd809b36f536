"""quantization_config: what it declares, and that it must agree with the headers."""

from __future__ import annotations

import pytest

from pilotfish.engine.checkpoint.inventory import Kind
from pilotfish.engine.checkpoint.quantization import Rules, matches, read_rules
from pilotfish.engine.errors import ConfigError, LayoutError
from tests.support.tiny_models import nvfp4_config


def group(**change):
    return nvfp4_config()["config_groups"]["group_0"] | change


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
    assert rules == Rules(("re:.*mlp.*", "lm_head"), ("x",))


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


def test_packs():
    rules = Rules(("Linear",), ("lm_head", "re:.*gate$"))
    assert rules.packs(["model.layers.0.mlp.up_proj"], Kind.LINEAR)
    assert not rules.packs(["lm_head"], Kind.LINEAR)
    assert not rules.packs(["model.layers.0.mlp.gate"], Kind.ROUTER)
    assert not rules.packs(["model.norm"], Kind.NORM)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "modelopt"}, "quant_method: 'modelopt' is not read; want plain"),
        ({"quant_method": "fp8"}, "quant_method: 'fp8' is not read"),
        ({"quant_method": None}, "quant_method: None is not read"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: 'sparse-24-bitmask' is not read"),
        ({"transform_config": {"config_groups": {}}}, "transform_config: transformed weights are not read"),
        ({"quantization_status": "frozen"}, "quantization_status: want 'compressed', got 'frozen'"),
        ({"config_groups": {"g": group(format="float-quantized")}}, "config_groups.g: format 'float-quantized' for"),
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
    ],
)
def test_refuses_malformed_declarations(change, message):
    with pytest.raises(ConfigError, match=message):
        read_rules(config(**change))


def test_refuses_a_declaration_that_is_no_object():
    with pytest.raises(ConfigError, match="want an object, got str"):
        read_rules({"quantization_config": "nvfp4"})
