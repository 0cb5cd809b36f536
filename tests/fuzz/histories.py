"""Sessions of several turns through all three APIs: our own answers come back, changed as clients and relays change
them, and nothing that we have said ourselves is ever refused.

A session is drawn from its number alone. Each turn's answer is taken whole or put together from a stream as clients do.
"""

from __future__ import annotations

import copy
import http.client
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from serving import PATIENCE, script

Entry = dict[str, Any]

PARAMETERS = {"city": {"type": "string"}, "days": {"type": "integer"}, "more": {"type": "object"}}
SCHEMA = {"type": "object", "properties": PARAMETERS}
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nZürich €\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    '<parameter=more>\n{"a": [1, null, "\\ud83d\\ude00"]}\n</parameter>\n</function>\n</tool_call>'
)
REPLIES = (
    *("Hello € 😀.", "Hm.\n</think>\n\nYes.", "Only thought", "\n\n", "<|im_end|>", "</think>", "<think>a</think>b"),
    *(CALL, f"I look.\n{CALL}", f"{CALL}\n{CALL}", f"Hm.\n</think>\n\n{CALL}", f"Hm. {CALL}</think>Done."),
    CALL.replace("1, null", r'"\ud83d"'),
    *(CALL[:60], CALL[:90], CALL.replace("3", "[1, 2"), "<tool_call>\n<function=other>\n</function>\n</tool_call>"),
)
IMAGE_URL = "data:image/png;base64,AAAA"
IMAGES: dict[str, Entry] = {
    "chat": {"type": "image_url", "image_url": {"url": IMAGE_URL}},
    "responses": {"type": "input_image", "image_url": IMAGE_URL, "detail": "auto"},
    "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
}
TEXT_TYPES = {"chat": "text", "responses": "input_text", "messages": "text"}
FOREIGN: dict[str, Any] = {
    "provider_specific_fields": {"reasoning_content": "r", "citations": None},
    "thinking_blocks": [{"type": "thinking", "thinking": "r", "signature": "s"}],
    "reasoning_details": [{"type": "reasoning.text", "text": "r", "index": 0}],
    "extra_content": {"google": {"thought_signature": "x"}},
    "cache_control": {"type": "ephemeral", "ttl": "5m"},
    "id": "x_1",
    "timestamp": 1700000000,
    "metadata": {"a": [1]},
    "annotations": [],
    "audio": None,
    "refusal": None,
    "function_call": None,
    "index": 0,
    "parsed": {"a": 1},
}
"""Fields that clients and relays have been seen to add to what they send back."""
SPOILT = ('{"city": "Zür', "[1]", '"x"', "", "null", "{" * 300, r'{"a": "\ud800"}', '{"a": NaN}', None, [1], 7, {})
STRANGE: dict[str, tuple[Entry, ...]] = {
    "chat": ({"type": "thinking", "thinking": "r"}, {"type": "refusal", "refusal": "No."}, {"type": "tool_reference"}),
    "responses": ({"type": "refusal", "refusal": "No."}, {"type": "reasoning_text", "text": "r"}),
    "messages": ({"type": "redacted_thinking", "data": "x"}, {"type": "server_tool_use", "id": "s", "name": "n"}),
}
STRANGE_ITEMS: tuple[Entry, ...] = (
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
    {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
    {"type": "local_shell_call_output", "call_id": "c", "output": "a"},
    {"type": "item_reference", "id": "msg_unknown"},
    {"type": "reasoning", "summary": [], "encrypted_content": "x"},
)


# -- the three APIs ------------------------------------------------------------------------------------------------


class Api(ABC):
    """How one API is asked, and how its clients put an answer into their history."""

    name = ""
    path = ""

    @abstractmethod
    def ask(self, history: list[Entry], rng: random.Random) -> Entry: ...

    @abstractmethod
    def keep(self, answer: Any) -> list[Entry]:
        """The answer as it goes back, and results of what it called."""

    @abstractmethod
    def from_events(self, events: list[Any]) -> Any:
        """What a client makes of a stream."""


class Chat(Api):
    name, path = "chat", "/v1/chat/completions"

    def ask(self, history: list[Entry], rng: random.Random) -> Entry:
        body: Entry = {"messages": history, "max_tokens": rng.choice([3, 60, 300]), "tools": [self.tool()]}
        body["chat_template_kwargs"] = {"enable_thinking": rng.random() < 0.5}
        return body

    def tool(self) -> Entry:
        return {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}

    def keep(self, answer: Any) -> list[Entry]:
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        return [message, *({"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in calls)]

    def from_events(self, events: list[Any]) -> Any:
        message: Entry = {"role": "assistant", "content": ""}
        calls: dict[int, Entry] = {}
        for delta in (choice["delta"] for event in events for choice in event["choices"]):
            message["content"] += delta.get("content") or ""
            if delta.get("reasoning_content"):
                message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
            for piece in delta.get("tool_calls") or []:
                call = calls.setdefault(piece["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
                call["id"] = piece.get("id") or call.get("id")
                call["function"]["name"] += piece["function"].get("name") or ""
                call["function"]["arguments"] += piece["function"].get("arguments") or ""
        if calls:
            message["tool_calls"] = list(calls.values())
        return {"choices": [{"message": message}]}


class Responses(Api):
    name, path = "responses", "/v1/responses"

    def ask(self, history: list[Entry], rng: random.Random) -> Entry:
        body: Entry = {"input": history, "max_output_tokens": rng.choice([3, 60, 300])}
        body["tools"] = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
        body["reasoning"] = {"effort": rng.choice(["none", "minimal", "low", "high"]), "summary": "auto"}
        if rng.random() < 0.5:
            body["instructions"] = "Be brief."
        return body

    def keep(self, answer: Any) -> list[Entry]:
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "rain"} for call in calls]
        return [*answer["output"], *results]

    def from_events(self, events: list[Any]) -> Any:
        return {"output": [event["item"] for event in events if event["type"] == "response.output_item.done"]}


class Messages(Api):
    name, path = "messages", "/v1/messages"

    def ask(self, history: list[Entry], rng: random.Random) -> Entry:
        body: Entry = {"model": "scripted", "messages": history, "max_tokens": rng.choice([3, 60, 300])}
        body["tools"] = [{"name": "weather", "input_schema": SCHEMA}]
        if rng.random() < 0.7:
            body["thinking"] = rng.choice([{"type": "adaptive"}, {"type": "disabled"}])
        if rng.random() < 0.5:
            body["system"] = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        return body

    def keep(self, answer: Any) -> list[Entry]:
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "rain"} for call in calls]
        said = {"role": "assistant", "content": answer["content"]}
        return [said, {"role": "user", "content": results}] if results else [said]

    def from_events(self, events: list[Any]) -> Any:
        blocks: list[Entry] = []
        texts: dict[int, str] = {}
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(dict(event["content_block"]))
            elif event["type"] == "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                for name in ("text", "thinking", "signature"):
                    if name in delta:
                        block[name] = block.get(name, "") + delta[name]
                texts[event["index"]] = texts.get(event["index"], "") + delta.get("partial_json", "")
        for index, text in texts.items():
            if text:
                blocks[index]["input"] = json.loads(text)
        return {"content": blocks}


APIS: tuple[Api, ...] = (Chat(), Responses(), Messages())


# -- what clients and relays do to a history -------------------------------------------------------------------------


def _objects(value: Any) -> Iterator[Entry]:
    """All objects of a history but those of the model's own making."""
    if isinstance(value, dict):
        yield value
        for name, inner in value.items():
            if name not in ("input", "arguments", "parameters", "logprobs"):
                yield from _objects(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _objects(inner)


def add_field(history: list[Entry], api: Api, rng: random.Random) -> None:
    target, name = rng.choice(list(_objects(history))), rng.choice(sorted(FOREIGN))
    target.setdefault(name, copy.deepcopy(FOREIGN[name]))


def spoil_arguments(history: list[Entry], api: Api, rng: random.Random) -> None:
    names = ("arguments", "input") if api.name == "messages" else ("arguments",)
    holders = [(holder, name) for holder in _objects(history) for name in names if name in holder]
    if holders:
        holder, name = rng.choice(holders)
        holder[name] = rng.choice(SPOILT)


def show_image(history: list[Entry], api: Api, rng: random.Random) -> None:
    """In an earlier turn, or in a tool's result."""
    parts = [copy.deepcopy(IMAGES[api.name]), {"type": TEXT_TYPES[api.name], "text": "what is it?"}]
    results = [part for part in _objects(history) if part.get("type") in ("tool_result", "function_call_output")]
    results += [message for message in history if message.get("role") == "tool"]
    if results and rng.random() < 0.5:
        result = rng.choice(results)
        result["output" if "output" in result else "content"] = parts
    elif users := [message for message in history[:-1] if message.get("role") == "user"]:
        user = rng.choice(users)
        content = user["content"]
        text = [{"type": TEXT_TYPES[api.name], "text": content}] if isinstance(content, str) else content
        user["content"] = [*text, *parts]


def add_system(history: list[Entry], api: Api, rng: random.Random) -> None:
    history.insert(rng.randrange(len(history)), {"role": "system", "content": "Mind the time."})


def as_parts(history: list[Entry], api: Api, rng: random.Random) -> None:
    for message in history:
        if isinstance(message.get("content"), str) and rng.random() < 0.5:
            own = "output_text" if api.name == "responses" and message["role"] == "assistant" else TEXT_TYPES[api.name]
            message["content"] = [{"type": own, "text": message["content"]}]


def drop_field(history: list[Entry], api: Api, rng: random.Random) -> None:
    names = ("id", "status", "signature", "reasoning_content", "reasoning", "refusal", "annotations", "tool_call_id")
    holders = [(holder, name) for holder in _objects(history) for name in names if name in holder]
    if holders:
        holder, name = rng.choice(holders)
        del holder[name]


def empty_field(history: list[Entry], api: Api, rng: random.Random) -> None:
    answers = [message for message in history if message.get("role") in ("assistant", "tool")]
    if answers:
        rng.choice(answers)["content"] = rng.choice([None, [], ""])


def add_strange_part(history: list[Entry], api: Api, rng: random.Random) -> None:
    answers = [message for message in history if message.get("role") == "assistant"]
    if api.name == "responses" and rng.random() < 0.7:
        history.insert(rng.randrange(len(history)), copy.deepcopy(rng.choice(STRANGE_ITEMS)))
    elif answers:
        answer = rng.choice(answers)
        content = answer.get("content") or []
        own = [{"type": TEXT_TYPES[api.name], "text": content}] if isinstance(content, str) else list(content)
        answer["content"] = [*own, copy.deepcopy(rng.choice(STRANGE[api.name]))]


def lose_entry(history: list[Entry], api: Api, rng: random.Random) -> None:
    """A result that never came, or an answer that was cut out to save room."""
    if len(history) > 2:
        del history[rng.randrange(1, len(history) - 1)]


def break_off(history: list[Entry], api: Api, rng: random.Random) -> None:
    """A text of null, or a call that ended before its name: servers have left both."""
    answers = [entry for entry in history if entry.get("role") == "assistant" or entry.get("type") == "function_call"]
    holders = [holder for answer in answers for holder in _objects(answer)]
    places = [
        (holder, name) for holder in holders for name in ("text", "thinking", "name", "call_id") if name in holder
    ]
    if places:
        holder, name = rng.choice(places)
        holder[name] = None


MUTATIONS: tuple[Callable[[list[Entry], Api, random.Random], None], ...] = (
    *(add_field, add_field, spoil_arguments, show_image, add_system),
    *(as_parts, drop_field, empty_field, add_strange_part, lose_entry, break_off),
)


# -- sessions ------------------------------------------------------------------------------------------------------


def run_session(port: int, seed: int) -> int:
    """How many turns it had. Raises AssertionError for an answer that is none, with the session's number and body."""
    rng = random.Random(seed)
    api = rng.choice(APIS)
    history: list[Entry] = []
    turns = rng.randrange(2, 5)
    for turn in range(turns):
        asked = f"{rng.choice(['Hi', 'And now?', '😀'])} {script(reply=rng.choice(REPLIES), runs=[rng.choice([1, 4])])}"
        history = copy.deepcopy([*history, {"role": "user", "content": asked}])
        if turn:
            for _ in range(rng.randrange(4)):
                rng.choice(MUTATIONS)(history, api, rng)
        body = api.ask(history, rng)
        stream = rng.random() < 0.5
        status, text = _post(port, api.path, {**body, "stream": True} if stream else body)
        assert status == 200, f"session {seed}: {status} {text[:500]!r} for {json.dumps(body)[:4000]}"
        answer = api.from_events(_events(text)) if stream else json.loads(text)
        history += api.keep(answer)
    return turns


def _post(port: int, path: str, body: Entry) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _events(text: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
