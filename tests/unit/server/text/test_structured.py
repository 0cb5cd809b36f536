"""One grammar from OpenAI's and vLLM's fields; what cannot be read is refused by field."""

import json
import subprocess
import sys

import pytest

from pilotfish.engine.grammar.bounds import MAX_SOURCE_BYTES
from pilotfish.engine.link.messages import Grammar
from pilotfish.server.errors import BadRequest
from pilotfish.server.text.structured import grammar_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "json_schema",
            json.dumps(SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"regex": "[ab]+", "json": None}}, "regex", "[ab]+"),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"guided_choice": ["yes", "no"]}, "choice", '["yes", "no"]'),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, "json_schema", json.dumps(SCHEMA)),
    ],
)
def test_each_field_gives_its_grammar(fields, kind, source):
    assert grammar_of(fields, 7) == Grammar(kind=kind, source=source, after_token_id=7)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_json_object": False}])
def test_free_text_has_no_grammar(fields):
    assert grammar_of(fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_json"),
        ({"guided_regex": "a" * (MAX_SOURCE_BYTES + 1)}, "guided_regex"),
        ({"guided_regex": "a{99999}"}, "guided_regex"),
        ({"guided_json": {"multipleOf": 999983}}, "guided_json"),
        ({"guided_json": "{not json"}, "guided_json"),
        ({"structured_outputs": {"grammar": "start: " + "(" * 99}}, "structured_outputs"),
    ],
)
def test_what_cannot_be_read_is_refused_by_field(fields, param):
    with pytest.raises(BadRequest) as refused:
        grammar_of(fields)
    assert refused.value.param == param


def test_the_http_process_never_loads_the_grammar_library():
    code = "import sys, pilotfish.server.serve, pilotfish.server.http.app; print('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
