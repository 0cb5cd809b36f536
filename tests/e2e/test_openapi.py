"""/openapi.json: valid, complete, and what the server does: bodies, answers and events are held against its schemas."""

import copy
import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from serving import PATIENCE, script, serving_in_thread

from pilotfish.server.http.app import _routes

CALL = "<tool_call>\n<function=f>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
ASK = [{"role": "user", "content": script(reply=f"Hm.</think>I call.{CALL}", runs=[3])}]
THINK = {"chat_template_kwargs": {"enable_thinking": True}}
BODIES = [
    ("/v1/completions", {"prompt": script(reply="ab"), "logprobs": 2, "echo": False, "user": "me", "best_of": 1}),
    ("/v1/completions", {"prompt": [[64, 65], [66]], "n": 2, "return_token_ids": True, "include_metrics": True}),
    ("/v1/chat/completions", {"messages": ASK, "tools": [{"type": "function", "function": FUNCTION}], **THINK}),
    ("/v1/chat/completions", {"messages": ASK, "logprobs": True, "top_logprobs": 1, "stop": "x", "audio": None}),
    ("/v1/responses", {"input": ASK, "tools": [{"type": "function", **FUNCTION}], "reasoning": {"effort": "low"}}),
    ("/v1/responses", {"input": ASK[0]["content"], "max_output_tokens": 3, "metadata": {"a": "b"}}),
    (
        "/v1/messages",
        {
            "messages": ASK,
            "max_tokens": 200,
            "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}],
            "thinking": {"type": "adaptive"},
        },
    ),
    ("/v1/messages/count_tokens", {"messages": ASK, "cache_control": {"type": "ephemeral"}}),
    ("/tokenize", {"prompt": "Hi", "return_token_strs": True}),
    ("/detokenize", {"tokens": [72, 105]}),
]
STREAMS = [(path, body) for path, body in BODIES if path.startswith("/v1/") and "count" not in path]


def call(server, path, body=None):
    """(status, content type, text)"""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"} if data else {})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return response.status, response.headers.get_content_type(), response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get_content_type(), error.read().decode()


@pytest.fixture(scope="module")
def document(server):
    status, kind, text = call(server, "/openapi.json")
    assert (status, kind) == (200, "application/json")
    return json.loads(text)


@pytest.fixture(scope="module")
def closed(document):
    """The document with every struct closed: what is not written there must not come."""
    strict = copy.deepcopy(document)
    for schema in strict["components"]["schemas"].values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    return strict


def errors_of(document, schema, value):
    validator = Draft202012Validator({**schema, "components": document["components"]})
    return [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(value)]


def body_schema(document, path):
    return document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def content_of(document, path, status):
    (operation,) = document["paths"][path].values()
    responses = operation["responses"]
    return responses.get(str(status), responses.get(f"{status // 100}XX"))["content"]


def test_the_document_is_valid(document):
    validate(document)
    assert document["openapi"] == "3.1.0" and document["servers"] == [{"url": "/"}]


def test_every_route_is_in_it_and_nothing_else(document):
    routes = {(route.method.lower(), re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path)) for route in _routes("")}
    documented = {(method, path) for path, operations in document["paths"].items() for method in operations}
    assert routes == documented
    assert len({operation["operationId"] for item in document["paths"].values() for operation in item.values()}) == len(
        documented
    )


def test_every_answer_of_a_get_is_as_it_says(server, document, closed):
    for path, operations in document["paths"].items():
        if "get" not in operations:
            continue
        for name in ("scripted", "absent") if "{name}" in path else ("",):
            status, kind, text = call(server, path.replace("{name}", name))
            media = content_of(closed, path, status)[kind]
            if kind == "application/json":
                assert errors_of(closed, media["schema"], json.loads(text)) == []


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_bodies_and_answers_are_as_it_says(server, closed, path, body):
    assert errors_of(closed, body_schema(closed, path), body) == []
    status, kind, text = call(server, path, body)
    assert status == 200, text
    assert errors_of(closed, content_of(closed, path, 200)[kind]["schema"], json.loads(text)) == []


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_events_are_as_it_says(server, closed, path, body):
    status, kind, text = call(server, path, {**body, "stream": True})
    assert (status, kind) == (200, "text/event-stream"), text
    schema = content_of(closed, path, 200)[kind]["schema"]["properties"]["data"]["contentSchema"]
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert events
    for event in events:
        assert errors_of(closed, schema, event) == [], event


