"""The grammar of a demanded call: which texts it takes, checked against the parser that reads them."""

import json
from pathlib import Path

import pytest

from pilotfish.engine.errors import RequestError
from pilotfish.engine.grammar.library import GrammarLibrary
from pilotfish.server.calls.grammar import call_grammar
from pilotfish.server.calls.parameters import Parameters
from pilotfish.server.calls.parser import AnswerParser, AnswerRules
from pilotfish.server.calls.parts import Call
from pilotfish.server.calls.tools import custom_tool, function_choice, function_tool, read_tools
from pilotfish.server.errors import BadRequest
from pilotfish.server.fields import FieldNotes
from pilotfish.server.model_files import load_model_files
from pilotfish.server.text.schemas import Held
from pilotfish.server.text.structured import grammar_of

DEMO = Path(__file__).resolve().parents[4] / "demo" / "model"
EOS = (8179,)
PLACE = {
    "type": "object",
    "properties": {"lat": {"type": "number"}},
    "required": ["lat"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"enum": ["C", "F"]},
        "place": {"$ref": "#/$defs/Place"},
        "tags": {"type": "array", "items": {"$ref": "#/properties/unit"}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "odd": {"type": "integer", "not": {"const": 3}},
        "free": {},
    },
    "required": ["city", "days"],
    "$defs": {"Place": PLACE},
}
SCHEMAS = {
    "get_weather": WEATHER,
    "stop": {},
    "say'": {"properties": {"a b": {"type": "boolean"}}, "required": ["a b"]},
}
TOOLS = [function_tool(name, None, schema) for name, schema in SCHEMAS.items()]


@pytest.fixture(scope="module")
def demo():
    return load_model_files(DEMO)


@pytest.fixture(scope="module")
def library():
    library = GrammarLibrary(DEMO / "tokenizer.json", 8192)
    yield library
    library.close()


def grammar(demo, tools=TOOLS, named="", left_out=None, **fields):
    held = Held(left_out.append) if left_out is not None else Held()
    choice = fields.pop("choice", function_choice(named) if named else "required")
    given = read_tools(list(tools), choice, FieldNotes())
    return call_grammar(given, held, demo.tokenizer, **{"single": False, "after": None, **fields})


def accepts(demo, library, made, text):
    """Whether the grammar takes the text as a whole, and may end there."""
    matcher = library.constraint(made, EOS)._matcher
    ids = demo.tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def takes(demo, library, text, named="", single=False):
    beginning = f"<tool_call>\n<function={named}>\n" if named else "<tool_call>\n<function="
    return accepts(demo, library, grammar(demo, named=named, single=single), beginning + text)


def arguments(text, named=""):
    """What the parser reads in a text."""
    beginning = f"<tool_call>\n<function={named}>\n" if named else "<tool_call>\n<function="
    parser = AnswerParser(AnswerRules(tools={name: Parameters(schema) for name, schema in SCHEMAS.items()}))
    parts = [*parser.push(beginning + text), *parser.flush()]
    calls = [part for part in parts if isinstance(part, Call)]
    return [call.name for call in calls], [json.loads(call.arguments) for call in calls]


def body(**values):
    return "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())


END = "</function>\n</tool_call>"
CITY = {"city": "Paris", "days": 3}
GOOD = {
    "required only": (CITY, {"city": "Paris", "days": 3}),
    "any text": ({"city": "a <b> & \n\n</param> é😀", "days": 1}, {"city": "a <b> & \n\n</param> é😀", "days": 1}),
    "empty text": ({"city": "", "days": 1}, {"city": "", "days": 1}),
    "enum": ({**CITY, "unit": "F"}, {**CITY, "unit": "F"}),
    "reference": ({**CITY, "place": '{"lat": -1.5}'}, {**CITY, "place": {"lat": -1.5}}),
    "reference to a neighbour": ({**CITY, "tags": '["C", "F"]'}, {**CITY, "tags": ["C", "F"]}),
    "text or null": ({**CITY, "note": "null"}, {**CITY, "note": None}),
    "not all of the schema": ({**CITY, "odd": "4"}, {**CITY, "odd": 4}),
    "free": ({**CITY, "free": "{x"}, {**CITY, "free": "{x"}),
}
BAD = {
    "a required one is missing": {"city": "Paris"},
    "another order": {"days": 3, "city": "Paris"},
    "beyond the maximum": {"city": "Paris", "days": 8},
    "not of the type": {"city": "Paris", "days": "three"},
    "not in the enum": {**CITY, "unit": "K"},
    "against a reference": {**CITY, "place": '{"lat": "north"}'},
    "more than the schema": {**CITY, "place": '{"lat": 1, "lon": 2}'},
    "not of the type that is left of a schema": {**CITY, "odd": "x"},
    "an unknown parameter": {**CITY, "colour": "red"},
}


