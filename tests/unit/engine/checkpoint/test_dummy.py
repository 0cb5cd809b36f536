"""Random weights: a model builds from them and stays finite, and they take the room that the real layout takes."""

from __future__ import annotations

import pytest
import torch

from pilotfish.engine.bench.sizes import released_config
from pilotfish.engine.checkpoint import dummy
from pilotfish.engine.checkpoint.inventory import ExpertForm, Experts, mtp, trunk
from pilotfish.engine.config import ModelConfig
from tests.support.rounds import CPU, make_engine

LAYOUTS = ("bf16", "nvfp4", "nvfp4-bf16-head", "mixed")


def config_of(kind):
    return make_engine(kind).executor.model.config


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ("moe", "hv_gt_hk"))
def test_all_tensors_of_the_config_with_their_shapes(kind, layout):
    config = config_of(kind)
    experts = Experts(ExpertForm.SINGLE, config.num_experts)
    wanted = trunk(config, lambda _: experts) | mtp(config, lambda _: experts)
    weights = dummy.dummy_weights(config, layout, CPU)
    assert {name: tuple(w.shape) for name, w in weights.items()} == {
        f"{name}{e.suffix}": e.shape for name, e in wanted.items()
    }
    assert ("NvFp4Weight" in {type(w).__name__ for w in weights.values()}) == (layout != "bf16")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_keep_the_variance_of_their_input(layout):
    config = config_of("moe")
    for name, weight in dummy.dummy_weights(config, layout, CPU).items():
        if weight.dim() == 2 if isinstance(weight, torch.Tensor) else True:
            values = weight if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float32)
            if "embed" not in name and values.numel() > 1000:
                assert 0.8 < float(values.float().std()) * values.shape[1] ** 0.5 < 1.25, name


def test_equal_seeds_give_equal_weights():
    config = config_of("moe")
    first, second = (dummy.dummy_weights(config, "mixed", CPU, seed=3) for _ in range(2))
    other = dummy.dummy_weights(config, "mixed", CPU, seed=4)
    name = "model.layers.0.linear_attn.in_proj_qkv.weight"
    values = [weights[name].dequantize() for weights in (first, second, other)]
    assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])


@pytest.mark.parametrize(("layout", "gib"), [("nvfp4", 19.3), ("nvfp4-bf16-head", 20.4), ("mixed", 20.9)])
def test_the_room_of_the_largest_target(layout, gib):
    """35B-A3B on a device without memory: what is counted is what the layouts' own sizes say."""
    total = 0
    config: ModelConfig = released_config("35B-A3B")
    experts = Experts(ExpertForm.SINGLE, config.num_experts)
    for name, e in (trunk(config, lambda _: experts) | mtp(config, lambda _: experts)).items():
        count = 1
        for size in e.shape:
            count *= size
        packed = e.kind.value == "linear" and not name.endswith(dummy.PLAIN)
        bits = {"nvfp4": 4.5, "fp8": 8, "bf16": 16}[dummy._form(name, layout) if packed else "bf16"]
        total += count * bits / 8
    assert total / 2**30 == pytest.approx(gib, rel=0.01)
