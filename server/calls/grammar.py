"""A demanded tool call as a grammar: the call comes, its form is whole, and its arguments fit the tool's schema.

The prompt already holds the call's beginning, so the grammar goes on after `<function=`, or, for a named function,
after its name. Parameters come in the schema's order, each at most once, the required ones always. A value is the JSON
that its schema allows, one of the texts of an enum, or any text where a string may stand. What the grammar library
cannot read of a schema is left out, and the type alone holds: the engine finds that out, this process only writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from pilotfish.engine.errors import RequestError
from pilotfish.engine.grammar import bounds
from pilotfish.engine.link.messages import JSON_OPTIONS, Grammar
from pilotfish.server.calls.parser import CALL, END_CALL, END_FUNCTION, END_PARAMETER, FUNCTION, PARAMETER
from pilotfish.server.calls.tools import Schema, argument_types, resolve
from pilotfish.server.errors import BadRequest
from pilotfish.server.text.tokenizer import Tokenizer

TEXT = r"text[lazy]: /(?s:.*)<\/parameter>/"


ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
"""Of a schema: they allow and forbid nothing."""


class Values:
    """Rules for the JSON of parameters: schemas that are written alike are one rule."""

    def __init__(self) -> None:
        self._rules: dict[tuple[str, str], str] = {}
        self._num_bytes = 0

    def rule(self, schema: str, simpler: str) -> str:
        """Its name. Raises BadRequest once all of them together are too large."""
        key = schema, simpler
        if key not in self._rules:
            self._num_bytes += len(schema) + len(simpler)
            if self._num_bytes > bounds.MAX_CALLS_BYTES:
                raise BadRequest(
                    f"Want parameters' schemas of at most {bounds.MAX_CALLS_BYTES} bytes for a demanded call, each "
                    "with the definitions that it refers to.",
                    param="tools",
                )
            self._rules[key] = f"v{len(self._rules)}"
        return self._rules[key]

    def all(self) -> tuple[tuple[str, str, str], ...]:
        return tuple((name, schema, simpler) for (schema, simpler), name in self._rules.items())


def call_grammar(schemas: dict[str, Schema], named: str, single: bool, tokenizer: Tokenizer) -> Grammar:
    """One call of the named function, else one or (not `single`) more calls of any. Raises BadRequest for schemas that
    are larger than a grammar may be."""
    rules = [TEXT, f"end: {_literal(END_FUNCTION)} {_literal(chr(10))} {_marker(END_CALL, tokenizer)}"]
    bodies, values = [], Values()
    chosen = {name: schema for name, schema in schemas.items() if not named or name == named}
    try:
        bounds.check_schema(list(chosen.values()))
    except RequestError as error:
        raise BadRequest(str(error), param="tools") from None
    for number, (name, schema) in enumerate(chosen.items()):
        rules += _body(number, schema, values)
        bodies.append((name, f"body{number}"))
    if named:
        rules.append(f"start: {bodies[0][1]} end")
    else:
        rules.append("call: " + " | ".join(f"{_literal(name + '>' + chr(10))} {body} end" for name, body in bodies))
        again = f"{_literal(chr(10))} {_marker(CALL, tokenizer)} {_literal(chr(10) + FUNCTION)} call"
        rules.append("start: call" if single else f"start: call ({again})*")
    return Grammar(kind="lark", source="\n".join(rules), schemas=values.all())


def _body(number: int, schema: Schema, values: Values) -> list[str]:
    """The rules of a function's parameters."""
    properties = schema.get("properties")
    required = schema.get("required")
    rules, parts = [], []
    for index, (name, own) in enumerate(properties.items() if isinstance(properties, dict) else ()):
        rule = f"p{number}x{index}"
        rules.append(f"{rule}: {_parameter(name, own, schema, values)}")
        parts.append(rule if isinstance(required, list) and name in required else rule + "?")
    # an empty rule is written as an empty text
    return [*rules, f"body{number}: {' '.join(parts) or _literal('')}"]


def _parameter(name: str, own: Any, function: Schema, values: Values) -> str:
    begin, end = _literal(f"{PARAMETER}{name}>\n"), _literal(f"\n{END_PARAMETER}\n")
    if texts := _texts(own, function):
        return f"{begin} ({' | '.join(map(_literal, texts))}) {end}"
    types = argument_types(function, name)
    if not types or "string" in types:
        return f"{begin} text {_literal(chr(10))}"
    simpler = json.dumps({"type": sorted(types), "x-guidance": JSON_OPTIONS})
    return f"{begin} {values.rule(_embedded(own, function), simpler)} {end}"


def _texts(own: Any, function: Schema) -> list[str]:
    """The only texts that a string may be; empty where there are others."""
    for _ in range(8):
        if not isinstance(own, dict) or not isinstance(own.get("$ref"), str):
            break
        own = resolve(own["$ref"], function)
    if not isinstance(own, dict):
        return []
    values = own.get("enum") if isinstance(own.get("enum"), list) else [own["const"]] if "const" in own else []
    return [*values] if values and all(isinstance(value, str) for value in values) else []


def _embedded(own: Schema, function: Schema) -> str:
    """The parameter's schema alone, with the definitions that it refers to and no others."""
    names: dict[str, str] = {}
    definitions: dict[str, Any] = {}
    root = _renamed({key: value for key, value in own.items() if key not in ANNOTATIONS}, function, names)
    todo = list(names)
    while todo:
        reference = todo.pop()
        before = len(names)
        definitions[names[reference]] = _renamed(_target(reference, function), function, names)
        todo += list(names)[before:]
    if definitions:
        root["$defs"] = definitions
    return json.dumps(root | {"x-guidance": JSON_OPTIONS})


def _renamed(schema: Any, function: Schema, names: dict[str, str]) -> Any:
    """With references to definitions by number, which `names` holds; those that lead nowhere stay."""
    if isinstance(schema, list):
        return [_renamed(part, function, names) for part in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {key: _renamed(value, function, names) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and _target(reference, function) is not None:
        renamed["$ref"] = "#/$defs/" + names.setdefault(reference, f"d{len(names)}")
    return renamed


def _target(reference: str, function: Schema) -> Any:
    """What a JSON pointer in a fragment points to in the function's own schema; None for other references."""
    if not reference.startswith("#"):
        return None
    found: Any = function
    for step in _steps(reference):
        if isinstance(found, list) and step.isdecimal() and len(step) < 6 and int(step) < len(found):
            found = found[int(step)]
        else:
            found = found.get(step) if isinstance(found, dict) else None
    return found


def _steps(reference: str) -> Iterator[str]:
    for step in reference[1:].split("/")[1:]:
        yield unquote(step).replace("~1", "/").replace("~0", "~")


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _marker(text: str, tokenizer: Tokenizer) -> str:
    """The marker's own token, if there is one: the library keeps those apart from text."""
    token_id = tokenizer.token_to_id(text)
    return _literal(text) if token_id is None else f"<[{token_id}]>"
