"""JSON schemas as far as the grammar library holds them.

What it cannot hold is left out, the rest holds: the keyword's name is counted and stands in a header of the answer. A
schema that is to be kept to strictly is refused by that name instead. Nothing is compiled here: what the library holds
is known by name, and a test asks it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from pilotfish.engine.errors import RequestError
from pilotfish.engine.grammar import bounds
from pilotfish.server.errors import BadRequest

UNHELD = frozenset(
    {
        *("contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains"),
        *("minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
        *("$dynamicRef", "$recursiveRef"),
    }
)
FORMATS = frozenset(
    {
        *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"),
    }
)
"""Those of strings that are held."""
SILENT = frozenset({"$schema", "$dynamicAnchor", "$recursiveAnchor"})
"""Nothing is forbidden without them."""
NOTHING = {"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True}
"""Values that forbid nothing."""
NO_SCHEMAS = frozenset({"const", "enum", "default", "examples", "example", "required", "x-guidance"})
"""Keywords whose values only look like schemas."""
BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords that hold schemas by name."""
KEYWORDS = UNHELD | {"format", "maxLength", "minLength", "oneOf", "pattern", "patternProperties"}
"""All that may be left out."""

_PLAIN = re.compile(r"\\(?P<escaped>.)|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_AROUND = re.compile(r"\(\?(?:=|!|<=|<!|>)|[^|(]\^|\$[^|)]", re.DOTALL)


def is_held_pattern(pattern: Any) -> bool:
    """No look-around, no reference back, and anchors only where something begins or ends."""
    if not isinstance(pattern, str):
        return False
    escapes = {found["escaped"] for found in _PLAIN.finditer(pattern) if found["escaped"]}
    return not escapes & set("123456789bBkGZzc") and not _AROUND.search(_PLAIN.sub("x", pattern))


class Held:
    """What one request's schemas leave out. `tell` gets the name of each keyword, one of KEYWORDS."""

    def __init__(self, tell: Callable[[str], None] = lambda keyword: None) -> None:
        self._tell = tell

    def schema(self, schema: dict[str, Any], where: str, *, strict: bool) -> dict[str, Any]:
        """As much of a schema as can be held. Raises BadRequest naming `where` for a difference if `strict`, and for a
        schema that is larger than a grammar may be."""
        try:
            bounds.check_schema(schema)
        except RequestError as error:
            raise BadRequest(str(error), param=where) from None
        kept = _copy(schema)
        for part in _parts(kept):
            for keyword in list(part):
                if self._is_held(part, keyword):
                    continue
                if keyword not in SILENT and part[keyword] is not NOTHING.get(keyword):
                    self.leave_out(keyword, where, strict=strict)
                del part[keyword]
            if isinstance(part.get("oneOf"), list) and not _are_apart(part["oneOf"], kept):
                self.leave_out("oneOf", where, strict=strict)
        return kept

    def leave_out(self, keyword: str, where: str, *, strict: bool) -> None:
        """Raises BadRequest if the schema is to be kept to strictly."""
        if strict:
            raise BadRequest(
                f"{keyword!r} cannot be held by a grammar, and the schema is strict: want it without, or not strict.",
                param=where,
                code="unsupported_schema",
            )
        self._tell(keyword)

    @staticmethod
    def _is_held(part: dict[str, Any], keyword: str) -> bool:
        if keyword == "format":
            return part[keyword] in FORMATS if isinstance(part[keyword], str) else False
        if keyword == "pattern":
            return is_held_pattern(part[keyword])
        if keyword == "patternProperties" and isinstance(part[keyword], dict):
            return all(map(is_held_pattern, part[keyword]))
        return keyword not in UNHELD and keyword not in SILENT


def _copy(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _copy(value) for key, value in schema.items()}
    return [_copy(value) for value in schema] if isinstance(schema, list) else schema


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema inside of one, itself first; what has been taken out of it meanwhile is not looked at."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            yield part
            for keyword, value in part.items():
                if keyword in BY_NAME and isinstance(value, dict):
                    waiting += value.values()
                elif keyword not in NO_SCHEMAS:
                    waiting.append(value)


def _are_apart(members: list[Any], root: dict[str, Any]) -> bool:
    """Whether it is easy to see that no value fits two of the alternatives: by type, or by what a property names."""
    shown = [_resolved(member, root) for member in members]
    return all(_is_apart(one, other) for index, one in enumerate(shown) for other in shown[:index])


def _resolved(member: Any, root: dict[str, Any]) -> dict[str, Any]:
    """The schema behind a reference to a definition."""
    for _ in range(8):
        reference = member.get("$ref") if isinstance(member, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found: Any = root
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, dict) else None
        member = found
    return member if isinstance(member, dict) else {}


def _is_apart(one: dict[str, Any], other: dict[str, Any]) -> bool:
    types = [_types(schema) for schema in (one, other)]
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    values = [_named(schema) for schema in (one, other)]
    if values[0] and values[1] and not values[0] & values[1]:
        return True
    members = [schema.get("properties") for schema in (one, other)]
    required = [set(map(str, schema.get("required") or ())) for schema in (one, other)]
    if not isinstance(members[0], dict) or not isinstance(members[1], dict):
        return False
    both = required[0] & required[1] & members[0].keys() & members[1].keys()
    return any(_is_apart(_only(members[0][name]), _only(members[1][name])) for name in both)


def _only(schema: Any) -> dict[str, Any]:
    """What a property names itself: one level is enough."""
    return {key: schema[key] for key in ("type", "const", "enum") if key in schema} if isinstance(schema, dict) else {}


def _types(schema: dict[str, Any]) -> set[str]:
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set(map(str, given)) if isinstance(given, list) else set()
    return types | {"integer"} if "number" in types else types


def _named(schema: dict[str, Any]) -> set[str]:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return {repr(value) for value in values} if isinstance(values, list) else set()
