"""Whose turn it is: requests wait in a line for each API key, and the key that was served least goes next.

What a key was served are the tokens that were read and written for it (Sheng et al. 2024, arXiv:2401.00588, "virtual
token counter"; deficit round robin in effect, with a token as the quantum). A key that comes back after a pause starts
where the least served of the others stands: nothing is saved up, and nothing is owed. Within a line lower `priority`
comes first, then arrival; with one key that is first come, first served. No torch.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from itertools import count

from pilotfish.engine.requests.sequence import Sequence


class FairLines:
    """`add`, then `next` and `take`, or `remove`; `leave` when what was taken has ended."""

    def __init__(self) -> None:
        self._lines: dict[str, list[tuple[int, int, Sequence]]] = {}
        self._arrivals = count()
        self._served: Counter[str] = Counter()
        self._present: Counter[str] = Counter()
        """Sequences of each key that wait or run."""

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in no order that means anything."""
        return (sequence for line in self._lines.values() for _, _, sequence in line)

    def add(self, sequence: Sequence) -> None:
        key = sequence.request.key
        if not self._present[key]:
            others = [self._served[other] for other, number in self._present.items() if number]
            self._served[key] = max(self._served[key], min(others)) if others else 0
        self._present[key] += 1
        entry = (sequence.request.priority, next(self._arrivals), sequence)
        heapq.heappush(self._lines.setdefault(key, []), entry)

    def next(self, unread: Counter[str]) -> Sequence:
        """The sequence to admit next; there must be one. `unread`: prompt tokens of each key that were admitted and are
        yet to be read, which count as served, so that several places at once go to several keys."""
        key = min(self._lines, key=lambda key: (self._served[key] + unread[key], *self._lines[key][0][:2]))
        return self._lines[key][0][2]

    def take(self, sequence: Sequence) -> None:
        """Removes what `next` gave: it runs now."""
        key = sequence.request.key
        line = self._lines[key]
        line.remove(next(entry for entry in line if entry[2] is sequence))
        heapq.heapify(line)
        if not line:
            del self._lines[key]

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that has ended while it waited."""
        self.take(sequence)
        self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        key = sequence.request.key
        self._present[key] -= 1
        assert self._present[key] >= 0
        if not any(self._present.values()):
            self._served.clear()
            self._present.clear()

    def serve(self, sequence: Sequence, num_tokens: int) -> None:
        """Tokens were read or written for a sequence."""
        self._served[sequence.request.key] += num_tokens

    def least_served(self, sequences: list[Sequence]) -> Sequence:
        """The first, in order of admission, of the key that was served least."""
        return min(sequences, key=lambda sequence: self._served[sequence.request.key])
