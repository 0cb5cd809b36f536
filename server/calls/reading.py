"""What a text that is not plainly formed says, if it can be read in one way only.

Models drift: a closing tag is missing, twice there, or misspelt; a name is quoted; arguments come as JSON; and values
hold tags themselves. Such a text is read as a whole. A reading says of each tag what it is: a part of a call, or text
of a value or of the answer. Each departure from the form has a price, and the cheapest reading is the answer's; if two
are equally cheap, or something was cut off, nothing is guessed, and all of it is text.
"""

from __future__ import annotations

import heapq
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from pilotfish.server.calls.parameters import Parameters
from pilotfish.server.calls.tools import NAME

MAX_MARKS = 2000
MAX_STEPS = 8000
"""Readings that are looked at; a text with more is not worth a guess."""

MAX_TRIED = 64 << 10
"""Characters of a value whose type is looked at: a longer one is taken as it is, so that no reading takes long."""

SPELLING = 1
"""A name that is quoted, arguments as JSON, a closing tag with another word in it."""
DOUBLED = 1
UNCLOSED_BEFORE_NEXT = 2
UNCLOSED_AT_END = 3
TAG_IN_VALUE = 2
"""One that has no counterpart in the value: those in pairs are free."""
MISFIT = 1
"""A value that its type does not allow."""
STRAY = 3
"""A tag in the text around calls."""
NO_CALL = 20
"""A call's beginning that is text."""
MOST_OF_A_CALL = 9
"""What departs further from the form is no call."""

MARK = re.compile(
    r"<tool_call>|</tool_call>|</function>"
    r"|<(?P<opener>function|parameter)(?: ?=| name ?=) ?(?P<name>[^<>\n]{0,256}?) ?(?:>|(?=\n))"
    r"|</parameter(?P<odd>[\w/ ]{0,20})(?:>|(?=\s|$))"
    r"|</(?P<named>[^<>/\s]{1,256})>"
)
_KINDS = {"<tool_call>": "open_call", "</tool_call>": "close_call", "</function>": "close_function"}
_COUNTERPART = {"open_call": "close_call", "open_function": "close_function", "open_parameter": "close_parameter"}


UNKNOWN = Parameters()
"""Those of a function that was not offered."""


class Mark(msgspec.Struct, frozen=True):
    """A tag. `exact`: written as the form has it; `leads`: only white space stands before it in its line."""

    kind: str
    start: int
    end: int
    name: str = ""
    exact: bool = True
    leads: bool = False


class ReadCall(msgspec.Struct, frozen=True):
    """`arguments` is the JSON of an object, `size` how many characters the call takes."""

    name: str
    arguments: str
    size: int


class _Reading(msgspec.Struct, frozen=True):
    """How far a reading is: before mark `at`, in the text, a call's body, or a value.

    `said`: texts and calls so far, `since`: where the text or value at hand began, `given`: values of the call at hand.
    `ended`: a function has just been closed, and where. `hopeless`: a call has broken off inside a value, so that what
    looks like calls later may be that value's text. `bound`: the value has had a closing tag that is its own text, so
    that only another one ends it. `spent`: the price of the call at hand.
    """

    place: Literal["text", "body", "value"]
    at: int
    since: int
    said: tuple[str | ReadCall, ...] = ()
    function: str = ""
    opened: int = 0
    parameter: str = ""
    given: tuple[tuple[str, str], ...] = ()
    wrapped: bool = False
    ended: bool = False
    hopeless: bool = False
    bound: bool = False
    spent: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """What matters for how it can go on."""
        given = tuple(name for name, _ in self.given)
        return (
            self.place,
            self.at,
            self.since,
            self.parameter,
            self.opened,
            self.ended,
            given,
            self.hopeless,
            self.bound,
        )


def read_drifted(text: str, tools: Mapping[str, Parameters], *, cut: bool) -> list[str | ReadCall]:
    """Texts and calls in their order; one text alone where there is no reading, or more than one.

    `cut`: the text was cut off, so that only what is well formed up to spelling is a call.
    """
    marks = list(_marks(text, tools))
    if len(marks) > MAX_MARKS:
        return [text]
    search = _Search(text, marks, tools, cut)
    return search.best() or [text]


