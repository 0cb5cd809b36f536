"""Whatever a schema allows can be written in a call that the grammar takes, and is read back as it was.

Schemas and values are drawn at random. Calls are written as chat templates write them, and, the other way round,
by walking through the grammar's masks at random, as a sampled model does.
"""

import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from llguidance.numpy import fill_next_token_bitmask

from pilotfish.engine.grammar.library import GrammarLibrary
from pilotfish.server.calls.grammar import call_grammar
from pilotfish.server.calls.parser import AnswerParser, AnswerRules
from pilotfish.server.calls.parts import Call, Said
from pilotfish.server.calls.tools import function_tool, read_tools
from pilotfish.server.fields import FieldNotes
from pilotfish.server.model_files import load_model_files
from pilotfish.server.text.schemas import Held

DEMO = Path(__file__).resolve().parents[4] / "demo" / "model"
EOS, VOCABULARY = (8179,), 8192
SCHEMAS, VALUES, PARTS = 640, 4, 8

NAMES = (
    *("city", "Due Date", "x-y", "a=b", "a.b", "naïve", "日付", "it's", 'say "hi"', "{}", "100%", "$ref", "#/a~b", "_"),
    *("parameter", "function", "tool_call", "a  b", "null", "|", "\\", "0", "&amp;", "'", "a'"),
)
PIECES = (
    *(
        "a",
        "B c",
        "\n",
        "\n\n",
        " ",
        "\t",
        '"',
        "'",
        "\\",
        "\\n",
        "<",
        "</",
        "</b>",
        "<parameter",
        "<function",
        "<tool_call",
    ),
    *(
        "</parameter"[:-1],
        "é",
        "日",
        "😀",
        "null",
        "7",
        "true",
        '{"a": 1}',
        "[",
        "€",
        "&",
        "</param>",
        "=",
        ">",
        "%",
        "\r\n",
    ),
)


def draw_text(rng):
    text = "".join(rng.choices(PIECES, k=rng.randrange(0, 6)))
    return text if "<parameter=" not in text and "<function=" not in text and "<tool_call>" not in text else "x"


def draw_text_schema(rng):
    return {"type": "string"}, lambda: draw_text(rng)


def draw_length_schema(rng):
    least, most = rng.randrange(0, 3), rng.randrange(3, 6)
    return {"type": "string", "minLength": least, "maxLength": most}, lambda: "".join(
        rng.choices('ab"\n é<', k=rng.randrange(least, most + 1))
    )


def draw_integer_schema(rng):
    low = rng.randrange(-50, 50)
    high = low + rng.randrange(0, 100)
    return {"type": "integer", "minimum": low, "maximum": high}, lambda: rng.randint(low, high)


def draw_number_schema(rng):
    return {"type": "number"}, lambda: rng.choice([0, -1, 1.5, -2.25, 1e20, 12345.678])


def draw_enum_schema(rng):
    values = rng.sample(["a", "b c", 'q"', "x\ny", "none", 1, 2.5, True, None, "l\n", "<b>"], rng.randrange(1, 5))
    return {"enum": values}, lambda: rng.choice(values)


def draw_const_schema(rng):
    value = rng.choice(["only", 3, None, False])
    return {"const": value}, lambda: value


def draw_array_schema(rng):
    inner, value = draw_schema(rng, nested=True)
    return {"type": "array", "items": inner, "maxItems": 3}, lambda: [value() for _ in range(rng.randrange(0, 4))]


def draw_object_schema(rng):
    members = {name: draw_schema(rng, nested=True) for name in rng.sample(NAMES, rng.randrange(0, 3))}
    schema = {
        "type": "object",
        "properties": {name: inner for name, (inner, _) in members.items()},
        "required": list(members),
        "additionalProperties": False,
    }
    return schema, lambda: {name: value() for name, (_, value) in members.items()}


def draw_union_schema(rng):
    """Of which the text says what it is: a string that looks like another type's JSON is that type's."""
    schema, value = rng.choice([draw_integer_schema, draw_array_schema, draw_object_schema])(rng)
    other, text = rng.choice(
        [
            ({"type": "null"}, lambda: None),
            ({"type": "string"}, lambda: "z" + draw_text(rng)),
            ({"enum": ["k"]}, lambda: "k"),
        ]
    )
    return {"anyOf": [other, schema]}, lambda: rng.choice([value, text])()


SIMPLE = (
    draw_text_schema,
    draw_length_schema,
    draw_integer_schema,
    draw_number_schema,
    draw_enum_schema,
    draw_const_schema,
)
FLAGS = ({"type": "boolean"}, {"type": ["boolean", "null"]})


