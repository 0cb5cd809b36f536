"""What of a schema is left out: what the library cannot hold, and nothing else."""

import json
from copy import deepcopy

import pytest
from llguidance import LLMatcher

from pilotfish.engine.link.messages import JSON_OPTIONS
from pilotfish.server.errors import BadRequest
from pilotfish.server.text.schemas import FORMATS, KEYWORDS, Held, is_held_pattern

ANY = {"type": ["array", "object", "string"]}
VALUES = {
    **{"contains": {"type": "integer"}, "dependencies": {"a": ["b"]}, "dependentRequired": {"a": ["b"]}},
    **{"dependentSchemas": {"a": {}}, "else": {"required": ["a"]}, "if": {"required": ["a"]}, "maxContains": 1},
    **{"minContains": 1, "not": {"type": "null"}, "propertyNames": {"pattern": "^a"}, "then": {"required": ["a"]}},
    **{"unevaluatedItems": False, "unevaluatedProperties": False, "uniqueItems": True, "format": "cron"},
    **{"$dynamicRef": "#a", "$recursiveRef": "#", "pattern": "(?=a)b", "patternProperties": {"(?!a)": {}}},
    "oneOf": [{"type": "integer"}, {"type": "number"}],
}


def error_of(schema):
    return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=JSON_OPTIONS))


def kept(schema, strict=False):
    left_out = []
    return Held(left_out.append).schema(schema, "x", strict=strict), left_out


@pytest.mark.parametrize("keyword", VALUES)
def test_what_the_library_cannot_hold_is_left_out_and_named(keyword):
    outer = {} if keyword == "oneOf" else ANY
    for schema in ({**outer, keyword: VALUES[keyword]}, {"properties": {"a": {"items": {keyword: VALUES[keyword]}}}}):
        before = deepcopy(schema)
        assert keyword == "oneOf" or error_of(schema)
        reduced, left_out = kept(schema)
        assert left_out == [keyword] and not error_of(reduced) and keyword in KEYWORDS
        assert schema == before
        with pytest.raises(BadRequest, match="strict") as caught:
            kept(schema, strict=True)
        assert caught.value.param == "x" and keyword in caught.value.message


HELD = [
    {"type": "object", "properties": {"not": {"type": "string"}, "if": {"enum": ["not"]}}, "required": ["not"]},
    {"enum": [{"uniqueItems": True}]},
    {"const": {"not": 1}},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2, "prefixItems": [{}]},
    {
        "type": "object",
        "patternProperties": {"^a": {"type": "null"}},
        "additionalProperties": False,
        "minProperties": 1,
    },
    {"type": "number", "multipleOf": 0.5, "exclusiveMinimum": 0},
    {"$ref": "#/$defs/A", "$defs": {"A": {"type": "string", "pattern": "^a|b$", "title": "not"}}},
    {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    {"oneOf": [{"const": "a"}, {"enum": ["b", "c"]}]},
]


@pytest.mark.parametrize("schema", HELD)
def test_what_the_library_holds_stays(schema):
    reduced, left_out = kept(schema, strict=True)
    assert reduced == schema and not left_out and not error_of(reduced)


def test_alternatives_that_name_what_they_are_stay_apart():
    def shape(kind):
        return {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}

    references = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]
    schema = {"oneOf": references, "$defs": {"a": shape("a"), "b": shape("b")}}
    assert kept(schema)[1] == []
    assert kept({**schema, "$defs": {"a": shape("a"), "b": shape("a")}})[1] == ["oneOf"]


def test_what_forbids_nothing_is_taken_out_silently():
    schema = {"$schema": "x", "uniqueItems": False, "unevaluatedProperties": True, "type": "array"}
    assert kept(schema, strict=True) == ({"type": "array"}, [])


@pytest.mark.parametrize("name", [*sorted(FORMATS), "cron", "decimal", "binary", "regex", "idn-email", "json-pointer"])
def test_formats_are_those_of_the_library(name):
    assert bool(error_of({"type": "string", "format": name})) == (name not in FORMATS)


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"\d+", r"\p{L}+", "(?i)a", "a++", "(?<n>a)", "(?P<n>a)", r"\bfoo\b", r"^\S+$", r"[^\s]", "a{2,}", "(?:a|b)"),
        *(
            r"\/",
            r"[\w.-]",
            r"\cA",
            r"\u00e9",
            "$^",
            "a$b",
            "(^a|b$)",
            "(?>a)",
            r"\k<n>",
            r"(a)\1",
            r"\Z",
            "^a|b$",
            "[$^]",
        ),
        *("(?=a)b", "(?!a)b", "(?<=a)b", "(?<!a)b", "[(?=]", r"\\1", "a|^b", r"\$a", ""),
    ],
)
def test_patterns_are_those_of_the_library(pattern):
    assert is_held_pattern(pattern) == (not error_of({"type": "string", "pattern": pattern}))
