"""Stop strings in a stream of text: where to cut, and which text must wait.

The cut does not depend on how the text arrives. The stop string that completes first wins; of several that
complete at the same character, the longest. Text that may be the beginning of a stop string is held back.
Each stop string is followed by its Knuth-Morris-Pratt automaton: one step a character, no rescans.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Pattern:
    """One stop string and how many of its characters the text so far ends with."""

    __slots__ = ("borders", "length", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = len(text)
        self.matched = 0
        self.borders = _borders(text)

    def advance(self, text: str) -> int | None:
        """Reads `text` up to the first completion and returns the index just past it, or None after all of it."""
        matched, pattern, length = self.matched, self.text, self.length
        if matched == 0 and pattern[0] not in text:
            return None
        for index, character in enumerate(text):
            while matched and pattern[matched] != character:
                matched = self.borders[matched]
            if pattern[matched] == character:
                matched += 1
            if matched == length:
                self.matched = self.borders[length]
                return index + 1
        self.matched = matched
        return None


def _borders(text: str) -> list[int]:
    """borders[n]: the longest proper prefix of text[:n] that is also its suffix."""
    borders = [0] * (len(text) + 1)
    matched = 0
    for index in range(1, len(text)):
        while matched and text[matched] != text[index]:
            matched = borders[matched]
        if text[matched] == text[index]:
            matched += 1
        borders[index + 1] = matched
    return borders


class StopMatcher:
    """Feed text with `push`, end with `flush`.

    `include` keeps the stop string itself in the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._patterns = [_Pattern(text) for text in dict.fromkeys(stops)]
        self._include = include
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Text that is now certain, and the stop string that has just completed, if any.

        Not `armed`: completions within this piece do not count (the minimum length is not reached), but a
        stop string may begin in it.
        """
        if not self._patterns or not text:
            return text, None
        best: tuple[int, int, str] | None = None
        for pattern in self._patterns:
            end = self._first_end(pattern, text, armed)
            if end is not None and (best is None or (end, -pattern.length) < best[:2]):
                best = (end, -pattern.length, pattern.text)
        whole = self._held + text
        if best is not None:
            end, negative_length, stop = best
            cut = len(self._held) + end + (0 if self._include else negative_length)
            self._held = ""
            assert cut >= 0, "a part of a stop string was released"
            return whole[:cut], stop
        keep = len(whole) - max(pattern.matched for pattern in self._patterns)
        self._held = whole[keep:]
        return whole[:keep], None

    def flush(self) -> str:
        """The text ends here: what was held back is text after all."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _first_end(pattern: _Pattern, text: str, armed: bool) -> int | None:
        end = pattern.advance(text)
        while end is not None and not armed:
            rest = text[end:]
            further = pattern.advance(rest)
            if further is None:
                return None
            end += further
        return end
