"""Messages to the text that a model reads, and to the rules by which its answer is read."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from pilotfish.engine.link.messages import Ready
from pilotfish.server import dialects
from pilotfish.server.calls.parser import END_THINK, THINK, AnswerRules
from pilotfish.server.calls.tools import Tools, read_tools
from pilotfish.server.chat.history import check_messages, place_system
from pilotfish.server.chat.thinking import ReasoningField, ThinkingField, Wish, template_values
from pilotfish.server.chat.volatile import without_volatile
from pilotfish.server.errors import BadRequest
from pilotfish.server.fields import FieldNotes
from pilotfish.server.model_files import ModelFiles
from pilotfish.server.protocol import MAX_LOGPROBS, Count, MaxTokens, SamplingFields, TokenizeRequest
from pilotfish.server.text.chat_template import ChatTemplate
from pilotfish.server.text.prompts import check_num_messages, count_tokens, most_counted


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions. Messages are checked one by one in `history.py`."""

    SAME_AS: ClassVar = dialects.CHAT
    ALSO: ClassVar = frozenset({"usage", *dialects.SWITCHES})

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    max_completion_tokens: MaxTokens | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingField | None = None
    reasoning: ReasoningField | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Count | None = None
    stop_in_reasoning: bool | None = None
    stream_tool_arguments: bool | None = None

    @classmethod
    def prepare(cls, raw: dict[str, Any], notes: FieldNotes) -> dict[str, Any]:
        return dialects.with_begun_answer(dialects.with_switches(dialects.with_usage(raw)))


class ChatPrompt(Struct, frozen=True):
    """The text, the rules where the answer has parts, what may be called, and what the text was made of."""

    text: str
    answer: AnswerRules | None
    tools: Tools | None
    messages: list[dict[str, Any]]
    values: dict[str, Any]


def chat_prompt(request: ChatRequest, files: ModelFiles, notes: FieldNotes, *, pieces: bool = False) -> ChatPrompt:
    """`pieces`: calls are told as they are written where the request says nothing. Raises BadRequest."""
    template = files.chat_template
    if template is None:
        raise BadRequest("This model has no chat template: use /v1/completions, or serve it with --chat-template.")
    tools = _tools(request, files, notes)
    messages = _messages(request, files, notes)
    own = template_values(request.chat_template_kwargs or {}, _wish(request), template.variables, notes)
    values = files.template_values | own
    text = _render(request, template, messages, tools, values)
    begun = messages[-1]["content"] if request.continue_final_message else None
    if tools is not None and tools.is_demanded:
        text = _close_thinking(text)
    return ChatPrompt(text, _answer_rules(request, files, text, tools, begun, pieces), tools, messages, values)


def tokens_of(request: TokenizeRequest, files: ModelFiles, ready: Ready, notes: FieldNotes) -> list[int]:
    """What /tokenize answers: the ids that the same text or messages would be as a prompt. Raises BadRequest."""
    if (request.prompt is None) == (request.messages is None):
        raise BadRequest("Want either 'prompt' or 'messages'.", param="prompt", code="missing_parameter")
    if request.messages is None:
        for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(request, name) is not None:
                raise BadRequest(f"'{name}' wants 'messages'.", param=name)
        special = request.add_special_tokens is not False
        return count_tokens(request.prompt or "", files.tokenizer, ready, "prompt", add_special_tokens=special)
    if files.chat_template is None:
        raise BadRequest("This model has no chat template.", param="messages")
    check_num_messages(request.messages, most_counted(ready))
    messages, tools = _messages(request, files, notes), read_tools(request.tools, None, notes)
    values = files.template_values | (request.chat_template_kwargs or {})
    text = _render(request, files.chat_template, messages, tools, values)
    special = bool(request.add_special_tokens)
    return count_tokens(text, files.tokenizer, ready, "messages", add_special_tokens=special)


