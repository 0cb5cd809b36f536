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


def test_a_trace_says_what_the_grammar_had_forced(demo_client, written):
    """The literal part, from the prompt's own token on, at every k; what is free never."""
    answer = demo_client.completions.create(
        model="scripted",
        prompt="Answer: ",
        temperature=0,
        max_tokens=40,
        extra_body={"structured_outputs": {"regex": r"The total of all is \d{2}"}, "speculation": {"trace": True}},
    )
    trace = answer.choices[0].model_extra["trace"]
    text = same(written, "trace", answer.choices[0].text)
    assert "".join(token["text"] for token in trace) == text
    # the last space may yet be a part of a token with a digit
    forced = ["The", " total", " of", " all", " is"]
    assert [token["text"] for token in trace if token["origin"] == "grammar"] == forced


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"guided_regex": "("}, "regex"),
        ({"guided_json": {"type": "nonsense"}}, "json_schema"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "grammar"),
        ({"guided_json": {}, "guided_regex": "a"}, "one grammar"),
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


def test_min_tokens_hold_as_long_as_the_grammar_can_go_on(demo_client, written):
    def complete(regex, least):
        extra = {"guided_regex": regex, "min_tokens": least}
        answer = demo_client.completions.create(
            model="scripted", prompt="x", temperature=0, max_tokens=40, extra_body=extra
        )
        return answer.usage.completion_tokens, answer.choices[0].text

    short = complete("(a|b)+", 0)
    longer = complete("(a|b)+", 12)
    assert longer[0] >= 12 and longer[1].startswith(short[1])
    assert complete("abc", 30)[1] == "abc"
    assert same(written, "least", longer) == longer


def test_json_object_with_a_schema_is_held_to_it(demo_client):
    form = {
        "type": "json_object",
        "schema": {
            "type": "object",
            "properties": {"n": {"enum": [7]}},
            "required": ["n"],
            "additionalProperties": False,
        },
    }
    answer = demo_client.chat.completions.create(extra_body={"response_format": form}, **BASE)
    assert json.loads(answer.choices[0].message.content)["n"] == 7


def test_what_a_schema_says_beyond_the_grammar_is_told_or_refused(demo_client):
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2, "not": {"const": []}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    told = demo_client.chat.completions.with_raw_response.create(response_format=form, **BASE)
    assert told.headers["X-Schema-Left-Out"] in ("uniqueItems, not", "not, uniqueItems")
    assert len(json.loads(told.parse().choices[0].message.content)) <= 2
    form["json_schema"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        demo_client.chat.completions.create(response_format=form, **BASE)


def test_tools_and_a_schema_together_are_calls_or_content_that_fits(demo_client, written):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"enum": [1, 2]}}}}}
    answer = demo_client.chat.completions.create(response_format=FORMAT, tools=[tool], temperature=0, **BASE)
    message = answer.choices[0].message
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    assert bool(calls) != bool(message.content)
    if calls:
        assert all(name == "f" and values in ({}, {"n": 1}, {"n": 2}) for name, values in calls)
    elif answer.choices[0].finish_reason == "stop":
        json.loads(message.content)
    assert same(written, "both", (calls, message.content)) == (calls, message.content)
