"""docs/api.md promises that no field is ignored silently: a stranger in any object is told, or refused by name."""

import asyncio
from copy import deepcopy

import aiohttp
from serving import script

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
USER = script(reply='{"a": "b"}')
TEXT = [{"type": "text", "text": USER}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a"}}
CUSTOM = {"type": "custom", "custom": {"name": "c", "format": GRAMMAR}}
CHAT = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "t"}]},
        {"role": "user", "content": TEXT},
    ],
    "tools": [FUNCTION, CUSTOM],
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    "stream_options": {"include_usage": True},
    "stream": True,
    "speculation": {"k": 1},
}
RESPONSES = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "t"},
        {"type": "custom_tool_call", "call_id": "2", "name": "c", "input": "t"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "t"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": USER}]},
    ],
    "tools": [
        {"type": "function", "name": "f", "parameters": SCHEMA},
        {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "regex", "definition": "a"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "reasoning": {"summary": "auto"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    "speculation": {"k": 1},
}
MESSAGES = {
    "max_tokens": 99,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": TEXT}, *TEXT]},
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "disabled"},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "speculation": {"k": 1},
}
BODIES = {
    "/v1/chat/completions": [CHAT, {**CHAT, "tool_choice": {"type": "function", "function": {"name": "f"}}}],
    "/v1/responses": [RESPONSES, {**RESPONSES, "tool_choice": {"type": "custom", "name": "c"}}],
    "/v1/messages": [MESSAGES],
    "/v1/completions": [{"prompt": USER, "structured_outputs": {"regex": "a"}, "speculation": {"k": 1}}],
}
ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
BODIES["/v1/chat/completions"].append({**CHAT, "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}})
FREE = {"parameters", "schema", "input_schema", "input"}
"""Objects that are the caller's own: schemas, and what a tool was called with."""


def places(value, path=()):
    """Paths of all objects whose fields are ours."""
    if isinstance(value, dict):
        yield path
        for name, inner in value.items():
            if not (name in FREE and isinstance(inner, dict)):
                yield from places(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*path, index))


def with_stranger(body, path):
    changed = deepcopy(body)
    place = changed
    for step in path:
        place = place[step]
    place["moodiness"] = "x"
    return changed


def test_a_stranger_in_any_object_is_told_or_refused(server):
    async def story():
        silent, tried = [], 0
        async with aiohttp.ClientSession() as http:
            for endpoint, bodies in BODIES.items():
                for body in bodies:
                    async with http.post(server.url + endpoint, json=body) as response:
                        text = await response.text()
                        assert response.status == 200 and "X-Ignored-Fields" not in response.headers, (endpoint, text)
                    for path in places(body):
                        tried += 1
                        async with http.post(server.url + endpoint, json=with_stranger(body, path)) as response:
                            text = await response.text()
                            told = "moodiness" in response.headers.get("X-Ignored-Fields", "")
                            if not told and not (response.status == 400 and "moodiness" in text):
                                silent.append((endpoint, path, response.status, text[:100]))
        assert not silent and tried > 80

    asyncio.run(story())
