"""Bodies in the documented forms of agents and relays, turn by turn: none meets a 400."""

import asyncio
import json

import aiohttp
import pytest
from serving import script

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
