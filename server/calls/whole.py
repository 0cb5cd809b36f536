"""Tool calls as wholes, for the APIs that cannot take a call back.

In a chat stream a call that breaks off stays unterminated, so that nobody runs it. Anthropic's client and OpenAI's
Responses close what was opened, and some agents run whatever has been closed: there a call is shown once its function
is complete, and one that never is only as the text it was.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pilotfish.server.calls.parser import CallArguments, CallClosed, CallOpened, Part, Said


class Call(msgspec.Struct, frozen=True):
    """`arguments` is the JSON of an object."""

    id: str
    name: str
    arguments: str


class WholeCalls:
    """Feed the parts of one choice in order. Without `reasoning` there is none in what comes out."""

    def __init__(self, *, reasoning: bool = True) -> None:
        self._reasoning = reasoning
        self._opened: CallOpened | None = None
        self._arguments: list[str] = []

    def push(self, parts: Iterable[Part]) -> list[Said | Call]:
        """What is certain now, neighbours as one. Calls do not overlap, and nothing is said inside of one."""
        certain: list[Said | Call] = []
        for part in parts:
            if isinstance(part, Said):
                last = certain[-1] if certain else None
                if isinstance(last, Said) and last.kind == part.kind:
                    certain[-1] = Said(part.kind, last.text + part.text)
                elif part.kind == "content" or self._reasoning:
                    certain.append(part)
            elif isinstance(part, CallOpened):
                self._opened, self._arguments = part, []
            elif isinstance(part, CallArguments):
                self._arguments.append(part.text)
            elif isinstance(part, CallClosed) and part.complete and self._opened is not None:
                certain.append(Call(self._opened.id, self._opened.name, "".join(self._arguments)))
        return certain
