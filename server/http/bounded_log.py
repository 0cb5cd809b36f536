"""A log that a client cannot fill: of records from one place only so many in a minute, then how many were left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

MOST = 10
SECONDS = 60.0
MAX_PLACES = 1000


class Bounded(logging.Filter):
    """A handler's filter that bounds lines by place. A place is a line of code and the beginning of its message, before
    values are put in."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._places: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        place, now = (record.name, record.lineno, str(record.msg).partition("\n")[0][:80]), self._clock()
        began, count = self._places.get(place, (now, 0))
        if now - began >= SECONDS:
            if count > MOST:
                record.msg = f"{record.getMessage()} ({count - MOST} more like it in the last {now - began:.0f} s)"
                record.args = ()
            began, count = now, 0
        if len(self._places) >= MAX_PLACES:
            self._places.clear()
        self._places[place] = (began, count + 1)
        return count < MOST
