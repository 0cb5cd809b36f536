"""Where a call's rows belong: the decode window of a batch, and a prompt span of one sequence.

B = sequences, W = window rows each, R = B * W rows, padded to whole tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pilotfish.kernels.attention import PAGE, RowTile, row_tiles
from pilotfish.kernels.linear import padded_rows
from pilotfish.kernels.rope import rope_angles


@dataclass(frozen=True)
class Window:
    """`width` consecutive positions of each sequence: row b * width + j is position starts[b] + j.

    `slots` int64 [B]; `pages`, `offsets` int64 [R] say where a row's keys and
    values go; `cos`, `sin` fp32 [R, 1, rotary / 2]. `tiles` is what attention reads.
    """

    width: int
    slots: torch.Tensor
    starts: list[int]
    positions: torch.Tensor
    pages: torch.Tensor
    offsets: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    tiles: list[RowTile]

    @classmethod
    def build(
        cls, width: int, slots: torch.Tensor, starts: list[int], tables: list[list[int]], inv_freq: torch.Tensor
    ) -> Window:
        rows = [start + j for start in starts for j in range(width)]
        pages = [table[(start + j) // PAGE] for start, table in zip(starts, tables, strict=True) for j in range(width)]
        positions = torch.tensor(rows)
        padded = torch.zeros(padded_rows(len(rows)), dtype=torch.int64)
        padded[: len(rows)] = positions
        # angles of whole tiles, so that the library's vector code meets every row alike
        cos, sin = rope_angles(padded.to(inv_freq.device), inv_freq)
        device = slots.device
        return cls(
            width,
            slots,
            starts,
            positions.to(device),
            torch.tensor(pages).to(device),
            (positions % PAGE).to(device),
            cos[: len(rows)],
            sin[: len(rows)],
            row_tiles(starts, tables, width, device),
        )

    @property
    def num_sequences(self) -> int:
        return len(self.starts)

    @property
    def num_rows(self) -> int:
        return len(self.starts) * self.width


@dataclass(frozen=True)
class Span:
    """Positions [start, start + length) of one prompt, whose sequence owns `slot` and the pages `table`, int64."""

    slot: int
    start: int
    length: int
    table: torch.Tensor
    positions: torch.Tensor
    pages: torch.Tensor
    offsets: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def build(cls, slot: int, start: int, length: int, table: list[int], inv_freq: torch.Tensor) -> Span:
        positions = torch.arange(start, start + length, device=inv_freq.device)
        owned = torch.tensor(table, device=inv_freq.device)
        pages, offsets = owned[positions // PAGE], positions % PAGE
        return cls(slot, start, length, owned, positions, pages, offsets, *rope_angles(positions, inv_freq))
