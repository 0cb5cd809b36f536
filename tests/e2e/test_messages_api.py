"""Anthropic's official client, unmodified: whole and streamed answers, tools, thinking, refusals."""

import json
import urllib.error
import urllib.request

import anthropic
import pydantic
import pytest
from serving import PATIENCE, script, serving_in_thread

EURO = "Hello € 😀 there STOP and more"
TOOLS = [
    {
        "name": "weather",
        "description": "Tells the weather.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
        "cache_control": {"type": "ephemeral"},
    }
]
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
THINKING = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=PATIENCE) as opened:
        yield opened


def asking(reply=EURO, **commands):
    return [{"role": "user", "content": script(reply=reply, **{"runs": [3, 1, 4], **commands})}]


def create(client, reply=EURO, **fields):
    return client.messages.create(**{"model": "scripted", "max_tokens": 500, "messages": asking(reply), **fields})


def shown(message):
    """Ids differ from request to request."""
    return [block.model_dump(exclude={"id", "signature", "parsed_output"}) for block in message.content]


def raw(server, body, headers=(), path="/v1/messages?beta=true"):
    """(status, headers, body) without any client between."""
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json", **dict(headers)}
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return response.status, response.headers, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


@pytest.fixture
def prompt_of(server, monkeypatch):
    """What the model reads of a body, from the ids that the engine is given."""
    submitted = []
    submit = server.service.client.submit
    monkeypatch.setattr(
        server.service.client, "submit", lambda request, feed: submitted.append(request) or submit(request, feed)
    )

    def prompt_of(**fields):
        status, _, text = raw(server, {"model": "scripted", "max_tokens": 9, "messages": asking("x"), **fields})
        assert status == 200, text
        return server.service.files.tokenizer.decode(submitted[-1].prompt_token_ids, skip_special_tokens=False)

    return prompt_of


def test_an_answer(client):
    answer = create(client)
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "scripted")
    assert answer.id.startswith("msg_")
    (block,) = answer.content
    assert (block.type, block.text) == ("text", EURO)
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens == len(EURO.encode())
    counted = client.messages.count_tokens(model="scripted", messages=asking())
    assert answer.usage.input_tokens == counted.input_tokens


@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        ({"stop_sequences": ["STOP"]}, "Hello € 😀 there ", "stop_sequence", "STOP"),
        ({"max_tokens": 5}, "Hello", "max_tokens", None),
        ({"stop_sequences": ["never"]}, EURO, "end_turn", None),
    ],
)
def test_why_an_answer_ended(client, fields, text, reason, sequence):
    answer = create(client, **fields)
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == (text, reason, sequence)
    with client.messages.stream(**{"model": "scripted", "max_tokens": 500, "messages": asking(), **fields}) as stream:
        streamed = stream.get_final_message()
    assert (shown(streamed), streamed.usage) == (shown(answer), answer.usage)
    assert (streamed.stop_reason, streamed.stop_sequence) == (reason, sequence)


@pytest.mark.parametrize(
    "reply",
    [
        EURO,
        f"I look.\n{CALL}\n{CALL}\nDone.",
        f"Hm €.\n</think>\n\nI look.\n{CALL}",
        "Only thought",
        "Hm.\n</think>\n\n",
        f"Hm. {CALL} more\n</think>\n\nYes.",
        "It is\n<tool_call>\n<function=weather>\n<parameter=city>\nZür",
        "It is\n<tool_call>\n<function=weather>\nno call at all",
        "",
    ],
)
@pytest.mark.parametrize("thinking", [THINKING, {"type": "adaptive"}, {"type": "disabled"}])
def test_a_stream_builds_the_whole_answer(client, reply, thinking):
    fields = {
        "model": "scripted",
        "max_tokens": 500,
        "messages": asking(reply or "<|im_end|>"),
        "tools": TOOLS,
        "thinking": thinking,
    }
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    assert shown(streamed) == shown(whole)
    assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)


def events_of(text):
    """[(event, data)], the frame checked byte by byte."""
    *blocks, end = text.split("\n\n")
    assert end == ""
    pairs = []
    for block in blocks:
        name, data = block.split("\n")
        pairs.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in pairs)
    return pairs


