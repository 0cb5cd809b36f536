"""Whatever a library raises for one request is that request's error, never the engine's end. No torch.

A library in Rust reports its own faults by an exception that is none of `Exception`'s, so everything is caught, but for
an interrupt of the person at the terminal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

MAX_REASON = 500

T = TypeVar("T")


class TokenRule(Protocol):
    """What a request's grammar is to the rounds. `error` says why its text cannot go on."""

    @property
    def error(self) -> str | None: ...

    def mask_rows(self, drafts: list[int], bits: np.ndarray) -> None: ...

    def forced(self, most: int, num_words: int) -> list[int]: ...

    def advance(self, tokens: list[int]) -> None: ...


class Guarded:
    """A rule whose faults end its own request. `fault` is the first of them; the rule is not asked again after it: any
    token is allowed, and the loop ends the request before one is shown. `overrun` says that the rule has used up its
    time; it is left alone then, since a thread may still be in it."""

    def __init__(self, rule: TokenRule, request_id: str):
        self._rule, self._request_id = rule, request_id
        self.fault: str | None = None
        self.overrun: str | None = None

    @property
    def error(self) -> str | None:
        return self.fault or self.overrun or self._rule.error

    def mask_rows(self, drafts: list[int], bits: np.ndarray) -> None:
        """See Constraint."""
        self._ask(lambda: self._rule.mask_rows(drafts, bits), None)
        if self.fault is not None:
            bits[:] = -1

    def forced(self, most: int, num_words: int) -> list[int]:
        """See Constraint."""
        return self._ask(lambda: self._rule.forced(most, num_words), [])

    def advance(self, tokens: list[int]) -> None:
        """See Constraint."""
        self._ask(lambda: self._rule.advance(tokens), None)

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        if self.fault is not None:
            return otherwise
        try:
            return question()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.fault = tell(error, self._request_id)
            return otherwise


def tell(error: BaseException, request_id: str) -> str:
    """Logs where a request's error came from, and gives the words for its client."""
    logger.error("request %s failed", request_id, exc_info=error)
    return reason(error)


def reason(error: BaseException) -> str:
    """A library's exception in a line that can be sent: its own words may be long, not text, or raise themselves."""
    name = type(error).__name__
    try:
        words = str(error)
    except BaseException:
        words = ""
    shown = f"{name}: {words}" if words else name
    return sendable(shown[:MAX_REASON])


def sendable(words: str) -> str:
    """The same in UTF-8: the name of a file, say, may be no text."""
    return words.encode("utf-8", "backslashreplace").decode("utf-8")
