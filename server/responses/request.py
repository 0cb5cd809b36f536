"""The body of POST /v1/responses, and the chat request that it means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from pilotfish.server import unused
from pilotfish.server.calls.tools import INPUT
from pilotfish.server.chat.history import newest
from pilotfish.server.chat.parts import text_of, thought_in
from pilotfish.server.chat.request import ChatRequest
from pilotfish.server.errors import BadRequest
from pilotfish.server.fields import FieldNotes
from pilotfish.server.plan import Context
from pilotfish.server.protocol import (
    MAX_LOGPROBS,
    Body,
    CacheSalt,
    PositiveCount,
    Seed,
    SpeculationField,
    Temperature,
    TopK,
    TopP,
    without_trace,
)
from pilotfish.server.responses.tools import chat_choice, chat_tools, flat_name

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        LOGPROBS,
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""What may be asked for: but for log-probabilities of items that never come, and reasoning for OpenAI's eyes only,
where ours is shown as it is."""


class MessageItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """What has a role needs no type; its parts are read as a chat's are. `id` and `status` are an earlier answer's."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]] | None = None
    phase: str | None = None
    id: str | None = None
    status: str | None = None


class FunctionCallItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    id: str | None = None
    status: str | None = None


class CustomCallItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    input: Any = None
    id: str | None = None
    status: str | None = None


class FunctionOutputItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"):
    call_id: str | None = None
    output: Any = None
    id: str | None = None
    status: str | None = None


class ReasoningItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What was thought: the content, or without one the summary."""

    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: str | None = None


class ItemReference(Struct, frozen=True, kw_only=True, tag_field="type", tag="item_reference"):
    """An item of an earlier answer, by its id."""

    id: str | None = None


Item = MessageItem | FunctionCallItem | CustomCallItem | FunctionOutputItem | ReasoningItem | ItemReference


ITEM_TYPES = frozenset(kind.__struct_config__.tag for kind in get_args(Item))
THOUGHT_FIELDS = frozenset({"type", "text"})
CALL_NAMES = frozenset({"type", "id", "call_id", "status"})
"""What an item of a call has beside what it was called with."""


class Reasoning(Struct, frozen=True, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Struct, frozen=True, kw_only=True):
    """`name`, `description` and `strict` are of json_schema. `strict`: a schema that no grammar holds is refused."""

    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class StreamOptions(Struct, frozen=True, kw_only=True):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Body, frozen=True, kw_only=True):
    """POST /v1/responses. `seed` and `speculation` are ours, `cache_salt` is vLLM's."""

    REFUSED: ClassVar = {
        "background": (None, False),
        "context_management": (None, []),
        "conversation": (None,),
        "moderation": (None,),
        "previous_response_id": (None,),
        "prompt": (None,),
    }
    UNUSED: ClassVar = unused.RESPONSES_FIELDS
    KINDS: ClassVar = {
        "input": "message, function_call, function_call_output or reasoning",
        "format": "text, json_object or json_schema",
    }

    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: PositiveCount | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    speculation: SpeculationField | None = None
    cache_salt: CacheSalt | None = None

    @classmethod
    def prepare(cls, raw: dict[str, Any], notes: FieldNotes) -> dict[str, Any]:
        """An item with a role and no type is a message, one of an id alone a reference; items of other services' tools
        become calls and results."""
        items = raw.get("input")
        if not isinstance(items, list):
            return raw
        read = (_known_item(item, f"input[{index}]", notes) for index, item in enumerate(items))
        return {**raw, "input": [item for item in read if item is not None]}


def _known_item(item: Any, where: str, notes: FieldNotes) -> Any:
    """The item as one of those that are read here; None for one that tells the model nothing, which is told."""
    if not isinstance(item, dict):
        return item
    kind = item.get("type")
    if kind is None and "role" in item:
        return {**item, "type": "message"}
    if kind is None and {name for name, value in item.items() if value is not None} == {"id"}:
        return {"id": item["id"], "type": "item_reference"}
    if not isinstance(kind, str) or kind in ITEM_TYPES:
        return item
    if kind == "custom_tool_call_output":
        return {**item, "type": "function_call_output"}
    notes.ignore(f"{where}.{kind}")
    call_id = item.get("call_id") or item.get("id")
    if not isinstance(call_id, str):
        return None
    if kind.endswith("_output"):
        return {"type": "function_call_output", "call_id": call_id, "output": item.get("output")}
    if kind.endswith("_call"):
        arguments = {name: value for name, value in item.items() if name not in CALL_NAMES}
        name = kind.removesuffix("_call")
        return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
    return None


