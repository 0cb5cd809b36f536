"""Pieces of text to the bodies of /v1/completions, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Struct

from pilotfish.engine.link.messages import TokenLogprob
from pilotfish.server.answer import LOWEST_LOGPROB, OpenAiFormat, PromptLogprob, usage_of
from pilotfish.server.generation import Choice, Piece, ShownToken
from pilotfish.server.plan import GenerationPlan
from pilotfish.server.protocol import Response, TracedToken
from pilotfish.server.text.detokenize import Detokenizer
from pilotfish.server.text.prompts import Prompt
from pilotfish.server.text.tokenizer import Tokenizer


class CompletionLogprobs(Struct, frozen=True):
    """Log-probabilities by token. Nothing is known of an echoed prompt's first: null."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    trace: list[TracedToken] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET


class CompletionFormat(OpenAiFormat):
    object = chunk_object = "text_completion"

    def __init__(self, plan: GenerationPlan, tokenizer: Tokenizer, fingerprint: str) -> None:
        super().__init__(plan, tokenizer, fingerprint)
        self._echoed: set[int] = set()

    def opening(self, choices: Sequence[Choice]) -> list[Response]:
        if self._plan.echoes_logprobs:
            # the prompt goes out with them, when it has been read
            return []
        if not self._plan.return_token_ids and not any(prompt.text for prompt in self._plan.prompts):
            return []
        shown = []
        for index in range(len(self._plan.prompts) * self._plan.n):
            prompt = self._prompt(index)
            shown.append(
                CompletionChoice(
                    index=index,
                    text=prompt.text,
                    logprobs=None,
                    finish_reason=None,
                    prompt_token_ids=prompt.token_ids if self._plan.return_token_ids else UNSET,
                )
            )
        return [self._chunk([choice]) for choice in shown]

    def chunks(self, choice: Choice, piece: Piece) -> list[Response]:
        echo = []
        if self._plan.echoes_logprobs and choice.index not in self._echoed:
            self._echoed.add(choice.index)
            echo.append(self._chunk([self._echo(choice)], choice))
        return [*echo, self._chunk([self._choice(choice.index, piece, piece.text)], choice)]

    def _echo(self, choice: Choice) -> CompletionChoice:
        """A stream's prompt, with its log-probabilities."""
        prompt = self._prompt(choice.index)
        return CompletionChoice(
            index=choice.index,
            text=prompt.text,
            logprobs=self._prompt_part(choice),
            finish_reason=None,
            prompt_token_ids=prompt.token_ids if self._plan.return_token_ids else UNSET,
        )

    def _prompt(self, index: int) -> Prompt:
        return self._plan.prompts[index // self._plan.n]

    def whole(self, pieces: Sequence[Piece], choices: Sequence[Choice]) -> Response:
        shown: list[CompletionChoice] = []
        for index, piece in enumerate(pieces):
            prompt = self._prompt(index)
            choice = self._choice(index, piece, prompt.text + piece.text)
            logprobs = choice.logprobs
            if self._plan.echoes_logprobs and logprobs is not None:
                logprobs = _joined(self._prompt_part(choices[index]), logprobs)
            shown.append(
                msgspec.structs.replace(
                    choice,
                    logprobs=logprobs,
                    prompt_token_ids=prompt.token_ids if self._plan.return_token_ids else UNSET,
                    prompt_logprobs=self._prompt_logprobs(choices[index]),
                )
            )
        return self._with_metrics(self._response(shown, usage_of(self._plan, choices), chunk=False), choices)

    def _choice(self, index: int, piece: Piece, text: str) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(piece.tokens, len(self._prompt(index).text)),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=self._token_ids(piece),
            trace=self._trace(piece),
        )

    def _prompt_part(self, choice: Choice) -> CompletionLogprobs:
        """Log-probabilities of an echoed prompt."""
        ids, entries = self._prompt(choice.index).token_ids, choice.prompt_logprobs
        detokenizer, offsets, length = Detokenizer(self._tokenizer.token_bytes, frozenset()), [], 0
        for token_id in ids:
            offsets.append(length)
            length += len(detokenizer.push(token_id))
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[None, *(max(entry.logprob, LOWEST_LOGPROB) for entry in entries)],
            tokens=[self._tokenizer.token_text(token_id) for token_id in ids],
            top_logprobs=[None, *(self._top_texts(entry) for entry in entries)] if self._num_top else None,
        )

    def _logprobs(self, tokens: Sequence[ShownToken], offset: int) -> CompletionLogprobs | None:
        """`offset`: characters of the echoed prompt before."""
        if self._num_top is None:
            return None
        entries = [(token, token.logprob) for token in tokens if token.logprob is not None]
        return CompletionLogprobs(
            text_offset=[offset + token.start for token, _ in entries],
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


def _joined(first: CompletionLogprobs, rest: CompletionLogprobs) -> CompletionLogprobs:
    top = None
    if first.top_logprobs is not None and rest.top_logprobs is not None:
        top = first.top_logprobs + rest.top_logprobs
    return CompletionLogprobs(
        text_offset=first.text_offset + rest.text_offset,
        token_logprobs=first.token_logprobs + rest.token_logprobs,
        tokens=first.tokens + rest.tokens,
        top_logprobs=top,
    )
