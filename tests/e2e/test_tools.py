"""Tool calls by the official client: whole and streamed, forced, in parallel, sent back, broken off."""

import asyncio
import json
import random
import urllib.request

import aiohttp
import openai
import pytest
from serving import PATIENCE, script

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
BEGIN, END = "<tool_call>\n<function=get_weather>\n", "</function>\n</tool_call>"
ARGUMENTS = "<parameter=city>\nBrașov\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
CALL = BEGIN + ARGUMENTS + END
CALL_CLOCK = "<tool_call>\n<function=clock>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0, timeout=PATIENCE) as opened:
        yield opened


def ask(client, reply, *, runs=(3, 1, 4), messages=(), tools=(WEATHER, CLOCK), stream=False, delay=0, **fields):
    prompt = [*messages, {"role": "user", "content": script(reply=reply, runs=list(runs), delay=delay)}]
    return client.chat.completions.create(model="scripted", messages=prompt, tools=list(tools), stream=stream, **fields)


def collect(chunks):
    """Content, reasoning, [(name, arguments)] and the finish_reason, put together as the client's users do."""
    content, reasoning, calls, finish = "", "", {}, None
    for chunk in chunks:
        (choice,) = chunk.choices
        assert finish is None, "nothing after the end"
        finish = choice.finish_reason
        delta = choice.delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            if call.id:
                assert call.index == len(calls) and call.type == "function" and call.function.name
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments
    return content, reasoning, [tuple(call) for call in calls.values()], finish


def whole(answer):
    (choice,) = answer.choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    reasoning = getattr(choice.message, "reasoning_content", None) or ""
    return choice.message.content or "", reasoning, calls, choice.finish_reason


def prompt_of(server, answer):
    return server.service.files.tokenizer.decode(answer.prompt_token_ids, skip_special_tokens=False)


WEATHER_CALL = ("get_weather", '{"city": "Brașov", "days": 3}')


@pytest.mark.parametrize("runs", [(1,), (2,), (3, 1, 4), (100,)])
@pytest.mark.parametrize(
    ("reply", "content", "calls", "finish"),
    [
        (CALL, "", [WEATHER_CALL], "tool_calls"),
        ("Let me look.\n\n" + CALL, "Let me look.", [WEATHER_CALL], "tool_calls"),
        (CALL + "\n" + CALL_CLOCK, "", [WEATHER_CALL, ("clock", "{}")], "tool_calls"),
        ("No need.", "No need.", [], "stop"),
        ("<tool_call>\nno call\n</tool_call>", "<tool_call>\nno call\n</tool_call>", [], "stop"),
    ],
)
def test_calls_whole_and_streamed(client, reply, content, calls, finish, runs):
    assert whole(ask(client, reply, runs=runs)) == (content, "", calls, finish)
    assert collect(ask(client, reply, runs=runs, stream=True)) == (content, "", calls, finish)


def test_a_whole_answer_has_the_official_shape(client):
    message = ask(client, CALL).choices[0].message
    assert message.content is None
    (call,) = message.tool_calls
    assert call.id.startswith("call_") and call.type == "function"
    plain = ask(client, "x").choices[0].message
    assert plain.content == "x" and plain.tool_calls is None


def test_arguments_come_in_pieces_to_those_who_ask(client):
    reply = BEGIN + "<parameter=city>\n" + "abcdefgh" * 20 + "\n</parameter>\n" + END
    pieces = {"stream_tool_arguments": True}
    chunks = list(ask(client, reply, runs=(4,), stream=True, delay=0.02, extra_body=pieces))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].function.name == "get_weather" and deltas[0].function.arguments == ""
    assert all(delta.id is None and delta.function.name is None for delta in deltas[1:])
    assert len(deltas) > 3
    assert json.loads("".join(delta.function.arguments for delta in deltas)) == {"city": "abcdefgh" * 20}


