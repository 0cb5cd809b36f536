"""Sizes of released models, against the parameter counts that are published for them."""

from __future__ import annotations

import math

import pytest

from pilotfish.engine.bench.sizes import SIZES, released_config
from pilotfish.engine.checkpoint.inventory import ExpertForm, Experts, mtp, trunk

PARAMETERS = {
    "0.8B": (0.752, 20.5),
    "2B": (1.882, 60.8),
    "4B": (4.206, 120.6),
    "9B": (8.954, 243.3),
    "27B": (26.896, 424.7),
    "35B-A3B": (34.661, 844.6),
    "122B-A10B": (122.11, 2524),
    "397B-A17B": (396.35, 6596),
}
"""Text parameters in billions, those of the MTP head in millions."""


@pytest.mark.parametrize("size", SIZES)
def test_parameters_are_as_many_as_published(size):
    config = released_config(f"Qwen/Qwen3.6-{size}")
    experts = Experts(ExpertForm.SINGLE, config.num_experts)
    counted = [sum(math.prod(e.shape) for e in part(config, lambda _: experts).values()) for part in (trunk, mtp)]
    billions, millions = PARAMETERS[size]
    assert counted[0] / 1e9 == pytest.approx(billions, rel=1e-3)
    assert counted[1] / 1e6 == pytest.approx(millions, rel=3e-3)


@pytest.mark.parametrize("name", ["Qwen3.5-27B", "Qwen/Qwen3.8-27B", "27B"])
def test_one_size_has_many_names(name):
    assert released_config(name).hidden_size == 5120


@pytest.mark.parametrize("name", ["demo/model", "Qwen3.6-28B", ""])
def test_other_names_are_none(name):
    assert released_config(name) is None