def test_the_events_of_a_stream(server):
    body = {
        "model": "scripted",
        "max_tokens": 500,
        "stream": True,
        "tools": TOOLS,
        "thinking": {"type": "adaptive"},
        "messages": asking(f"Hm.\n</think>\n\nI look.\n{CALL}", runs=[100]),
    }
    status, headers, text = raw(server, body)
    assert status == 200 and headers["Content-Type"] == "text/event-stream; charset=utf-8"
    pairs = events_of(text)
    names = [name for name, _ in pairs if name != "content_block_delta"]
    assert names == [
        "message_start",
        *["content_block_start", "content_block_stop"] * 3,
        "message_delta",
        "message_stop",
    ]
    start = pairs[0][1]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None) and start["usage"]["input_tokens"] > 9
    opened = [data["content_block"] for name, data in pairs if name == "content_block_start"]
    assert opened[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert opened[1] == {"type": "text", "text": ""}
    assert (opened[2]["name"], opened[2]["input"]) == ("weather", {}) and opened[2]["id"].startswith("toolu_")
    deltas = [(data["index"], data["delta"]["type"]) for name, data in pairs if name == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == [
        (0, "thinking_delta"),
        (0, "signature_delta"),
        (1, "text_delta"),
        (2, "input_json_delta"),
    ]
    assert pairs[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_tools_and_their_results(client, prompt_of):
    answer = create(client, f"I look.\n{CALL}", tools=TOOLS)
    assert answer.stop_reason == "tool_use"
    text, use = answer.content
    assert (text.text, use.name, use.input) == ("I look.", "weather", {"city": "Zürich", "days": 3})
    result = {
        "type": "tool_result",
        "tool_use_id": use.id,
        "is_error": True,
        "content": [{"type": "text", "text": "rain", "cache_control": {"type": "ephemeral"}}],
    }
    history = [
        *asking(),
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "And? " + script(reply="Rain.")}]},
    ]
    prompt = prompt_of(tools=[{**TOOLS[0]}], messages=history)
    assert f"I look.{CALL}<|im_end|>\n<|im_start|>tool\nrain<|im_end|>\n<|im_start|>user\nAnd? @" in prompt
    assert '"parameters": {"type": "object"' in prompt and "cache_control" not in prompt
    again = client.messages.create(model="scripted", max_tokens=500, tools=TOOLS, messages=history)
    assert again.content[0].text == "Rain."


