"""Which rounds are captured: numbers of sequences and depths. No torch.

A batch runs in the smallest captured size that holds it, filled up with the null slot: row invariance makes that exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

WIDE_SIZES = (8, 12, 16, 24, 32, 48, 64)
"""Sizes captured beyond the fast path, where a padded row costs little beside the rest."""


@dataclass(frozen=True, order=True)
class Shape:
    """A round of `num_sequences` at `depth` drafts each."""

    num_sequences: int
    depth: int

    @property
    def width(self) -> int:
        return self.depth + 1

    @property
    def num_rows(self) -> int:
        return self.num_sequences * self.width


def sizes(depth: int, fast_rows: int, max_num_seqs: int) -> list[int]:
    """Numbers of sequences to capture: each one on the fast path, then steps, the last one holding max_num_seqs."""
    fast = min(max_num_seqs, fast_rows // (depth + 1))
    wide = [size for size in WIDE_SIZES if fast < size < max_num_seqs]
    return [*range(1, fast + 1), *wide, *([max_num_seqs] if max_num_seqs > fast else [])]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the largest round, and of what it may read; and of the longest piece of a prompt that may be captured, 0
    where none may."""

    num_slots: int
    max_sequences: int
    max_rows: int
    max_width: int
    max_model_len: int
    max_piece: int = 0


class Shapes:
    """Every shape that serving meets, given the depths it uses: 0, the served k, and what is configured."""

    def __init__(self, depths: Iterable[int], fast_rows: int, max_num_seqs: int):
        self.depths = sorted(set(depths))
        self._sizes = {depth: sizes(depth, fast_rows, max_num_seqs) for depth in self.depths}
        self._fitting: dict[tuple[int, int], Shape | None] = {}

    def __iter__(self) -> Iterator[Shape]:
        return (Shape(size, depth) for depth in self.depths for size in self._sizes[depth])

    def fit(self, num_sequences: int, depth: int) -> Shape | None:
        """The smallest shape that holds the batch; None if none does. Rows past a sequence's own k match nothing, so
        a larger depth is exact too."""
        batch = num_sequences, depth
        if batch not in self._fitting:
            self._fitting[batch] = self._smallest(num_sequences, depth)
        return self._fitting[batch]

    def _smallest(self, num_sequences: int, depth: int) -> Shape | None:
        deep = next((known for known in self.depths if known >= depth), None)
        if deep is None:
            return None
        size = next((known for known in self._sizes[deep] if known >= num_sequences), None)
        return None if size is None else Shape(size, deep)
