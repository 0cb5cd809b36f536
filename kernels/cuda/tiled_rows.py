"""Rows of activations in the order in which a product's lanes load them: a warp's load is 512 bytes in one piece.

Lane 4 g + q loads 16 bytes at a time of row g of eight: of each half of a unit of 128 columns the columns 16 q ..., in
two loads (packing.py). Of row-major rows such a load touches 8 lines and half of each sector. Here the elements are

    [eight rows][unit][half 2][octet 2][row 8][q 4][column 8]

so a lane's further loads are at constant distances still, and 8 columns from a multiple of 8 on are 16 bytes in one
piece for those that write them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pilotfish.kernels.cuda.packing import UNIT

ROWS = 8
MOST_AT_ONCE = 64
"""Rows that a program of a product reads at most: there is room for whole groups of so many."""


@dataclass(frozen=True, eq=False)
class TiledRows:
    """A matrix [num_rows, width], width a multiple of UNIT, at the front of `memory`, flat and with room for whole
    groups of MOST_AT_ONCE rows: `size` numbers. What stands past its rows is anything, and decides no bit of theirs."""

    memory: torch.Tensor
    num_rows: int
    width: int

    def __post_init__(self) -> None:
        assert self.width % UNIT == 0 and self.memory.dim() == 1, (self.width, self.memory.shape)
        assert self.memory.numel() >= size(self.num_rows, self.width), (self.memory.shape, self.num_rows)

    def __len__(self) -> int:
        return self.num_rows

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.width

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    @staticmethod
    def empty(num_rows: int, width: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> TiledRows:
        """Rows to be written. What stands in them, and past them, is anything."""
        return TiledRows(torch.empty(size(num_rows, width), dtype=dtype, device=device), num_rows, width)

    @staticmethod
    def of(rows: torch.Tensor) -> TiledRows:
        """A copy of row-major rows; zeros past them."""
        num_rows, width = rows.shape
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -num_rows % MOST_AT_ONCE))
        # eight rows, row, unit, half, q, octet, column
        parts = padded.view(-1, ROWS, width // UNIT, 2, 4, 2, 8)
        return TiledRows(parts.permute(0, 2, 3, 5, 1, 4, 6).flatten(), num_rows, width)

    def plain(self) -> torch.Tensor:
        """A row-major copy, [num_rows, width]."""
        parts = self.memory[: size(self.num_rows, self.width)].view(-1, self.width // UNIT, 2, 2, ROWS, 4, 8)
        return parts.permute(0, 4, 1, 2, 5, 3, 6).reshape(-1, self.width)[: self.num_rows]


AnyRows = torch.Tensor | TiledRows


def size(num_rows: int, width: int) -> int:
    """Numbers of memory that rows take."""
    return -(-num_rows // MOST_AT_ONCE) * MOST_AT_ONCE * width


def stored(rows: AnyRows) -> tuple[torch.Tensor, bool]:
    """The memory of rows that are contiguous, and whether they are tiled: what a kernel is given."""
    if isinstance(rows, TiledRows):
        return rows.memory, True
    assert rows.is_contiguous(), rows.stride()
    return rows, False


def written(rows: AnyRows) -> tuple[torch.Tensor, int, bool]:
    """Where a product's rows go: memory, the step from row to row (of tiled ones their width), and whether they are
    tiled. Others may be columns of wider rows."""
    if isinstance(rows, TiledRows):
        return rows.memory, rows.width, True
    assert rows.stride(1) == 1, rows.stride()
    return rows, rows.stride(0), False


@triton.jit
def row_place(row, width):
    """Where column 0 of a row is."""
    return (row >> 3) * (8 * width) + (row & 7) * 32


@triton.jit
def column_place(column):
    """How far a column is from column 0 of its row. In divisions, of which Triton sees that 8 columns in one piece stay
    that; unsigned ones, which are shifts."""
    column = column.to(tl.uint32)
    octet = column // 8
    moved = octet // 16 * 1024 + octet // 8 % 2 * 512 + octet % 2 * 256 + octet // 2 % 4 * 8
    return (moved + column % 8).to(tl.int32)


@triton.jit
def at(row, column, width, TILED: tl.constexpr):
    """Where a number of some rows is, tiled ones or row-major ones."""
    if TILED:
        return row_place(row, width) + column_place(column)
    else:
        return row * width + column
