"""Tiny checkpoints, built once a session, of which a test may spoil a copy; prompts that pause by no clock."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pilotfish.engine.round import executor
from pilotfish.engine.round.prompt import PromptPass
from tests.support.tiny_models import build_tiny, write_checkpoint


@pytest.fixture(autouse=True, scope="module")
def prompts_pause_by_no_clock():
    """A test that counts steps or looks at a batch sees the same on every machine; `pauses_after` says where prompts
    pause, and test_pauses.py how the clock does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "HOST_ROUNDS_SHARE", math.inf)
        patch.setattr(PromptPass, "_time", lambda self, num_rows: 0.0)
        yield


@dataclass
class Draft:
    """A checkpoint in memory: change it, then write it."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def text(self) -> dict[str, Any]:
        return self.config.get("text_config", self.config)

    def take(self, prefix: str) -> dict[str, torch.Tensor]:
        """Removes and returns the tensors whose names begin so."""
        return {name: self.tensors.pop(name) for name in list(self.tensors) if name.startswith(prefix)}

    def write(self, **files: dict[str, torch.Tensor]) -> Path:
        """Writes model.safetensors and any further files (key `mtp` -> mtp.safetensors); returns the folder."""
        named = {f"{name}.safetensors": tensors for name, tensors in files.items()}
        return write_checkpoint(self.folder, self.config, {"model.safetensors": self.tensors} | named)


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Callable[[str, bool], Path]:
    """The folder of a kind, packed or not; built on first use. Not to be written to."""
    folders: dict[tuple[str, bool], Path] = {}

    def get(kind: str, nvfp4: bool = False) -> Path:
        if (kind, nvfp4) not in folders:
            folder = tmp_path_factory.mktemp(f"{kind}-{nvfp4}")
            folders[kind, nvfp4] = build_tiny(folder, kind, nvfp4=nvfp4, dtype="bfloat16")
        return folders[kind, nvfp4]

    return get


@pytest.fixture
def draft(built, tmp_path) -> Callable[..., Draft]:
    """A copy of a tiny checkpoint, not yet written."""

    def get(kind: str = "dense", nvfp4: bool = False) -> Draft:
        folder = built(kind, nvfp4)
        config = json.loads((folder / "config.json").read_text())
        return Draft(tmp_path / "checkpoint", copy.deepcopy(config), load_file(folder / "model.safetensors"))

    return get
