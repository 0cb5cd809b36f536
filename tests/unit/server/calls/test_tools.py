"""Tools as clients describe them, and arguments as schemas type them."""

import json

import pytest

from pilotfish.server.calls.tools import argument_json, argument_types, read_tools
from pilotfish.server.errors import BadRequest
from pilotfish.server.fields import FieldNotes


def tool(name="f", **function):
    return {"type": "function", "function": {"name": name, **function}}


def named(name):
    return {"type": "function", "function": {"name": name}}


def test_tools_are_shown_as_they_came_but_for_promises_about_the_decoder():
    given = [tool(description="d", parameters={"type": "object"}, strict=True), tool("g")]
    tools = read_tools(given, None, FieldNotes())
    assert tools.shown == [tool(description="d", parameters={"type": "object"}), tool("g")]
    assert tools.schemas == {"f": {"type": "object"}, "g": {}}
    assert tools.choice.mode == "auto"


@pytest.mark.parametrize(("tools", "choice"), [(None, None), ([], "auto"), (None, "none"), ([tool()], "none")])
def test_nothing_may_be_called(tools, choice):
    assert read_tools(tools, choice, FieldNotes()) is None


def test_choices():
    assert read_tools([tool()], "auto", FieldNotes()).choice.mode == "auto"
    assert read_tools([tool()], "required", FieldNotes()).choice.mode == "required"
    assert read_tools([tool(), tool("g")], named("g"), FieldNotes()).choice.named == "g"


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([1], None, "tools[0].type"),
        ([{"type": "web_search"}], None, "tools[0].type"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([{"type": "function", "fucntion": {"name": "f"}}], None, "tools[0].fucntion"),
        ([tool(descripton="x")], None, "tools[0].function.descripton"),
        ([tool(), tool("a b")], None, "tools[1].function.name"),
        ([tool("")], None, "tools[0].function.name"),
        ([tool("a>")], None, "tools[0].function.name"),
        ([tool(7)], None, "tools[0].function.name"),
        ([tool(parameters=[])], None, "tools[0].function.parameters"),
        ([tool(description=1)], None, "tools[0].function.description"),
        ([tool(), tool()], None, "tools[1]"),
        ([tool(str(number)) for number in range(1025)], None, "tools"),
        ([tool()], "always", "tool_choice"),
        ([tool()], 1, "tool_choice"),
        ([tool()], {"type": "allowed_tools"}, "tool_choice"),
        ([tool()], {"type": "function"}, "tool_choice"),
        ([tool()], named("g"), "tool_choice.function.name"),
        (None, "required", "tool_choice"),
        (None, named("f"), "tool_choice.function.name"),
    ],
)
def test_refusals_name_the_field(tools, choice, param):
    with pytest.raises(BadRequest) as caught:
        read_tools(tools, choice, FieldNotes())
    assert caught.value.param == param


def types(schema, **root):
    return set(argument_types({"properties": {"x": schema}, **root}, "x"))


def test_types_of_a_schema():
    assert types({"type": "integer"}) == {"integer"}
    assert types({"type": ["string", "null"]}) == {"string", "null"}
    assert types({"anyOf": [{"type": "integer"}, {"type": "null"}]}) == {"integer", "null"}
    assert types({"enum": ["a", 1]}) == {"string", "integer"}
    assert types({"const": True}) == {"boolean"}
    assert types({"$ref": "#/$defs/A"}, **{"$defs": {"A": {"type": "array"}}}) == {"array"}
    assert types({"$ref": "#/properties/x"}) == types({"$ref": "http://x"}) == types({"$ref": "#/no/where"}) == set()
    assert types({"anyOf": [{"oneOf": [{"type": "null"}]}, {"allOf": [{"enum": [1.5]}]}]}) == {"null", "number"}
    assert types({}) == types(None) == types({"type": 1, "anyOf": 1}) == set()
    assert argument_types({"properties": []}, "x") == argument_types({}, "x") == set()


def test_a_schema_of_references_to_itself_takes_no_time():
    schema = {"anyOf": [{"anyOf": [{"$ref": "#/properties/x"}] * 500}] * 500 + [{"type": "integer"}]}
    for _ in range(100):
        schema = {"anyOf": [schema, schema, {"$ref": "#/properties/x"}]}
    assert types(schema) == {"integer"}


@pytest.mark.parametrize(
    ("text", "allowed", "value"),
    [
        ("7", ["integer"], 7),
        (" 7 ", ["number"], 7),
        ("7.0", ["integer"], 7.0),
        ("7.5", ["integer"], "7.5"),
        ("1e3", ["number"], 1000.0),
        ("true", ["boolean"], True),
        ("False", ["boolean"], False),
        ("1", ["boolean"], "1"),
        ("true", ["integer"], "true"),
        ("null", ["integer", "null"], None),
        ("None", ["null"], None),
        ("null", ["string"], "null"),
        ('{"a": [1]}', ["object"], {"a": [1]}),
        ("[1, 2]", ["object"], "[1, 2]"),
        ("[1, 2]", ["array", "string"], [1, 2]),
        ("two", ["array", "string"], "two"),
        ("7", [], "7"),
        ('"x"', ["string"], '"x"'),
        ('"x"', ["object"], '"x"'),
        ("NaN", ["number"], "NaN"),
        ("-Infinity", ["number"], "-Infinity"),
        ("[" * 100_000, ["array"], "[" * 100_000),
        ("1" * 10_000, ["integer"], "1" * 10_000),
        ("", ["integer"], ""),
        ('a\n"b" \\ €', ["string"], 'a\n"b" \\ €'),
    ],
)
def test_arguments_are_what_the_schema_allows_else_strings(text, allowed, value):
    written = argument_json(text, frozenset(allowed))
    assert json.loads(written) == value
    assert type(json.loads(written)) is type(value)
