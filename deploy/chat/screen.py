"""What may reach a terminal: an answer is a stranger's text, and escape sequences in it would be orders to it."""

from __future__ import annotations

import unicodedata
from typing import TextIO

KEPT = "\n\t\u200c\u200d"
"""Line ends, tabs, and the two joiners that scripts and emoji are written with."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    """The text without control characters: each is a sign for itself, or U+FFFD, which stands for what turns the
    direction of writing, too."""
    if text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character in KEPT or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else UNKNOWN


class Screen:
    """Answers go to `out`, all else to `aside`. Nothing but what is printable is written."""

    def __init__(self, out: TextIO, aside: TextIO) -> None:
        self._out, self._aside = out, aside
        self._dims = {True: ("\033[2m", "\033[0m"), False: ("", "")}

    def answer(self, text: str) -> None:
        self._out.write(printable(text))
        self._out.flush()

    def thought(self, text: str) -> None:
        """What the model thinks before it answers."""
        self._write(self._out if self._out.isatty() else self._aside, text, "")

    def say(self, text: str) -> None:
        """A line of ours."""
        self._write(self._aside, text, "\n")

    def _write(self, stream: TextIO, text: str, end: str) -> None:
        begin, after = self._dims[stream.isatty()]
        stream.write(f"{begin}{printable(text)}{after}{end}")
        stream.flush()
