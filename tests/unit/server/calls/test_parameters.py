"""Arguments as schemas type them."""

import json

import pytest

from pilotfish.server.calls.parameters import Parameters


def types(schema, **root):
    return set(Parameters({"properties": {"x": schema}, **root}).types("x"))


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
    assert types({"minItems": 1}) == {"array"} and types({"properties": {}}) == {"object"}
    assert Parameters({"properties": []}).types("x") == Parameters({}).types("x") == set()


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
        ("NULL", ["null"], None),
        ("None", ["null", "string"], None),
        ("none", ["null", "string"], "none"),
        ("TRUE", ["boolean"], True),
        ("TRUE", ["boolean", "string"], "TRUE"),
        ("{'a': [None, 'b']}", ["object"], {"a": [None, "b"]}),
        ("('a', 1)", ["array"], ["a", 1]),
        ("{'a'}", ["array"], "{'a'}"),
        ("{1: 2}", ["object"], {"1": 2}),
        ("__import__('os')", ["object"], "__import__('os')"),
        ("'\\d'", ["array"], "'\\d'"),
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
    written = Parameters({"properties": {"x": {"type": allowed}}}).json_of("x", text)
    assert json.loads(written) == value
    assert type(json.loads(written)) is type(value)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"enum": ["none", "auto"]}, {"type": "null"}]}, "none", "none"),
        ({"anyOf": [{"enum": ["none", "auto"]}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"enum": ["auto"]}, {"type": "null"}]}, "none", None),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"const": "true"}, "true", "true"),
        ({"enum": ["null", True]}, "null", "null"),
        ({"type": "string", "enum": ["7"]}, "7", "7"),
    ],
)
def test_a_value_that_the_schema_names_is_that_value(schema, text, value):
    written = Parameters({"properties": {"x": schema}}).json_of("x", text)
    assert json.loads(written) == value and type(json.loads(written)) is type(value)


def test_properties_are_found_behind_references_and_in_parts():
    own = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for schema in ({"$ref": "#/$defs/A", "$defs": {"A": own}}, {"allOf": [own]}, {"anyOf": [own, own]}, own):
        parameters = Parameters(schema)
        assert (list(parameters.properties), set(parameters.required)) == (["a"], {"a"}), schema
    other = {"properties": {"b": {}}, "required": ["b"]}
    assert Parameters({"anyOf": [own, other]}).required == frozenset()
    assert set(Parameters({"allOf": [own, other]}).required) == {"a", "b"}
    assert Parameters({"$ref": "#"}).properties == {}