def _marks(text: str, tools: Mapping[str, Parameters]) -> Iterator[Mark]:
    declared = {name for parameters in tools.values() for name in parameters.properties}
    for found in MARK.finditer(text):
        line = text.rfind("\n", 0, found.start()) + 1
        leads = not text[line : found.start()].replace("<tool_call>", "").strip()
        span, whole = found.span(), found[0]
        if found["opener"]:
            name = _unquoted(found["name"])
            exact = whole == f"<{found['opener']}={name}>"
            yield Mark(f"open_{found['opener']}", *span, name=name, exact=exact, leads=leads)
        elif found["named"] is not None and whole not in _KINDS:
            if found["named"] in declared:
                yield Mark("close_named", *span, name=found["named"], exact=False, leads=leads)
        elif whole in _KINDS:
            yield Mark(_KINDS[whole], *span, leads=leads)
        else:
            yield Mark("close_parameter", *span, exact=whole == "</parameter>", leads=leads)


def _unquoted(name: str) -> str:
    quoted = len(name) > 2 and name[0] == name[-1] and name[0] in "\"'"
    return name[1:-1] if quoted else name


class _Search:
    """The cheapest reading first, as far as one is cheaper than all others."""

    def __init__(self, text: str, marks: list[Mark], tools: Mapping[str, Parameters], cut: bool) -> None:
        self._text, self._marks, self._tools, self._cut = text, marks, tools, cut
        self._skips = self._pairs()

    def best(self) -> list[str | ReadCall] | None:
        order = itertools.count()
        heap: list[tuple[int, int, _Reading]] = [(0, 0, _Reading("text", 0, 0))]
        cheapest: dict[tuple[Any, ...], int] = {}
        found: tuple[int, tuple[str | ReadCall, ...]] | None = None
        for _ in range(MAX_STEPS):
            if not heap or (found is not None and heap[0][0] > found[0]):
                return list(found[1]) if found is not None else None
            price, _, reading = heapq.heappop(heap)
            if reading.place == "text" and reading.at == len(self._marks):
                said = self._with_text(reading, len(self._text)).said
                if found is not None and said != found[1]:
                    return None
                found = (price, said)
                continue
            if price > cheapest.setdefault(reading.key, price):
                continue
            for cost, after in self._steps(reading):
                spent = 0 if after.place == "text" else reading.spent + cost
                if spent <= MOST_OF_A_CALL:
                    after = msgspec.structs.replace(after, spent=spent)
                    heapq.heappush(heap, (price + cost, next(order), after))
        return None

    def _pairs(self) -> dict[int, int]:
        """The ends of each tag that opens something: where its balanced content and its closing tag end."""
        skips: dict[int, int] = {}
        for index in range(len(self._marks) - 1, -1, -1):
            wanted = _COUNTERPART.get(self._marks[index].kind)
            inner = index + 1
            while inner in skips:
                inner = skips[inner]
            if wanted and inner < len(self._marks) and self._marks[inner].kind == wanted:
                skips[index] = inner + 1
        return skips

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _steps(self, reading: _Reading) -> Iterator[tuple[int, _Reading]]:
        if reading.place == "text":
            yield from self._in_text(reading, self._marks[reading.at])
        elif reading.at < len(self._marks):
            mark = self._marks[reading.at]
            yield from self._in_body(reading, mark) if reading.place == "body" else self._in_value(reading, mark)

    def _with_text(self, reading: _Reading, end: int) -> _Reading:
        text = self._text[reading.since : end]
        if reading.ended and end == len(self._text) and "</tool_call>".startswith(text.strip()):
            return reading
        return msgspec.structs.replace(reading, said=(*reading.said, text)) if text else reading

    def _is_space(self, start: int, end: int) -> bool:
        return not self._text[start:end].strip()

    def _in_text(self, reading: _Reading, mark: Mark) -> Iterator[tuple[int, _Reading]]:
        at, near = reading.at, reading.ended and self._is_space(reading.since, mark.start)
        if near and mark.kind == "close_call":
            *before, call = reading.said
            assert isinstance(call, ReadCall)
            call = msgspec.structs.replace(call, size=call.size + mark.end - reading.since)
            yield 0, _Reading("text", at + 1, mark.end, (*before, call))
            return
        if mark.kind in ("open_call", "open_function") and not reading.hopeless:
            wrapped = near and reading.wrapped and mark.kind == "open_function"
            yield from self._opening(self._with_text(reading, mark.start), mark, wrapped)
        price = NO_CALL if mark.kind == "open_call" else STRAY
        if mark.kind == "open_function":
            price = NO_CALL if mark.name in self._tools else 0
        if mark.kind == "close_named":
            price = 0
        hopeless = reading.hopeless or self._opens_value(at)
        yield price, msgspec.structs.replace(reading, at=at + 1, ended=False, hopeless=hopeless)

    def _opening(self, reading: _Reading, mark: Mark, wrapped: bool) -> Iterator[tuple[int, _Reading]]:
        """A call's beginning, if the mark is one."""
        at, cost = reading.at, 0
        if mark.kind == "open_call":
            if (call := self._json_call(at)) is not None:
                closing = self._marks[at + 1]
                yield SPELLING, _Reading("text", at + 2, closing.end, (*reading.said, call))
            wrapped, at = True, at + 1
            if at == len(self._marks) or not self._is_space(mark.end, self._marks[at].start):
                return
            mark = self._marks[at]
        known = mark.name in self._tools
        if mark.kind == "open_function" and (known or (wrapped and mark.exact and NAME.fullmatch(mark.name))):
            cost += 0 if mark.exact else SPELLING
            body = _Reading("body", at + 1, mark.end, reading.said, mark.name, opened=reading.at, wrapped=wrapped)
            yield cost, body

    def _opens_value(self, at: int) -> bool:
        """Marks from here on are those of a call's beginning, and of a value."""
        at += self._marks[at].kind == "open_call"
        following = self._marks[at : at + 2]
        if [mark.kind for mark in following] != ["open_function", "open_parameter"]:
            return False
        return self._is_space(following[0].end, following[1].start)

    def _json_call(self, at: int) -> ReadCall | None:
        """`{"name": .., "arguments": {..}}` between the wrapper's tags, as other templates teach it."""
        if at + 1 == len(self._marks) or self._marks[at + 1].kind != "close_call":
            return None
        given = _object_in(self._text[self._marks[at].end : self._marks[at + 1].start])
        arguments = given.get("arguments") if given is not None else None
        if given is None or given.keys() != {"name", "arguments"} or not isinstance(arguments, dict):
            return None
        name, size = given["name"], self._marks[at + 1].end - self._marks[at].start
        if not isinstance(name, str) or name not in self._tools:
            return None
        return ReadCall(name, json.dumps(arguments, ensure_ascii=False), size)

    def _in_body(self, reading: _Reading, mark: Mark) -> Iterator[tuple[int, _Reading]]:
        if not self._is_space(reading.since, mark.start):
            if not reading.given and mark.kind in ("close_function", "close_call"):
                yield from self._json_body(reading, mark)
        elif mark.kind == "open_parameter":
            yield from self._begin_value(reading, mark, 0)
        elif mark.kind == "close_parameter" and reading.given and not self._cut:
            yield DOUBLED, msgspec.structs.replace(reading, at=reading.at + 1, since=mark.end)
        elif mark.kind in ("close_function", "close_call"):
            yield 0, self._ended(reading, mark, self._parameters(reading).arguments(reading.given))

    def _json_body(self, reading: _Reading, mark: Mark) -> Iterator[tuple[int, _Reading]]:
        given = _object_in(self._text[reading.since : mark.start])
        if given is not None and given.keys() <= self._parameters(reading).properties.keys():
            yield SPELLING, self._ended(reading, mark, json.dumps(given, ensure_ascii=False))

    def _ended(self, reading: _Reading, mark: Mark, arguments: str) -> _Reading:
        size = mark.end - self._marks[reading.opened].start
        said = (*reading.said, ReadCall(reading.function, arguments, size))
        ended = mark.kind == "close_function"
        return _Reading("text", reading.at + 1, mark.end, said, wrapped=reading.wrapped, ended=ended)

    def _parameters(self, reading: _Reading) -> Parameters:
        return self._tools.get(reading.function, UNKNOWN)

    def _begin_value(self, reading: _Reading, mark: Mark, cost: int) -> Iterator[tuple[int, _Reading]]:
        declared = mark.name in self._parameters(reading).properties
        if mark.name in dict(reading.given) or not (declared or (mark.exact and NAME.fullmatch(mark.name))):
            return
        cost += 0 if mark.exact else SPELLING
        place = {"place": "value", "at": reading.at + 1, "since": mark.end, "parameter": mark.name}
        yield cost, msgspec.structs.replace(reading, **place)

    def _in_value(self, reading: _Reading, mark: Mark) -> Iterator[tuple[int, _Reading]]:
        drifts = not self._cut and not reading.bound
        if mark.kind == "close_parameter" and (mark.exact or drifts):
            yield self._closed(reading, mark, 0 if mark.exact else SPELLING, reading.at + 1, mark.end)
        if drifts:
            yield from self._unclosed(reading, mark)
        yield from self._tag_in_value(reading, mark)

    def _closed(self, reading: _Reading, mark: Mark, cost: int, at: int, since: int) -> tuple[int, _Reading]:
        text = self._text[reading.since : mark.start].removeprefix("\n").removesuffix("\n")
        given = (*reading.given, (reading.parameter, text))
        if len(text) <= MAX_TRIED and not self._parameters(reading).fits(reading.parameter, text):
            cost += MISFIT
        return cost, msgspec.structs.replace(
            reading, place="body", at=at, since=since, given=given, parameter="", bound=False
        )

    def _unclosed(self, reading: _Reading, mark: Mark) -> Iterator[tuple[int, _Reading]]:
        """The value's closing tag is missing, or has the parameter's own name."""
        if mark.kind == "open_parameter" and self._is_next(reading, mark):
            cost, closed = self._closed(reading, mark, UNCLOSED_BEFORE_NEXT, reading.at, mark.start)
            yield from self._begin_value(closed, mark, cost)
        elif mark.kind in ("close_function", "close_call"):
            cost, closed = self._closed(reading, mark, UNCLOSED_AT_END, reading.at, mark.start)
            yield cost, self._ended(closed, mark, self._parameters(closed).arguments(closed.given))
        elif mark.kind == "close_named" and self._is_own_name(reading, mark):
            yield self._closed(reading, mark, SPELLING, reading.at + 1, mark.end)

    def _is_own_name(self, reading: _Reading, mark: Mark) -> bool:
        return mark.name == reading.parameter and f"<{mark.name}" not in self._text[reading.since : mark.start]

    def _is_next(self, reading: _Reading, mark: Mark) -> bool:
        """Whether the tag can only be the next parameter's: a declared one, not yet given, where a line begins."""
        taken = mark.name == reading.parameter or mark.name in dict(reading.given)
        parameters = self._parameters(reading)
        if taken or mark.name not in parameters.properties:
            return False
        text = self._text[reading.since : mark.start].strip()
        return mark.leads or (not parameters.is_text(reading.parameter) and parameters.fits(reading.parameter, text))

    def _tag_in_value(self, reading: _Reading, mark: Mark) -> Iterator[tuple[int, _Reading]]:
        """The tag is text of the value; one that opens something may take its closing tag with it."""
        free = mark.kind == "close_named" or (mark.kind == "close_parameter" and not mark.exact)
        if reading.at in self._skips:
            yield 0, msgspec.structs.replace(reading, at=self._skips[reading.at])
        if free or not (self._cut or self._is_structure(reading, mark)):
            bound = reading.bound or (mark.kind == "close_parameter" and mark.exact)
            yield 0 if free else TAG_IN_VALUE, msgspec.structs.replace(reading, at=reading.at + 1, bound=bound)

    def _is_structure(self, reading: _Reading, mark: Mark) -> bool:
        """A tag that text would not have alone: an opening one, or a closing one right before another parameter."""
        following = self._marks[reading.at + 1] if reading.at + 1 < len(self._marks) else None
        if mark.kind == "close_parameter" and following is not None and following.kind == "open_parameter":
            return self._is_space(mark.end, following.start)
        if mark.kind == "open_parameter":
            return mark.leads and self._is_next(reading, mark)
        if mark.kind == "open_call" and following is not None:
            mark = following
        return mark.kind == "open_function" and mark.leads and mark.name in self._tools


def _object_in(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
