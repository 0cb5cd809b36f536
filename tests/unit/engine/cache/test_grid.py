"""The grid of cuts: a cut depends on what comes before it alone, and shared ones end with a page."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pilotfish.engine.cache.grid import Grid

GRIDS = [Grid(2048, 256), Grid(256, 256), Grid(512, 256), Grid(64, 256), Grid(300, 256), Grid(96, 64), Grid(1, 1)]
both = pytest.mark.parametrize("grid", GRIDS, ids=str)
LENGTHS = (1, 2, 63, 64, 65, 255, 256, 257, 511, 512, 1023, 1024, 1025, 2047, 2048, 2049, 4096, 5000)


def cuts(grid, length):
    found = [0]
    while found[-1] < length:
        found.append(grid.next_cut(found[-1], length))
    return found[1:]


@pytest.mark.parametrize(
    ("chunk", "length", "expected"),
    [
        (2048, 9000, [1024, 2048, 4096, 6144, 8192, 9000]),
        (2048, 1024, [1024]),
        (2048, 1000, [1000]),
        (512, 1100, [256, 512, 1024, 1100]),
        (256, 600, [256, 512, 600]),
        (64, 150, [64, 128, 150]),
    ],
)
def test_prompts_are_cut_at_a_half_and_at_whole_chunks(chunk, length, expected):
    assert cuts(Grid(chunk, 256), length) == expected


@both
def test_prompts_that_begin_alike_are_cut_alike(grid):
    longest = cuts(grid, max(LENGTHS))
    for length in LENGTHS:
        assert cuts(grid, length) == [cut for cut in longest if cut < length] + [length]
        assert grid.num_chunks(length) == len(cuts(grid, length))


@both
def test_boundaries_are_the_cuts_that_end_with_a_page(grid):
    whole = cuts(grid, max(LENGTHS))
    boundaries = [cut for cut in whole[:-1] if cut % grid.page == 0]
    for length in LENGTHS[:-1]:
        assert grid.last_boundary(length) == max((end for end in boundaries if end <= length), default=0)
    assert [cut for cut in whole[:-1] if grid.is_boundary(cut)] == boundaries
    assert not grid.is_boundary(0)


@both
def test_no_chunk_is_longer_than_the_largest(grid):
    found = [0, *cuts(grid, 5000)]
    assert max(end - start for start, end in pairwise(found)) <= grid.chunk


@pytest.mark.parametrize("numbers", [(0, 256), (256, 0)])
def test_a_grid_without_chunks_is_refused(numbers):
    with pytest.raises(ValueError, match="grid: want"):
        Grid(*numbers)
