"""The body of POST /v1/responses, and the chat request that it means."""

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
from pilotfish.server.protocol import Body, PositiveCount, Seed, SpeculationField, Temperature, TopP

Name = Annotated[str, Meta(min_length=1)]
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""What may be asked for of items that never come, and reasoning for OpenAI's eyes only: ours is shown as it is."""


class InputText(Struct, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    text: str


class OutputText(Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str


class Refusal(Struct, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    refusal: str


class ReasoningText(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(Struct, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    text: str


Part = InputText | OutputText | Refusal


class MessageItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """What has a role needs no type. `id` and `status` are those of an earlier answer."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    id: str | None = None
    status: str | None = None


class FunctionCallItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    call_id: str
    name: Name
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionOutputItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str | list[Part]
    id: str | None = None
    status: str | None = None


class ReasoningItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """Its content is what was thought; without it the summary is."""

    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: str | None = None


Item = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem


class FunctionTool(Struct, frozen=True, kw_only=True):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Struct, frozen=True, kw_only=True):
    type: Literal["function"]
    name: str


class Reasoning(Struct, frozen=True, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Struct, frozen=True, kw_only=True):
    """`name`, `description` and `strict` are of json_schema, whose schema is always kept to."""

    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, frozen=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class StreamOptions(Struct, frozen=True, kw_only=True):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Body, frozen=True, kw_only=True):
    """POST /v1/responses. `seed` and `speculation` are ours."""

    REFUSED: ClassVar = {
        "background": (None, False),
        "context_management": (None, []),
        "conversation": (None,),
        "max_tool_calls": (None,),
        "moderation": (None,),
        "previous_response_id": (None,),
        "prompt": (None,),
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled"),
    }
    UNUSED: ClassVar = unused.RESPONSES_FIELDS
    KINDS: ClassVar = {
        "input": "message, function_call, function_call_output or reasoning",
        "content": "input_text, output_text or refusal",
        "output": "input_text, output_text or refusal",
        "tools": "function",
        "format": "text, json_object or json_schema",
    }

    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: PositiveCount | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    speculation: SpeculationField | None = None

    @classmethod
    def prepare(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """An item with a role and no type is a message."""
        items = raw.get("input")
        if not isinstance(items, list):
            return raw
        untyped = [isinstance(item, dict) and "role" in item and "type" not in item for item in items]
        return {
            **raw,
            "input": [{**item, "type": "message"} if bare else item for item, bare in zip(items, untyped, strict=True)],
        }


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
    _check_include(request.include or [], context)
    choice = request.tool_choice
    return ChatRequest(
        model=request.model,
        messages=lead_with_system(_messages(request), context.files.chat_template),
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        tools=[function_tool(tool.name, tool.description, tool.parameters) for tool in request.tools or ()],
        tool_choice=function_choice(choice.name) if isinstance(choice, NamedFunction) else choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request.text),
        stream=request.stream,
        seed=request.seed,
        speculation=request.speculation,
        **_reasoning(request.reasoning, context),
    )


def _check_include(names: list[str], context: Context) -> None:
    for index, name in enumerate(names):
        if name not in INCLUDABLE:
            told = "Log-probabilities are told by /v1/chat/completions only." if name == LOGPROBS else "Unknown name."
            raise BadRequest(told, param=f"include[{index}]", code="unsupported_parameter")
    if names:
        context.notes.unused(unused.INCLUDE)


# -- input ---------------------------------------------------------------------------------------------------------


def _messages(request: ResponsesRequest) -> Iterator[dict[str, Any]]:
    """Neighbouring items of an answer become one message: thought, text, calls, in this order."""
    if request.instructions is not None:
        yield {"role": "system", "content": request.instructions}
    if isinstance(request.input, str):
        yield {"role": "user", "content": request.input}
        return
    turn: dict[str, Any] = {}
    for index, item in enumerate(request.input):
        if turn and _begins_another(item, turn):
            yield {"role": "assistant", "content": "", **turn}
            turn = {}
        if isinstance(item, ReasoningItem):
            turn["reasoning_content"] = _thought(item, f"input[{index}]")
        elif isinstance(item, FunctionCallItem):
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            turn["tool_calls"] = [*turn.get("tool_calls", ()), call]
        elif isinstance(item, FunctionOutputItem):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
        elif item.role == "assistant":
            turn["content"] = _text(item.content)
        else:
            yield {"role": item.role, "content": _text(item.content)}
    if turn:
        yield {"role": "assistant", "content": "", **turn}


def _begins_another(item: Item, turn: dict[str, Any]) -> bool:
    if isinstance(item, ReasoningItem):
        return True
    if isinstance(item, MessageItem):
        return item.role != "assistant" or "content" in turn or "tool_calls" in turn
    return isinstance(item, FunctionOutputItem)


def _text(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)


def _thought(item: ReasoningItem, where: str) -> str:
    if item.encrypted_content and not item.content and not item.summary:
        raise BadRequest(
            "Encrypted reasoning is another service's: want its content or its summary.",
            param=f"{where}.encrypted_content",
            code="unsupported_parameter",
        )
    if item.content:
        return "".join(part.text for part in item.content)
    return "\n\n".join(part.text for part in item.summary)


# -- tools, reasoning, format --------------------------------------------------------------------------------------


def _reasoning(given: Reasoning | None, context: Context) -> dict[str, Any]:
    """An effort is for the template to read; where it does not, one above none still says to think."""
    if given is None:
        return {}
    if given.summary is not None or given.generate_summary is not None:
        context.notes.unused(unused.SUMMARY)
    variables = context.files.chat_template.variables if context.files.chat_template else frozenset()
    if given.effort is None:
        return {}
    if "reasoning_effort" in variables or (given.effort == "none" and "enable_thinking" in variables):
        return {"reasoning_effort": given.effort}
    context.notes.unused(unused.EFFORT)
    return (
        {"chat_template_kwargs": {"enable_thinking": given.effort != "none"}} if "enable_thinking" in variables else {}
    )


def _response_format(config: TextConfig | None) -> Any:
    form = config.format if config is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": form.name or "answer", "schema": form.schema}}
