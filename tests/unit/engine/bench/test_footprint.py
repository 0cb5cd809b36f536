"""Memory by layout, computed from configs, against weights that are made and caches that are allocated."""

from pathlib import Path

import pytest
import torch

from pilotfish.engine.bench.footprint import footprint, table
from pilotfish.engine.bench.sizes import released_config
from pilotfish.engine.cache.tensors import KvCache
from pilotfish.engine.checkpoint.dummy import dummy_weights, stored_bytes
from pilotfish.engine.config import ModelConfig
from pilotfish.engine.plan import page_bytes

ROOT = Path(__file__).parents[4]
DEMO = ROOT / "demo" / "model"


def num_bytes(weight):
    return weight.nbytes if isinstance(weight, torch.Tensor) else weight.num_bytes


@pytest.mark.parametrize("layout", ["bf16", "nvfp4", "nvfp4-bf16-head", "mixed"])
def test_weights_are_as_many_bytes_as_random_ones_of_that_layout(layout):
    config = ModelConfig.load(DEMO)
    made = dummy_weights(config, layout, torch.device("cpu"))
    # beside its scales each NVFP4 matrix has one number of its own
    packed = sum(not isinstance(weight, torch.Tensor) for weight in made.values())
    assert stored_bytes(config, layout) == pytest.approx(sum(map(num_bytes, made.values())), abs=4 * packed)


def test_a_token_is_what_caches_of_all_attention_layers_hold():
    config = ModelConfig.load(DEMO)
    cache = KvCache.empty(config, 3, torch.bfloat16, torch.device("cpu"))
    layers = len(config.full_layers) + 1
    assert 3 * page_bytes(config, torch.bfloat16, with_head=True) == layers * (cache.k.nbytes + cache.v.nbytes)


def test_the_35b_takes_what_was_resident_on_a_gpu():
    """19.41 GiB, of which 0.4 % were not in the files (docs/benchmarks.md)."""
    found = footprint(released_config("35B-A3B"), "nvfp4")
    assert found.weights / 2**30 == pytest.approx(19.41 / 1.004, rel=0.002)


def test_the_table_of_models_is_this_one():
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert "\n".join(table()) in page, "run: python -m pilotfish.engine.bench.footprint"
