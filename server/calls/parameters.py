"""A function's parameters: which there are, and how the text of each becomes JSON.

The model writes arguments as text. The schema says what a text is: a string as it stands, or the JSON of a number,
boolean, null, array or object. Text that is not what the schema allows is kept as a string: it is the caller who
validates, and nothing is lost.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn
from urllib.parse import unquote

from pilotfish.server.errors import BadRequest

Schema = dict[str, Any]

MAX_LITERAL = 20_000
"""Characters of a value that is tried as Python's."""
WORDS = {"True": "true", "False": "false", "None": "null", "Null": "null"}
"""Templates print Python's constants, and models write what they have read."""
HINTS = {
    "object": ("properties", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "contains", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Keywords that say of a schema without a type what it is about."""


class Parameters:
    """Those of one function. `schema` is the root that references start from."""

    def __init__(self, schema: Schema | None = None) -> None:
        self.schema = schema or {}
        self.properties, self.required = _members(self.schema, self.schema, set())
        self._known: dict[str, _Values] = {}

    def types(self, name: str) -> frozenset[str]:
        """JSON types that the schema allows for a parameter; empty where it says nothing."""
        return self._values(name).types

    def choices(self, name: str) -> list[Any] | None:
        """The only values that a parameter may have, if they are named."""
        return self._values(name).choices

    def strings(self, name: str) -> list[str]:
        """Those of the values that are named, in their order."""
        return self._values(name).strings

    def takes_text(self, name: str) -> bool:
        """Whether any string may stand there."""
        return not self.types(name) or self._values(name).is_free_text

    def is_text(self, name: str) -> bool:
        """A string and nothing else: it needs no look at its end to be written."""
        return self.types(name) <= {"string"}

    def fits(self, name: str, text: str) -> bool:
        """Whether the text can be of an allowed type."""
        values = self._values(name)
        return not values.types or values.is_free_text or values.read(text) is not None

    def json_of(self, name: str, text: str) -> str:
        """The JSON of an argument: its own text where that is JSON of an allowed type, else a string."""
        return self._values(name).read(text) or json.dumps(text, ensure_ascii=False)

    def arguments(self, given: Iterable[tuple[str, str]]) -> str:
        """The JSON object of names and texts."""
        pairs = (f"{json.dumps(name, ensure_ascii=False)}: {self.json_of(name, text)}" for name, text in given)
        return "{" + ", ".join(pairs) + "}"

    def _values(self, name: str) -> _Values:
        if name not in self._known:
            self._known[name] = _Values(self.properties.get(name), self.schema)
        return self._known[name]


class _Values:
    """What a parameter may be: types, and the values if all of them are named."""

    def __init__(self, schema: Any, root: Schema) -> None:
        types: set[str] = set()
        choices: list[Any] = []
        self.is_free_text = has_free = False
        for part in _alternatives(schema, root):
            named = _choices(part)
            kinds = {_type_of(value) for value in named} if named is not None else _own_types(part)
            types |= kinds
            choices += named or ()
            has_free = has_free or named is None
            self.is_free_text = self.is_free_text or (named is None and "string" in kinds)
        self.types = frozenset(types)
        self.choices = choices if choices and not has_free else None
        self.strings = list(dict.fromkeys(value for value in choices if isinstance(value, str)))

    def read(self, text: str) -> str | None:
        """The JSON of a text that is what the schema allows; None also for any text as a string."""
        if text in self.strings:
            return json.dumps(text, ensure_ascii=False)
        stripped = text.strip()
        word = stripped if self.is_free_text else stripped.capitalize()
        written = WORDS.get(word, stripped)
        try:
            value = json.loads(written, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            written, value = _literal(stripped) if self.types & {"array", "object"} else ("", "")
        kind = _type_of(value)
        fits = kind in self.types or (kind == "integer" and "number" in self.types)
        fits = fits or ("integer" in self.types and isinstance(value, float) and value.is_integer())
        return written if fits and kind != "string" else None


def resolve(reference: str, root: Schema) -> Any:
    """What a JSON pointer in a fragment points to in the function's own schema; None for other references."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for step in reference[1:].split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and len(name) < 6 and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def _alternatives(schema: Any, root: Schema) -> Iterator[Schema]:
    """The parts of a schema that speak of types; each is looked at once, whatever its references do."""
    waiting, seen = [schema], set()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part.get("$ref"), str):
            waiting.append(resolve(part["$ref"], root))
        elif _choices(part) is not None or _own_types(part):
            yield part
        else:
            for group in ("anyOf", "oneOf", "allOf"):
                waiting += part[group] if isinstance(part.get(group), list) else []


def _choices(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return list(schema["enum"]) if isinstance(schema.get("enum"), list) and schema["enum"] else None


def _own_types(schema: Schema) -> set[str]:
    """Those that the schema names itself, or shows by its other keywords."""
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {name for name in given if isinstance(name, str)}
    if any(isinstance(schema.get(group), list) for group in ("anyOf", "oneOf", "allOf")):
        return set()
    return {kind for kind, words in HINTS.items() if any(word in schema for word in words)}


def _members(schema: Any, root: Schema, seen: set[int]) -> tuple[dict[str, Any], frozenset[str]]:
    """Properties, and the names of those that must be given: of the schema, and of what it is put together from."""
    if not isinstance(schema, dict) or id(schema) in seen:
        return {}, frozenset()
    seen = seen | {id(schema)}
    properties: dict[str, Any] = {}
    required: frozenset[str] = frozenset()
    parts = [resolve(schema["$ref"], root)] if isinstance(schema.get("$ref"), str) else []
    parts += schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    for part in parts:
        its_properties, its_required = _members(part, root, seen)
        properties, required = {**properties, **its_properties}, required | its_required
    for group in ("anyOf", "oneOf"):
        if isinstance(schema.get(group), list) and schema[group]:
            members = [_members(part, root, seen) for part in schema[group]]
            for its_properties, _ in members:
                properties = {**its_properties, **properties}
            required |= frozenset.intersection(*(its_required for _, its_required in members))
    own = schema.get("properties")
    properties = {**properties, **own} if isinstance(own, dict) else properties
    given = schema.get("required")
    names = (name for name in given if isinstance(name, str)) if isinstance(given, list) else ()
    return properties, (required | frozenset(names)).intersection(properties)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _literal(text: str) -> tuple[str, Any]:
    """A list or dictionary as Python writes it: its JSON, and itself; else texts of nothing."""
    if len(text) > MAX_LITERAL:
        return "", ""
    try:
        with warnings.catch_warnings(action="ignore"):
            value = ast.literal_eval(text)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return written, json.loads(written)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return "", ""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# -- names ---------------------------------------------------------------------------------------------------------

MAX_NAME = 256
STRANGE = re.compile(r"[<>\x00-\x1f\x7f\x85\u2028\u2029]")


def check_names(parameters: Parameters, where: str) -> None:
    """Raises BadRequest for a name that the form of a call has no way to write: a tag's end or a line's in it."""
    for name in parameters.properties:
        fits = 1 <= len(name) <= MAX_NAME and name == name.strip() and not STRANGE.search(name)
        if not fits or (len(name) > 1 and name[0] in "\"'" and name[0] == name[-1]):
            raise BadRequest(
                f"The name of the parameter {name[:100]!r} cannot be written in a tool call of this model: want 1 to "
                f"{MAX_NAME} characters without <, >, line breaks, spaces or quotes around it.",
                param=f"{where}.properties",
            )