RENAMED = (
    ("max_tokens", "max_output_tokens"),
    ("tool_choice.function", "tool_choice"),
    (".function.", "."),
    ("messages", "input"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
)
"""What the core calls fields, and what they are called here."""


def chat_request(request: ResponsesRequest, context: Context) -> ChatRequest:
    """What is asked for, in the terms of chat completions. Raises BadRequest naming the field."""
    logprobs = _wants_logprobs(request.include or [], context)
    if request.top_logprobs and not logprobs:
        raise BadRequest(f"'top_logprobs' wants {LOGPROBS} to be included.", param="top_logprobs")
    return ChatRequest(
        model=request.model,
        messages=list(_messages(request, _items(request.input, context), context.notes)),
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        tools=chat_tools(request.tools or [], context.notes),
        tool_choice=chat_choice(request.tool_choice, context.notes),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request.text),
        logprobs=logprobs,
        top_logprobs=request.top_logprobs if logprobs else None,
        stream=request.stream,
        seed=request.seed,
        speculation=without_trace(request.speculation),
        cache_salt=request.cache_salt,
        reasoning_effort=_effort(request.reasoning, context),
        chat_template_kwargs=request.chat_template_kwargs,
        stream_tool_arguments=False,
    )


def _wants_logprobs(names: list[str], context: Context) -> bool:
    """What else may be included is nothing here; unknown names are judged as those of fields are."""
    context.notes.check(dict.fromkeys(names, True), INCLUDABLE, "include")
    if INCLUDABLE.intersection(names) - {LOGPROBS}:
        context.notes.unused(unused.INCLUDE)
    return LOGPROBS in names


# -- input ---------------------------------------------------------------------------------------------------------


def _items(given: str | list[Item], context: Context) -> list[Item]:
    """References as what they refer to; what is not known, or no longer, is left out and told."""
    items: list[Item] = []
    for index, item in enumerate(given if isinstance(given, list) else ()):
        known = context.recall(item.id) if isinstance(item, ItemReference) and item.id else None
        if known is not None:
            items.append(msgspec.json.decode(known, type=Item))
        elif isinstance(item, ItemReference):
            context.notes.ignore(f"input[{index}].item_reference")
        else:
            items.append(item)
    return items


def _messages(request: ResponsesRequest, items: list[Item], notes: FieldNotes) -> Iterator[dict[str, Any]]:
    """Neighbouring items of an answer become one message: thought, text, calls, in this order."""
    if request.instructions is not None:
        yield {"role": "system", "content": request.instructions}
    if isinstance(request.input, str):
        yield {"role": "user", "content": request.input}
        return
    turn: dict[str, Any] = {}
    own = newest([_role(item) for item in items])
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if turn and _begins_another(item, turn):
            yield {"role": "assistant", "content": "", **turn}
            turn = {}
        if isinstance(item, ReasoningItem):
            turn["reasoning_content"] = _thought(item, where, notes)
        elif isinstance(item, FunctionCallItem | CustomCallItem):
            arguments = item.arguments if isinstance(item, FunctionCallItem) else {INPUT: item.input}
            function = {"name": item.name and flat_name(item.namespace, item.name), "arguments": arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            turn["tool_calls"] = [*turn.get("tool_calls", ()), call]
        elif isinstance(item, FunctionOutputItem):
            text = text_of(item.output, f"{where}.output", notes, past=True)
            yield {"role": "tool", "tool_call_id": item.call_id, "content": text}
        elif isinstance(item, MessageItem):
            past, answered = index != own, item.role == "assistant"
            text = text_of(item.content, f"{where}.content", notes, past=past or item.role != "user", own=answered)
            if answered:
                turn["content"] = text
            else:
                yield {"role": item.role, "content": text}
    if turn:
        yield {"role": "assistant", "content": "", **turn}


def _role(item: Item) -> str:
    if isinstance(item, MessageItem):
        return item.role
    return "tool" if isinstance(item, FunctionOutputItem) else "assistant"


def _begins_another(item: Item, turn: dict[str, Any]) -> bool:
    if isinstance(item, ReasoningItem):
        return True
    if isinstance(item, MessageItem):
        return item.role != "assistant" or "content" in turn or "tool_calls" in turn
    return isinstance(item, FunctionOutputItem)


def _thought(item: ReasoningItem, where: str, notes: FieldNotes) -> str:
    """Encrypted reasoning is another service's and cannot be read."""
    for part in ("content", "summary"):
        for index, entry in enumerate(getattr(item, part) or ()):
            notes.check(entry, THOUGHT_FIELDS, f"{where}.{part}[{index}]")
    if item.content:
        return "".join(map(thought_in, item.content))
    if item.encrypted_content and not item.summary:
        notes.ignore(f"{where}.encrypted_content")
    return "\n\n".join(map(thought_in, item.summary or ()))


# -- tools, reasoning, format --------------------------------------------------------------------------------------


def _effort(given: Reasoning | None, context: Context) -> str | None:
    if given is not None and (given.summary is not None or given.generate_summary is not None):
        context.notes.unused(unused.SUMMARY)
    return given.effort if given is not None else None


def _response_format(config: TextConfig | None) -> Any:
    form = config.format if config is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object", "schema": form.schema}
    named = {"name": form.name or "answer", "schema": form.schema, "strict": form.strict}
    return {"type": "json_schema", "json_schema": named}
