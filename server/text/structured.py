"""Structured output: OpenAI's `response_format` and vLLM's `structured_outputs` and `guided_*`, as one grammar."""

from __future__ import annotations

import json
from typing import Any

from pilotfish.engine.errors import RequestError
from pilotfish.engine.grammar import bounds
from pilotfish.engine.link.messages import Grammar
from pilotfish.server.errors import BadRequest
from pilotfish.server.fields import FieldNotes
from pilotfish.server.text.schemas import Held

GUIDED_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
"""vLLM's older names, and what each is called inside `structured_outputs`."""


def grammar_of(fields: dict[str, Any], after_token_id: int | None = None, held: Held | None = None) -> Grammar | None:
    """The one grammar that a request's fields ask for, in force after a token if given (the end of thinking).

    `fields` holds the values of response_format, structured_outputs and guided_* that are not None. Raises BadRequest
    naming the field, also if two of them ask for a grammar.
    """
    held = held or Held()
    asked = [(name, grammar) for name, value in fields.items() if (grammar := _read(name, value, held)) is not None]
    if len(asked) > 1:
        names = " and ".join(name for name, _ in asked)
        raise BadRequest(f"Want one grammar, got {names}.", param=asked[1][0])
    if not asked:
        return None
    name, (kind, source) = asked[0]
    made = Grammar(kind=kind, source=source, after_token_id=after_token_id)
    try:
        bounds.check(made)
    except RequestError as error:
        raise BadRequest(str(error), param=name) from None
    return made


FORMAT_FIELDS = frozenset({"type", "json_schema", "schema"})
SCHEMA_FIELDS = frozenset({"name", "description", "schema", "strict"})


def check_format(value: Any, notes: FieldNotes) -> None:
    """Tells what `response_format` has and nobody here reads."""
    if isinstance(value, dict):
        notes.check(value, FORMAT_FIELDS, "response_format")
        if isinstance(value.get("json_schema"), dict):
            notes.check(value["json_schema"], SCHEMA_FIELDS, "response_format.json_schema")


def _read(name: str, value: Any, held: Held) -> tuple[Any, str] | None:
    """(kind, source) of one field, or None where it asks for free text."""
    if name == "response_format":
        return _response_format(value, held)
    if name in GUIDED_FIELDS:
        return _constraint(name, GUIDED_FIELDS[name], value, held)
    if not isinstance(value, dict):
        raise BadRequest(f"Want an object, got {type(value).__name__}.", param=name)
    given = {key: inner for key, inner in value.items() if inner is not None}
    known = set(GUIDED_FIELDS.values())
    strange = sorted(given.keys() - known)
    if strange:
        raise BadRequest(f"Not supported here: {strange[0]}. Want one of {', '.join(sorted(known))}.", param=name)
    if len(given) != 1:
        raise BadRequest(f"Want exactly one of {', '.join(sorted(known))}, got {len(given)}.", param=name)
    ((key, inner),) = given.items()
    return _constraint(f"{name}.{key}", key, inner, held)


def _response_format(value: Any, held: Held) -> tuple[Any, str] | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")
        if schema is None:
            return "json_object", ""
        return _json_schema(schema, "response_format.schema", held)
    if kind == "json_schema":
        holder = value.get("json_schema")
        schema = holder.get("schema") if isinstance(holder, dict) else None
        strict = isinstance(holder, dict) and holder.get("strict") is True
        return _json_schema(schema, "response_format.json_schema.schema", held, strict=strict)
    raise BadRequest("Want type text, json_object or json_schema.", param="response_format.type")


def _json_schema(schema: Any, param: str, held: Held, *, strict: bool = False) -> tuple[Any, str]:
    """True and {} are the schemas of any value."""
    if isinstance(schema, bool) and schema:
        schema = {}
    if not isinstance(schema, dict):
        raise BadRequest("Want an object.", param=param)
    return "json_schema", json.dumps(held.schema(schema, param, strict=strict))


def _constraint(param: str, key: str, value: Any, held: Held) -> tuple[Any, str] | None:
    if key == "json_object":
        return ("json_object", "") if value else None
    if key == "json":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise BadRequest("Want the JSON of a schema.", param=param) from None
        if not isinstance(value, dict):
            raise BadRequest(f"Want a JSON schema, got {type(value).__name__}.", param=param)
        return _json_schema(value, param, held)
    if key == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(choice, str) for choice in value):
            raise BadRequest("Want a list of at least one string.", param=param)
        return "choice", json.dumps(value)
    if not isinstance(value, str) or not value:
        given = "an empty one" if value == "" else type(value).__name__
        raise BadRequest(f"Want a string, got {given}.", param=param)
    return key, value
