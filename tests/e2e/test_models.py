"""The served names: aliases, any name at all, and the list as both APIs' clients read it."""

import json
import urllib.error
import urllib.request

import anthropic
import openai
import pytest
from serving import PATIENCE, script, serving_in_thread


@pytest.fixture(scope="module")
def theirs(server):
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=PATIENCE) as opened:
        yield opened


def test_anthropics_client_lists_models(server, theirs):
    page = theirs.models.list()
    assert [model.id for model in page] == ["scripted", "alias"]
    first = page.data[0]
    assert (first.type, first.display_name, first.max_input_tokens) == ("model", "scripted", 4096)
    assert first.created_at.year >= 2026 and not page.has_more
    assert theirs.models.retrieve("alias").id == "alias"
    assert [model.id for model in theirs.models.list(limit=1)] == ["scripted", "alias"]
    assert [model.id for model in theirs.models.list(before_id="alias").data] == ["scripted"]
    with pytest.raises(anthropic.NotFoundError) as caught:
        theirs.models.retrieve("nobody")
    assert caught.value.response.json()["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        theirs.models.list(limit=0)


def test_openais_client_lists_models(server):
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0, timeout=PATIENCE) as client:
        first = client.models.list().data[0]
        assert (first.id, first.object, first.max_model_len) == ("scripted", "model", 4096)


def test_any_name_is_answered_under_itself(folder):
    def post(server, name):
        body = {"model": name, "messages": [{"role": "user", "content": script(reply="x")}]}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(server.v1 + "/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return json.loads(response.read())["model"]

    with serving_in_thread(folder, any_model_name=True) as server:
        for name in ("claude-haiku-9", "scripted", "a/b:c"):
            assert post(server, name) == name
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(server, "x" * 300)
        caught.value.close()
        assert caught.value.code == 404