@pytest.mark.parametrize(("values", "wanted"), GOOD.values(), ids=GOOD)
def test_calls_that_fit_are_taken_and_read_back(demo, library, values, wanted):
    text = body(**values) + END
    assert takes(demo, library, text, named="get_weather", single=True)
    assert arguments(text, named="get_weather") == (["get_weather"], [wanted])


@pytest.mark.parametrize("values", BAD.values(), ids=BAD)
def test_calls_that_do_not_fit_are_not_taken(demo, library, values):
    assert not takes(demo, library, body(**values) + END, named="get_weather", single=True)


def test_a_text_in_place_of_a_call_is_not_taken(demo, library):
    for text in ("Sorry, no.", "", END + " And more.", "get_weather>\n" + END):
        assert not takes(demo, library, text)
    for text in ("", "Sorry, no.", "Sure: <tool_call>\n<function=stop>\n" + END):
        assert not accepts(demo, library, grammar(demo), text)


def test_required_takes_one_call_or_more_of_any_function(demo, library):
    first, second = "get_weather>\n" + body(**CITY) + END, "stop>\n" + END
    both = f"{first}\n<tool_call>\n<function={second}"
    for text, names in ((first, ["get_weather"]), (second, ["stop"]), (both, ["get_weather", "stop"])):
        assert takes(demo, library, text)
        assert arguments(text)[0] == names
    assert takes(demo, library, "say'>\n<parameter=a b>\ntrue\n</parameter>\n" + END)
    assert not takes(demo, library, both, single=True)
    assert not takes(demo, library, "other>\n" + END)


def test_a_named_function_is_called_once(demo, library):
    text = body(**CITY) + END
    assert takes(demo, library, text, named="get_weather")
    assert not takes(demo, library, f"{text}\n<tool_call>\n<function=get_weather>\n{text}", named="get_weather")


@pytest.mark.parametrize(
    "tag", ["</parameter", "<parameter=x>", "</function>", "<function=f>", "</tool_call>", "<tool_call>"]
)
def test_a_text_has_none_of_the_form_s_tags(demo, library, tag):
    assert not takes(demo, library, body(city=f"a {tag} b", days=1) + END, named="get_weather")


STRINGS = {
    "code": {"type": "string", "pattern": "^[A-Z]{2}/[0-9]+$", "maxLength": 6},
    "word": {"type": "string", "minLength": 2, "maxLength": 3},
    "part": {"type": "string", "pattern": "b"},
}


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ({"code": "AB/12"}, True),
        ({"code": "AB/1234"}, False),
        ({"code": "ab/1"}, False),
        ({"word": "a\nb"}, True),
        ({"word": "a"}, False),
        ({"word": "abcd"}, False),
        ({"part": "abc"}, True),
        ({"part": "ac"}, False),
    ],
)
def test_texts_keep_to_lengths_and_patterns(demo, library, values, fits):
    tools = [function_tool("f", None, {"properties": STRINGS})]
    text = f"<tool_call>\n<function=f>\n{body(**values)}{END}"
    assert accepts(demo, library, grammar(demo, tools), text) == fits


def test_what_a_schema_says_beyond_the_grammar_is_named_or_refused(demo):
    schema = {
        "properties": {
            "a": {"type": "string", "format": "date"},
            "b": {"type": "string", "pattern": "^(?=x)"},
            "c": {"type": "integer", "not": {"const": 1}},
            "d": {"type": "array", "items": {"type": "string", "format": "cron"}, "uniqueItems": True},
            "e": {"type": "string", "maxLength": 10**6},
        }
    }
    left_out = []
    grammar(demo, [function_tool("f", None, schema)], left_out=left_out)
    assert sorted(left_out) == ["format", "format", "maxLength", "not", "pattern", "uniqueItems"]
    for name, own in schema["properties"].items():
        tools = [function_tool("f", None, {"properties": {name: own}}, strict=True)]
        with pytest.raises(BadRequest, match="strict") as caught:
            grammar(demo, tools)
        assert caught.value.param == f"f.{name}"


def test_calls_or_an_answer_that_fits(demo, library):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    answer = grammar_of({"guided_json": schema})
    made = grammar(demo, choice="auto", answer=answer)
    call = "<tool_call>\n<function=stop>\n" + END
    for text in ('{"n": 1}', call, call + "\n" + call, '\n\n{"n": 1}'):
        assert accepts(demo, library, made, text), text
    for text in ("Hello", '{"n": "x"}', "So: " + call, call + '{"n": 1}', ""):
        assert not accepts(demo, library, made, text), text


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("guided_regex", "[a-z]+/[0-9]", "ab/1"),
        ("guided_choice", ["yes", 'n"o'], 'n"o'),
        ("guided_grammar", 'start: "x" /[0-9]+/', "x12"),
        ("guided_json_object", True, '{"a": 1}'),
    ],
)
def test_any_structured_output_goes_with_calls(demo, library, field, value, text):
    made = grammar(demo, choice="auto", answer=grammar_of({field: value}))
    assert accepts(demo, library, made, text)
    assert accepts(demo, library, made, "<tool_call>\n<function=stop>\n" + END)
    assert not accepts(demo, library, made, "other text")