def _messages(request: ChatRequest | TokenizeRequest, files: ModelFiles, notes: FieldNotes) -> list[dict[str, Any]]:
    """Checked. Only text that the assistant has begun is gone on with."""
    messages = check_messages(request.messages or [], notes)
    if files.volatile_lines == "drop":
        messages = without_volatile(messages, notes.on_volatile)
    messages = place_system(messages, files.chat_template, files.late_system)
    if request.continue_final_message:
        if messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]:
            raise BadRequest("Want a last message of the assistant, of text.", param="continue_final_message")
        if request.add_generation_prompt:
            raise BadRequest("Want no new turn: add_generation_prompt is true.", param="continue_final_message")
    return messages


def _render(
    request: ChatRequest | TokenizeRequest,
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: Tools | None,
    values: dict[str, Any] | None,
) -> str:
    return template.render(
        messages,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_last=bool(request.continue_final_message),
        tools=tools.shown if tools else None,
        values=values,
    )


def budget_of(request: ChatRequest) -> int | None:
    """The thinking budget, under whichever name it comes."""
    given = (
        request.thinking_token_budget,
        request.thinking.budget_tokens if request.thinking is not None else None,
        request.reasoning.max_tokens if request.reasoning is not None else None,
    )
    return next((budget for budget in given if budget is not None), None)


def shows_reasoning(request: ChatRequest) -> bool:
    hidden = request.include_reasoning is False
    hidden = hidden or (request.thinking is not None and request.thinking.display == "omitted")
    return not (hidden or (request.reasoning is not None and request.reasoning.exclude))


def _wish(request: ChatRequest) -> Wish:
    thinking, reasoning = request.thinking, request.reasoning
    says = (
        request.enable_thinking,
        thinking.type != "disabled" if thinking is not None else None,
        reasoning.enabled if reasoning is not None else None,
    )
    effort = request.reasoning_effort or (reasoning.effort if reasoning is not None else None)
    on = next((said for said in says if said is not None), None)
    return Wish(on=on, budget=budget_of(request), effort=effort)


def _tools(request: ChatRequest, files: ModelFiles, notes: FieldNotes) -> Tools | None:
    """What may be called. Tools that must not be are not shown to the model either."""
    tools = read_tools(request.tools, request.tool_choice, notes)
    if tools is None:
        return None
    template = files.chat_template
    if not files.parses_tool_calls or template is None or "tools" not in template.variables:
        raise BadRequest("This model's chat template has no tools that are known here.", param="tools")
    new_turn = request.add_generation_prompt is not False and not request.continue_final_message
    if tools.is_demanded and not new_turn:
        raise BadRequest("A call can only be demanded in a new turn.", param="add_generation_prompt")
    return tools


def _answer_rules(
    request: ChatRequest, files: ModelFiles, text: str, tools: Tools | None, begun: str | None, pieces: bool
) -> AnswerRules | None:
    """None where the answer has no parts to tell apart. `begun` is its beginning where that stands in the messages."""
    if tools is None and not files.parses_reasoning:
        return None
    thinking: Literal["none", "look", "open"] = "none"
    if files.parses_reasoning and begun is not None:
        thinking = "open" if begun.rfind(THINK) > begun.rfind(END_THINK) else "none"
    elif files.parses_reasoning and (tools is None or not tools.is_demanded):
        thinking = "open" if _is_thinking(text) else "look"
    return AnswerRules(
        thinking=thinking,
        tools=tools.parameters if tools else None,
        single=request.parallel_tool_calls is False,
        pieces=bool(request.stream)
        and (pieces if request.stream_tool_arguments is None else request.stream_tool_arguments),
    )


def _is_thinking(text: str) -> bool:
    """The prompt ends inside an empty thinking block."""
    return text.rstrip().endswith(THINK)


def _close_thinking(text: str) -> str:
    """A call that is demanded comes without thought: the block that the template opened is closed again."""
    return text.rstrip() + f"\n\n{END_THINK}\n\n" if _is_thinking(text) else text
