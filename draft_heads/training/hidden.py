"""The trunk's hidden states for rows of text: what serving hands to the head, by the same prefill in the same chunks.

Where asked, each row of text goes on with tokens that the trunk itself writes. Kept on disk if asked: computed once, as
rows are first wanted, and there again after an interruption.
P = tokens of text of a row, N = tokens the trunk writes behind them, T = P + N, H = hidden.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from pilotfish.draft_heads.training.own_text import write_on
from pilotfish.engine.errors import OptionError
from pilotfish.engine.model.build import Model
from pilotfish.engine.round.prompt import read_text

STAMP_FILE, TOKENS_FILE, ROWS_FILE, DONE_FILE = "stamp.json", "tokens.bin", "hidden.bin", "done.bin"

Row = tuple[torch.Tensor, torch.Tensor]
"""Tokens int64 [T] and hidden states [T, H]."""


class HiddenStates:
    """Rows to train on, each from an empty state: `texts` int32 [n, P], `num_own` tokens behind each, and their hidden
    states. The model needs pages for one row."""

    def __init__(self, model: Model, texts: np.ndarray, num_own: int = 0, cache: HiddenCache | None = None):
        self.model, self.texts, self.num_own, self.cache = model, texts, num_own, cache
        self._written: dict[int, Row] = {}

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, numbers: list[int], together: list[int]) -> Row:
        """Tokens int64 [B, T] and hidden states [B, T, H] in the model's dtype, on its device.

        Of the rows that are wanted soon, these among them, `together` are written on at once if one of these is not
        there: what the trunk writes may depend on what it is written beside.
        """
        if self.num_own and not all(map(self._has, numbers)):
            self._write(together)
        tokens, hidden = zip(*map(self._row, numbers), strict=True)
        return torch.stack(tokens).to(self.model.device), torch.stack(hidden).to(self.model.device)

    def _has(self, number: int) -> bool:
        return number in self._written or (self.cache is not None and self.cache.has(number))

    def _write(self, together: list[int]) -> None:
        distinct = list(dict.fromkeys(together))
        pieces = torch.from_numpy(self.texts[distinct]).long()
        rows = zip(distinct, *write_on(self.model, pieces, self.num_own), strict=True)
        self._written = {number: (tokens, hidden) for number, tokens, hidden in rows}
        if self.cache is not None:
            for number, row in self._written.items():
                self.cache.write(number, row)
            self._written = {}

    def _row(self, number: int) -> Row:
        if number in self._written:
            return self._written[number]
        if self.cache is not None and self.cache.has(number):
            return self.cache.read(number)
        tokens = torch.from_numpy(self.texts[number]).long()
        row = tokens, read_text(self.model, tokens)
        if self.cache is not None:
            self.cache.write(number, row)
        return row


class HiddenCache:
    """A folder with the rows that were asked for so far."""

    def __init__(self, folder: Path, texts: np.ndarray, num_own: int, width: int, dtype: torch.dtype, source: str):
        """`source` names the trunk. Raises OptionError if the folder holds states of other rows or another trunk."""
        digest = hashlib.blake2b(texts.tobytes(), digest_size=16).hexdigest()
        shape = (*texts.shape, num_own, width)
        stamp = json.dumps({"trunk": source, "rows": digest, "shape": shape, "dtype": str(dtype)})
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / STAMP_FILE
        if known.exists() and known.read_text() != stamp:
            raise OptionError(f"{folder}: holds hidden states of another text, trunk or row length; remove it")
        self._dtype, count, length = dtype, len(texts), texts.shape[1] + num_own
        self._shape = (length, width)
        mode: Literal["r+", "w+"] = "r+" if known.exists() else "w+"
        self._folder = folder
        self._tokens = np.memmap(folder / TOKENS_FILE, np.int32, mode, shape=(count, length))
        self._bytes = np.memmap(folder / ROWS_FILE, np.uint8, mode, shape=(count, length * width * dtype.itemsize))
        self._done = np.memmap(folder / DONE_FILE, np.uint8, mode, shape=(count,))
        known.write_text(stamp)

    def has(self, number: int) -> bool:
        return bool(self._done[number])

    def read(self, number: int) -> Row:
        hidden = torch.from_numpy(self._bytes[number].copy()).view(self._dtype).view(self._shape)
        return torch.from_numpy(self._tokens[number].copy()).long(), hidden

    def write(self, number: int, row: Row) -> None:
        tokens, hidden = (part.cpu().contiguous() for part in row)
        self._put(TOKENS_FILE, number, tokens.int().numpy())
        self._put(ROWS_FILE, number, hidden.view(torch.uint8).flatten().numpy())
        self._put(DONE_FILE, number, np.ones(1, np.uint8))

    def _put(self, name: str, number: int, row: np.ndarray) -> None:
        """Writes a row, and not through the mapping: where the disk is full, that ends the process without a word."""
        with (self._folder / name).open("r+b") as file:
            file.seek(number * row.nbytes)
            file.write(row.tobytes())
