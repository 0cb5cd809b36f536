"""Tools that are no plain functions: groups by namespace, tools of one text, hosted ones; and which are allowed."""

import json

import anthropic
import openai
import pytest
from byte_model import write_model
from serving import PATIENCE, script, serving_in_thread

PATCH = "*** Begin Patch\n*** Add File: a.py\n+print(1)\n*** End Patch"
CALL_PATCH = f"<tool_call>\n<function=apply_patch>\n<parameter=input>\n{PATCH}\n</parameter>\n</function>\n</tool_call>"
CALL_SEARCH = (
    "<tool_call>\n<function=mcp__docs__search>\n<parameter=query>\nsamplers\n</parameter>\n</function>\n</tool_call>"
)
SEARCH = {
    "type": "function",
    "name": "search",
    "description": "Searches",
    "strict": False,
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}
GROUP = {"type": "namespace", "name": "mcp__docs__", "description": "Documentation", "tools": [SEARCH]}
AGENTS = {"type": "namespace", "name": "collaboration", "tools": [{**SEARCH, "name": "spawn_agent"}]}
APPLY = {"type": "custom", "name": "apply_patch", "description": "Patches files", "format": {"type": "text"}}
HOSTED = [{"type": "web_search", "external_web_access": True}, {"type": "image_generation"}]
TOOLS = [SEARCH, GROUP, AGENTS, APPLY, *HOSTED]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0, timeout=PATIENCE) as opened:
        yield opened


def asking(reply, runs=(3, 1, 4)):
    return script(reply=reply, runs=list(runs))


def respond(client, reply, **fields):
    return client.responses.create(**{"model": "scripted", "input": asking(reply), "tools": TOOLS, **fields})


@pytest.fixture
def prompts(server, monkeypatch):
    """What the model has read, newest last."""
    submitted, submit = [], server.service.client.submit
    decode = server.service.files.tokenizer.decode

    def noting(request, feed):
        submitted.append(decode(request.prompt_token_ids, skip_special_tokens=False))
        return submit(request, feed)

    monkeypatch.setattr(server.service.client, "submit", noting)
    return submitted


def test_functions_of_a_group_are_flat_for_the_model_and_apart_for_the_client(client, prompts):
    (call,) = respond(client, CALL_SEARCH).output
    assert (call.type, call.namespace, call.name) == ("function_call", "mcp__docs__", "search")
    assert json.loads(call.arguments) == {"query": "samplers"}
    assert '"name": "mcp__docs__search"' in prompts[-1] and '"name": "collaboration__spawn_agent"' in prompts[-1]
    (plain,) = respond(client, CALL_SEARCH.replace("mcp__docs__", "")).output
    assert (plain.name, plain.namespace) == ("search", None)


