"""Tools: what a request offers, which of them it demands, and how an argument's text becomes JSON.

The model writes arguments as text. The tool's JSON schema says what a text is: a string as it stands, or the JSON of
a number, boolean, null, array or object. Text that is not what the schema allows is kept as a string: it is the
caller who validates, and nothing is lost.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal, NoReturn

import msgspec

from pilotfish.server.errors import BadRequest
from pilotfish.server.fields import FieldNotes

Schema = dict[str, Any]

NAME = re.compile(r"[^\s<>\"]{1,256}")
MAX_TOOLS = 1024
TOOL_FIELDS = frozenset({"type", "function", "cache_control"})
FUNCTION_FIELDS = frozenset({"name", "description", "parameters", "strict", "cache_control"})
SHOWN_FIELDS = frozenset({"name", "description", "parameters"})
WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
"""Some models write Python's constants."""


class ToolChoice(msgspec.Struct, frozen=True):
    """`named` only with mode "named"."""

    mode: Literal["none", "auto", "required", "named"]
    named: str = ""


class Tools(msgspec.Struct, frozen=True):
    """`shown` is what the template prints, `schemas` the parameters' schemas by function."""

    shown: list[dict[str, Any]]
    schemas: dict[str, Schema]
    choice: ToolChoice


def function_tool(name: str, description: str | None, parameters: Schema | None) -> dict[str, Any]:
    """A tool as chat completions have it."""
    fields = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


def function_choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def read_tools(tools: list[Any] | None, choice: Any, notes: FieldNotes) -> Tools | None:
    """None where no tool may be called. Raises BadRequest naming the field."""
    shown = [_read_tool(tool, f"tools[{index}]", notes) for index, tool in enumerate(tools or ())]
    if len(shown) > MAX_TOOLS:
        raise BadRequest(f"Want at most {MAX_TOOLS} tools, got {len(shown)}.", param="tools")
    schemas: dict[str, Schema] = {}
    for index, tool in enumerate(shown):
        function = tool["function"]
        if function["name"] in schemas:
            raise BadRequest(f"Want different names, got {function['name']!r} twice.", param=f"tools[{index}]")
        schemas[function["name"]] = function.get("parameters") or {}
    chosen = _read_choice(choice, schemas)
    return Tools(shown, schemas, chosen) if schemas and chosen.mode != "none" else None


def _read_tool(tool: Any, where: str, notes: FieldNotes) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise BadRequest("Want an object with type 'function'.", param=f"{where}.type", code="unsupported_parameter")
    notes.check(tool, TOOL_FIELDS, where)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise BadRequest("Want an object.", param=f"{where}.function")
    notes.check(function, FUNCTION_FIELDS, f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadRequest("Want a name of 1 to 256 characters without spaces.", param=f"{where}.function.name")
    kinds: dict[str, type] = {"description": str, "parameters": dict, "strict": bool}
    for field, kind in kinds.items():
        if function.get(field) is not None and not isinstance(function[field], kind):
            raise BadRequest(f"Want {kind.__name__}.", param=f"{where}.function.{field}")
    # only what is for the model to read: `strict` is a promise about the decoder
    return {"type": "function", "function": {field: function[field] for field in function if field in SHOWN_FIELDS}}


def _read_choice(choice: Any, schemas: dict[str, Schema]) -> ToolChoice:
    if choice is None or choice == "auto":
        return ToolChoice("auto")
    if choice == "none":
        return ToolChoice("none")
    if choice == "required":
        if not schemas:
            raise BadRequest("'tool_choice' wants 'tools'.", param="tool_choice")
        return ToolChoice("required")
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest("Want 'none', 'auto', 'required', or a function by name.", param="tool_choice")
    if function["name"] not in schemas:
        raise BadRequest(f"No tool is called {function['name'][:100]!r}.", param="tool_choice.function.name")
    return ToolChoice("named", function["name"])


# -- arguments -----------------------------------------------------------------------------------------------------


def argument_types(function: Schema, parameter: str) -> frozenset[str]:
    """JSON types that the schema allows for a parameter; empty where it says nothing.

    Each part of the schema is looked at once, whatever its references do.
    """
    properties = function.get("properties")
    waiting = [properties.get(parameter)] if isinstance(properties, dict) else []
    seen: set[int] = set()
    found: set[str] = set()
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        if isinstance(schema.get("$ref"), str):
            waiting.append(resolve(schema["$ref"], function))
        elif (own := _own_types(schema)) is not None:
            found |= own
        else:
            for group in ("anyOf", "oneOf", "allOf"):
                waiting += schema[group] if isinstance(schema.get(group), list) else []
    return frozenset(found)


def _own_types(schema: Schema) -> set[str] | None:
    """Those that the schema names itself, or shows by its values; None if it does neither."""
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {name for name in given if isinstance(name, str)}
    values = list(schema["enum"]) if isinstance(schema.get("enum"), list) else []
    values += [schema["const"]] if "const" in schema else []
    return {_type_of(value) for value in values} or None


def resolve(reference: str, root: Schema) -> Any:
    """`#/$defs/Name` in the function's own schema."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for step in reference.lstrip("#/").split("/"):
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def is_text(types: frozenset[str]) -> bool:
    """A string and nothing else: it needs no look at its end to be written."""
    return types <= {"string"}


def argument_json(text: str, types: frozenset[str]) -> str:
    """The JSON of an argument: its own text where that is JSON of an allowed type, else a string."""
    stripped = text.strip()
    written = WORDS.get(stripped.lower(), stripped)
    try:
        value = json.loads(written, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _type_of(value)
    fits = kind in types or (kind == "integer" and "number" in types)
    fits = fits or ("integer" in types and isinstance(value, float) and value.is_integer())
    return written if fits and kind != "string" else json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
