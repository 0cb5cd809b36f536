"""Rows in the order in which a product's lanes load them: where each number is, and that both ways lose none."""

from __future__ import annotations

import pytest
import torch

from pilotfish.kernels.cuda.tiled_rows import TiledRows, column_place, row_place, size, stored


def places(rows: int, width: int) -> torch.Tensor:
    """Where each number of a matrix stands, by what a lane 4 g + q loads at step t of a unit."""
    row, unit, half, octet, q, column = (
        values.flatten()
        for values in torch.meshgrid(
            *(torch.arange(count) for count in (rows, width // 128, 2, 2, 4, 8)),
            indexing="ij",
        )
    )
    # a load of a warp is 32 lanes of 16 bytes, four of them a unit, and a unit of eight rows follows the one before
    load = (row // 8 * (width // 128) + unit) * 4 + half * 2 + octet
    out = torch.empty(rows, width, dtype=torch.int64)
    out[row, unit * 128 + half * 64 + q * 16 + octet * 8 + column] = (load * 32 + row % 8 * 4 + q) * 8 + column
    return out


@pytest.mark.parametrize(("rows", "width"), [(1, 128), (8, 256), (9, 384), (20, 128)])
def test_a_lane_s_loads_of_a_warp_are_in_one_piece(rows, width):
    x = torch.randn(rows, width)
    tiled = TiledRows.of(x)
    assert (len(tiled), tiled.shape, tiled.dtype) == (rows, x.shape, x.dtype)
    assert tiled.memory.numel() == size(rows, width) == -(-rows // 64) * 64 * width
    assert torch.equal(tiled.memory[places(rows, width)], x) and torch.equal(tiled.plain(), x)
    # nothing stands in two places, and what is no row is zero
    assert int((tiled.memory != 0).sum()) == rows * width


def test_kernels_know_the_same_places():
    """By the functions that they are made of, whose arithmetic is that of numbers too."""

    class Columns(torch.Tensor):
        def to(self, *_args):
            return self

    row, column = torch.arange(20)[:, None], torch.arange(384).as_subclass(Columns)
    got = row_place.fn(row, 384) + column_place.fn(column)
    assert torch.equal(got.as_subclass(torch.Tensor), places(20, 384))


def test_memory_may_be_more_and_must_not_be_less():
    memory = torch.full((3 * 32 * 128,), float("nan"))
    first = TiledRows(memory, 9, 128)
    memory[: size(9, 128)] = TiledRows.of(torch.ones(9, 128)).memory
    assert torch.equal(first.plain(), torch.ones(9, 128)) and stored(first) == (memory, True)
    assert TiledRows.empty(9, 128, torch.device("cpu")).dtype == torch.bfloat16
    for rows, width in ((97, 128), (9, 192)):
        with pytest.raises(AssertionError):
            TiledRows(memory, rows, width)


def test_row_major_rows_must_be_contiguous():
    x = torch.zeros(4, 256)
    assert stored(x) == (x, False)
    with pytest.raises(AssertionError):
        stored(x[:, :128])