def test_tool_choice(client):
    answer = create(client, CALL, tools=TOOLS, tool_choice={"type": "tool", "name": "weather"})
    assert answer.content[0].input == {"city": "Zürich", "days": 3}
    answer = create(client, CALL, tools=TOOLS, tool_choice={"type": "any"})
    assert answer.content[0].name == "weather"
    none = create(client, CALL, tools=TOOLS, tool_choice={"type": "none"})
    assert none.content[0].text == CALL
    single = create(client, CALL + CALL, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert len(single.content) == 1 and single.stop_reason == "tool_use"


def test_a_call_that_breaks_off_is_text_and_never_a_tool_use(client):
    """An agent runs what it is handed: half a command is not handed out."""
    half = "<tool_call>\n<function=weather>\n<parameter=city>\nZür"
    for fields in ({"max_tokens": len(half.encode())}, {"stop_sequences": ["ür"]}, {}):
        answer = create(client, half, tools=TOOLS, **fields)
        assert [(block.type, block.text) for block in answer.content] == [("text", half)]
        assert answer.stop_reason != "tool_use"


def test_thinking(client, prompt_of):
    reply = "Both € and 😀.\n</think>\n\nYes."
    answer = create(client, reply, thinking=THINKING)
    thought, said = answer.content
    assert (thought.type, thought.thinking, said.text) == ("thinking", "Both € and 😀.", "Yes.")
    assert thought.signature
    # by the API's default there is none, and then the prompt opens no block
    assert not prompt_of().endswith("<think>\n")
    assert prompt_of(thinking={"type": "adaptive"}).endswith("<think>\n")
    hidden = create(client, reply, thinking={"type": "adaptive", "display": "omitted"})
    assert [block.type for block in hidden.content] == ["text"]
    assert hidden.usage.output_tokens == len(reply.encode())
    history = [*asking(), {"role": "assistant", "content": [block.model_dump() for block in answer.content]}]
    prompt = prompt_of(messages=[*history, *asking("x")], thinking=THINKING)
    assert "assistant\n<think>\nBoth € and 😀.\n</think>\n\nYes.<|im_end|>" in prompt


def test_the_helper_that_runs_tools(client):
    """It wants the server to keep the conversation, and does it itself once it is told that this one does not."""
    asked = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: Where.
        """
        asked.append(city)
        return "rain, " + script(reply="It rains.")

    call = "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>"
    runner = client.beta.messages.tool_runner(
        model="scripted", max_tokens=300, tools=[weather], messages=asking(f"I look.\n{call}")
    )
    assert [answer.stop_reason for answer in runner] == ["tool_use", "end_turn"]
    assert asked == ["Bern"]


def test_structured_output(client):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    answer = create(client, '{"a": 1}', output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(answer.content[0].text) == {"a": 1}

    # as the beta had it
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
        create(client, extra_body={"output_format": {"type": "json_schema"}})

    class Parsed(pydantic.BaseModel):
        a: int

    parsed = client.messages.parse(
        model="scripted", max_tokens=50, messages=asking('{"a": 3}'), output_format=Parsed
    ).parsed_output
    assert parsed == Parsed(a=3)


def test_the_client_knows_the_id_of_its_request(client):
    answer = create(client)
    assert answer._request_id == answer.id
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(client, max_tokens=-1)
    assert caught.value.request_id == caught.value.response.headers["X-Request-Id"]


def test_a_prompt_is_read_and_nothing_written(client):
    answer = create(client, max_tokens=0)
    assert (answer.content, answer.stop_reason, answer.usage.output_tokens) == ([], "max_tokens", 0)
    with client.messages.stream(model="scripted", max_tokens=0, messages=asking("x")) as stream:
        assert stream.get_final_message().stop_reason == "max_tokens"


def test_what_claude_code_sends(server):
    """A body in its form: system in blocks, reminders, tools, thinking, a record of the user, its headers."""
    body = {
        "model": "scripted",
        "max_tokens": 2000,
        "temperature": 1,
        "stream": True,
        "system": [
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>today</system-reminder>"},
                    {
                        "type": "text",
                        "text": script(reply=f"Hm.\n</think>\n\n{CALL}"),
                        "cache_control": {"type": "ephemeral"},
                    },
                ],
            }
        ],
        "tools": [
            {
                **TOOLS[0],
                "eager_input_streaming": True,
                "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", **TOOLS[0]["input_schema"]},
            }
        ],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "enabled", "budget_tokens": 1999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    headers = {
        "x-api-key": "k",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "x-app": "cli",
        "User-Agent": "claude-cli/2.1 (external, cli)",
        "X-Stainless-Retry-Count": "0",
    }
    before = unused_fields(server)
    status, _, text = raw(server, body, headers)
    assert status == 200, text
    assert [data["content_block"]["type"] for name, data in events_of(text) if name == "content_block_start"] == [
        "thinking",
        "tool_use",
    ]
    counted = {name: value - before.get(name, 0) for name, value in unused_fields(server).items()}
    names = {"anthropic-beta", "cache_control", "metadata", "effort"}
    assert {name for name, value in counted.items() if value} == names
    status, _, text = raw(
        server,
        {name: body[name] for name in ("model", "messages", "system", "tools", "thinking")},
        headers,
        "/v1/messages/count_tokens?beta=true",
    )
    assert status == 200 and json.loads(text)["input_tokens"] > 100


def unused_fields(server):
    with urllib.request.urlopen(server.url + "/metrics", timeout=PATIENCE) as response:
        lines = response.read().decode().splitlines()
    found = [line for line in lines if line.startswith("pilotfish_unused_fields_total{")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in found}


BEGUN = [{"role": "user", "content": script(reply="x")}, {"role": "assistant", "content": "Answer: "}]
CALLED = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages[0].content[0].image: Could not process image: ",
        ),
        ({"messages": BEGUN, "thinking": {"type": "adaptive"}}, "thinking: "),
        ({"messages": []}, "messages: "),
        ({"max_tokens": -1}, "max_tokens: "),
        ({"max_tokens": 50000}, "input length and `max_tokens` exceed context limit: "),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "prompt is too long: "),
        ({"extra_body": {"temperature": 3}}, "temperature: "),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type: "),
        ({"tools": [{**TOOLS[0], "name": "two words"}]}, "tools[0].name: "),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name: "),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name: "),
        ({"extra_body": {"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}}, "mcp_servers: "),
        ({"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}}, "edits[0]: "),
        ({"extra_body": {"top_j": 1}}, "top_j: "),
        ({"extra_body": {"thinking": {"type": "between_tools"}}}, "thinking.type: "),
        ({"system": [IMAGE]}, "system[0]"),
        ({"system": [{"text": "x"}]}, "system[0].type: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_controll": {"a": 1}}]}]},
            "content[0].cache_controll: ",
        ),
        (
            {"messages": [{"role": "user", "content": [CALLED]}]},
            "[0]",
        ),
        ({"extra_body": {"speculation": {"k": 9}}}, "speculation.k: "),
    ],
)
def test_refusals_name_the_field(client, fields, named):
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(client, **fields)
    body = caught.value.response.json()
    assert body["type"] == "error" and set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"]


def test_what_the_assistant_has_begun_is_gone_on_with(client, server):
    answer = create(client, messages=BEGUN)
    assert [block.text for block in answer.content] == ["x"]
    counted = client.messages.count_tokens(model="scripted", messages=BEGUN)
    _, _, text = raw(server, {"messages": BEGUN, "continue_final_message": True}, path="/tokenize")
    assert counted.input_tokens == answer.usage.input_tokens == json.loads(text)["count"]
    _, _, text = raw(server, {"tokens": json.loads(text)["tokens"]}, path="/detokenize")
    assert json.loads(text)["prompt"].endswith("<|im_start|>assistant\nAnswer: ")


def test_thought_is_refused_only_before_an_answer_that_is_begun(client):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with pytest.raises(anthropic.BadRequestError, match="thinking: An answer that is begun"):
        create(client, messages=BEGUN, max_tokens=2000, thinking=thinking)
    # Claude Code counts a history as it stands
    assert client.messages.count_tokens(model="scripted", messages=BEGUN, thinking=thinking).input_tokens > 20
    called = [*BEGUN[:1], {"role": "assistant", "content": [CALLED]}]
    assert create(client, messages=called, max_tokens=2000, thinking=thinking).stop_reason == "end_turn"


def test_other_errors_have_the_same_shape(client, server):
    with pytest.raises(anthropic.NotFoundError) as caught:
        create(client, model="other")
    assert caught.value.response.json()["error"]["type"] == "not_found_error"
    status, _, text = raw(server, {}, path="/v1/messages/batches")
    assert (status, json.loads(text)["type"]) == (404, "error")
    status, _, text = raw(server, [])
    assert (status, json.loads(text)["error"]["type"]) == (400, "invalid_request_error")


def test_an_error_in_a_stream_is_its_last_event(folder):
    with (
        serving_in_thread(folder) as server,
        anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0, timeout=PATIENCE) as client,
    ):
        messages = asking("abcdefgh", fault="raise", at=5, runs=[1], delay=0.05)
        with client.messages.stream(model="scripted", max_tokens=99, messages=messages) as stream:
            assert next(iter(stream)).type == "message_start"
            with pytest.raises(anthropic.APIStatusError, match="engine failed"):
                stream.get_final_message()
        with pytest.raises(anthropic.InternalServerError) as caught:
            create(client)
        assert caught.value.response.json()["error"]["type"] == "api_error"


def test_keys_come_in_either_header(folder):
    with serving_in_thread(folder, api_keys=("key-1", "key-2")) as server:
        body = {"model": "scripted", "max_tokens": 9, "messages": asking("x")}
        for headers in ({"x-api-key": "key-2"}, {"Authorization": "Bearer key-1"}):
            assert raw(server, body, headers)[0] == 200
        for headers in ({}, {"x-api-key": "key-3"}):
            status, _, text = raw(server, body, headers)
            assert (status, json.loads(text)["error"]["type"]) == (401, "authentication_error")
        assert raw(server, body, {"Authorization": "Bearer of another", "x-api-key": "key-1"})[0] == 200


def test_silence_is_broken_by_pings(server, monkeypatch):
    monkeypatch.setattr("pilotfish.server.handlers.HEARTBEAT_SECONDS", 0.05)
    body = {
        "model": "scripted",
        "max_tokens": 500,
        "stream": True,
        "tools": TOOLS,
        "messages": asking(CALL, runs=[4], delay=0.02),
    }
    _, _, text = raw(server, body)
    assert sum(line == 'data: {"type":"ping"}' for line in text.splitlines()) >= 2
