"""Rows to choose tokens for, each of a slot of its own, from the fields that a test names."""

from __future__ import annotations

from typing import Any

import torch

from pilotfish.spec.rules import Rows
from pilotfish.spec.sampling import choose
from pilotfish.spec.slots import SAMPLED, SlotState


def rows_of(positions: torch.Tensor, vocab_size: int, **fields: Any) -> Rows:
    """One row for each position that a token is to take; a field that is not named must not be read."""
    count = len(positions)
    known = {
        "length": positions.long() - 1,
        "drafts": torch.zeros((count, 0), dtype=torch.int64),
        "counts": torch.zeros((count, vocab_size), dtype=torch.int32),
    }
    state = SlotState(**dict.fromkeys(SlotState._fields) | known | fields)
    return Rows.of(state, torch.arange(count), 1)


def drawn(logits: torch.Tensor, temperature: float, seed: int, choice: int, position: int) -> int:
    """The token of one row of logits [1, V], by temperature and noise alone."""
    fields = {"temperature": [temperature], "seed": [seed], "choice": [choice]}
    rows = rows_of(
        torch.tensor([position]), logits.shape[1], **{name: torch.tensor(value) for name, value in fields.items()}
    )
    return int(choose(logits, rows, SAMPLED))
