"""Token ids to text, a token at a time, never a broken character.

A byte-level token is a run of bytes that may begin or end inside a character. The bytes go through one UTF-8
decoder that keeps an unfinished character until it is finished or certainly broken; what is broken becomes
U+FFFD exactly as in a decoding of the whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of one sequence. `token_bytes[i]` are the bytes of id i; ids in `skipped` have no text."""

    def __init__(self, token_bytes: Sequence[bytes], skipped: frozenset[int] = frozenset()) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decoder = _new_decoder("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token makes certain; an id without an entry has none."""
        if token_id in self._skipped or not 0 <= token_id < len(self._token_bytes):
            return ""
        return self._decoder.decode(self._token_bytes[token_id])

    def push_all(self, token_ids: Sequence[int]) -> str:
        """The characters that these tokens make certain."""
        table, skipped = self._token_bytes, self._skipped
        return self._decoder.decode(b"".join([table[i] for i in token_ids if i not in skipped and 0 <= i < len(table)]))

    def flush(self) -> str:
        """U+FFFD for a character that was never finished, else nothing."""
        return self._decoder.decode(b"", True)


def decode(token_ids: Iterable[int], token_bytes: Sequence[bytes], skipped: frozenset[int] = frozenset()) -> str:
    """The whole text at once."""
    detokenizer = Detokenizer(token_bytes, skipped)
    return "".join(detokenizer.push(token_id) for token_id in token_ids) + detokenizer.flush()
