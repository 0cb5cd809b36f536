"""`serve --log-requests`: a line of JSON for each request that has ended, on stdout, and nothing else there."""

import contextlib
import http.client
import json
import subprocess
import urllib.error
import urllib.request

import pytest
from byte_model import write_model
from processes import SERVE, running, status, until
from serving import ENVIRONMENT, PATIENCE, script, whole_lines

from pilotfish.deploy.ports import free_port

SECRET = "nobody may read this"


@contextlib.contextmanager
def logging_server(folder, *flags):
    """Its URL, and a function that gives the lines written so far."""
    port = free_port()
    command = [*SERVE, str(folder), "--port", str(port), "--core", "scripted_core:make_core", *flags]
    output = folder / "stdout"
    with output.open("wb") as stdout, running(command, env=ENVIRONMENT, stdout=stdout, stderr=subprocess.DEVNULL):
        url = f"http://127.0.0.1:{port}"
        until(lambda: status(url + "/ready") == 200, "the server is ready")
        yield url, lambda: whole_lines(output)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = ("--log-requests", "--api-key", "sesame", "--root-path", "/llm", "--served-model-name", "logged")
    with logging_server(write_model(tmp_path_factory.mktemp("model")), *flags) as started:
        yield started


@pytest.fixture
def log(server):
    """Waits for the lines of one test: an answer is out before its line."""
    _, lines = server
    before = len(lines())

    def new(count=1):
        until(lambda: len(lines()) >= before + count, f"{count} lines")
        assert len(lines()) == before + count
        return lines()[before:]

    return new


def post(url, path="/v1/completions", key="sesame", headers=None, **body):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"} | (headers or {})
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=PATIENCE)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/responses", {"input": "Hi", "max_output_tokens": 3}), ("/v1/messages", {"max_tokens": 3})],
)
def test_the_other_apis_have_lines_too(server, log, path, body):
    messages = {"messages": [{"role": "user", "content": "Hi"}]} if path == "/v1/messages" else {}
    with post(server[0], path, **body, **messages) as response:
        assert response.status == 200
    (line,) = log()
    assert (line["endpoint"], line["model"], line["completion_tokens"]) == (path, "logged", 3)


@pytest.mark.parametrize("stream", [False, True])
def test_what_stands_in_a_line(server, log, stream):
    prompt = script(SECRET, reply="abcdefghij", runs=[3, 1], drafted=3)
    body = {"prompt": prompt, "max_tokens": 9, "stream": stream}
    with post(server[0], headers={"X-Request-Id": "mine"}, **body) as response:
        text = response.read().decode()
    (line,) = log()
    # one token of the prompt, then rounds of 3, 1, 3 and 1
    assert {key: line[key] for key in ("completion_tokens", "mean_acceptance_length", "k")} == {
        "completion_tokens": 9,
        "mean_acceptance_length": 2.0,
        "k": 3,
    }
    assert (line["status"], line["error"], line["finish_reasons"]) == (200, None, ["length"])
    assert (line["endpoint"], line["key"], line["client_id"]) == ("/v1/completions", "1", "mine")
    assert (line["model"], line["stream"], line["prompt_tokens"]) == ("logged", stream, len(prompt.encode()))
    assert 0 < line["ttft_seconds"] < line["seconds"] < PATIENCE
    assert f'"{line["id"]}"' in text
    assert SECRET not in json.dumps(line)


def test_choices_and_chats_are_one_line_each(server, log):
    messages = [{"role": "user", "content": script(reply="<|im_end|>", ids=[97, 302])}]
    with post(server[0], "/llm/v1/chat/completions", messages=messages, n=2) as response:
        usage = json.load(response)["usage"]
    (line,) = log()
    assert line["finish_reasons"] == ["stop", "stop"] and line["endpoint"] == "/llm/v1/chat/completions"
    assert (line["prompt_tokens"], line["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])


@pytest.mark.parametrize(
    ("wanted", "code", "error", "key"),
    [
        ({"key": "wrong", "prompt": "x"}, 401, "invalid_api_key", "none"),
        ({"prompt": "x", "model": "other"}, 404, "model_not_found", "1"),
        ({"prompt": "x", "max_tokens": -2}, 400, "invalid_value", "1"),
    ],
)
def test_refusals_are_lines_too(server, log, wanted, code, error, key):
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server[0], **wanted)
    caught.value.close()
    (line,) = log()
    assert (line["status"], line["error"], line["key"]) == (code, error, key)
    assert caught.value.code == code and line["id"] is None and line["completion_tokens"] is None


def test_a_preflight_has_no_line(server, log):
    asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    request = urllib.request.Request(server[0] + "/llm/v1/completions", headers=asked, method="OPTIONS")
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        assert response.status == 204
    with post(server[0], prompt="Hi"):
        pass
    log()


def test_an_error_after_the_status_is_named(server, log):
    prompt = script(reply="x", times=99, delay=0.02, fault="raise", at=5)
    with post(server[0], prompt=prompt, max_tokens=99, stream=True) as response:
        assert b"[DONE]" not in response.read()
    (line,) = log()
    assert (line["status"], line["error"], line["finish_reasons"]) == (200, "engine_failed", ["error"])
    assert line["completion_tokens"] == 5
    until(lambda: status(server[0] + "/ready") == 200, "the engine was started again")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_told_apart(server, log, stream):
    body = {"prompt": script(reply="x", times=2900, delay=0.05), "max_tokens": 3000, "stream": stream}
    client = http.client.HTTPConnection(server[0].removeprefix("http://"), timeout=PATIENCE)
    headers = {"Content-Type": "application/json", "Authorization": "Bearer sesame"}
    client.request("POST", "/v1/completions", json.dumps(body), headers)
    until(lambda: num_running(server[0]) == 1, "it runs")
    client.close()
    (line,) = log()
    assert (line["finish_reasons"], line["status"]) == (["abort"], 499)
    assert line["completion_tokens"] < 2900


def num_running(url):
    with urllib.request.urlopen(url + "/metrics", timeout=PATIENCE) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("pilotfish_num_requests_running "))


def test_scrapes_are_no_lines(server, log):
    for path in ("/ready", "/metrics", "/v1/models"):
        status(server[0] + path)
    with post(server[0], prompt=script(reply="x")) as response:
        response.read()
    assert len(log()) == 1


def test_prompts_only_where_they_are_asked_for(folder):
    with logging_server(folder, "--log-prompts") as (url, lines):
        messages = [{"role": "user", "content": SECRET}]
        with post(url, "/v1/chat/completions", messages=messages) as response:
            response.read()
        until(lambda: len(lines()) == 1, "a line")
        assert lines()[0]["prompts"] == [f"<|im_start|>user\n{SECRET}<|im_end|>\n<|im_start|>assistant\n"]