def draw_schema(rng, nested=False):
    """A schema and what draws a value of it."""
    if nested and rng.random() < 0.4:
        return rng.choice(SIMPLE)(rng)
    if rng.random() < 0.1:
        return rng.choice(FLAGS), lambda: rng.choice([True, False])
    return rng.choice((*SIMPLE, draw_array_schema, draw_object_schema, draw_union_schema))(rng)


def draw_function(rng):
    """A function's schema, and what draws its arguments."""
    members = {name: draw_schema(rng) for name in rng.sample(NAMES, rng.randrange(0, 4))}
    schema = {"type": "object", "properties": {name: inner for name, (inner, _) in members.items()}}
    if members and rng.random() < 0.3:
        name = rng.choice(list(members))
        schema["$defs"] = {"A/b": members[name][0]}
        schema["properties"][name] = {"$ref": "#/$defs/A~1b"}
    required = [name for name in members if rng.random() < 0.7]
    schema["required"] = required

    def draw():
        given = [name for name in members if name in required or rng.random() < 0.5]
        return {name: members[name][1]() for name in given}

    return schema, draw


def written(name, arguments):
    values = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in arguments.items()
    }
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def read(tools, text):
    """Calls and whatever is said beside them."""
    parser = AnswerParser(AnswerRules(tools=tools.parameters))
    parts = [*parser.push(text), *parser.flush()]
    calls = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, Call)]
    return calls, [part for part in parts if isinstance(part, Said)]


def is_same(value, other):
    return json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True)


@pytest.fixture(scope="module")
def demo():
    library = GrammarLibrary(DEMO / "tokenizer.json", VOCABULARY)
    yield load_model_files(DEMO), library
    library.close()


def matcher_of(demo, tools):
    files, library = demo
    made = call_grammar(tools, Held(), files.tokenizer, single=False, after=None)
    return library.constraint(made, EOS)._matcher


@pytest.mark.parametrize("part", range(PARTS))
def test_what_a_template_writes_is_taken_and_read_back(demo, part):
    for seed in range(part * SCHEMAS // PARTS, (part + 1) * SCHEMAS // PARTS):
        rng = random.Random(seed)
        schema, draw = draw_function(rng)
        tools = read_tools([function_tool("f", None, schema)], "required", FieldNotes())
        matcher = matcher_of(demo, tools)
        for _ in range(VALUES):
            arguments = draw()
            text = written("f", arguments)
            ids = demo[0].tokenizer.encode(text, add_special_tokens=False)
            told = (seed, schema, text)
            matcher.reset()
            assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting(), told
            calls, said = read(tools, text)
            assert not said and len(calls) == 1 and calls[0][0] == "f", told
            assert is_same(calls[0][1], arguments), told


CLOSINGS = ("\n</parameter>\n", "</function>\n", "<", "\n", "</", "parameter", "=", ">", '"', "}", "]")


def walk(demo, tools, rng):
    """A text that the grammar takes, one allowed token after another, mostly those that lead to an end."""
    files, _ = demo
    matcher, words = matcher_of(demo, tools), np.zeros((1, VOCABULARY // 32), dtype=np.int32)
    ids = []
    for step in range(400):
        fill_next_token_bitmask(matcher, words, 0)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if matcher.is_accepting() and rng.random() < 0.7:
            break
        allowed = allowed[(allowed != EOS[0])]
        if not allowed.size:
            break
        ending = [int(i) for text in CLOSINGS for i in files.tokenizer.encode(text, add_special_tokens=False)[:1]]
        wanted = [token for token in ending if token in allowed]
        token = rng.choice(wanted) if wanted and rng.random() < 0.3 + step / 400 else int(rng.choice(allowed))
        assert matcher.consume_token(token)
        ids.append(token)
    return files.tokenizer.decode(ids, skip_special_tokens=False), matcher.is_accepting()


def test_what_a_walk_through_the_grammar_writes_is_read_as_calls_that_fit(demo):
    ended = 0
    for seed in range(120):
        rng = random.Random(seed)
        schema, _ = draw_function(rng)
        tools = read_tools([function_tool("f", None, schema), function_tool("g", None, None)], "required", FieldNotes())
        text, whole = walk(demo, tools, rng)
        if not whole or "\ufffd" in text:
            continue
        ended += 1
        calls, said = read(tools, text)
        assert not said and len(calls) == text.count("<function="), (seed, schema, text)
        for name, arguments in calls:
            assert name in ("f", "g"), (seed, text)
            jsonschema.validate(arguments, schema if name == "f" else {"maxProperties": 0})
    assert ended >= 40
