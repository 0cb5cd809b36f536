"""Structured output over HTTP with the official client, on the demo model: it parses, and k does not change it."""

import json
import re

import openai
import pytest

SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 20}, "pages": {"type": "integer"}},
    "required": ["title", "pages"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "book", "schema": SCHEMA, "strict": True}}
BASE = {"model": "scripted", "messages": [{"role": "user", "content": "Name a book."}], "max_tokens": 64}


def same(written, name, text):
    assert written.setdefault(name, text) == text
    return text


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_a_json_schema_is_kept(demo_client, written, temperature):
    answer = demo_client.chat.completions.create(response_format=FORMAT, temperature=temperature, seed=4, **BASE)
    text = same(written, ("schema", temperature), answer.choices[0].message.content)
    book = json.loads(text)
    assert isinstance(book["title"], str) and isinstance(book["pages"], int)
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_is_the_same_text(demo_client, written):
    stream = demo_client.chat.completions.create(response_format=FORMAT, temperature=0, seed=4, stream=True, **BASE)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == same(written, ("schema", 0), text)


def test_json_object(demo_client, written):
    # an object of no given shape may be long: the limit may cut it
    answer = demo_client.chat.completions.create(response_format={"type": "json_object"}, temperature=0, **BASE)
    text = same(written, "object", answer.choices[0].message.content)
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_vllm_s_fields(demo_client, written):
    for name, fields, pattern in (
        ("regex", {"structured_outputs": {"regex": r"\d{2}-\d{2}"}}, r"\d{2}-\d{2}"),
        ("choice", {"guided_choice": ["yes", "no"]}, "yes|no"),
        ("grammar", {"structured_outputs": {"grammar": 'start: "a" /[bc]{3}/ "d"'}}, "a[bc]{3}d"),
    ):
        answer = demo_client.completions.create(
            model="scripted", prompt="Answer: ", temperature=0.8, seed=1, max_tokens=20, extra_body=fields
        )
        text = same(written, name, answer.choices[0].text)
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"guided_regex": "("}, "regex"),
        ({"guided_json": {"type": "nonsense"}}, "json_schema"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "grammar"),
        ({"guided_json": {}, "guided_regex": "a"}, "one grammar"),
        ({"guided_regex": "a+", "min_tokens": 4}, "min_tokens"),
        ({"response_format": {"type": "yaml"}}, "json_object"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_a_400_that_says_why(demo_client, fields, word):
    with pytest.raises(openai.BadRequestError, match=word):
        demo_client.completions.create(model="scripted", prompt="x", max_tokens=4, extra_body=fields)


CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1300)} | {"d1300": {"type": "integer"}}
RULES = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "a"'
MULTIPLE = {"type": "integer", "multipleOf": 999983}
ATTACKS = {
    "references": (
        {"response_format": FORMAT | {"json_schema": {"schema": {"$defs": CHAIN, "$ref": "#/$defs/d0"}}}},
        "500",
    ),
    "rules": ({"structured_outputs": {"grammar": RULES}}, "at most 1000 rules"),
    "multiples": ({"guided_json": MULTIPLE, "n": 4}, "multipleOf"),
    "multiples where they are not counted": ({"guided_grammar": f"start: %json {json.dumps(MULTIPLE)}"}, "CPU time"),
    "properties": ({"guided_json": {"properties": {f"p{i}": {} for i in range(9000)}}}, "2000 properties"),
    "repetitions": ({"guided_regex": "((a{99}){99}){99}"}, "written out"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_grammar_that_costs_too_much_is_a_400_that_says_which_bound(demo_client, name):
    fields, word = ATTACKS[name]
    with pytest.raises(openai.BadRequestError, match=word):
        demo_client.chat.completions.create(**BASE, extra_body=fields)


def test_after_all_of_them_the_engine_is_the_first_one(demo_client):
    root = str(demo_client.base_url).removesuffix("/v1/")
    metrics = demo_client.with_options(base_url=root).get("/metrics", cast_to=str)
    assert "\npilotfish_engine_restarts_total 0.0" in metrics


def test_tools_and_a_schema_together_are_refused(demo_client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(openai.BadRequestError, match="tools"):
        demo_client.chat.completions.create(response_format=FORMAT, tools=[tool], **BASE)
