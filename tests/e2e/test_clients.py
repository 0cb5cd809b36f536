"""Bodies in the forms of agents and relays, turn by turn: none meets a 400.

Those of /v1/responses and /v1/messages are cut from what openai-agents 0.24, Codex 0.171 and Claude Code 2.1.197 sent
here, those of chat are in the documented forms.
"""

import asyncio
import json

import aiohttp
import pytest
from byte_model import TEMPLATE, write_model
from serving import script, serving_in_thread

CALL = "<tool_call>\n<function=read_file>\n<parameter=path>\na.py\n</parameter>\n</function>\n</tool_call>"
STRICT_TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file.",
        "parameters": {
            "properties": {"path": {"title": "Path", "type": "string"}},
            "required": ["path"],
            "title": "read_file_args",
            "type": "object",
            "additionalProperties": False,
        },
        "strict": True,
    },
}
PARTS = [{"type": "text", "text": "You edit code.", "cache_control": {"type": "ephemeral"}}]

AGENTS_SDK = {
    "tools": [STRICT_TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "store": True,
    "metadata": {"trace": "t"},
    "prompt_cache_retention": "in_memory",
    "top_p": 1.0,
}
LITELLM = {
    "tools": [STRICT_TOOL],
    "user": "team-a",
    "temperature": 0,
    "max_tokens": 400,
    "n": 1,
    "stop": None,
    "functions": None,
    "response_format": None,
    "seed": None,
    "stream": False,
}
EDITOR = {"temperature": 0, "stream": True, "reasoning_effort": None, "max_completion_tokens": 400}


async def turn(http, server, body):
    async with http.post(server.v1 + "/chat/completions", json={"model": "scripted", **body}) as response:
        text = await response.text()
        assert response.status == 200, text
        if not body.get("stream"):
            return json.loads(text)["choices"][0]["message"]
        assert text.endswith("data: [DONE]\n\n")
        return assembled(json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2])


def assembled(chunks):
    """A message as clients keep it: what the deltas add up to, index and empty fields included."""
    message = {"role": "assistant", "content": None, "tool_calls": [], "refusal": None, "annotations": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] = (
                (message["content"] or "") + delta["content"] if "content" in delta else message["content"]
            )
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    message["tool_calls"].append(call)
                else:
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize("body", [AGENTS_SDK, LITELLM, EDITOR], ids=["agents-sdk", "litellm", "editor"])
def test_a_conversation(server, body):
    async def story():
        messages = [{"role": "system", "content": PARTS}]
        headers = {"User-Agent": "x", "X-Stainless-Lang": "python", "Accept": "application/json"}
        async with aiohttp.ClientSession(headers=headers) as http:
            for reply, result in (("I read it.\n" + CALL, "print()"), (CALL + "\n" + CALL, "x"), ("It prints.", None)):
                messages.append({"role": "user", "content": [{"type": "text", "text": script(reply=reply, runs=[3])}]})
                message = await turn(http, server, {**body, "messages": messages})
                messages.append(message)
                for call in message.get("tool_calls") or ():
                    assert json.loads(call["function"]["arguments"]) == {"path": "a.py"}
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        assert messages[-1]["content"] == "It prints."
        assert len([m for m in messages if m["role"] == "tool"]) == (3 if body.get("tools") else 0)

    asyncio.run(story())


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    """With a template that wants its one system message first, as Qwen's do."""
    folder = write_model(tmp_path_factory.mktemp("model"))
    guard = "{% if message.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    template = folder / "strict.jinja"
    template.write_text("{% for message in messages %}" + guard + "{% endfor %}" + TEMPLATE)
    with serving_in_thread(folder, files={"chat_template": template}) as running:
        yield running


async def post(http, url, body, headers=()):
    async with http.post(url, json=body, headers=dict(headers)) as response:
        text = await response.text()
        assert response.status == 200, text
        return text


def events_of(text):
    """The data of a stream of typed events."""
    return [json.loads(event.split("data: ")[1]) for event in text.split("\n\n")[:-1]]


def block(text, **fields):
    return {"type": "text", "text": text, **fields}


CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE_CODE = {
    "model": "scripted",
    "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
    "max_tokens": 2000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
    "system": [
        block("x-anthropic-billing-header: cc_version=2.1.197;"),
        block("You are an agent.", **CACHED),
        block("Be brief.", **CACHED),
    ],
    "tools": [
        {
            "name": "read_file",
            "description": "Reads a file.",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"path": {"description": "Where", "type": "string"}},
                "required": ["path"],
                "additionalProperties": False,
            },
        }
    ],
}
CLAUDE_CODE_HEADERS = {
    "Accept": "application/json",
    "User-Agent": "claude-cli/2.1.197 (external, sdk-cli)",
    "X-Claude-Code-Session-Id": "s",
    "X-Stainless-Retry-Count": "0",
    "X-Stainless-Timeout": "600",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,mid-conversation-system-2026-04-07",
    "anthropic-dangerous-direct-browser-access": "true",
    "anthropic-version": "2023-06-01",
    "x-api-key": "k",
    "x-app": "cli",
}


def test_claude_code(strict):
    url = strict.v1 + "/messages?beta=true"

    async def story():
        messages = [
            {
                "role": "user",
                "content": [block("<system-reminder>\nToday.\n</system-reminder>\n"), block("", **CACHED)],
            },
            {"role": "system", "content": "Available agent types for the Agent tool: none"},
        ]
        async with aiohttp.ClientSession(headers=CLAUDE_CODE_HEADERS) as http:
            for reply in (f"Hm.</think>\n\nI read.\n{CALL}", f"Hm.</think>{CALL}{CALL}", "So.</think>It prints."):
                messages[0]["content"][1]["text"] = script(reply=reply, runs=[4])
                blocks = []
                for event in events_of(await post(http, url, {**CLAUDE_CODE, "messages": messages})):
                    if event["type"] == "content_block_start":
                        blocks.append({**event["content_block"], "json": ""})
                    elif event["type"] == "content_block_delta":
                        (name, value), *_ = [(k, v) for k, v in event["delta"].items() if k != "type"]
                        name = "json" if name == "partial_json" else name
                        blocks[-1][name] += value
                for made in blocks:
                    written = made.pop("json")
                    if made["type"] == "tool_use":
                        made["input"] = json.loads(written)
                messages.append({"role": "assistant", "content": blocks})
                results = [
                    {"type": "tool_result", "tool_use_id": made["id"], "content": "print()", "is_error": False}
                    for made in blocks
                    if made["type"] == "tool_use"
                ]
                if results:
                    messages.append({"role": "user", "content": [*results[:-1], {**results[-1], **CACHED}]})
                    messages.append({"role": "system", "content": "The task tools haven't been used recently."})
        assert [made["type"] for made in messages[-1]["content"]] == ["thinking", "text"]
        assert sum(made["type"] == "tool_use" for m in messages for made in m["content"] if isinstance(made, dict)) == 3

    asyncio.run(story())


FLAT_TOOL = {"type": "function", **STRICT_TOOL["function"]}
SDK_RESPONSES = {
    "model": "scripted",
    "include": [],
    "instructions": "Be brief.",
    "metadata": {"trace": "t"},
    "parallel_tool_calls": True,
    "reasoning": {"effort": "low", "summary": "auto"},
    "store": True,
    "temperature": 0.1,
    "tools": [FLAT_TOOL],
}
CODEX = {
    "model": "scripted",
    "stream": True,
    "tools": [{**FLAT_TOOL, "strict": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "p",
    "client_metadata": {"x-codex-turn-metadata": "{}"},
}
DEVELOPER = [
    {"type": "message", "id": f"msg_{n}", "role": "developer", "content": [{"type": "input_text", "text": text}]}
    for n, text in enumerate(("You are an agent.", "<skills_instructions>"))
]


@pytest.mark.parametrize(("body", "lead"), [(SDK_RESPONSES, []), (CODEX, DEVELOPER)], ids=["agents-sdk", "codex"])
@pytest.mark.parametrize("stream", [False, True])
def test_agents_on_responses(strict, body, lead, stream):
    async def story():
        items = list(lead)
        async with aiohttp.ClientSession() as http:
            for reply in ("Hm.</think>I read it.\n" + CALL, CALL + CALL, "It prints."):
                content = [{"type": "input_text", "text": script(reply=reply, runs=[3])}]
                items.append({"type": "message", "role": "user", "content": content})
                text = await post(http, strict.v1 + "/responses", {**body, "stream": stream, "input": items})
                answer = events_of(text)[-1]["response"] if stream else json.loads(text)
                assert answer["status"] == "completed"
                items += answer["output"]
                for item in answer["output"]:
                    if item["type"] == "function_call":
                        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "print()"}
                        items.append(result)
        kinds = [item["type"] for item in items]
        assert kinds.count("function_call") == kinds.count("function_call_output") == 3
        # the second answer calls at once
        assert kinds.count("reasoning") == (2 if body is SDK_RESPONSES else 0)

    asyncio.run(story())
