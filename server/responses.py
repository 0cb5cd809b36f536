"""Pieces of text to OpenAI's response bodies, whole or in chunks, one formatter an endpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET

from pilotfish.engine.messages import TokenLogprob
from pilotfish.server.answer import CallArguments, CallOpened, Part, Said, merge
from pilotfish.server.errors import ApiError
from pilotfish.server.generation import Choice, Piece, ShownToken
from pilotfish.server.plan import Plan
from pilotfish.server.protocol import (
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    CompletionChoice,
    CompletionLogprobs,
    Response,
    ResponseMetrics,
    SpeculationMetrics,
    TokensDetails,
    ToolCall,
    TopLogprob,
    Usage,
    encode,
)
from pilotfish.server.tokenizer import Tokenizer
from pilotfish.server.whole_calls import Call, WholeCalls

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity; a token that a filter has ruled out gets this."""


def usage_of(plan: Plan, choices: Sequence[Choice]) -> Usage:
    prompt = sum(len(entry.token_ids) for entry in plan.prompts)
    completion = sum(choice.num_tokens for choice in choices)
    accepted = sum(choice.num_accepted for choice in choices)
    rejected = sum(choice.num_drafted for choice in choices) - accepted
    reasoning = sum(choice.num_reasoning_tokens for choice in choices)
    return Usage(prompt, completion, prompt + completion, TokensDetails(accepted, rejected, reasoning))


def metrics_of(plan: Plan, choices: Sequence[Choice]) -> ResponseMetrics:
    """Raw counts of all choices, as the metrics of the server count them."""
    rounds: Counter[int] = Counter()
    for choice in choices:
        rounds.update(choice.committed_per_round)
    total, num_tokens = rounds.total(), sum(size * count for size, count in rounds.items())
    return ResponseMetrics(
        SpeculationMetrics(
            k=plan.speculative_k,
            rounds=total,
            drafted=sum(choice.num_drafted for choice in choices),
            accepted=sum(choice.num_round_accepted for choice in choices),
            mean_acceptance_length=num_tokens / total if total else None,
            committed_per_round=[rounds[size] for size in range(1, max(rounds, default=0) + 1)],
        )
    )


def join(pieces: Sequence[Piece]) -> Piece:
    """The pieces of one choice as one."""
    last = pieces[-1]
    return Piece(
        merge(part for piece in pieces for part in piece.parts),
        [token for piece in pieces for token in piece.tokens],
        last.finish_reason,
        last.stop_reason,
    )