def test_the_streaming_helper_of_the_client(client):
    prompt = [{"role": "user", "content": script(reply=CALL, runs=[2])}]
    with client.chat.completions.stream(model="scripted", messages=prompt, tools=[WEATHER]) as stream:
        names = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in names and "tool_calls.function.arguments.done" in names
    assert message.tool_calls[0].function.parsed_arguments == {"city": "Brașov", "days": 3}


def test_one_call_only(client):
    reply = "x " + CALL + "\n" + CALL_CLOCK
    for stream, read in ((False, whole), (True, collect)):
        answer = ask(client, reply, parallel_tool_calls=False, stream=stream)
        assert read(answer) == ("x", "", [WEATHER_CALL], "tool_calls")
    usage = ask(client, reply, parallel_tool_calls=False).usage
    assert usage.completion_tokens == len(("x " + BEGIN + ARGUMENTS + "</function>").encode())


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("thinking", [False, True])
def test_a_call_that_is_demanded_begins_the_answer(client, server, choice, thinking):
    fields = {"tool_choice": choice, "extra_body": {"chat_template_kwargs": {"enable_thinking": thinking}}}
    for stream, read in ((False, whole), (True, collect)):
        assert read(ask(client, CALL, stream=stream, **fields)) == ("", "", [WEATHER_CALL], "tool_calls")
    fields["extra_body"]["return_token_ids"] = True
    prompt = prompt_of(server, ask(client, CALL, **fields))
    closed = "<think>\n\n</think>\n\n" if thinking else ""
    assert prompt.endswith(f"assistant\n{closed}")


def test_what_may_not_be_called_is_not_shown(client, server):
    answer = ask(client, CALL, tool_choice="none", extra_body={"return_token_ids": True})
    assert whole(answer) == (CALL, "", [], "stop")
    assert "Weather of a city" not in prompt_of(server, answer)


REBOOT = {
    "type": "function",
    "function": {"name": "reboot", "parameters": {"type": "object", "properties": {"when": {"type": "string"}}}},
}
CALL_REBOOT = "<tool_call>\n<function=reboot>\n<parameter=when>\nnever\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("limit", range(1, len(CALL_REBOOT.encode()), 3))
def test_a_call_cut_off_is_text(client, limit):
    complete = limit >= CALL_REBOOT.index("</function>") + len("</function>")
    expected = ("", "", [("reboot", '{"when": "never"}')], "length")
    if not complete:
        expected = (CALL_REBOOT[:limit], "", [], "length")
    for stream, read in ((False, whole), (True, collect)):
        assert read(ask(client, CALL_REBOOT, tools=[REBOOT], max_tokens=limit, stream=stream)) == expected


def test_calls_before_one_that_is_cut_off_go_out(client):
    reply = CALL + "\n" + CALL_REBOOT
    for stream, read in ((False, whole), (True, collect)):
        answer = ask(client, reply, tools=[WEATHER, REBOOT], max_tokens=len(CALL.encode()) + 40, stream=stream)
        assert read(answer) == (CALL_REBOOT[:39], "", [WEATHER_CALL], "length")


def test_a_call_goes_out_when_it_is_whole(client):
    chunks = list(ask(client, CALL + "\n" + CALL_CLOCK, runs=(3,), stream=True, delay=0.002))
    told = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [(call.index, call.function.name, call.function.arguments) for call in told] == [
        (0, "get_weather", ""),
        (0, None, WEATHER_CALL[1]),
        (1, "clock", ""),
        (1, None, "{}"),
    ]
    assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks if chunk.choices[0].finish_reason)


@pytest.mark.parametrize("stop", ["never", "\n", "</tool_call>", "</function>", "</parameter>", "when>\nn", "e"])
def test_stop_strings_do_not_cut_calls(client, stop):
    for stream, read in ((False, whole), (True, collect)):
        content, _, calls, finish = read(ask(client, CALL_REBOOT + "abc", tools=[REBOOT], stop=[stop], stream=stream))
        assert calls == [("reboot", '{"when": "never"}')] and finish == "tool_calls"
        assert content == "abc"
    beside = whole(ask(client, "x " + CALL_REBOOT + " y never z", tools=[REBOOT], stop=["never"]))
    assert beside == ("x y ", "", [("reboot", '{"when": "never"}')], "tool_calls")
    assert whole(ask(client, "<tool_call> never", tools=[REBOOT], stop=["never"]))[0] == "<tool_call> "


