"""Where prompts are cut: the one function of a prompt's length and the largest chunk that everything follows.

Cuts stand at half a chunk and at the multiples of a chunk, counted from the prompt's first token, so that two prompts
that begin alike are cut alike as far as they do. The last piece ends with the prompt. What was read up to a cut can be
shared where the cut is a multiple of a page: such a cut is a boundary. docs/prefix-cache.md has the arithmetic behind
the half. No torch: the HTTP process computes by it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import lcm


@dataclass(frozen=True)
class Grid:
    """`chunk`: tokens of the largest chunk; `page`: tokens of a KV page."""

    chunk: int
    page: int

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.page < 1:
            raise ValueError(f"grid: want a chunk and a page of at least 1 token, got {self.chunk} and {self.page}")

    @cached_property
    def half(self) -> int | None:
        """The first cut, if there is one before a whole chunk: no shorter than a page, or nothing could be shared."""
        half, odd = divmod(self.chunk, 2)
        return half if not odd and half % self.page == 0 else None

    @cached_property
    def spacing(self) -> int:
        """Tokens from one boundary to the next, past the half."""
        return lcm(self.chunk, self.page)

    def next_cut(self, start: int, length: int) -> int:
        """Where the chunk ends that begins at the cut `start` of a prompt of `length` tokens."""
        assert 0 <= start < length, f"want a start in 0..{length - 1}, got {start}"
        if self.half is not None and start < self.half:
            return min(self.half, length)
        return min((start // self.chunk + 1) * self.chunk, length)

    def num_chunks(self, length: int) -> int:
        """Chunks that a prompt of `length` tokens is read in."""
        return -(-length // self.chunk) + (self.half is not None and length > self.half)

    def last_boundary(self, length: int) -> int:
        """The last boundary at or below `length`; 0 where there is none."""
        boundary = length - length % self.spacing
        return boundary or (self.half if self.half is not None and length >= self.half else 0)

    def next_boundary(self, start: int) -> int:
        """The first boundary after `start`."""
        if self.half is not None and start < self.half:
            return self.half
        return (start // self.spacing + 1) * self.spacing

    def is_boundary(self, end: int) -> bool:
        """Whether what was read up to the cut `end` can be shared."""
        return end > 0 and end == self.last_boundary(end)
