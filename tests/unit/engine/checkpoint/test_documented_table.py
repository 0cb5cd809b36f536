"""The table of docs/checkpoints.md says, layout by layout, what really happens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.errors import PilotfishError
from tests.support.packing import RECIPES, pack_checkpoint, refused_layouts
from tests.support.tiny_models import build_tiny, split_experts, write_checkpoint

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "checkpoints.md"
FAMILIES = {"Qwen3-Next": "qwen3_next", "Qwen3.8-Flash-Next": "qwen4_exp", "another model_type": "llama"}
MODULE = "model.layers.3.self_attn.v_proj"


def documented() -> dict[str, str]:
    """First and last cell of each row under the heading Layouts."""
    section = DOCUMENT.read_text().split("\n## Layouts\n")[1].split("\n##")[0]
    rows = [line.strip("| \n").split("|") for line in section.splitlines() if line.startswith("| ")]
    return {cells[0].strip(): cells[-1].strip() for cells in rows[1:]}


def outcome(folder: Path) -> str:
    try:
        load_weights(open_checkpoint(folder), progress=False)
    except PilotfishError as error:
        assert "\n" not in str(error)
        return "refused"
    return "loaded"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = build_tiny(tmp_path_factory.mktemp("source"), "dense")
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def test_the_table_is_what_happens(source, tmp_path):
    config, tensors = source
    found = {}
    for number, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        plain = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        folder = write_checkpoint(tmp_path / f"plain{number}", config, {"model.safetensors": plain})
        found[f"plain {('BF16', 'F16', 'F32')[number]}"] = outcome(folder)
    for number, recipe in enumerate(RECIPES):
        folder, _ = pack_checkpoint(tmp_path / f"packed{number}", config, split_experts(tensors), recipe)
        found[recipe.name] = outcome(folder)
    for number, (name, parts) in enumerate(refused_layouts(tensors[f"{MODULE}.weight"]).items()):
        rest = {other: tensor for other, tensor in tensors.items() if not other.startswith(MODULE)}
        rest |= {f"{MODULE}.{suffix}": tensor for suffix, tensor in parts.items()}
        found[name] = outcome(write_checkpoint(tmp_path / f"other{number}", config, {"model.safetensors": rest}))
    for name, model_type in FAMILIES.items():
        folder = write_checkpoint(
            tmp_path / model_type, config | {"model_type": model_type}, {"m.safetensors": tensors}
        )
        found[name] = outcome(folder)
    assert found == documented()
