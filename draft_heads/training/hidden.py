"""The trunk's hidden states for rows of text: what serving hands to the head, by the same prefill in the same chunks.

Kept on disk if asked: computed once, row by row as they are first wanted, and there again after an interruption.
T = tokens of a row, H = hidden.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from pilotfish.engine.errors import OptionError
from pilotfish.engine.model.build import Model
from pilotfish.engine.model.prefill import read_text

STAMP_FILE, ROWS_FILE, DONE_FILE = "stamp.json", "hidden.bin", "done.bin"


class HiddenStates:
    """Hidden states of `rows` int32 [n, T], each row from an empty state. The model needs pages for one row."""

    def __init__(self, model: Model, rows: np.ndarray, cache: HiddenCache | None = None):
        self.model, self.rows, self.cache = model, rows, cache

    def take(self, numbers: list[int]) -> torch.Tensor:
        """[B, T, H] in the model's dtype, on its device."""
        return torch.stack([self._row(number) for number in numbers])

    def _row(self, number: int) -> torch.Tensor:
        if self.cache is not None and self.cache.has(number):
            return self.cache.read(number).to(self.model.device)
        hidden = read_text(self.model, torch.from_numpy(self.rows[number]).long())
        if self.cache is not None:
            self.cache.write(number, hidden)
        return hidden


class HiddenCache:
    """A folder with the hidden states of the rows that were asked for so far."""

    def __init__(self, folder: Path, rows: np.ndarray, width: int, dtype: torch.dtype, source: str):
        """`source` names the trunk. Raises OptionError if the folder holds states of other rows or another trunk."""
        digest = hashlib.blake2b(rows.tobytes(), digest_size=16).hexdigest()
        stamp = json.dumps({"trunk": source, "rows": digest, "shape": [*rows.shape, width], "dtype": str(dtype)})
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / STAMP_FILE
        if known.exists() and known.read_text() != stamp:
            raise OptionError(f"{folder}: holds hidden states of another text, trunk or row length; remove it")
        self._dtype, self._shape = dtype, (rows.shape[1], width)
        mode: Literal["r+", "w+"] = "r+" if known.exists() else "w+"
        sizes = (rows.shape[1] * width * dtype.itemsize,)
        self._bytes = np.memmap(folder / ROWS_FILE, np.uint8, mode, shape=(len(rows), *sizes))
        self._done = np.memmap(folder / DONE_FILE, np.uint8, mode, shape=(len(rows),))
        known.write_text(stamp)

    def has(self, number: int) -> bool:
        return bool(self._done[number])

    def read(self, number: int) -> torch.Tensor:
        return torch.from_numpy(self._bytes[number].copy()).view(self._dtype).view(self._shape)

    def write(self, number: int, hidden: torch.Tensor) -> None:
        self._bytes[number] = hidden.cpu().contiguous().view(torch.uint8).flatten().numpy()
        self._done[number] = 1
