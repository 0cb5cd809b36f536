"""A whole round of fused kernels, wired as it is served, compiles for a GPU where there is none."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from pilotfish.engine.batch_state import BatchState
from pilotfish.engine.checkpoint.dummy import dummy_weights
from pilotfish.engine.checkpoint.nvfp4 import LynnWeight
from pilotfish.engine.config import ModelConfig
from pilotfish.engine.device_round.rounds import WHOLE
from pilotfish.engine.device_round.shapes import Shape
from pilotfish.engine.device_round.start import make_rounds
from pilotfish.engine.errors import LayoutError
from pilotfish.engine.model.build import CacheSizes, build_model
from tests.support.compiled import compiling
from tests.support.rounds import CPU

DEMO = Path(__file__).parents[4] / "demo" / "model"
LAUNCHES = {
    *("_embed_rows_kernel", "_add_norm_kernel", "_pair_norm_kernel", "_route_kernel", "_choose_kernel"),
    *("_accept_commit_kernel", "_rows_kernel", "experts_kernel", "combine_kernel", "plan_kernel", "project_kernel"),
}


def test_the_demo_model_s_round(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=132)
    )
    config = ModelConfig.load(DEMO)
    weights = dummy_weights(config, "nvfp4", CPU)
    model = build_model(weights, config, CacheSizes(8, 3, 0), torch.bfloat16, CPU, fused=True)
    state = BatchState(3, 3, config.vocab_size, CPU, complete=True)
    rounds = make_rounds(model, state, 3, 2, 512, 16)
    with torch.inference_mode(), compiling() as kernels:
        rounds._work(Shape(2, 3), WHOLE)
    names = {kernel.metadata.name for kernel in kernels}
    assert names >= LAUNCHES, LAUNCHES - names
    # launches of eight layers, the head three times, lm_head four times
    assert len(kernels) > 100


@pytest.mark.parametrize(
    ("change", "words"),
    [({"head_dim": 48}, "head_dim: the GPU kernels want"), ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim")],
)
def test_sizes_that_kernels_do_not_hold_are_named(change, words):
    config = dataclasses.replace(ModelConfig.load(DEMO), **change)
    with pytest.raises(LayoutError, match=words):
        build_model({}, config, CacheSizes(8, 3, 0), torch.bfloat16, CPU, fused=True)


def test_weights_that_kernels_do_not_hold_are_named():
    config = ModelConfig.load(DEMO)
    weights = dummy_weights(config, "nvfp4", CPU)
    name = "model.layers.0.linear_attn.out_proj.weight"
    packed = weights[name]
    weights[name] = LynnWeight(packed.packed, packed.scale.half(), 1.0)
    with pytest.raises(LayoutError, match=r"e4m3 scales.*--kernels torch"):
        build_model(weights, config, CacheSizes(8, 3, 0), torch.bfloat16, CPU, fused=True)
