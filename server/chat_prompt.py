"""Messages to the text that a model reads, and to the rules by which its answer is read."""

from __future__ import annotations

from typing import Any, Literal

from pilotfish.server.answer import CALL, END_THINK, FUNCTION, THINK, AnswerRules
from pilotfish.server.chat_template import ChatTemplate
from pilotfish.server.errors import BadRequest
from pilotfish.server.messages import check_messages
from pilotfish.server.model_files import ModelFiles
from pilotfish.server.prompts import encode
from pilotfish.server.protocol import ChatRequest, TokenizeRequest
from pilotfish.server.tool_calls import Tools, read_tools


def chat_prompt(request: ChatRequest, files: ModelFiles, *, ignore_unknown: bool) -> tuple[str, AnswerRules | None]:
    """The text, and the rules where the answer has parts. Raises BadRequest naming the field."""
    template = files.chat_template
    if template is None:
        raise BadRequest("This model has no chat template: use /v1/completions, or serve it with --chat-template.")
    tools = _tools(request, files)
    text = template.render(
        check_messages(request.messages, ignore_unknown=ignore_unknown),
        add_generation_prompt=request.add_generation_prompt is not False,
        tools=tools.shown if tools else None,
        values=_template_values(request, template),
    )
    answer = _answer_rules(request, files, text, tools)
    if answer is not None and answer.forced:
        text = _close_thinking(text) + answer.forced
    return text, answer


async def tokens_of(request: TokenizeRequest, files: ModelFiles, *, ignore_unknown: bool) -> list[int]:
    """What /tokenize answers: the ids that the same text or messages would be as a prompt. Raises BadRequest."""
    if (request.prompt is None) == (request.messages is None):
        raise BadRequest("Want either 'prompt' or 'messages'.", param="prompt", code="missing_parameter")
    if request.messages is None:
        for name in ("tools", "add_generation_prompt", "chat_template_kwargs"):
            if getattr(request, name) is not None:
                raise BadRequest(f"'{name}' wants 'messages'.", param=name)
        special = request.add_special_tokens is not False
        return await encode(request.prompt or "", files.tokenizer, add_special_tokens=special)
    if files.chat_template is None:
        raise BadRequest("This model has no chat template.", param="messages")
    tools = read_tools(request.tools, None)
    text = files.chat_template.render(
        check_messages(request.messages, ignore_unknown=ignore_unknown),
        add_generation_prompt=request.add_generation_prompt is not False,
        tools=tools.shown if tools else None,
        values=request.chat_template_kwargs,
    )
    return await encode(text, files.tokenizer, add_special_tokens=bool(request.add_special_tokens))


def _template_values(request: ChatRequest, template: ChatTemplate) -> dict[str, Any]:
    """Keyword values for the template; an effort that it does not read is refused, but none is a switch many have."""
    values = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort == "none" and "enable_thinking" in template.variables:
        values.setdefault("enable_thinking", False)
    elif request.reasoning_effort is not None:
        if "reasoning_effort" not in template.variables:
            raise BadRequest("This model's chat template has no reasoning_effort.", param="reasoning_effort")
        values.setdefault("reasoning_effort", request.reasoning_effort)
    return values


def _tools(request: ChatRequest, files: ModelFiles) -> Tools | None:
    """What may be called. Tools that must not be are not shown to the model either."""
    tools = read_tools(request.tools, request.tool_choice)
    if tools is None:
        return None
    template = files.chat_template
    if not files.parses_tool_calls or template is None or "tools" not in template.variables:
        raise BadRequest("This model's chat template has no tools that are known here.", param="tools")
    if tools.choice.mode in ("required", "named") and request.add_generation_prompt is False:
        raise BadRequest("A call can only be demanded in a new turn.", param="add_generation_prompt")
    return tools


def _answer_rules(request: ChatRequest, files: ModelFiles, text: str, tools: Tools | None) -> AnswerRules | None:
    """None where the answer has no parts to tell apart."""
    if tools is None and not files.parses_reasoning:
        return None
    forced, named = "", tools.choice.named if tools is not None else ""
    if tools is not None and tools.choice.mode in ("required", "named"):
        forced = f"{CALL}\n{FUNCTION}" + (f"{named}>\n" if named else "")
    thinking: Literal["none", "look", "open"] = "none"
    if files.parses_reasoning and not forced:
        thinking = "open" if _is_thinking(text) else "look"
    return AnswerRules(
        thinking=thinking,
        tools=tools.schemas if tools else None,
        forced=forced,
        named=named,
        single=request.parallel_tool_calls is False,
    )


def _is_thinking(text: str) -> bool:
    """The prompt ends inside an empty thinking block."""
    return text.rstrip().endswith(THINK)


def _close_thinking(text: str) -> str:
    """A call that is demanded comes without thought: the block that the template opened is closed again."""
    return text.rstrip() + f"\n\n{END_THINK}\n\n" if _is_thinking(text) else text
