"""How large a grammar may be, by kind of part: counted in plain Python before anything else reads it.

No recursion, and time linear in the source, so that it can run where nothing may take long. What passes may still cost
too much: that is found by trying it (trial.py). The limits are where the library's time or stack begins to grow out of
hand, well above what people write.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Container, Iterator
from decimal import Decimal
from typing import Any

from pilotfish.engine.errors import RequestError
from pilotfish.engine.link.messages import Grammar

MAX_SOURCE_BYTES = 256 << 10
MAX_CALLS_BYTES = 1 << 20
"""Bytes of the grammar of a demanded call, which holds the schemas of all tools."""

SCHEMA_LIMITS = {
    "levels of nesting": 128,
    "properties": 2000,
    "optional properties in one object": 480,
    "pattern properties": 40,
    "references": 2000,
    "definitions referred to": 500,
    "members of anyOf, oneOf and allOf": 1000,
    "values of enum": 20_000,
    "items that each have a schema": 2000,
    "as the sum of all multipleOf, digits alone": 20_000,
    "as a least number of characters, items or properties": 100_000,
}
"""Bounds of a JSON schema, over the whole of it unless it says otherwise."""
REGEX_LIMITS = {
    "characters in a regular expression": 32 << 10,
    "levels of groups": 64,
    "parts once repetitions are written out": 20_000,
}
GRAMMAR_LIMITS = {
    "rules and terminals": 1000,
    "alternatives": 5000,
    "levels of brackets": 64,
    "repetitions": 20_000,
    "characters of long strings, rules and repetitions written out": 10_000_000,
}
"""Bounds of a grammar in Lark or GBNF. The last one is for what must come: the library writes all of it out before the
next mask, 21 bytes for a character, up to 50 000 rules and terminals, of which only the length is not bounded."""
LONG_TEXT = 64
"""Strings and patterns up to this length cannot become much in 50 000 of them."""
MAX_ITEMS = 50_000
CHOICE_LIMITS = {"choices": 1900}

QUANTIFIER = re.compile(r"\{(\d*)(?:,(\d*))?\}")
RULE = re.compile(r"^[ \t]*[?!]?([\w.-]+)(?:\[[^\]\n]{0,99}\])?[ \t]*(?:::=|:)", re.MULTILINE)
NAME = re.compile(r"[\w.-]+")
GRAMMAR_PART = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|/(?:[^/\\\n]|\\.)*+/?|[|()\[\]{}]|~[ \t]*\d+(?:\.\.\d+)?')


def check(grammar: Grammar) -> None:
    """Raises RequestError with the kind of part, what came and what is allowed."""
    size = len(grammar.source.encode("utf-8", "surrogatepass")) + sum(
        len(schema) + len(simpler) for _, schema, simpler in grammar.schemas
    )
    _within(size, MAX_CALLS_BYTES if grammar.kind == "lark" else MAX_SOURCE_BYTES, "bytes of a grammar")
    if grammar.kind == "json_schema":
        check_schema(_parsed(grammar.source))
    elif grammar.kind == "regex":
        check_regex(grammar.source)
    elif grammar.kind == "choice":
        choices = _parsed(grammar.source)
        _within(len(choices) if isinstance(choices, list) else 0, CHOICE_LIMITS["choices"], "choices")
    elif grammar.kind == "grammar":
        check_text(grammar.source)


def _within(count: int, limit: int, what: str) -> None:
    if count > limit:
        shown = str(count) if count < 10**12 else "far more"
        raise RequestError(f"grammar: want at most {limit} {what}, got {shown}")


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except RecursionError:
        raise RequestError(
            f"grammar: want at most {SCHEMA_LIMITS['levels of nesting']} levels of nesting, got far more"
        ) from None
    except ValueError as error:
        raise RequestError(f"json_schema: {error}") from None


# -- JSON schemas ------------------------------------------------------------------------------------------------------


def check_schema(schema: Any) -> None:
    """Raises RequestError. Whatever is nested anywhere counts, in constants and unused definitions too."""
    counts: Counter[str] = Counter()
    targets: set[str] = set()
    for value, depth in _walk(schema):
        _within(depth, SCHEMA_LIMITS["levels of nesting"], "levels of nesting")
        if isinstance(value, dict):
            _count_object(value, counts, targets)
    counts["definitions referred to"] = len(targets)
    for what, limit in SCHEMA_LIMITS.items():
        _within(counts[what], limit, what)


def _walk(value: Any) -> Iterator[tuple[Any, int]]:
    """Every object and list inside, with its level; those beyond the limit are not entered."""
    todo = [(value, 1)]
    while todo:
        inner, depth = todo.pop()
        if not isinstance(inner, dict | list):
            continue
        yield inner, depth
        if depth <= SCHEMA_LIMITS["levels of nesting"]:
            todo += [(part, depth + 1) for part in (inner.values() if isinstance(inner, dict) else inner)]


def _count_object(value: dict[str, Any], counts: Counter[str], targets: set[str]) -> None:
    properties, required = _dict(value, "properties"), _strings(value, "required")
    counts["properties"] += len(properties.keys() | required)
    _largest(counts, "optional properties in one object", len(properties.keys() - required))
    patterns = _dict(value, "patternProperties")
    counts["pattern properties"] += len(patterns)
    for key in ("$ref", "$dynamicRef", "$recursiveRef"):
        if isinstance(value.get(key), str):
            counts["references"] += 1
            targets.add(value[key])
    for key in ("anyOf", "oneOf", "allOf"):
        counts["members of anyOf, oneOf and allOf"] += _length(value, key)
    counts["values of enum"] += _length(value, "enum")
    counts["items that each have a schema"] += _length(value, "prefixItems") + _length(value, "items")
    counts["as the sum of all multipleOf, digits alone"] += _digits(value.get("multipleOf"))
    for key in ("minLength", "minItems", "minProperties", "minContains"):
        least: Any = value.get(key)
        if least is not None and _is_number(least):
            _largest(counts, "as a least number of characters, items or properties", min(least, 10**18))
    for pattern in (*patterns, value.get("pattern"), value.get("whitespace_pattern")):
        if isinstance(pattern, str):
            check_regex(pattern)


def _largest(counts: Counter[str], what: str, count: float) -> None:
    counts[what] = max(counts[what], int(count))


def _dict(value: dict[str, Any], key: str) -> dict[str, Any]:
    inner = value.get(key)
    return inner if isinstance(inner, dict) else {}


def _strings(value: dict[str, Any], key: str) -> set[str]:
    inner = value.get(key)
    return {name for name in inner if isinstance(name, str)} if isinstance(inner, list) else set()


def _length(value: dict[str, Any], key: str) -> int:
    inner = value.get(key)
    return len(inner) if isinstance(inner, list) else 0


def _digits(number: Any) -> int:
    """The number without its point and zeros: an automaton that divides by it has about so many states."""
    if not _is_number(number):
        return 0
    if abs(number) >= 10**12:
        return 10**12
    digits = Decimal(repr(number)).normalize().as_tuple()
    assert isinstance(digits.exponent, int)
    if len(digits.digits) + max(digits.exponent, 0) > 12:
        return 10**12
    return int("".join(map(str, digits.digits))) * 10 ** max(digits.exponent, 0)


def _is_number(value: Any) -> bool:
    """Any but NaN and the infinities, which some JSON has."""
    return not isinstance(value, bool) and (
        isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    )


# -- regular expressions -----------------------------------------------------------------------------------------------


def check_regex(pattern: str) -> int:
    """Raises RequestError. The parts, counted roughly: a character, a class or a group, times its repetitions."""
    _within(len(pattern), REGEX_LIMITS["characters in a regular expression"], "characters in a regular expression")
    # the sizes of the open groups, and that of the last part of each
    sizes, last, place = [0], [0], 0
    while place < len(pattern):
        character = pattern[place]
        if character == "{" and (found := QUANTIFIER.match(pattern, place)):
            sizes[-1] += last[-1] * (_times(found) - 1)
            last[-1] *= _times(found)
            place = found.end()
        elif character == ")" and len(sizes) > 1:
            inner = sizes.pop()
            last.pop()
            sizes[-1] += inner
            last[-1] = inner
            place += 1
        elif character == "(":
            sizes.append(0)
            last.append(0)
            place += 1
        else:
            place = _after_part(pattern, place)
            if character not in "*+?|^$":
                sizes[-1] += 1
                last[-1] = 1
        _within(len(sizes) - 1, REGEX_LIMITS["levels of groups"], "levels of groups")
        _within(
            sizes[-1], REGEX_LIMITS["parts once repetitions are written out"], "parts once repetitions are written out"
        )
    _within(
        sum(sizes), REGEX_LIMITS["parts once repetitions are written out"], "parts once repetitions are written out"
    )
    return sum(sizes)


def _after_part(pattern: str, place: int) -> int:
    """Where the character, escape or class that begins here has ended."""
    if pattern[place] == "\\":
        return place + 2
    if pattern[place] != "[":
        return place + 1
    place += 2
    while place < len(pattern) and pattern[place] != "]":
        place += 2 if pattern[place] == "\\" else 1
    return place + 1


def _times(quantifier: re.Match[str]) -> int:
    """The most that is written out of it; without an upper end, the lower one."""
    numbers = [int(text[:12]) for text in quantifier.groups() if text]
    return max(numbers, default=1) or 1


# -- Lark and GBNF -----------------------------------------------------------------------------------------------------


def check_text(text: str) -> None:
    """Raises RequestError. A grammar in Lark or GBNF is looked at by its marks alone."""
    counts: Counter[str] = Counter({"rules and terminals": sum(1 for _ in RULE.finditer(text))})
    depth = 0
    for found in GRAMMAR_PART.finditer(text):
        mark = found[0]
        if mark in ")]}":
            depth = max(0, depth - 1)
        elif mark == "|":
            counts["alternatives"] += 1
        elif mark in "([{":
            depth += 1
            _largest(counts, "levels of brackets", depth)
            if mark == "{" and (times := QUANTIFIER.match(text, found.start())):
                _largest(counts, "repetitions", _times(times))
        elif mark[0] == "~":
            _largest(counts, "repetitions", max(int(number[:12]) for number in re.findall(r"\d+", mark)))
        elif mark[0] == "/":
            check_regex(mark.strip("/"))
    counts["characters of long strings, rules and repetitions written out"] = _written_out(text)
    for what, limit in GRAMMAR_LIMITS.items():
        _within(counts[what], limit, what)


def _written_out(text: str) -> int:
    """The most characters of long strings and patterns that one rule may have to write, all others written out in it. A
    rule that comes back to itself is written out as often as the library takes it."""
    heads = list(RULE.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)] * bool(heads)
    bodies = {head[1]: text[head.end() : end] for head, end in zip(heads, ends, strict=True)}
    parts = {name: _parts_of(body, bodies) for name, body in bodies.items()}
    sizes: dict[str, int] = {}
    for first in parts:
        way, open_rules, again = [first], {first}, set[str]()
        while way:
            name = way[-1]
            own, times, used = parts[name]
            inner = next((other for other in used if other not in sizes and other not in open_rules), None)
            if inner is not None:
                way.append(inner)
                open_rules.add(inner)
                continue
            again |= used.keys() & open_rules - sizes.keys()
            size = own + sum(count * sizes.get(other, 0) for other, count in used.items())
            sizes[name] = min(10**15, size * times * (MAX_ITEMS if name in again else 1))
            open_rules.discard(way.pop())
    return max(sizes.values(), default=0)


def _parts_of(body: str, rules: Container[str]) -> tuple[int, int, Counter[str]]:
    """Of a rule: the characters of its long strings and patterns, the product of its repetitions, the rules it uses."""
    own, times = 0, 1
    for found in GRAMMAR_PART.finditer(body):
        mark = found[0]
        if mark[0] in '"/':
            size = check_regex(mark.strip("/")) if mark[0] == "/" else len(mark)
            own += size if size > LONG_TEXT else 0
        elif mark == "{" and (repeated := QUANTIFIER.match(body, found.start())):
            times *= _times(repeated)
        elif mark[0] == "~":
            times *= max(int(number[:12]) for number in re.findall(r"\d+", mark)) or 1
    used = Counter(name for name in NAME.findall(GRAMMAR_PART.sub(" ", body)) if name in rules)
    return own, min(times, 10**15), used
