"""The body of POST /v1/messages as Anthropic's clients send it, and as the chat request that it means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from pilotfish.server import unused
from pilotfish.server.calls.tools import function_choice, function_tool
from pilotfish.server.chat.history import lead_with_system
from pilotfish.server.chat.request import ChatRequest
from pilotfish.server.errors import BadRequest
from pilotfish.server.plan import Context
from pilotfish.server.protocol import (
    MAX_STOPS,
    Body,
    Count,
    PositiveCount,
    Seed,
    SpeculationField,
    StopString,
    Temperature,
    TopK,
    TopP,
)

Name = Annotated[str, Meta(min_length=1)]
KEEP_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
"""The edit of a context that changes nothing."""


class TextBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str
    cache_control: Any = None


class ThinkingBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """Thinking is not signed here, so no signature is checked."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: Name
    input: dict[str, Any]
    cache_control: Any = None


class ToolResultBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class Message(Struct, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


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


class Thinking(Struct, frozen=True, kw_only=True):
    """`omitted`: thought, but not shown."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


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
    KINDS: ClassVar = {
        "content": "text, thinking, tool_use or tool_result",
        "system": "text",
        "tools": "custom: tools of the client's own, with an input_schema",
        "thinking": "enabled, adaptive or disabled",
    }

    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """POST /v1/messages. `seed` and `speculation` are ours."""

    max_tokens: PositiveCount
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    seed: Seed | None = None
    speculation: SpeculationField | None = None


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
            "speculation": request.speculation,
        }
    choice = request.tool_choice
    return ChatRequest(
        messages=lead_with_system(_messages(request), context.files.chat_template),
        tools=[function_tool(tool.name, tool.description, tool.input_schema) for tool in request.tools or ()],
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=_response_format(request.output_config),
        # what the assistant has begun, the model goes on with
        continue_final_message=request.messages[-1].role == "assistant",
        **_thinking(request, context),
        **fields,
    )


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


# -- messages ------------------------------------------------------------------------------------------------------


def _messages(request: CountTokensRequest) -> Iterator[dict[str, Any]]:
    if request.system:
        yield {"role": "system", "content": _text(request.system)}
    for index, message in enumerate(request.messages):
        where = f"messages[{index}]"
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _assistant(message.content, where)
        else:
            yield from _user(message, message.content, where)


def _text(content: str | list[TextBlock] | None) -> str:
    """Blocks are a line each; what the model wrote itself is put together as it was."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())


def _assistant(blocks: list[Block], where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    for index, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            message["content"] += block.text
        elif isinstance(block, ThinkingBlock):
            message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": block.input}
            message["tool_calls"].append({"id": block.id, "type": "function", "function": function})
        else:
            raise _misplaced("tool_result", "user", f"{where}.content[{index}]")
    return message


def _user(message: Message, blocks: list[Block], where: str) -> Iterator[dict[str, Any]]:
    """Results are messages of their own, text around them stays in order."""
    said: list[str] = []
    for index, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            said.append(block.text)
        elif isinstance(block, ToolResultBlock) and message.role == "user":
            if said:
                yield {"role": "user", "content": "\n".join(said)}
                said = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
        else:
            kind = "tool_result" if isinstance(block, ToolResultBlock) else "assistant's block"
            role = "user" if isinstance(block, ToolResultBlock) else "assistant"
            raise _misplaced(kind, role, f"{where}.content[{index}]")
    if said or not blocks:
        yield {"role": message.role, "content": "\n".join(said)}


def _misplaced(kind: str, role: str, where: str) -> BadRequest:
    return BadRequest(f"Want a {kind} only in a message of role {role!r}.", param=where, code="invalid_value")


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
    """The API's own default is not to think, and a model that has no switch for it does as it always does."""
    thinking = request.thinking
    on = thinking is not None and thinking.type != "disabled"
    variables = context.files.chat_template.variables if context.files.chat_template else frozenset()
    fields: dict[str, Any] = {}
    if "enable_thinking" in variables:
        fields["chat_template_kwargs"] = {"enable_thinking": on}
    if on and request.messages[-1].role == "assistant":
        raise BadRequest("An answer that is begun comes without thought: want it disabled.", param="thinking")
    if thinking is not None and on:
        fields["include_reasoning"] = thinking.display != "omitted"
        if thinking.budget_tokens is not None and context.files.parses_reasoning:
            fields["thinking_token_budget"] = thinking.budget_tokens
        elif thinking.budget_tokens is not None:
            context.notes.unused(unused.BUDGET)
    effort = request.output_config.effort if request.output_config else None
    if effort is not None and "reasoning_effort" in variables:
        fields["reasoning_effort"] = effort
    elif effort is not None:
        context.notes.unused(unused.EFFORT)
    return fields


def _response_format(config: OutputConfig | None) -> Any:
    if config is None or config.format is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": config.format.schema}}
