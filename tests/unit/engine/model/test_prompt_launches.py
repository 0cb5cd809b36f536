"""A prompt through a model as a GPU has it, wired and compiled where there is none: our launches of each kind of layer.

The host's time for a prompt is theirs: what a change adds here is paid by every layer of every prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from pilotfish.engine.checkpoint.dummy import dummy_weights
from pilotfish.engine.config import ModelConfig
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.model.build import CacheSizes, Model, build_model
from pilotfish.engine.round import cuda_table
from pilotfish.engine.round.prompt import PromptPass
from pilotfish.kernels.cuda import delta_prefill, linear
from pilotfish.kernels.cuda.expand import expand
from tests.support.compiled import compiling

CPU = torch.device("cpu")
ATTENTION = ["PRODUCT", "project_kernel", "_gather_kernel", "_gate_kernel", "PRODUCT"]
LINEAR = ["IN_PROJ", "_mix_kernel", *["_state_kernel"] * 2, "_gate_kernel", "PRODUCT"]
"""fla-core's five are not among them."""
MLP = ["_add_norm_kernel", "PRODUCT", "_route_kernel", "EXPERTS", "combine_kernel"]
FEW = {
    "PRODUCT": ["_rows_kernel"],
    "IN_PROJ": ["_rows_kernel"],
    "EXPERTS": ["list_groups_kernel", *["listed_kernel"] * 2],
}
MANY = {
    "PRODUCT": ["_expand_kernel"],
    # b and a stay BF16, and are written out by a launch of their own
    "IN_PROJ": ["_expand_kernel"] * 2,
    "EXPERTS": ["_prepare_kernel", *["_experts_kernel"] * 2],
}
"""What stands for each part: of few rows a round's kernels, of many what unpacks once for all of them."""


def on_a_gpu(model: Model, monkeypatch: pytest.MonkeyPatch) -> PromptPass:
    """Prompts with everything chosen as where weights are on a GPU."""
    monkeypatch.setattr(linear, "expand", lambda *operands: expand(*operands, on_device=True))
    monkeypatch.setattr(cuda_table, "is_installed", lambda: True)

    def rule(q: Any, k: Any, v: torch.Tensor, *rest: Any, initial_state: torch.Tensor, **options: Any) -> Any:
        return torch.zeros_like(v), initial_state.clone()

    monkeypatch.setattr(delta_prefill, "_chunked", lambda: rule)
    return PromptPass(model, cuda_table.CudaOperators(model, on_device=True))


@pytest.mark.parametrize(
    ("rows", "chosen"), [(40, FEW), (200, MANY | {"EXPERTS": FEW["EXPERTS"]}), (300, MANY)], ids=["40", "200", "300"]
)
def test_a_prompt_takes_so_many_launches(monkeypatch, rows, chosen):
    config = ModelConfig.load(Path(__file__).parents[4] / "demo" / "model")
    weights = dummy_weights(config, "nvfp4", CPU)
    model = build_model(weights, config, CacheSizes(8, 3, 0), torch.bfloat16, CPU, fused=True)
    prompt = on_a_gpu(model, monkeypatch)
    with torch.inference_mode(), compiling() as kernels:
        hidden = prompt.trunk(torch.zeros(rows, dtype=torch.int64), prompt.span(1, 0, rows, [1, 2]))
    assert hidden.shape == (rows, config.hidden_size) and hidden.dtype == torch.bfloat16
    want = []
    for layer in model.trunk.layers:
        for part in [*(ATTENTION if isinstance(layer.mixer, GatedAttention) else LINEAR), *MLP]:
            want += chosen.get(part, [part])
    assert [kernel.metadata.name for kernel in kernels] == want
