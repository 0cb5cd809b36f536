"""What is wrong with weights that a model computes nonsense from: read again, once something else has told so.

Values that are not finite, matrices and norms of zeros; what scales tell was refused when the weights were loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from pilotfish.engine.checkpoint.fp8 import Fp8Weight
from pilotfish.engine.checkpoint.layouts import Module
from pilotfish.engine.checkpoint.load import ModuleReader, Weight

BLOCK = 1 << 24
NOT_FINITE, ZEROS = "NaN or infinite values", "zeros alone"
UNTRAINED = "norms never trained or lost: zeros, where w of 1 + w is held,"


def findings(modules: Iterable[Module]) -> dict[str, str]:
    """NOT_FINITE, ZEROS and UNTRAINED, as far as they were found: in a few words, and where first."""
    found: dict[str, list[str]] = defaultdict(list)
    reader = ModuleReader()
    for module in modules:
        for name, weight in reader.read(module).items():
            if (what := _look(name, weight)) is not None:
                found[what].append(name)
    reader.close()
    return {what: f"{what} in {names[0]}{_more(names)}" for what, names in found.items()}


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _look(name: str, weight: Weight) -> str | None:
    if isinstance(weight, torch.Tensor):
        flat = weight.reshape(-1)
        if not all(bool(part.isfinite().all()) for part in flat.split(BLOCK)):
            return NOT_FINITE
        what = ZEROS if weight.dim() > 1 else UNTRAINED if "norm" in name else None
        return what if what and not any(bool(part.any()) for part in flat.split(BLOCK)) else None
    if isinstance(weight, Fp8Weight):
        codes = weight.weight.view(torch.uint8).reshape(-1)
        return NOT_FINITE if any(bool(((part & 0x7F) == 0x7F).any()) for part in codes.split(BLOCK)) else None
    return None
