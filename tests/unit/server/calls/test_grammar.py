"""The grammar of a demanded call: which texts it takes, checked against the parser that reads them."""

import json
from pathlib import Path

import pytest

from pilotfish.engine.grammar.library import GrammarLibrary
from pilotfish.server.calls.grammar import call_grammar
from pilotfish.server.calls.parser import AnswerParser, AnswerRules, CallArguments, CallOpened
from pilotfish.server.errors import BadRequest
from pilotfish.server.model_files import load_model_files

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
    'say"\\': {"properties": {"a b": {"type": "boolean"}}, "required": ["a b"]},
}


@pytest.fixture(scope="module")
def demo():
    return load_model_files(DEMO)


@pytest.fixture(scope="module")
def library():
    library = GrammarLibrary(DEMO / "tokenizer.json", 8192)
    yield library
    library.close()


def takes(demo, library, text, named="", single=False):
    """Whether the grammar takes the text as a whole, and may end there."""
    matcher = library.constraint(call_grammar(SCHEMAS, named, single, demo.tokenizer), EOS)._matcher
    ids = demo.tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def arguments(text, named=""):
    """What the parser reads in a text that stands after the demanded beginning."""
    forced = "<tool_call>\n<function=" + (f"{named}>\n" if named else "")
    parser = AnswerParser(AnswerRules(tools=SCHEMAS, forced=forced))
    parts = [*parser.push(text), *parser.flush()]
    names = [part.name for part in parts if isinstance(part, CallOpened)]
    pieces = {}
    for part in parts:
        if isinstance(part, CallArguments):
            pieces[part.index] = pieces.get(part.index, "") + part.text
    return names, [json.loads(pieces[index]) for index in sorted(pieces)]


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


def test_required_takes_one_call_or_more_of_any_function(demo, library):
    first, second = "get_weather>\n" + body(**CITY) + END, "stop>\n" + END
    both = f"{first}\n<tool_call>\n<function={second}"
    for text, names in ((first, ["get_weather"]), (second, ["stop"]), (both, ["get_weather", "stop"])):
        assert takes(demo, library, text)
        assert arguments(text)[0] == names
    assert takes(demo, library, 'say"\\>\n<parameter=a b>\ntrue\n</parameter>\n' + END)
    assert not takes(demo, library, both, single=True)
    assert not takes(demo, library, "other>\n" + END)


def test_a_named_function_is_called_once(demo, library):
    text = body(**CITY) + END
    assert takes(demo, library, text, named="get_weather")
    assert not takes(demo, library, f"{text}\n<tool_call>\n<function=get_weather>\n{text}", named="get_weather")


def chain(count):
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)} | {f"d{count}": {"type": "integer"}}
    return {"properties": {"a": {"$ref": "#/$defs/d0"}}, "required": ["a"], "$defs": definitions}


def test_schemas_that_are_too_large_are_a_refusal_of_tools(demo):
    with pytest.raises(BadRequest, match="500 definitions referred to, got 1301") as refused:
        call_grammar({"f": chain(1300)}, "", False, demo.tokenizer)
    assert refused.value.param == "tools"
    definition = {"properties": {f"p{i}": {"enum": [i]} for i in range(400)}}
    parameters = {f"p{i}": {"anyOf": [{"$ref": "#/$defs/big"}, {"const": i}]} for i in range(400)}
    with pytest.raises(BadRequest, match="bytes for a demanded call"):
        call_grammar({"f": {"properties": parameters, "$defs": {"big": definition}}}, "f", True, demo.tokenizer)


def test_parameters_take_along_what_they_refer_to_and_no_more(demo, library):
    """1 500 parameters of one definition are one rule, whatever is said about each."""
    parameters = {f"p{i}": {"$ref": "#/$defs/x", "description": f"number {i}"} for i in range(400)}
    others = {f"unused {i}": {"type": "object"} for i in range(400)}
    schema = {"properties": parameters, "$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/y/anyOf/1"}}}}
    schema["$defs"] |= {"y": {"anyOf": [{"type": "null"}, {"type": "integer"}]}} | others
    grammar = call_grammar({"f": schema}, "f", True, demo.tokenizer)
    ((name, written, simpler),) = grammar.schemas
    assert name == "v0" and json.loads(simpler)["type"] == ["array"]
    assert json.loads(written)["$defs"] == {
        "d0": {"type": "array", "items": {"$ref": "#/$defs/d1"}},
        "d1": {"type": "integer"},
    }
    matcher = library.constraint(grammar, EOS)._matcher
    for text, fits in (("[1, 2]", True), ("[null]", False)):
        ids = demo.tokenizer.encode(body(p7=text) + "</function>\n</tool_call>", add_special_tokens=False)
        assert (matcher.deep_copy().try_consume_tokens(ids) == len(ids)) is fits


@pytest.mark.parametrize(
    "reference", ["#", "#/$defs/a~1b", "#/$defs/a%20c", "#/properties/p/anyOf/0", "#/nowhere", "other.json", "#anchor"]
)
def test_every_reference_leads_somewhere_or_the_type_alone_holds(demo, library, reference):
    number = {"type": "integer"}
    schema = {"properties": {"p": {"anyOf": [number, {"$ref": reference}]}}, "$defs": {"a/b": number, "a c": number}}
    grammar = call_grammar({"f": schema}, "f", True, demo.tokenizer)
    assert library.constraint(grammar, EOS)
