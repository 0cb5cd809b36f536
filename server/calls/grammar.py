"""A demanded tool call as a grammar: the call comes, its form is whole, and its arguments fit the tool's schema.

The prompt already holds the call's beginning, so the grammar goes on after `<function=`, or, for a named function,
after its name. Parameters come in the schema's order, each at most once, the required ones always. A value is the JSON
that its schema allows, one of the texts of an enum, or any text where a string may stand. What the grammar library
cannot read of a schema is left out, and the type alone holds.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from pilotfish.engine.link.messages import JSON_OPTIONS, Grammar
from pilotfish.server.calls.parser import CALL, END_CALL, END_FUNCTION, END_PARAMETER, FUNCTION, PARAMETER
from pilotfish.server.calls.tools import Schema, argument_types, resolve
from pilotfish.server.text.tokenizer import Tokenizer

TEXT = r"text[lazy]: /(?s:.*)<\/parameter>/"


def call_grammar(schemas: dict[str, Schema], named: str, single: bool, tokenizer: Tokenizer) -> Grammar:
    """One call of the named function, else one or (not `single`) more calls of any."""
    rules = [TEXT, f"end: {_literal(END_FUNCTION)} {_literal(chr(10))} {_marker(END_CALL, tokenizer)}"]
    bodies = []
    for number, (name, schema) in enumerate(schemas.items()):
        if not named or name == named:
            rules += _body(number, schema)
            bodies.append((name, f"body{number}"))
    if named:
        rules.append(f"start: {bodies[0][1]} end")
    else:
        rules.append("call: " + " | ".join(f"{_literal(name + '>' + chr(10))} {body} end" for name, body in bodies))
        again = f"{_literal(chr(10))} {_marker(CALL, tokenizer)} {_literal(chr(10) + FUNCTION)} call"
        rules.append("start: call" if single else f"start: call ({again})*")
    return Grammar(kind="lark", source="\n".join(rules))


def _body(number: int, schema: Schema) -> list[str]:
    """The rules of a function's parameters."""
    properties = schema.get("properties")
    required = schema.get("required")
    rules, parts = [], []
    for index, (name, own) in enumerate(properties.items() if isinstance(properties, dict) else ()):
        rule = f"p{number}x{index}"
        rules += _parameter(rule, name, own, schema)
        parts.append(rule if isinstance(required, list) and name in required else rule + "?")
    # an empty rule is written as an empty text
    return [*rules, f"body{number}: {' '.join(parts) or _literal('')}"]


def _parameter(rule: str, name: str, own: Any, function: Schema) -> list[str]:
    begin, end = _literal(f"{PARAMETER}{name}>\n"), _literal(f"\n{END_PARAMETER}\n")
    if texts := _texts(own, function):
        return [f"{rule}: {begin} ({' | '.join(map(_literal, texts))}) {end}"]
    types = argument_types(function, name)
    if not types or "string" in types:
        return [f"{rule}: {begin} text {_literal(chr(10))}"]
    schema = _embedded(own, name, function)
    if not _is_readable(schema):
        schema = json.dumps({"type": sorted(types), "x-guidance": JSON_OPTIONS})
    return [f"{rule}: {begin} {rule}j {end}", f"{rule}j: %json {schema}"]


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


def _embedded(own: Schema, name: str, function: Schema) -> str:
    """The parameter's schema alone, with what its references want."""
    if '"$ref"' not in json.dumps(own):
        return json.dumps({**own, "x-guidance": JSON_OPTIONS})
    whole = _moved(function)
    place = name.replace("~", "~0").replace("/", "~1")
    root = {"$ref": f"#/$defs/whole/properties/{place}", "$defs": {"whole": whole}, "x-guidance": JSON_OPTIONS}
    return json.dumps(root)


def _moved(schema: Any) -> Any:
    """With references that hold when it stands under $defs/whole."""
    if isinstance(schema, list):
        return [_moved(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value) for key, value in schema.items()}
    if isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#"):
        moved["$ref"] = "#/$defs/whole" + schema["$ref"][1:]
    return moved


@lru_cache(4096)
def _is_readable(schema: str) -> bool:
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(f"start: %json {schema}"))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _marker(text: str, tokenizer: Tokenizer) -> str:
    """The marker's own token, if there is one: the library keeps those apart from text."""
    token_id = tokenizer.token_to_id(text)
    return _literal(text) if token_id is None else f"<[{token_id}]>"
