"""Sizes by kind: what is above a limit is refused by that name, what is at it passes, and nothing recurses."""

import contextlib
import json

import pytest

from pilotfish.engine.errors import RequestError
from pilotfish.engine.grammar import bounds
from pilotfish.engine.link.messages import Grammar


def chain(count):
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)} | {f"d{count}": {"type": "integer"}}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def nested(levels):
    schema = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def optional(count):
    return {"properties": {f"p{i}": {} for i in range(count)}}


SCHEMAS = {
    "levels of nesting": (nested(128), nested(129)),
    "properties": (
        {"required": [f"p{i}" for i in range(2000)]} | optional(2000),
        {"allOf": [{"required": [f"p{i}" for i in range(2001)]}]},
    ),
    "optional properties in one object": (optional(480), optional(481)),
    "pattern properties": (
        {"patternProperties": {f"^a{i}": {} for i in range(40)}},
        {"anyOf": [{"patternProperties": {f"^{letter}{i}": {} for i in range(21)}} for letter in "ab"]},
    ),
    "references": ({"anyOf": [{"$ref": "#"}] * 999}, {"prefixItems": [{"$ref": "#"}] * 2000, "items": {"$ref": "#"}}),
    "definitions referred to": (chain(499), chain(501)),
    "members of anyOf, oneOf and allOf": ({"anyOf": [{}] * 1000}, {"anyOf": [{}] * 501, "oneOf": [{}] * 500}),
    "values of enum": ({"enum": [1] * 20_000}, {"enum": [1] * 20_001}),
    "items that each have a schema": ({"prefixItems": [{}] * 2000}, {"items": [{}] * 2001}),
    "as the sum of all multipleOf, digits alone": (
        {"multipleOf": 0.01, "items": {"multipleOf": 1000}},
        {"properties": {"a": {"multipleOf": 10_001}, "b": {"multipleOf": 1.0001}}},
    ),
    "as a least number of characters, items or properties": ({"minLength": 100_000}, {"not": {"minItems": 10**9}}),
}


@pytest.mark.parametrize("what", bounds.SCHEMA_LIMITS)
def test_every_kind_of_part_of_a_schema_has_its_limit(what):
    at, above = SCHEMAS[what]
    bounds.check(Grammar(kind="json_schema", source=json.dumps(at)))
    with pytest.raises(RequestError, match=rf"at most {bounds.SCHEMA_LIMITS[what]} {what}, got \S+$"):
        bounds.check(Grammar(kind="json_schema", source=json.dumps(above)))


@pytest.mark.parametrize("number", [999_983, 10**300, 1e308, 123_456_789.123, 10**4000])
def test_no_large_multiple_passes(number):
    with pytest.raises(RequestError, match="multipleOf"):
        bounds.check_schema({"type": "number", "multipleOf": number})


@pytest.mark.parametrize("number", [1, 5, 0.01, 1e-05, 100, 0, -7, True, None, "7", float("nan"), float("inf"), []])
def test_small_multiples_and_what_is_none_pass(number):
    bounds.check_schema({"multipleOf": number, "minItems": number})


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "a{9999}",
        "(a{99}){99}",
        r"^[A-Z]{2}-\d{4}$",
        "[]{}a{3}]{2,}",
        r"\{5}{3}",
        "(((a*)*)*)*b",
        "a{,5}",
        ")",
        "[a",
    ],
)
def test_patterns_that_people_write_pass(pattern):
    bounds.check(Grammar(kind="regex", source=pattern))


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("a{20001}", "written out"),
        ("a{3,20001}", "written out"),
        ("((a{30}){30}){30}", "written out"),
        ("(ab{100}|c){300}", "written out"),
        (r"[\]{x]{150}" * 150, "written out"),
        ("(" * 65 + "a", "levels of groups"),
        ("a" * 40_000, "characters"),
        ("a{" + "9" * 4400 + "}", "written out"),
    ],
)
def test_patterns_beyond_a_limit_are_refused(pattern, word):
    with pytest.raises(RequestError, match=word):
        bounds.check(Grammar(kind="regex", source=pattern))
    with pytest.raises(RequestError, match=word):
        bounds.check_schema({"items": {"patternProperties": {pattern: {}}}})
    if len(pattern) < 5000 and "\\" not in pattern:
        with pytest.raises(RequestError, match=word):
            bounds.check(Grammar(kind="grammar", source=f"start: /{pattern}/"))


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("start: x\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(1001)), "rules"),
        ("root ::= x\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(1001)), "rules"),
        ("start: T0\n" + "\n".join(f"T{i}: T{i + 1}" for i in range(1001)), "terminals"),
        ("start: " + " | ".join(["x"] * 5002), "alternatives"),
        ("start: " + "(" * 65 + "x", "brackets"),
        ("start: x{1,30000}", "repetitions"),
        ('start: "x" ~ 5..30000', "repetitions"),
        ('root ::= "x"{30000}', "repetitions"),
    ],
)
def test_grammars_beyond_a_limit_are_refused(source, word):
    with pytest.raises(RequestError, match=word):
        bounds.check(Grammar(kind="grammar", source=source))