def test_a_call_being_written_is_no_silence(server, monkeypatch):
    monkeypatch.setattr("pilotfish.server.handlers.HEARTBEAT_SECONDS", 0.05)
    reply = BEGIN + "<parameter=city>\n" + "abc" * 20 + "\n</parameter>\n" + END
    messages = [{"role": "user", "content": script(reply=reply, delay=0.01)}]
    body = json.dumps({"messages": messages, "tools": [WEATHER], "stream": True}).encode()
    request = urllib.request.Request(server.v1 + "/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        events = response.read().decode().split("\n\n")
    assert events.count(": waiting") >= 3
    assert sum("tool_calls" in event for event in events) == 3


def test_calls_and_results_go_back(client, server):
    answer = ask(client, "I look.\n" + CALL + CALL_CLOCK)
    message = answer.choices[0].message
    history = [{"role": "user", "content": "Weather?"}, message.model_dump()]
    history += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    again = ask(client, "It rains.", messages=history, extra_body={"return_token_ids": True})
    assert again.choices[0].message.content == "It rains."
    prompt = prompt_of(server, again)
    assert f"assistant\nI look.{CALL}{CALL_CLOCK}" in prompt
    assert prompt.count("tool\nrain") == 2


def test_several_choices_each_with_calls(client):
    answer = ask(client, CALL, n=3)
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls"] * 3
    assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 3


JUNK = (
    *(None, True, -1, 1.5, 10**30, "", "x", "get_weather", "<tool_call>", "\x00", [], {}, [[]], ["x"], {"x": {}}),
    *(
        {"type": "function"},
        {"$ref": "#"},
        {"$ref": "#/properties/city"},
        {"anyOf": [{"$ref": "#"}]},
        WEATHER,
        [WEATHER],
    ),
)


def spoilt(value, rng):
    """The value with one part of it replaced, removed or renamed."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return rng.choice(JUNK)
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    changed = value.copy()
    if isinstance(changed, dict) and rng.random() < 0.1:
        changed[rng.choice(("name", "type", "mood"))] = changed.pop(key)
    else:
        changed[key] = spoilt(value[key], rng)
    return changed


def test_spoilt_tools_and_histories_are_answered_or_refused(server):
    """Only 200 and 400, and a 400 names a field."""
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "x"}'}}
    base = {
        "messages": [
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "r"},
            {"role": "tool", "content": "rain", "tool_call_id": "c"},
            {"role": "user", "content": script(reply="x" + CALL)},
        ],
        "tools": [WEATHER, CLOCK],
        "tool_choice": {"type": "function", "function": {"name": "clock"}},
        "parallel_tool_calls": False,
        "include_reasoning": True,
        "speculation": {"k": 1},
        "max_tokens": 20,
    }

    async def story():
        seen = set()
        async with aiohttp.ClientSession() as http:
            for seed in range(400):
                rng = random.Random(seed)
                body = base
                for _ in range(rng.randrange(1, 3)):
                    body = spoilt(body, rng)
                async with http.post(server.v1 + "/chat/completions", json=body) as response:
                    answer = await response.json()
                    seen.add(response.status)
                    assert response.status in (200, 400), (seed, body, answer)
                    assert response.status == 200 or answer["error"]["message"]
        assert seen == {200, 400}

    asyncio.run(story())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice.function.name"),
        ({"tool_choice": "required", "extra_body": {"add_generation_prompt": False}}, "add_generation_prompt"),
    ],
)
def test_refusals_name_the_field(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "x", **fields)
    assert caught.value.param == param
