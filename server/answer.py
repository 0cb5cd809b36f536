"""Pieces of text to OpenAI's response bodies, whole or in chunks, one formatter an endpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET

from pilotfish.engine.link.messages import TokenLogprob
from pilotfish.server.calls.parts import Part, Said, merge
from pilotfish.server.errors import ApiError
from pilotfish.server.generation import Choice, Piece, ShownToken
from pilotfish.server.plan import GenerationPlan
from pilotfish.server.protocol import (
    PromptTokensDetails,
    Response,
    ResponseMetrics,
    SpeculationMetrics,
    TokensDetails,
    TracedToken,
    Usage,
    encode,
)
from pilotfish.server.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity; a token that a filter has ruled out gets this."""


def usage_of(plan: GenerationPlan, choices: Sequence[Choice]) -> Usage:
    prompt = sum(len(entry.token_ids) for entry in plan.prompts)
    completion = sum(choice.num_tokens for choice in choices)
    accepted = sum(choice.num_accepted for choice in choices)
    rejected = sum(choice.num_drafted for choice in choices) - accepted
    reasoning = sum(choice.num_reasoning_tokens for choice in choices)
    return Usage(
        prompt, completion, prompt + completion, cached_of(plan, choices), TokensDetails(accepted, rejected, reasoning)
    )


def cached_of(plan: GenerationPlan, choices: Sequence[Choice]) -> PromptTokensDetails:
    """What is known so far."""
    least: dict[int, int] = {}
    for choice in choices:
        if choice.num_cached_tokens is not None:
            prompt = choice.index // plan.n
            least[prompt] = min(choice.num_cached_tokens, least.get(prompt, choice.num_cached_tokens))
    written = sum(max(0, plan.prompts[prompt].num_kept - cached) for prompt, cached in least.items())
    return PromptTokensDetails(sum(least.values()), written)


def metrics_of(plan: GenerationPlan, choices: Sequence[Choice]) -> ResponseMetrics:
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


class PromptLogprob(msgspec.Struct, frozen=True):
    """vLLM's names."""

    logprob: float
    rank: int | None
    decoded_token: str


def prompt_logprobs_of(
    entries: Sequence[TokenLogprob], wanted: int, tokenizer: Tokenizer
) -> list[dict[str, PromptLogprob] | None]:
    """Log-probabilities of a prompt's tokens, by id: the n likeliest and the token itself; nothing comes before the
    first."""

    def shown(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(max(logprob, LOWEST_LOGPROB), rank, tokenizer.token_text(token_id))

    found: list[dict[str, PromptLogprob] | None] = [None]
    for entry in entries:
        own = {str(entry.token_id): shown(entry.token_id, entry.logprob, entry.rank)}
        top = entry.top[:wanted]
        found.append({str(id): shown(id, value, rank) for rank, (id, value) in enumerate(top, 1)} | own)
    return found


def trace_of(tokens: Sequence[ShownToken]) -> list[TracedToken]:
    return [
        TracedToken(
            text=token.text,
            round=token.round,
            origin="grammar" if token.forced else "draft" if token.draft else "trunk",
            draft=token.draft or None,
        )
        for token in tokens
    ]


def join(pieces: Sequence[Piece]) -> Piece:
    """The pieces of one choice as one."""
    last = pieces[-1]
    return Piece(
        merge(part for piece in pieces for part in piece.parts),
        [token for piece in pieces for token in piece.tokens],
        last.finish_reason,
        last.stop_reason,
    )


def shown_parts(parts: Sequence[Part], plan: GenerationPlan) -> list[Part]:
    """What the client sees, neighbours of one kind as one."""
    return merge(
        part for part in parts if plan.include_reasoning or not isinstance(part, Said) or part.kind == "content"
    )


class AnswerFormat(Protocol):
    """What the handlers need from an endpoint's shape. `heartbeat` is what a stream says while it has no news, `end`
    its last bytes unless it failed."""

    heartbeat: bytes
    end: bytes

    def opening(self, choices: Sequence[Choice]) -> Sequence[msgspec.Struct]:
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


class OpenAiFormat:
    """What the chunks and the wholes of both of OpenAI's older endpoints share."""

    object = ""
    chunk_object = ""
    heartbeat = b": waiting\n\n"
    end = b"data: [DONE]\n\n"

    def __init__(self, plan: GenerationPlan, tokenizer: Tokenizer, fingerprint: str) -> None:
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
        """A chunk of one choice, or before any text."""
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

    def _trace(self, piece: Piece) -> list[TracedToken] | msgspec.UnsetType:
        return trace_of(piece.tokens) if self._plan.traces else UNSET

    def _prompt_logprobs(self, choice: Choice) -> list[dict[str, PromptLogprob] | None] | msgspec.UnsetType:
        wanted = self._plan.prompt_logprobs
        return UNSET if wanted is None else prompt_logprobs_of(choice.prompt_logprobs, wanted, self._tokenizer)

    def _top(self, entry: TokenLogprob) -> list[tuple[int, float]]:
        return [(token_id, max(value, LOWEST_LOGPROB)) for token_id, value in entry.top[: self._num_top]]