PATCH = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: "*** Add File: " /(.+)/ LF ("+" /(.*)/ LF)+
%import common.LF
"""


def test_a_tool_s_own_grammar_holds_its_text(demo, library):
    form = {"type": "grammar", "syntax": "lark", "definition": PATCH}
    tools = [custom_tool("apply_patch", None, form), function_tool("stop", None, None)]
    patch = "*** Begin Patch\n*** Add File: a.py\n+print('}')\n*** End Patch"
    good = "<tool_call>\n<function=apply_patch>\n" + body(input=patch) + END
    bad = "<tool_call>\n<function=apply_patch>\n" + body(input="print()") + END
    for choice, around in (("required", ("", "")), ("auto", ("", "")), ("auto", ("I patch < it: ", " Done."))):
        made = grammar(demo, tools, choice=choice)
        assert accepts(demo, library, made, good.join(around))
        assert not accepts(demo, library, made, bad.join(around))
    assert accepts(demo, library, grammar(demo, tools, choice="auto"), "No patch.")
    regex = [custom_tool("when", None, {"type": "grammar", "syntax": "regex", "definition": "[0-9]{4}/[0-9]{2}"})]
    for text, fits in (("2026/11", True), ("soon", False)):
        text = "<tool_call>\n<function=when>\n" + body(input=text) + END
        assert accepts(demo, library, grammar(demo, regex), text) == fits


def test_a_tool_s_grammar_that_is_none_is_refused(demo, library):
    made = grammar(demo, [custom_tool("c", None, {"type": "grammar", "syntax": "lark", "definition": "start: ("})])
    with pytest.raises(RequestError, match="lark"):
        library.constraint(made, EOS)


def chain(count):
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)} | {f"d{count}": {"type": "integer"}}
    return {"properties": {"a": {"$ref": "#/$defs/d0"}}, "required": ["a"], "$defs": definitions}


def test_schemas_that_are_too_large_are_a_refusal_of_tools(demo):
    with pytest.raises(BadRequest, match="500 definitions referred to, got 1301") as refused:
        grammar(demo, [function_tool("f", None, chain(1300))])
    assert refused.value.param == "tools"
    definition = {"properties": {f"p{i}": {"enum": [i]} for i in range(400)}}
    parameters = {f"p{i}": {"anyOf": [{"$ref": "#/$defs/big"}, {"const": i}]} for i in range(400)}
    with pytest.raises(BadRequest, match="bytes for a demanded call"):
        grammar(demo, [function_tool("f", None, {"properties": parameters, "$defs": {"big": definition}})])


def test_parameters_take_along_what_they_refer_to_and_no_more(demo, library):
    """1 500 parameters of one definition are one rule, whatever is said about each."""
    parameters = {f"p{i}": {"$ref": "#/$defs/x", "description": f"number {i}"} for i in range(400)}
    others = {f"unused {i}": {"type": "object"} for i in range(400)}
    schema = {"properties": parameters, "$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/y/anyOf/1"}}}}
    schema["$defs"] |= {"y": {"anyOf": [{"type": "null"}, {"type": "integer"}]}} | others
    made = grammar(demo, [function_tool("f", None, schema)])
    ((name, written, simpler),) = made.schemas
    assert name == "v0" and json.loads(simpler)["type"] == ["array"]
    assert json.loads(written)["$defs"] == {
        "d0": {"type": "array", "items": {"$ref": "#/$defs/d1"}},
        "d1": {"type": "integer"},
    }
    for text, fits in (("[1, 2]", True), ("[null]", False)):
        text = f"<tool_call>\n<function=f>\n{body(p7=text)}{END}"
        assert accepts(demo, library, made, text) is fits


@pytest.mark.parametrize(
    "reference", ["#", "#/$defs/a~1b", "#/$defs/a%20c", "#/properties/p/anyOf/0", "#/nowhere", "other.json", "#anchor"]
)
def test_every_reference_leads_somewhere_or_the_type_alone_holds(demo, library, reference):
    number = {"type": "integer"}
    schema = {"properties": {"p": {"anyOf": [number, {"$ref": reference}]}}, "$defs": {"a/b": number, "a c": number}}
    assert library.constraint(grammar(demo, [function_tool("f", None, schema)]), EOS)
