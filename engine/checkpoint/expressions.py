"""A deadline for regular expressions out of a checkpoint, some of which take for ever on a name of forty letters."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pilotfish.engine.errors import ConfigError

MATCH_SECONDS = 10.0
"""CPU time for all names of a checkpoint together; those of real ones take milliseconds."""


class Deadline:
    """CPU time that is left to the expressions of one checkpoint.

    `re` looks for signals while it matches, and nothing else can stop it. Signals reach the main thread, on which
    checkpoints are read; on another one there is no deadline.
    """

    def __init__(self, seconds: float = MATCH_SECONDS):
        self._left = seconds

    def match(self, expression: re.Pattern[str], name: str) -> bool:
        """Whether it fits from the name's start on. Raises ConfigError when no time is left."""
        began = time.process_time()
        try:
            with _in_time(self._left):
                return expression.match(name) is not None
        except TimeoutError:
            raise ConfigError(
                f"the regular expression {expression.pattern!r:.100} takes too long on the name {name:.100}"
            ) from None
        finally:
            self._left = max(self._left - (time.process_time() - began), 1e-3)


@contextmanager
def _in_time(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _expire)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _expire(*_: object) -> None:
    raise TimeoutError
