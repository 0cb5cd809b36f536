"""Answers as the Responses API gives them: items of output, or the events that build them."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from pilotfish.server.answer import shown_parts, usage_of
from pilotfish.server.calls.parts import Call, Said
from pilotfish.server.calls.tools import input_of
from pilotfish.server.chat.answer import ChatFormat, ChatLogprob
from pilotfish.server.errors import ApiError
from pilotfish.server.generation import Choice, Piece, ShownToken
from pilotfish.server.plan import GenerationPlan
from pilotfish.server.protocol import encode
from pilotfish.server.responses.request import Reasoning, ResponsesRequest, TextConfig, TextFormat
from pilotfish.server.responses.tools import ToolPlace, places

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] = []


class ReasoningText(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class Message(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: str = "assistant"
    status: Status
    content: list[OutputText]


class Thought(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """There are no summaries here: the reasoning itself is the content."""

    id: str
    status: Status
    summary: list[Any] = []
    content: list[ReasoningText]


class FunctionCall(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str
    status: Status


class CustomCall(Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a tool that takes a text, which is `input` as it stands."""

    id: str
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    input: str
    status: Status


Item = Message | Thought | FunctionCall | CustomCall


class InputDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Struct, frozen=True):
    reasoning_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ErrorDetail(Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: str


class Response(Struct, frozen=True, kw_only=True):
    """The answer, and what was asked for where the API repeats it. `seed` is ours."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool = False
    error: ErrorDetail | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any] = {}
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: Reasoning
    seed: int
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: TextConfig
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: str = "disabled"
    usage: Usage | None = None


class InputTokens(Struct, frozen=True):
    """The answer of /v1/responses/input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


# -- events --------------------------------------------------------------------------------------------------------


class _Event(Struct, frozen=True, kw_only=True):
    type: str
    sequence_number: int


class ResponseEvent(_Event, frozen=True, kw_only=True):
    """`response.created`, `.in_progress`, `.completed`, `.incomplete`, `.failed`."""

    response: Response


class ItemEvent(_Event, frozen=True, kw_only=True):
    """`response.output_item.added`, `.done`."""

    output_index: int
    item: Item


class PartEvent(_Event, frozen=True, kw_only=True):
    """`response.content_part.added`, `.done`."""

    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class TextEvent(_Event, frozen=True, kw_only=True):
    """`response.output_text.delta`, `.done` and `response.reasoning_text.delta`, `.done`."""

    item_id: str
    output_index: int
    content_index: int = 0
    delta: str | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[ChatLogprob] | msgspec.UnsetType = msgspec.UNSET


class ArgumentsEvent(_Event, frozen=True, kw_only=True):
    """`response.function_call_arguments.delta`, `.done`."""

    item_id: str
    output_index: int
    name: str | msgspec.UnsetType = msgspec.UNSET
    delta: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class InputEvent(_Event, frozen=True, kw_only=True):
    """`response.custom_tool_call_input.delta`, `.done`."""

    item_id: str
    output_index: int
    delta: str | msgspec.UnsetType = msgspec.UNSET
    input: str | msgspec.UnsetType = msgspec.UNSET


Event = ResponseEvent | ItemEvent | PartEvent | TextEvent | ArgumentsEvent | InputEvent
EVENTS = (ResponseEvent, ItemEvent, PartEvent, TextEvent, ArgumentsEvent, InputEvent)
AnyEvent = TypeVar("AnyEvent", bound=_Event)


# -- the format ----------------------------------------------------------------------------------------------------


class _Open(Struct):
    """The item of text that is being written."""

    kind: Literal["content", "reasoning"]
    id: str
    text: list[str]


class ResponsesFormat:
    """Builds items from the parts of the one choice; a stream tells each step, numbered. `keep` gets whole items.

    Log-probabilities, as `told` writes them, are those of the answer's first text.
    """

    heartbeat = b": waiting\n\n"
    end = b""

    def __init__(
        self,
        request: ResponsesRequest,
        plan: GenerationPlan,
        told: ChatFormat,
        keep: Callable[[Item], None] = lambda item: None,
    ) -> None:
        self._request = request
        self._plan = plan
        self._told = told
        self._keep = keep
        self._tokens: list[ShownToken] = []
        self._num_told = 0
        self._places = places(request.tools or [])
        self._numbers = itertools.count()
        self._items: list[Item] = []
        self._open: _Open | None = None

    def event(self, chunk: Struct) -> bytes:
        return f"event: {chunk.type}\ndata: ".encode() + encode(chunk) + b"\n\n"  # type: ignore[attr-defined]

    def failure(self, error: ApiError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = self._response("failed", error=ErrorDetail(code, error.message))
        return self.event(self._response_event("failed", response))

    def opening(self, choices: Sequence[Choice]) -> list[Event]:
        response = self._response("in_progress")
        return [self._response_event(step, response) for step in ("created", "in_progress")]

    def chunks(self, choice: Choice, piece: Piece) -> list[Event]:
        events: list[Event] = []
        if choice.answer_start is not None and not self._items_of_answer():
            self._tokens += [token for token in piece.tokens if token.start >= choice.answer_start]
        for part in shown_parts(piece.parts, self._plan):
            if isinstance(part, Call):
                events += self._close("completed") + self._call(part)
            elif isinstance(part, Said):
                events += self._say(part)
        return events

    def closing(self, choices: Sequence[Choice]) -> list[Event]:
        events, status = self._finish(choices[0].finish_reason)
        return [*events, self._response_event(status, self._response(status, choices))]

    def whole(self, pieces: Sequence[Piece], choices: Sequence[Choice]) -> Response:
        self.chunks(choices[0], pieces[0])
        _, status = self._finish(pieces[0].finish_reason)
        return self._response(status, choices)

    def _finish(self, finish_reason: str | None) -> tuple[list[Event], Status]:
        """Closes the last item. An answer of nothing, or of thought alone, still has a message: clients look for it."""
        status: Status = "incomplete" if finish_reason == "length" else "completed"
        events: list[Event] = []
        told = self._open is not None and self._open.kind == "content"
        told = told or any(isinstance(item, Message | FunctionCall | CustomCall) for item in self._items)
        if status == "completed" and not told:
            events = self._say(Said("content", ""))
        return [*events, *self._close(status)], status

    def _items_of_answer(self) -> list[Item]:
        return [item for item in self._items if not isinstance(item, Thought)]

    def _logprobs(self, tokens: list[ShownToken]) -> list[ChatLogprob]:
        told = self._told.logprobs(tokens) if not self._items_of_answer() else None
        return told.content if told is not None else []

    def _first_logprobs(self, text: str) -> list[ChatLogprob]:
        """Log-probabilities of the tokens that begin in this text: a call's tokens may follow them."""
        spoken = [token for token in self._tokens if self._told.text_of(token).strip()]
        end = spoken[0].start + len(text) if spoken else 0
        return self._logprobs([token for token in self._tokens if token.start < end])

    # -- items -------------------------------------------------------------------------------------------------------

    def _say(self, part: Said) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open.kind != part.kind:
            events = self._close("completed")
            prefix = "rs_" if part.kind == "reasoning" else "msg_"
            self._open = _Open(part.kind, prefix + secrets.token_hex(12), [])
            item = self._item(self._open, "in_progress")
            events += [self._item_event("added", item), self._part_event("added", self._open)]
        self._open.text.append(part.text)
        return [*events, self._text_event("delta", self._open, delta=part.text)] if part.text else events

    def _close(self, status: Status) -> list[Event]:
        done = self._open
        if done is None:
            return []
        self._open = None
        item = self._item(done, status)
        events: list[Event] = [self._text_event("done", done, text="".join(done.text)), self._part_event("done", done)]
        events.append(self._item_event("done", item))
        self._done(item)
        return events

    def _call(self, call: Call) -> list[Event]:
        place = self._places.get(call.name, ToolPlace(call.name))
        named: dict[str, Any] = {"call_id": call.id, "name": place.name, "namespace": place.namespace or msgspec.UNSET}
        number = call.id.removeprefix("call_")
        item: FunctionCall | CustomCall
        if place.is_custom:
            text = input_of(call.arguments)
            item = CustomCall(id=f"ctc_{number}", **named, input="", status="in_progress")
            whole: Item = msgspec.structs.replace(item, input=text, status="completed")
            events: list[Event] = [
                self._item_event("added", item),
                self._input_event("delta", item.id, delta=text),
                self._input_event("done", item.id, input=text),
            ]
        else:
            item = FunctionCall(id=f"fc_{number}", **named, arguments="", status="in_progress")
            whole = msgspec.structs.replace(item, arguments=call.arguments, status="completed")
            events = [
                self._item_event("added", item),
                self._arguments_event("delta", item.id, delta=call.arguments),
                self._arguments_event("done", item.id, arguments=call.arguments, name=place.name),
            ]
        events.append(self._item_event("done", whole))
        self._done(whole)
        return events

    def _done(self, item: Item) -> None:
        self._items.append(item)
        self._keep(item)

    def _item(self, written: _Open, status: Status) -> Message | Thought:
        text = "".join(written.text)
        has_begun = status != "in_progress"
        if written.kind == "reasoning":
            return Thought(id=written.id, status=status, content=[ReasoningText(text)] if has_begun else [])
        said = [OutputText(text, logprobs=self._first_logprobs(text))] if has_begun else []
        return Message(id=written.id, status=status, content=said)

    # -- events ------------------------------------------------------------------------------------------------------

    def _numbered(self, kind: type[AnyEvent], step: str, **fields: Any) -> AnyEvent:
        return kind(type=f"response.{step}", sequence_number=next(self._numbers), **fields)

    def _response_event(self, step: str, response: Response) -> ResponseEvent:
        return self._numbered(ResponseEvent, step, response=response)

    def _item_event(self, step: str, item: Item) -> ItemEvent:
        return self._numbered(ItemEvent, f"output_item.{step}", output_index=len(self._items), item=item)

    def _part_event(self, step: str, written: _Open) -> PartEvent:
        text = "".join(written.text)
        part = ReasoningText(text) if written.kind == "reasoning" else OutputText(text)
        place = {"item_id": written.id, "output_index": len(self._items)}
        return self._numbered(PartEvent, f"content_part.{step}", **place, part=part)

    def _text_event(self, step: str, written: _Open, **text: str) -> TextEvent:
        place = {"item_id": written.id, "output_index": len(self._items)}
        if written.kind == "reasoning":
            return self._numbered(TextEvent, f"reasoning_text.{step}", **place, **text)
        fresh, self._num_told = self._tokens[self._num_told :], len(self._tokens)
        logprobs = self._logprobs(fresh) if step == "delta" else self._first_logprobs(text["text"])
        return self._numbered(TextEvent, f"output_text.{step}", **place, **text, logprobs=logprobs)

    def _arguments_event(self, step: str, item_id: str, **fields: str) -> ArgumentsEvent:
        place = {"item_id": item_id, "output_index": len(self._items)}
        return self._numbered(ArgumentsEvent, f"function_call_arguments.{step}", **place, **fields)

    def _input_event(self, step: str, item_id: str, **fields: str) -> InputEvent:
        place = {"item_id": item_id, "output_index": len(self._items)}
        return self._numbered(InputEvent, f"custom_tool_call_input.{step}", **place, **fields)

    # -- the response ------------------------------------------------------------------------------------------------

    def _response(self, status: Status, choices: Sequence[Choice] = (), error: ErrorDetail | None = None) -> Response:
        request, plan, sampling = self._request, self._plan, self._plan.sampling[0]
        return Response(
            id=plan.id,
            created_at=plan.created,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            error=error,
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            model=plan.model,
            output=list(self._items),
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning=request.reasoning or Reasoning(),
            seed=plan.seed,
            temperature=sampling.temperature,
            text=request.text or TextConfig(format=TextFormat(type="text")),
            tool_choice=request.tool_choice or "auto",
            tools=request.tools or [],
            top_p=sampling.top_p,
            usage=self._usage(choices) if choices else None,
        )

    def _usage(self, choices: Sequence[Choice]) -> Usage:
        usage = usage_of(self._plan, choices)
        details = usage.prompt_tokens_details
        return Usage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(details.cached_tokens, details.cache_write_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(usage.completion_tokens_details.reasoning_tokens),
            total_tokens=usage.total_tokens,
        )
