"""Pieces of text to the bodies of /v1/completions, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Struct

from pilotfish.engine.link.messages import TokenLogprob
from pilotfish.server.answer import LOWEST_LOGPROB, OpenAiFormat, usage_of
from pilotfish.server.generation import Choice, Piece, ShownToken
from pilotfish.server.protocol import Response


class CompletionLogprobs(Struct, frozen=True):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]] | None


class CompletionChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionFormat(OpenAiFormat):
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
