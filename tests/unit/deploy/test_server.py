"""What answers, and is no server of models, is told in a line."""

from __future__ import annotations

import asyncio
import http.client
import io
import json

import pytest

from pilotfish.deploy.chat.screen import Screen
from pilotfish.deploy.chat.talk import Answer
from pilotfish.deploy.gate.server import Refused, Server, Unreachable
from pilotfish.deploy.sweep.client import Endpoint, EndpointError

STRANGERS = ["{}", "[]", "null", '{"data": []}', '{"data": [{}]}', '{"data": null}', '{"data": ["a"]}', "3"]


class Answers(Server):
    """A server that always says the same."""

    def __init__(self, text):
        super().__init__("http://nowhere")
        self._text = text

    def _send(self, path, body=None):
        return io.BytesIO(self._text.encode())


def test_the_first_model_is_named():
    assert Answers('{"data": [{"id": "one"}, {"id": "other"}]}').first_model() == "one"


@pytest.mark.parametrize("text", STRANGERS)
def test_an_answer_without_a_model_is_refused(text):
    with pytest.raises(Refused, match="/v1/models: the answer names no model"):
        Answers(text).first_model()


class BreaksOff(io.BytesIO):
    def read(self, size=-1):
        raise http.client.IncompleteRead(b"pilotfish_engine")


def test_a_scrape_that_breaks_off_is_told_and_closed():
    server, answer = Answers(""), BreaksOff()
    server._send = lambda path: answer
    with pytest.raises(Unreachable, match="the answer broke off"):
        server.metrics()
    assert answer.closed


def test_an_answer_that_is_no_json_is_refused():
    with pytest.raises(Refused, match="/health: the answer is no JSON: b'<html>"):
        Answers("<html></html>").get("/health")


@pytest.mark.parametrize("text", STRANGERS)
def test_a_sweep_refuses_it_too(text):
    endpoint = Endpoint(None, "http://nowhere")

    async def get(path):
        return json.loads(text)

    endpoint._get = get
    with pytest.raises(EndpointError, match="/v1/models: the answer names no model"):
        asyncio.run(endpoint.describe())


@pytest.mark.parametrize("error", ["overloaded", {"message": "overloaded"}, {"code": "overloaded"}, ["overloaded"]])
def test_an_error_in_a_stream_has_any_form(error):
    with pytest.raises(Refused, match="overloaded"):
        Answer(Screen(io.StringIO(), io.StringIO())).take({"error": error})
