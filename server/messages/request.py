"""The body of POST /v1/messages as Anthropic's clients send it, and as the chat request that it means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from pilotfish.server import unused
from pilotfish.server.calls.tools import function_choice, function_tool, is_hosted, leave_out
from pilotfish.server.chat.request import ChatRequest
from pilotfish.server.chat.thinking import ThinkingField
from pilotfish.server.errors import BadRequest
from pilotfish.server.fields import FieldNotes
from pilotfish.server.messages.history import chat_messages
from pilotfish.server.plan import Context
from pilotfish.server.protocol import (
    MAX_STOPS,
    Body,
    CacheSalt,
    Count,
    Seed,
    SpeculationField,
    StopString,
    Temperature,
    TopK,
    TopP,
    without_trace,
)

Name = Annotated[str, Meta(min_length=1)]
KEEP_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
"""The edit of a context that changes nothing."""


class TextBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str
    cache_control: Any = None


class Message(Struct, frozen=True, kw_only=True):
    """What blocks there are is said in `history.py`."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]] | None = None


class Tool(Struct, frozen=True, kw_only=True):
    """A tool of the client's own. `strict` is a promise about the decoder; input is streamed as it comes anyway."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    cache_control: Any = None


class ToolChoice(Struct, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class JsonFormat(Struct, frozen=True, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountTokensRequest(Body, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens: everything of a request that makes its prompt."""

    REFUSED: ClassVar = {
        "compaction": (None,),
        "container": (None,),
        "diagnostics": (None,),
        "fallbacks": (None, []),
        "mcp_servers": (None, []),
        "thread": (None,),
    }
    UNUSED: ClassVar = unused.MESSAGES_FIELDS
    ALSO: ClassVar = frozenset({"output_format"})
    KINDS: ClassVar = {
        "system": "text",
        "tools": "custom: tools of the client's own, with an input_schema",
        "thinking": "enabled, adaptive or disabled",
    }

    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingField | None = None
    output_config: OutputConfig | None = None
    context_management: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @classmethod
    def prepare(cls, raw: dict[str, Any], notes: FieldNotes) -> dict[str, Any]:
        """Tools that run at Anthropic are left out; `output_format` is what the beta called `output_config.format`."""
        config = raw.get("output_config")
        if raw.get("output_format") is not None and isinstance(config, dict | None):
            raw = {**raw, "output_config": {"format": raw["output_format"], **(config or {})}}
        tools = raw.get("tools")
        if not isinstance(tools, list):
            return raw
        hosted = [isinstance(tool, dict) and is_hosted(tool.get("type")) for tool in tools]
        for tool, is_left_out in zip(tools, hosted, strict=True):
            if is_left_out:
                leave_out(tool["type"], notes)
        own = [tool for tool, is_left_out in zip(tools, hosted, strict=True) if not is_left_out]
        return {**raw, "tools": own}


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """POST /v1/messages. `seed` and `speculation` are ours, `cache_salt` is vLLM's."""

    max_tokens: Count
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    seed: Seed | None = None
    speculation: SpeculationField | None = None
    cache_salt: CacheSalt | None = None


RENAMED = (
    ("continue_final_message", "messages"),
    ("tool_choice.function", "tool_choice"),
    ("function.parameters", "input_schema"),
    (".function.", "."),
    ("thinking_token_budget", "thinking.budget_tokens"),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
)
"""What the core calls fields, and what they are called here."""


def chat_request(request: CountTokensRequest, context: Context) -> ChatRequest:
    """What is asked for, in the terms of chat completions. Raises BadRequest naming the field."""
    _check_context_management(request.context_management)
    fields: dict[str, Any] = {}
    if isinstance(request, MessagesRequest):
        fields = {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stop": request.stop_sequences,
            "stream": request.stream,
            "seed": request.seed,
            "speculation": without_trace(request.speculation),
            "cache_salt": request.cache_salt,
        }
    choice = request.tool_choice
    return ChatRequest(
        messages=[*_system(request.system), *chat_messages(request.messages, context.notes)],
        tools=[
            function_tool(tool.name, tool.description, tool.input_schema, tool.strict) for tool in request.tools or ()
        ],
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=_response_format(request.output_config),
        stream_tool_arguments=False,
        # what the assistant has begun, the model goes on with
        continue_final_message=_is_begun(request.messages[-1]),
        **_thinking(request, context),
        **fields,
    )


def _is_begun(last: Message) -> bool:
    """Text that the assistant has begun; after calls without results comes a new turn."""
    blocks = last.content if isinstance(last.content, list) else []
    return last.role == "assistant" and all(block.get("type") != "tool_use" for block in blocks)


def _system(given: str | list[TextBlock] | None) -> Iterator[dict[str, Any]]:
    """Blocks are a line each."""
    if given:
        text = given if isinstance(given, str) else "\n".join(block.text for block in given)
        yield {"role": "system", "content": text}


def _check_context_management(given: dict[str, Any] | None) -> None:
    edits = (given or {}).get("edits") or []
    if set(given or ()) - {"edits"} or not isinstance(edits, list):
        raise BadRequest("Want an object with 'edits'.", param="context_management")
    for index, edit in enumerate(edits):
        if edit != KEEP_THINKING:
            raise BadRequest(
                "Contexts are not edited here: want no edit, or clear_thinking_20251015 that keeps all.",
                param=f"context_management.edits[{index}]",
                code="unsupported_parameter",
            )


# -- tools, thinking, output ---------------------------------------------------------------------------------------


def _tool_choice(choice: ToolChoice | None) -> Any:
    if choice is None or choice.type in ("auto", "none"):
        return choice.type if choice is not None else None
    if choice.type == "any":
        return "required"
    if choice.name is None:
        raise BadRequest("Want the name of the tool.", param="tool_choice.name", code="missing_parameter")
    return function_choice(choice.name)


def _thinking(request: CountTokensRequest, context: Context) -> dict[str, Any]:
    """The API's own default is not to think."""
    thinking, effort = request.thinking, request.output_config.effort if request.output_config else None
    fields: dict[str, Any] = {"thinking": thinking, "reasoning_effort": effort}
    fields["chat_template_kwargs"] = request.chat_template_kwargs
    if thinking is None and effort is None:
        fields["enable_thinking"] = False
    on = thinking is not None and thinking.type != "disabled"
    if on and isinstance(request, MessagesRequest) and _is_begun(request.messages[-1]):
        raise BadRequest("An answer that is begun comes without thought: want it disabled.", param="thinking")
    return fields


def _response_format(config: OutputConfig | None) -> Any:
    if config is None or config.format is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": config.format.schema}}