@pytest.mark.parametrize("path", sorted({path for path, _ in BODIES}))
def test_refusals_are_as_it_says(server, closed, path):
    for body in ({}, {"no_such_field": 1}, {"model": "absent", **dict(BODIES)[path]}):
        status, kind, text = call(server, path, body)
        assert status in (400, 404)
        assert errors_of(closed, content_of(closed, path, status)[kind]["schema"], json.loads(text)) == []


def test_another_method_is_told_which_are_allowed(server):
    for path, allowed in (("/v1/responses", "POST"), ("/health", "GET,HEAD"), ("/v1/models/scripted", "GET,HEAD")):
        request = urllib.request.Request(server.url + path, method="PUT")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=PATIENCE)
        assert caught.value.code == 405
        assert set(caught.value.headers["Allow"].split(",")) <= set(allowed.split(","))
        caught.value.close()


def test_a_wrong_answer_would_be_seen(closed):
    answer = {"input_tokens": 3}
    schema = content_of(closed, "/v1/messages/count_tokens", 200)["application/json"]["schema"]
    assert errors_of(closed, schema, answer) == []
    for wrong in ({}, {"input_tokens": "3"}, {**answer, "more": 1}):
        assert errors_of(closed, schema, wrong)


def test_under_a_root_path(folder):
    with serving_in_thread(folder, root_path="/llm") as server:
        _, _, text = call(server, "/llm/openapi.json")
        assert json.loads(text)["servers"] == [{"url": "/llm"}]


# -- whatever is accepted is documented ------------------------------------------------------------------------------

JUNK = st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats(allow_nan=False) | st.text(max_size=8)
JUNK = st.recursive(
    JUNK, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
)


def values(document, schema, depth=0):
    """Mostly what the schema allows."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return st.deferred(lambda: values(document, document["components"]["schemas"][name], depth + 1))
    for key in ("anyOf", "enum"):
        if key in schema:
            options = [values(document, one, depth) if key == "anyOf" else st.just(one) for one in schema[key]]
            return st.one_of(options)
    if "const" in schema:
        return st.just(schema["const"])
    low, high = schema.get("minItems", schema.get("minLength", 0)), 3
    kinds = {
        "null": st.none(),
        "boolean": st.booleans(),
        "integer": st.integers(max(schema.get("minimum", -9), -9), min(schema.get("maximum", 300), 300)),
        "number": st.floats(max(schema.get("minimum", 0), -2), min(schema.get("maximum", 2), 2), exclude_min=True),
        "string": st.text(min_size=low, max_size=low + 12),
    }
    kind = schema.get("type")
    if kind == "array":
        return st.lists(values(document, schema.get("items", {}), depth + 1), min_size=low, max_size=high)
    if kind == "object" and "properties" in schema:
        return objects(document, schema, depth)
    if kind == "object":
        return st.dictionaries(st.text(max_size=5), JUNK, max_size=2)
    return kinds.get(kind, JUNK)


@st.composite
def objects(draw, document, schema, depth):
    properties, required = schema["properties"], schema.get("required", [])
    optional = sorted(properties.keys() - set(required))
    names = [
        *required,
        *draw(st.lists(st.sampled_from(optional or [""]), max_size=4 if depth == 0 else 2, unique=True)),
    ]
    made = {name: draw(values(document, properties[name], depth)) for name in names if name}
    if draw(st.integers(0, 9)) == 0:
        made[draw(st.text(max_size=5) | st.sampled_from(sorted(properties)))] = draw(JUNK)
    return made


@st.composite
def bodies(draw, document, path):
    """A good body with a few fields of its schema set anew."""
    schema = document["components"]["schemas"][body_schema(document, path)["$ref"].rpartition("/")[2]]
    body = dict(draw(st.sampled_from([body for known, body in BODIES if known == path])))
    for name in draw(st.lists(st.sampled_from(sorted(schema["properties"])), max_size=3)):
        body[name] = draw(values(document, schema["properties"][name]))
    if draw(st.integers(0, 5)) == 0:
        body[draw(st.text(max_size=5) | st.sampled_from(sorted(body)))] = draw(JUNK)
    return body


@pytest.mark.parametrize("path", sorted({path for path, _ in BODIES}))
def test_what_is_accepted_is_documented(server, document, path):
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(server.url).netloc, timeout=PATIENCE)
    seen = Counter()

    @settings(max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(bodies(document, path))
    def holds(body):
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        seen[response.status] += 1
        assert response.status in (200, 400, 404), (response.status, text)
        if response.status == 200:
            assert errors_of(document, body_schema(document, path), body) == []

    holds()
    connection.close()
    assert seen[200] >= 5 and seen[400] >= 1
    assert server.service.client.state == "ready"
