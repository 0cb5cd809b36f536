"""Pieces of text to the bodies of /v1/chat/completions, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Struct

from pilotfish.server.answer import LOWEST_LOGPROB, OpenAiFormat, usage_of
from pilotfish.server.calls.parts import Call, CallArguments, CallOpened, Part, Said
from pilotfish.server.calls.tools import input_of
from pilotfish.server.generation import Choice, Piece, ShownToken
from pilotfish.server.protocol import Response, TracedToken


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class CalledCustom(Struct, frozen=True, kw_only=True):
    """A tool of one text, and that text."""

    name: str
    input: str


class CalledFunction(Struct, frozen=True, kw_only=True):
    """`arguments` is JSON; in a stream, a piece of it."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class ToolCall(Struct, frozen=True, kw_only=True):
    """A tool call. In a stream only the first delta of an index has id, type and name."""

    index: int | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET
    function: CalledFunction | msgspec.UnsetType = msgspec.UNSET
    custom: CalledCustom | msgspec.UnsetType = msgspec.UNSET


class ChatMessage(Struct, frozen=True, kw_only=True):
    """`reasoning` and `reasoning_content` are two names for one thing: clients read either."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(Struct, frozen=True, kw_only=True):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    trace: list[TracedToken] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    trace: list[TracedToken] | msgspec.UnsetType = msgspec.UNSET


class ChatFormat(OpenAiFormat):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, choices: Sequence[Choice]) -> list[Response]:
        delta = ChatDelta(role="assistant", content="")
        chunks = [self._chunk([ChatChunkChoice(index=index, delta=delta)]) for index in range(self._plan.n)]
        if self._plan.return_token_ids:
            ids = self._plan.prompts[0].token_ids
            chunks[0] = msgspec.structs.replace(chunks[0], prompt_token_ids=ids)
        return chunks

    def chunks(self, choice: Choice, piece: Piece) -> list[Response]:
        """One chunk for each part; tokens come with the first, the end with the last, but never with a call's."""
        deltas = [delta for part in piece.parts for delta in self._deltas(part)]
        if piece.finish_reason is not None and deltas and deltas[-1].tool_calls is not UNSET:
            deltas.append(ChatDelta())
        if not deltas and not piece.tokens and piece.finish_reason is None:
            return []
        choices = [ChatChunkChoice(index=choice.index, delta=delta) for delta in deltas or [ChatDelta()]]
        choices[0] = msgspec.structs.replace(
            choices[0],
            logprobs=self.logprobs(piece.tokens) if piece.tokens else None,
            token_ids=self._token_ids(piece),
            trace=self._trace(piece),
        )
        choices[-1] = msgspec.structs.replace(
            choices[-1], finish_reason=piece.finish_reason, stop_reason=piece.stop_reason
        )
        return [self._chunk([entry], choice) for entry in choices]

    def _deltas(self, part: Part) -> list[ChatDelta]:
        """What a client sees of a part, if anything. A whole call comes as OpenAI's do: its name, then arguments."""
        if isinstance(part, Said):
            if part.kind == "content":
                return [ChatDelta(content=part.text)]
            shown = self._plan.include_reasoning
            return [ChatDelta(reasoning=part.text, reasoning_content=part.text)] if shown else []
        if isinstance(part, Call) and part.name in self._plan.custom_tools:
            return [ChatDelta(tool_calls=[msgspec.structs.replace(self._tool_call(part), index=part.index)])]
        if isinstance(part, Call):
            opened, arguments = CallOpened(part.index, part.id, part.name), CallArguments(part.index, part.arguments)
            return [*self._deltas(opened), *self._deltas(arguments)]
        if isinstance(part, CallOpened):
            function = CalledFunction(name=part.name, arguments="")
            return [ChatDelta(tool_calls=[ToolCall(index=part.index, id=part.id, type="function", function=function)])]
        return [ChatDelta(tool_calls=[ToolCall(index=part.index, function=CalledFunction(arguments=part.text))])]

    def _tool_call(self, call: Call) -> ToolCall:
        if call.name in self._plan.custom_tools:
            return ToolCall(
                id=call.id, type="custom", custom=CalledCustom(name=call.name, input=input_of(call.arguments))
            )
        return ToolCall(id=call.id, type="function", function=CalledFunction(name=call.name, arguments=call.arguments))

    def _message(self, parts: Sequence[Part]) -> ChatMessage:
        content = "".join(part.text for part in parts if isinstance(part, Said) and part.kind == "content")
        reasoning = "".join(part.text for part in parts if isinstance(part, Said) and part.kind == "reasoning")
        calls = [self._tool_call(part) for part in parts if isinstance(part, Call)]
        shown = reasoning if reasoning and self._plan.include_reasoning else UNSET
        return ChatMessage(
            content=content or (None if calls else ""),
            reasoning=shown,
            reasoning_content=shown,
            tool_calls=calls or UNSET,
        )

    def whole(self, pieces: Sequence[Piece], choices: Sequence[Choice]) -> Response:
        shown = [
            ChatChoice(
                index=index,
                message=self._message(piece.parts),
                logprobs=self.logprobs(piece.tokens),
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
                token_ids=self._token_ids(piece),
                trace=self._trace(piece),
            )
            for index, piece in enumerate(pieces)
        ]
        response = self._response(shown, usage_of(self._plan, choices), chunk=False)
        response = self._with_metrics(response, choices)
        if self._plan.return_token_ids:
            response = msgspec.structs.replace(response, prompt_token_ids=self._plan.prompts[0].token_ids)
        return msgspec.structs.replace(response, prompt_logprobs=self._prompt_logprobs(choices[0]))

    def logprobs(self, tokens: Sequence[ShownToken]) -> ChatLogprobs | None:
        """Those of tokens that have any; None where nobody asked for them."""
        if self._num_top is None:
            return None
        content = []
        for token in tokens:
            if token.logprob is not None:
                top = [TopLogprob(*self._shown(token_id, value)) for token_id, value in self._top(token.logprob)]
                value = max(token.logprob.logprob, LOWEST_LOGPROB)
                content.append(ChatLogprob(*self._shown(token.token_id, value), top_logprobs=top))
        return ChatLogprobs(content)

    def text_of(self, token: ShownToken) -> str:
        return self._tokenizer.token_text(token.token_id)

    def _shown(self, token_id: int, value: float) -> tuple[str, float, list[int]]:
        return self._tokenizer.token_text(token_id), value, list(self._tokenizer.bytes_of(token_id))
