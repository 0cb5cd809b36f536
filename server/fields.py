"""Fields that nobody here knows: let through and told, or refused where they look like a misspelling.

A request's FieldNotes go with it through decoding and planning. What they have gathered at the end stands in the
answer's X-Ignored-Fields header, is counted, and is logged once a name.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from pilotfish.server import unused
from pilotfish.server.errors import unknown_field

logger = logging.getLogger(__name__)

HEADER = "X-Ignored-Fields"
SCHEMA_HEADER = "X-Schema-Left-Out"
"""Keywords of a request's schemas that the grammar does not hold."""
MAX_NAMES = 16
"""Names that a header tells of one request; of more it tells that there are more. Relays want headers below 4 KiB."""
MAX_NAME_LENGTH = 80
MAX_LOGGED = 1000
"""Names that are logged, once each, in the life of a server."""
FAMILIAR = frozenset({"context", "min_tokens", "mode", "models", "top_a", "typ_p", "typical"})
"""Fields of other services that are a letter or two from ours, and no misspellings."""


class FieldNotes:
    """What one request has that changes nothing. `strict` refuses every unknown field by name.

    `on_unused` gets each known name, one of unused.NAMES, that has no effect, `on_left_out` each keyword of a schema
    that the grammar does not hold, `on_volatile` each line of a system prompt that was left out, one of volatile.LINES.
    """

    def __init__(
        self,
        *,
        strict: bool = False,
        on_unused: Callable[[str], None] = lambda name: None,
        on_left_out: Callable[[str], None] = lambda keyword: None,
        on_volatile: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.strict = strict
        self.unused = on_unused
        self.on_left_out = on_left_out
        self.on_volatile = on_volatile
        self._ignored: dict[str, None] = {}
        self.has_more = False
        self._left_out: dict[str, None] = {}

    def leave_out(self, keyword: str) -> None:
        """Tells that a schema's keyword is not held: once a request."""
        if keyword not in self._left_out:
            self._left_out[keyword] = None
            self.on_left_out(keyword)

    @property
    def schema_header(self) -> str:
        """Empty where schemas are held as they are."""
        return ", ".join(self._left_out)

    def check(self, given: Mapping[str, Any], known: frozenset[str], where: str = "") -> None:
        """Looks at the names of one object, at `where`. Raises BadRequest for a misspelling.

        Inside of the body what is empty asks for nothing, and a name beside the one that it resembles is no
        misspelling of it.
        """
        for name, value in given.items():
            if name in known:
                continue
            if where and (value is None or value is False or value == [] or value == {}):
                continue
            path = f"{where}.{name}" if where else name
            if self.strict:
                raise unknown_field(path)
            meant = resembled(name, known)
            if meant is not None and value is not None and not (where and meant in given):
                raise unknown_field(path, meant)
            self.ignore(path)

    def ignore(self, path: str) -> None:
        """Tells that what stands at `path` is left out; numbers of places in lists are not part of its name."""
        name = re.sub(r"[^!-~]|[,\"\\]", "?", re.sub(r"\[\d+\]", "", path))[:MAX_NAME_LENGTH]
        if name in self._ignored:
            return
        if len(self._ignored) >= MAX_NAMES:
            self.has_more = True
            return
        self._ignored[name] = None
        self.unused(unused.UNKNOWN)

    @property
    def ignored(self) -> list[str]:
        return list(self._ignored)

    @property
    def header(self) -> str:
        """Empty where nothing was let through."""
        return ", ".join([*self._ignored, *(["..."] if self.has_more else [])])


class FieldLog:
    """Says of each ignored name once that clients send it."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def tell(self, names: list[str]) -> None:
        for name in names:
            if name in self._seen or len(self._seen) >= MAX_LOGGED:
                continue
            self._seen.add(name)
            logger.warning("a request has a field that is not known here and is ignored: %s", name)
            if len(self._seen) == MAX_LOGGED:
                logger.warning("further names of ignored fields are not logged")


@functools.lru_cache(maxsize=4096)
def resembled(name: str, known: frozenset[str]) -> str | None:
    """The known name that this one is a letter or two from, or differs from only in case and underscores."""
    if len(name) > MAX_NAME_LENGTH or name in FAMILIAR:
        return None
    for other in sorted(known):
        allowed = 0 if len(other) < 4 else 1 if len(other) < 6 else 2
        if allowed and (_plain(name) == _plain(other) or _is_within(name, other, allowed)):
            return other
    return None


def _plain(name: str) -> str:
    return re.sub(r"[_-]", "", name).lower()


def _is_within(one: str, other: str, most: int) -> bool:
    """Whether at most so many letters are missing, added, exchanged for others or swapped with their neighbours."""
    if abs(len(one) - len(other)) > most:
        return False
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, last, row = row, before, [i]
        for j, wanted in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if last and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
        if min(row) > most:
            return False
    return row[-1] <= most
