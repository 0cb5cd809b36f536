"""One request's grammar: which tokens may come next, for every row of a window. llguidance does the parsing; no torch.

A row's mask is a function of the committed tokens and the drafts before it, so what speculation writes is what plain
decoding under the same grammar writes. Bits are packed 32 to an int32, bit i of word w for token 32 w + i, as the
library writes them.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from llguidance import LLMatcher

from pilotfish.engine.grammar.form import first_words

MIN_FORCED = 2
"""Fewer forced tokens than this are left to the head: it often knows one, and then more after it."""
FORCED_SECONDS = 0.002
"""CPU time after which no further forced token is looked for."""


class Constraint:
    """How far a text is in its grammar. `error` says why it cannot go on. Not for two threads at a time.

    `ends` are not allowed before `min_tokens` tokens where anything else is: a text that is whole may have to end.
    """

    def __init__(self, matcher: LLMatcher, after_token_id: int | None, min_tokens: int = 0, ends: tuple[int, ...] = ()):
        self._matcher, self._after = matcher, after_token_id
        self._active = after_token_id is None
        self._to_come = min_tokens
        self._words = np.array([token // 32 for token in ends], dtype=np.intp)
        self._bits = np.array([1 << token % 32 for token in ends], dtype=np.uint32).view(np.int32)
        self.error: str | None = None

    def mask_rows(self, drafts: list[int], bits: np.ndarray) -> None:
        """Fills bits int32 [len(drafts) + 1, words]: row j allows what may follow the committed tokens and j drafts.

        Rows after a draft that the grammar forbids allow everything: that draft cannot be accepted, nor they be read.
        """
        bits[:] = -1
        first = 0 if self._active else len(drafts) + 1
        if not self._active and self._after in drafts:
            first = drafts.index(self._after) + 1
        if first <= len(drafts):
            self._mask(drafts[first:], bits[first:])
        for row in range(min(self._to_come, len(drafts) + 1)):
            self._go_on(bits[row])

    def _mask(self, drafts: list[int], rows: np.ndarray) -> None:
        """The rows that the grammar is in force for."""
        assert rows.dtype == np.int32 and rows.flags.c_contiguous
        # on a copy, which costs a microsecond: going back over drafts whose masks were computed leaves masks of theirs
        # behind (llguidance 1.8 to 1.9.1), which are then taken for those of what came instead
        fill = self._matcher.deep_copy() if drafts else self._matcher
        _compute(fill, drafts, rows)
        if fill.is_error():
            self.error = first_words(fill.get_error())

    def _go_on(self, row: np.ndarray) -> None:
        """Takes the ends out of a row that has anything else."""
        rest = row.copy()
        np.bitwise_and.at(rest, self._words, ~self._bits)
        if rest.any():
            row[:] = rest

    def forced(self, most: int, num_words: int) -> list[int]:
        """The next MIN_FORCED .. `most` tokens, each the only one that may come in its place; else none.

        The library's own `compute_ff_tokens` writes out all that must come, megabytes for a grammar of some bytes, and
        keeps the interpreter's lock for seconds meanwhile. A mask lets go of it, and where one took long none follows.
        """
        if not self._active or self.error is not None:
            return []
        tokens: list[int] = []
        row, rest = np.empty((1, num_words), dtype=np.int32), self._matcher
        began = time.thread_time()
        while len(tokens) < most and not rest.is_stopped() and not rest.is_accepting():
            _compute(rest, [], row)
            token = _only_token(row[0])
            if token is None or time.thread_time() - began > FORCED_SECONDS:
                break
            rest = rest.deep_copy() if rest is self._matcher else rest
            rest.consume_token(token)
            tokens.append(token)
        return tokens if len(tokens) >= MIN_FORCED else []

    def advance(self, tokens: list[int]) -> None:
        """Takes committed tokens; sets `error` at one that the grammar forbids (no token at all was allowed)."""
        self._to_come = max(0, self._to_come - len(tokens))
        for token in tokens:
            if not self._active:
                self._active = token == self._after
            elif not self._matcher.is_stopped() and not self._matcher.consume_token(token):
                error = first_words(self._matcher.get_error())
                self.error = error or f"the grammar allows no token here, got {token}"
                return


def _compute(matcher: Any, drafts: list[int], rows: np.ndarray) -> None:
    """The masks of the next token and of those after each draft, in one call, which keeps no other thread of ours from
    running. The library's stub leaves the method out."""
    matcher.unsafe_compute_mask_ptr_with_draft_token(rows.ctypes.data, rows.strides[0], drafts)


def _only_token(row: np.ndarray) -> int | None:
    """The token whose bit is set, if it is the only one."""
    places = np.flatnonzero(row)
    word = int(row[places[0]]) & 0xFFFFFFFF if len(places) == 1 else 0
    return 32 * int(places[0]) + word.bit_length() - 1 if word and not word & (word - 1) else None