class Format(Protocol):
    """What the handlers need from an endpoint's shape. `heartbeat` is what a stream says while it has no news, `end`
    its last bytes unless it failed."""

    heartbeat: bytes
    end: bytes

    def opening(self) -> Sequence[msgspec.Struct]:
        """Chunks sent before any text."""

    def chunks(self, choice: Choice, piece: Piece) -> Sequence[msgspec.Struct]:
        """A piece of a stream."""

    def closing(self, choices: Sequence[Choice]) -> Sequence[msgspec.Struct]:
        """The last chunks, after all text."""

    def whole(self, pieces: Sequence[Piece], choices: Sequence[Choice]) -> msgspec.Struct:
        """The answer to a request without streaming; `pieces` in the order of the choices."""

    def event(self, chunk: msgspec.Struct) -> bytes:
        """A chunk as a server-sent event."""

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream whose status line is out."""


class _Base:
    object = ""
    chunk_object = ""
    heartbeat = b": waiting\n\n"
    end = b"data: [DONE]\n\n"

    def __init__(self, plan: Plan, tokenizer: Tokenizer, fingerprint: str) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint

    def _response(self, choices: list, usage: Usage | msgspec.UnsetType | None, *, chunk: bool) -> Response:
        return Response(
            id=self._plan.id,
            object=self.chunk_object if chunk else self.object,
            created=self._plan.created,
            model=self._plan.model,
            choices=choices,
            usage=usage,
            system_fingerprint=self._fingerprint,
            seed=self._plan.seed,
        )

    def _chunk(self, choices: list, of: Choice | None = None) -> Response:
        """Of one choice, or before any text."""
        usage: Usage | msgspec.UnsetType | None = None if self._plan.include_usage else UNSET
        if self._plan.include_usage and self._plan.continuous_usage:
            usage = usage_of(self._plan, [of] if of is not None else [])
        return self._response(choices, usage, chunk=True)

    def event(self, chunk: msgspec.Struct) -> bytes:
        return b"data: " + encode(chunk) + b"\n\n"

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def closing(self, choices: Sequence[Choice]) -> list[Response]:
        if not (self._plan.include_usage or self._plan.include_metrics):
            return []
        usage = usage_of(self._plan, choices) if self._plan.include_usage else UNSET
        return [self._with_metrics(self._response([], usage, chunk=True), choices)]

    def _with_metrics(self, response: Response, choices: Sequence[Choice]) -> Response:
        if not self._plan.include_metrics:
            return response
        return msgspec.structs.replace(response, metrics=metrics_of(self._plan, choices))

    @property
    def _num_top(self) -> int | None:
        return self._plan.sampling[0].logprobs

    def _token_ids(self, piece: Piece) -> list[int] | msgspec.UnsetType:
        return [token.token_id for token in piece.tokens] if self._plan.return_token_ids else UNSET

    def _top(self, entry: TokenLogprob) -> list[tuple[int, float]]:
        return [(token_id, max(value, LOWEST_LOGPROB)) for token_id, value in entry.top[: self._num_top]]


class CompletionFormat(_Base):
    object = chunk_object = "text_completion"

    def opening(self) -> list[Response]:
        if not self._plan.return_token_ids and not any(prompt.text for prompt in self._plan.prompts):
            return []
        choices = []
        for index in range(len(self._plan.prompts) * self._plan.n):
            prompt = self._plan.prompts[index // self._plan.n]
            choices.append(
                CompletionChoice(
                    index=index,
                    text=prompt.text,
                    logprobs=None,
                    finish_reason=None,
                    prompt_token_ids=prompt.token_ids if self._plan.return_token_ids else UNSET,
                )
            )
        return [self._chunk([choice]) for choice in choices]

    def chunks(self, choice: Choice, piece: Piece) -> list[Response]:
        return [self._chunk([self._choice(choice.index, piece, piece.text)], choice)]

    def whole(self, pieces: Sequence[Piece], choices: Sequence[Choice]) -> Response:
        shown: list[CompletionChoice] = []
        for index, piece in enumerate(pieces):
            prompt = self._plan.prompts[index // self._plan.n]
            choice = self._choice(index, piece, prompt.text + piece.text)
            if self._plan.return_token_ids:
                choice = msgspec.structs.replace(choice, prompt_token_ids=prompt.token_ids)
            shown.append(choice)
        return self._with_metrics(self._response(shown, usage_of(self._plan, choices), chunk=False), choices)

    def _choice(self, index: int, piece: Piece, text: str) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(piece.tokens),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=self._token_ids(piece),
        )

    def _logprobs(self, tokens: Sequence[ShownToken]) -> CompletionLogprobs | None:
        if self._num_top is None:
            return None
        entries = [(token, token.logprob) for token in tokens if token.logprob is not None]
        return CompletionLogprobs(
            text_offset=[token.start for token, _ in entries],
            token_logprobs=[max(entry.logprob, LOWEST_LOGPROB) for _, entry in entries],
            tokens=[self._tokenizer.token_text(token.token_id) for token, _ in entries],
            top_logprobs=[self._top_texts(entry) for _, entry in entries] if self._num_top else None,
        )

    def _top_texts(self, entry: TokenLogprob) -> dict[str, float]:
        """The n likeliest and the chosen token; of two ids with one text the likelier stays."""
        texts: dict[str, float] = {}
        for token_id, value in [*self._top(entry), (entry.token_id, max(entry.logprob, LOWEST_LOGPROB))]:
            texts.setdefault(self._tokenizer.token_text(token_id), value)
        return texts


class ChatFormat(_Base):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[Response]:
        delta = ChatDelta(role="assistant", content="")
        chunks = [self._chunk([ChatChunkChoice(index=index, delta=delta)]) for index in range(self._plan.n)]
        if self._plan.return_token_ids:
            ids = self._plan.prompts[0].token_ids
            chunks[0] = msgspec.structs.replace(chunks[0], prompt_token_ids=ids)
        return chunks

    def chunks(self, choice: Choice, piece: Piece) -> list[Response]:
        """One chunk for each part; tokens come with the first, the end with the last."""
        deltas = [delta for part in piece.parts if (delta := self._delta(part)) is not None]
        if not deltas and not piece.tokens and piece.finish_reason is None:
            return []
        choices = [ChatChunkChoice(index=choice.index, delta=delta) for delta in deltas or [ChatDelta()]]
        choices[0] = msgspec.structs.replace(
            choices[0],
            logprobs=self._logprobs(piece.tokens) if piece.tokens else None,
            token_ids=self._token_ids(piece),
        )
        choices[-1] = msgspec.structs.replace(
            choices[-1], finish_reason=piece.finish_reason, stop_reason=piece.stop_reason
        )
        return [self._chunk([entry], choice) for entry in choices]

    def _delta(self, part: Part) -> ChatDelta | None:
        """What a client sees of a part, if anything."""
        if isinstance(part, Said):
            if part.kind == "content":
                return ChatDelta(content=part.text)
            shown = self._plan.include_reasoning
            return ChatDelta(reasoning=part.text, reasoning_content=part.text) if shown else None
        if isinstance(part, CallOpened):
            function = CalledFunction(name=part.name, arguments="")
            return ChatDelta(tool_calls=[ToolCall(index=part.index, id=part.id, type="function", function=function)])
        if isinstance(part, CallArguments):
            return ChatDelta(tool_calls=[ToolCall(index=part.index, function=CalledFunction(arguments=part.text))])
        return None

    def _message(self, parts: Sequence[Part]) -> ChatMessage:
        """The parts as a whole; calls that broke off are text."""
        content = "".join(part.text for part in parts if isinstance(part, Said) and part.kind == "content")
        reasoning = "".join(part.text for part in parts if isinstance(part, Said) and part.kind == "reasoning")
        calls = _complete_calls(parts)
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
                logprobs=self._logprobs(piece.tokens),
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
                token_ids=self._token_ids(piece),
            )
            for index, piece in enumerate(pieces)
        ]
        response = self._response(shown, usage_of(self._plan, choices), chunk=False)
        response = self._with_metrics(response, choices)
        if self._plan.return_token_ids:
            response = msgspec.structs.replace(response, prompt_token_ids=self._plan.prompts[0].token_ids)
        return response

    def _logprobs(self, tokens: Sequence[ShownToken]) -> ChatLogprobs | None:
        if self._num_top is None:
            return None
        content = []
        for token in tokens:
            if token.logprob is not None:
                top = [TopLogprob(*self._shown(token_id, value)) for token_id, value in self._top(token.logprob)]
                value = max(token.logprob.logprob, LOWEST_LOGPROB)
                content.append(ChatLogprob(*self._shown(token.token_id, value), top_logprobs=top))
        return ChatLogprobs(content)

    def _shown(self, token_id: int, value: float) -> tuple[str, float, list[int]]:
        return self._tokenizer.token_text(token_id), value, list(self._tokenizer.bytes_of(token_id))


def _complete_calls(parts: Sequence[Part]) -> list[ToolCall]:
    return [
        ToolCall(id=part.id, type="function", function=CalledFunction(name=part.name, arguments=part.arguments))
        for part in WholeCalls().push(parts)
        if isinstance(part, Call)
    ]