LONG = '"' + "hello world " * 400 + '"'
BEGINNING = "start: /[ab]{40}/ "


@pytest.mark.parametrize(
    "source",
    [
        BEGINNING + "x{50}\nx: y{50}\ny: " + LONG,
        BEGINNING + "x ~ 5..50\nx: y ~ 50\ny: " + LONG,
        BEGINNING + "r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(13)) + "\nr13: " + LONG,
        # an end that never comes
        BEGINNING + "a\na: b a\nb: " + LONG,
        BEGINNING + "a\na: b\nb: c\nc: T a\nT: /x{300}/",
        "root ::= [ab]{40} x{50}\nx ::= y{50}\ny ::= " + LONG,
        # names as GBNF has them
        "root ::= [ab]{40} 1-a{50}\n1-a ::= -{50}\n- ::= " + LONG,
    ],
)
def test_what_must_come_is_bounded_behind_any_beginning(source):
    with pytest.raises(RequestError, match="long strings"):
        bounds.check(Grammar(kind="grammar", source=source))


@pytest.mark.parametrize(
    "source",
    [
        "start: x{50}\nx: y{30}\ny: " + LONG,
        "start: " + " | ".join(LONG for _ in range(20)),
        # what recurses has short strings
        'start: e\ne: e "+" t | t\nt: t "*" f | f\nf: NUMBER | "(" e ")"\nNUMBER: /-?(0|[1-9][0-9]*)/',
        "\n".join(["start: r0", *(f'r{i}: r{i + 1} "+" r{i + 1} | "-"' for i in range(60)), 'r60: "x"']),
        'root ::= item ("," item)*\nitem ::= "' + "x" * 80 + '" item?',
    ],
)
def test_grammars_with_long_strings_or_deep_rules_pass(source):
    bounds.check(Grammar(kind="grammar", source=source))


def test_what_stands_in_strings_is_not_counted():
    bounds.check(Grammar(kind="grammar", source="start: " + " ".join(['"((((||||{99999}"'] * 2000)))


@pytest.mark.parametrize("kind", ["json_schema", "regex", "grammar", "choice"])
def test_sources_have_a_size(kind):
    with pytest.raises(RequestError, match="bytes"):
        bounds.check(Grammar(kind=kind, source="é" * (bounds.MAX_SOURCE_BYTES // 2 + 1)))
    with pytest.raises(RequestError, match="bytes"):
        part = "x" * (bounds.MAX_CALLS_BYTES // 3)
        bounds.check(Grammar(kind="lark", source=part, schemas=(("v0", part, part), ("v1", "x", "y"))))


def test_choices_have_a_number():
    with pytest.raises(RequestError, match="1900 choices"):
        bounds.check(Grammar(kind="choice", source=json.dumps(["x"] * 1901)))


@pytest.mark.parametrize("source", ["[" * 100_000, '{"a":' * 50_000, "{", "nul", "1" * 5000, ""])
def test_json_that_cannot_be_read_is_refused(source):
    with pytest.raises(RequestError):
        bounds.check(Grammar(kind="json_schema", source=source))


def test_nothing_recurses_over_a_schema():
    schema = deep = {}
    for _ in range(100_000):
        deep["not"] = deep = {}
    with pytest.raises(RequestError, match="levels"):
        bounds.check_schema(schema)
    # so that the interpreter can let go of it
    while schema:
        schema = schema.pop("not")


@pytest.mark.parametrize(
    "text", ['"' * 100_000, '"\\' * 60_000, "/\\" * 60_000, "~ " * 60_000, "a" * 200_000, "[" * 99_999, " \t" * 60_000]
)
def test_marks_are_found_in_one_pass(text):
    """Regular expressions that go back and forth over such lines would not end."""
    for source in (text, "start: " + text):
        with contextlib.suppress(RequestError):
            bounds.check(Grammar(kind="grammar", source=source))