def test_calls_of_a_group_go_back_as_they_came(client, prompts):
    (call,) = respond(client, CALL_SEARCH).output
    (patch,) = respond(client, CALL_PATCH).output
    history = [
        {"role": "user", "content": "Search."},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "found"},
        patch.model_dump(exclude_none=True),
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "Success."},
        {"role": "user", "content": asking("Done.")},
    ]
    assert respond(client, "", input=history).output_text == "Done."
    assert CALL_SEARCH in prompts[-1] and CALL_PATCH in prompts[-1]
    assert "tool\nfound" in prompts[-1] and "tool\nSuccess." in prompts[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_of_one_text_is_called_with_that_text(client, stream):
    if not stream:
        (call,) = respond(client, "I patch." + CALL_PATCH).output[1:]
    else:
        events = list(respond(client, "I patch." + CALL_PATCH, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events if "custom_tool_call" in event.type]
        assert kinds == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
        (done,) = [event for event in events if event.type.endswith("custom_tool_call_input.done")]
        assert done.input == PATCH
        call = events[-1].response.output[1]
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", PATCH)
    assert call.id.startswith("ctc_") and call.call_id.startswith("call_")


@pytest.mark.parametrize("stream", [False, True])
def test_chat_has_tools_of_one_text(client, stream):
    tool = {"type": "custom", "custom": {"name": "apply_patch", "description": "d"}}
    messages = [{"role": "user", "content": asking(CALL_PATCH)}]
    answer = client.chat.completions.create(model="scripted", messages=messages, tools=[tool], stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        (delta,) = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        finish, told = chunks[-1].finish_reason, (delta.type, delta.custom["name"], delta.custom["input"])
    else:
        (call,) = answer.choices[0].message.tool_calls
        finish, told = answer.choices[0].finish_reason, (call.type, call.custom.name, call.custom.input)
        messages += [answer.choices[0].message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "ok"}]
        messages += [{"role": "user", "content": asking("Done.")}]
        again = client.chat.completions.create(model="scripted", messages=messages, tools=[tool])
        assert again.choices[0].message.content == "Done."
    assert finish == "tool_calls" and told == ("custom", "apply_patch", PATCH)


def hosted_count(client):
    root = str(client.base_url).removesuffix("/v1/")
    metrics = client.with_options(base_url=root).get("/metrics", cast_to=str)
    lines = [line for line in metrics.splitlines() if 'unused_fields_total{field="tools.hosted"}' in line]
    return float(lines[0].split()[-1]) if lines else 0


def test_hosted_tools_are_left_out_in_all_three_apis(client, server, prompts):
    before = hosted_count(client)
    assert respond(client, "Hello.").output_text == "Hello."
    assert "web_search" not in prompts[-1] and "image_generation" not in prompts[-1]
    messages = [{"role": "user", "content": asking("Hello.")}]
    tools = [{"type": "web_search"}]
    chat = client.chat.completions.create(model="scripted", messages=messages, tools=tools)
    assert chat.choices[0].message.content == "Hello."
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=PATIENCE) as other:
        tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]
        answer = other.messages.create(model="scripted", max_tokens=99, messages=messages, tools=tools)
    assert answer.content[0].text == "Hello."
    assert hosted_count(client) == before + 4


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ({"type": "custom", "name": "apply_patch"}, ("apply_patch", "search", "collaboration__spawn_agent")),
        ({"type": "function", "namespace": "mcp__docs__", "name": "search"}, ("apply_patch", "mcp__docs__search")),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "custom", "name": "apply_patch"}, {"type": "web_search"}],
            },
            ("apply_patch",),
        ),
    ],
)
def test_choices(client, prompts, choice, shown):
    answer = respond(client, CALL_PATCH, tool_choice=choice)
    assert answer.output[0].type == "custom_tool_call" and answer.tool_choice.type == choice["type"]
    assert all(f'"name": "{name}"' in prompts[-1] for name in shown)
    if choice["type"] == "allowed_tools":
        assert '"name": "search"' not in prompts[-1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "x", "name": "y"}]}]},
            "tools[0].tools[0].type",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice.name"),
    ],
)
def test_refusals_name_the_field(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, "x", **fields)
    assert caught.value.param == param


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def test_tools_and_a_schema_go_together_in_all_three_apis(client, server):
    form = {"type": "json_schema", "name": "out", "schema": SCHEMA, "strict": True}
    answer = respond(client, '{"n": 1}', text={"format": form})
    assert answer.output_text == '{"n": 1}'
    assert respond(client, CALL_SEARCH, text={"format": form}).output[0].name == "search"
    messages = [{"role": "user", "content": asking(CALL_SEARCH)}]
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=PATIENCE) as other:
        tools = [{"name": "mcp__docs__search", "input_schema": SEARCH["parameters"]}]
        config = {"format": {"type": "json_schema", "schema": SCHEMA}}
        fields = {"model": "scripted", "max_tokens": 999, "tools": tools, "output_config": config}
        assert other.messages.create(messages=messages, **fields).stop_reason == "tool_use"
        messages = [{"role": "user", "content": asking('{"n": 2}')}]
        assert other.messages.create(messages=messages, **fields).content[0].text == '{"n": 2}'


@pytest.mark.parametrize("stream", [False, True])
def test_the_flag_for_pieces_is_for_chat_streams_alone(tmp_path, stream):
    with serving_in_thread(write_model(tmp_path), stream_tool_arguments=True) as running:
        with openai.OpenAI(base_url=running.v1, api_key="unused", max_retries=0, timeout=PATIENCE) as client:
            answer = respond(client, CALL_SEARCH, stream=stream)
            answer = list(answer)[-1].response if stream else answer
            assert [json.loads(item.arguments) for item in answer.output] == [{"query": "samplers"}]
            tools = [
                {"type": "function", "function": {"name": "mcp__docs__search", "parameters": SEARCH["parameters"]}}
            ]
            messages = [{"role": "user", "content": asking(CALL_SEARCH, (2,))}]
            chat = client.chat.completions.create(model="scripted", messages=messages, tools=tools, stream=stream)
            calls = [chat.choices[0].message.tool_calls] if not stream else []
            calls = calls or [chunk.choices[0].delta.tool_calls for chunk in chat]
            told = [call.function.arguments for delta in calls for call in delta or ()]
            assert json.loads("".join(told)) == {"query": "samplers"}
            # an event may hold several rounds, so only that there are pieces is certain
            assert len(told) > 1 if stream else len(told) == 1
        with anthropic.Anthropic(base_url=running.url, api_key="unused", max_retries=0, timeout=PATIENCE) as other:
            fields = {"tools": [{"name": "mcp__docs__search", "input_schema": SEARCH["parameters"]}], "max_tokens": 999}
            if stream:
                with other.messages.stream(model="scripted", messages=messages, **fields) as events:
                    message = events.get_final_message()
            else:
                message = other.messages.create(model="scripted", messages=messages, **fields)
            assert [block.input for block in message.content] == [{"query": "samplers"}]
