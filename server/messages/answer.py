"""Answers as Anthropic's clients read them: a message of blocks, or the events that build one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from pilotfish.server.answer import shown_parts, usage_of
from pilotfish.server.calls.parts import Call, Kind, Said
from pilotfish.server.errors import ApiError, ContextExceeded
from pilotfish.server.generation import Choice, Piece
from pilotfish.server.plan import GenerationPlan
from pilotfish.server.protocol import encode

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Usage(Struct, frozen=True, kw_only=True):
    """The prompt's tokens in three parts: read from the cache, written to it, and neither. Until it is known, when a
    stream begins before the prompt's turn has come, all of them are neither."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Text(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class Thinking(Struct, frozen=True, tag_field="type", tag="thinking"):
    """`signature`: clients want one to send thinking back; it is the message's id and is not checked."""

    thinking: str
    signature: str


class ToolUse(Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw


Block = Text | Thinking | ToolUse


class Message(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: str = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: Usage


class TokenCount(Struct, frozen=True):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


# -- events --------------------------------------------------------------------------------------------------------


class TextDelta(Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class InputDelta(Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


Delta = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class MessageStart(Struct, frozen=True, tag_field="type", tag="message_start"):
    message: Message


class BlockStart(Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class BlockDelta(Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: Delta


class BlockStop(Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class Stop(Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: Stop
    usage: Usage


class MessageStop(Struct, frozen=True, tag_field="type", tag="message_stop"):
    """The last event."""


class Ping(Struct, frozen=True, tag_field="type", tag="ping"):
    """While there is nothing else to say."""


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
EVENTS = (MessageStart, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop, Ping)


# -- errors --------------------------------------------------------------------------------------------------------

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class Reason(Struct, frozen=True):
    error_code: str


NO_THREADS = Reason("thread_unsupported_request")
"""Clients that let the server keep conversations go on without, told so in these words."""


class ErrorDetail(Struct, frozen=True):
    type: str
    message: str
    details: Reason | msgspec.UnsetType = msgspec.UNSET


class ErrorBody(Struct, frozen=True, tag_field="type", tag="error"):
    error: ErrorDetail


def error_body(error: ApiError) -> bytes:
    """There is no field for the parameter: the message begins with it, but for words that clients look for."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    if error.type == "overloaded_error":
        kind = error.type
    message = f"{error.param}: {error.message}" if error.param else error.message
    if isinstance(error, ContextExceeded):
        message = error.anthropic
    return encode(ErrorBody(ErrorDetail(kind, message, NO_THREADS if error.param == "thread" else msgspec.UNSET)))


# -- the format ----------------------------------------------------------------------------------------------------


class MessagesFormat:
    """One message: blocks follow each other, each opened, filled and closed."""

    heartbeat = b'event: ping\ndata: {"type":"ping"}\n\n'
    end = b""

    def __init__(self, plan: GenerationPlan) -> None:
        self._plan = plan
        self._index = 0
        self._kind: Kind | None = None

    def event(self, chunk: Struct) -> bytes:
        return f"event: {chunk.__struct_config__.tag}\ndata: ".encode() + encode(chunk) + b"\n\n"

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error_body(error) + b"\n\n"

    def opening(self, choices: Sequence[Choice]) -> list[Event]:
        usage = msgspec.structs.replace(self._usage(choices), output_tokens=0)
        return [MessageStart(self._message([], None, None, usage))]

    def chunks(self, choice: Choice, piece: Piece) -> list[Event]:
        events: list[Event] = []
        for part in shown_parts(piece.parts, self._plan):
            if isinstance(part, Call):
                events += self._close() + self._use(part)
            elif isinstance(part, Said):
                events += self._say(part)
        return events

    def closing(self, choices: Sequence[Choice]) -> list[Event]:
        stop = Stop(*_stop_of(choices[0]))
        return [*self._close(), MessageDelta(stop, self._usage(choices)), MessageStop()]

    def whole(self, pieces: Sequence[Piece], choices: Sequence[Choice]) -> Message:
        (piece,) = pieces
        blocks: list[Block] = []
        for part in shown_parts(piece.parts, self._plan):
            if isinstance(part, Call):
                blocks.append(_tool_use(part, part.arguments))
            elif isinstance(part, Said):
                blocks.append(Thinking(part.text, self._plan.id) if part.kind == "reasoning" else Text(part.text))
        return self._message(blocks, *_stop_of(choices[0]), self._usage(choices))

    def _message(self, content: list[Block], reason: StopReason | None, sequence: str | None, usage: Usage) -> Message:
        return Message(
            id=self._plan.id,
            model=self._plan.model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage,
        )

    def _usage(self, choices: Sequence[Choice]) -> Usage:
        usage = usage_of(self._plan, choices)
        details = usage.prompt_tokens_details
        return Usage(
            input_tokens=usage.prompt_tokens - details.cached_tokens - details.cache_write_tokens,
            cache_creation_input_tokens=details.cache_write_tokens,
            cache_read_input_tokens=details.cached_tokens,
            output_tokens=usage.completion_tokens,
        )

    def _say(self, part: Said) -> list[Event]:
        events: list[Event] = []
        thinking = part.kind == "reasoning"
        if self._kind != part.kind:
            events = self._close()
            self._kind = part.kind
            events.append(BlockStart(self._index, Thinking("", "") if thinking else Text("")))
        delta = ThinkingDelta(part.text) if thinking else TextDelta(part.text)
        return [*events, BlockDelta(self._index, delta)]

    def _use(self, call: Call) -> list[Event]:
        index = self._index
        self._index += 1
        return [
            BlockStart(index, _tool_use(call, "{}")),
            BlockDelta(index, InputDelta(call.arguments)),
            BlockStop(index),
        ]

    def _close(self) -> list[Event]:
        """Whatever is open; a block of thinking is signed first."""
        if self._kind is None:
            return []
        signed = [BlockDelta(self._index, SignatureDelta(self._plan.id))] if self._kind == "reasoning" else []
        events: list[Event] = [*signed, BlockStop(self._index)]
        self._kind = None
        self._index += 1
        return events


def _tool_use(call: Call, arguments: str) -> ToolUse:
    return ToolUse("toolu_" + call.id.removeprefix("call_"), call.name, msgspec.Raw(arguments.encode()))


def _stop_of(choice: Choice) -> tuple[StopReason, str | None]:
    if isinstance(choice.stop_reason, str) and choice.finish_reason == "stop" and not choice.looped:
        return "stop_sequence", choice.stop_reason
    reasons: dict[str | None, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use"}
    return reasons.get(choice.finish_reason, "end_turn"), None
