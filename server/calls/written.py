"""A call while it is read: its text, in case it is none, and the JSON of its arguments as far as it is certain."""

from __future__ import annotations

import json
import secrets

from pilotfish.server.calls.reading import UNKNOWN


class WrittenCall:
    """The call at hand: all its text, in case it is none, its values, and what comes after it."""

    def __init__(self, wrapped: bool = False) -> None:
        self.id = f"call_{secrets.token_hex(12)}"
        self.index: int | None = None
        self.name = ""
        self.parameters = UNKNOWN
        self.seen: set[str] = set()
        self.wrapped, self.closed = wrapped, False
        self.size = 0
        self._raw: list[str] = []
        self._trail: list[str] = []
        self._parameter = ""
        self._value: list[str] = []
        # the arguments' JSON so far, pieces of strings included; of it, what has been told
        self._written = ["{"]
        self._num_told = 0

    def add(self, text: str) -> None:
        self._raw.append(text)
        self.size += len(text)

    def take(self) -> str:
        """All its text, which is no longer counted here."""
        text = "".join(self._raw)
        self._raw, self.size = [], 0
        return text

    def add_trail(self, text: str) -> None:
        self.add(text)
        self._trail.append(text)

    @property
    def trail(self) -> str:
        return "".join(self._trail)

    @property
    def has_trail(self) -> bool:
        """Whether there is more than white space."""
        return any(text.strip() for text in self._trail)

    def close(self, marker: str) -> None:
        self.add(marker)
        self.closed, self._trail = True, []

    def open_value(self, name: str) -> None:
        key = ("" if not self.seen else ", ") + json.dumps(name, ensure_ascii=False) + ": "
        self.seen.add(name)
        self._parameter, self._value, self._newline = name, [], ""
        self._is_text = self.parameters.is_text(name)
        self._written.append(key + '"' if self._is_text else key)

    def add_value(self, text: str) -> None:
        """Takes more of the value. Strings are written at once, but for a newline that may be the last."""
        self.add(text)
        if not text:
            return
        if not self._value:
            self._value.append("")
            text = text.removeprefix("\n")
        self._value.append(text)
        if self._is_text and text:
            text = self._newline + text
            self._newline = "\n" if text.endswith("\n") else ""
            self._written.append(json.dumps(text.removesuffix("\n"), ensure_ascii=False)[1:-1])

    def close_value(self) -> None:
        text = "".join(self._value).removesuffix("\n")
        self._written.append('"' if self._is_text else self.parameters.json_of(self._parameter, text))

    def arguments(self) -> str:
        return "".join(self._written) + "}"

    def news(self) -> str:
        """What has been written of the arguments since it was last asked for."""
        text = "".join(self._written[self._num_told :])
        self._num_told = len(self._written)
        return text

    @property
    def told(self) -> str:
        return "".join(self._written[: self._num_told])
