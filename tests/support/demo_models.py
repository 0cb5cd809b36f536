"""The demo model, broken on purpose."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

DEMO = Path(__file__).resolve().parents[2] / "demo" / "model"
Tensors = dict[str, torch.Tensor]


def shift_norms(tensors: Tensors) -> Tensors:
    """The head's norms, whose files hold w of 1 + w, hold 1 + w."""
    return {
        name: tensor + 1 if name.startswith("mtp.") and "norm" in name else tensor for name, tensor in tensors.items()
    }


def drop_tensor(tensors: Tensors) -> Tensors:
    """One of the head's is missing."""
    return {name: tensor for name, tensor in tensors.items() if name != "mtp.pre_fc_norm_hidden.weight"}


def changed_demo(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """The demo model with the tensors that `change` returns."""
    shutil.copytree(DEMO, folder)
    for shard in folder.glob("*.safetensors"):
        save_file(change(load_file(shard)), shard, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    known = set().union(*(load_file(shard) for shard in folder.glob("*.safetensors")))
    listed = json.loads(index.read_text())
    listed["weight_map"] = {name: file for name, file in listed["weight_map"].items() if name in known}
    index.write_text(json.dumps(listed))
    return folder
