"""Grammars: which tokens may come next, for every row of a window. llguidance does the parsing; no torch here.

A row's mask is a function of the committed tokens and the drafts before it, so what speculation writes is what plain
decoding under the same grammar writes. Bits are packed 32 to an int32, bit i of word w for token 32 w + i, as the
library writes them.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer, gbnf_to_lark
from llguidance.numpy import fill_next_token_bitmask

from pilotfish.engine.errors import RequestError
from pilotfish.engine.link.messages import JSON_OPTIONS, Grammar

MIN_FORCED = 2
"""Fewer forced tokens than this are left to the head: it often knows one, and then more after it."""


class Constraint:
    """One request's grammar and how far its text is in it. `error` says why it cannot go on."""

    def __init__(self, matcher: LLMatcher, after_token_id: int | None):
        self._matcher, self._after = matcher, after_token_id
        self._active = after_token_id is None
        self.error: str | None = None

    def mask_rows(self, drafts: list[int], bits: np.ndarray) -> None:
        """Fills bits int32 [len(drafts) + 1, words]: row j allows what may follow the committed tokens and j drafts.

        Rows after a draft that the grammar forbids allow everything: that draft cannot be accepted, nor they be read.
        """
        bits[:] = -1
        active, consumed = self._active, 0
        for row in range(len(drafts) + 1):
            if active:
                fill_next_token_bitmask(self._matcher, bits, row)
            if row == len(drafts):
                break
            if not active:
                active = drafts[row] == self._after
            elif self._matcher.try_consume_tokens([drafts[row]]) == 1:
                consumed += 1
            else:
                break
        if consumed:
            self._matcher.rollback(consumed)

    def forced(self) -> list[int]:
        """Tokens whose text must come next, at least MIN_FORCED, else none; other tokens may spell the same text."""
        if not self._active or self.error is not None or self._matcher.is_stopped():
            return []
        tokens = self._matcher.compute_ff_tokens()
        return tokens if len(tokens) >= MIN_FORCED else []

    def advance(self, tokens: list[int]) -> None:
        """Takes committed tokens; sets `error` at one that the grammar forbids (no token at all was allowed)."""
        for token in tokens:
            if not self._active:
                self._active = token == self._after
            elif not self._matcher.is_stopped() and not self._matcher.consume_token(token):
                self.error = self._matcher.get_error() or f"the grammar allows no token here, got {token}"
                return


class GrammarLibrary:
    """Makes constraints for one tokenizer.json, which is read when the first grammar comes."""

    def __init__(self, tokenizer_file: Path, vocab_size: int):
        self.file, self.vocab_size = tokenizer_file, vocab_size
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}

    def constraint(self, grammar: Grammar, eos_token_ids: tuple[int, ...]) -> Constraint:
        """Raises RequestError if the grammar is malformed, beyond the library's limits, or there is no tokenizer."""
        try:
            source = _source(grammar)
        except Exception as error:  # the library's converters raise plain Exception
            raise RequestError(f"{grammar.kind}: {error}") from None
        matcher = LLMatcher(self._tokenizer(eos_token_ids), source, log_level=0)
        if matcher.is_error():
            raise RequestError(f"{grammar.kind}: {matcher.get_error()}")
        return Constraint(matcher, grammar.after_token_id)

    def _tokenizer(self, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
        if eos_token_ids not in self._tokenizers:
            if not eos_token_ids:
                raise RequestError("grammar: the model has no end-of-text token, so no grammar could end")
            try:
                text = self.file.read_text(encoding="utf-8")
                made = LLTokenizer(text, n_vocab=self.vocab_size, eos_token=list(eos_token_ids))
            except (OSError, ValueError) as error:
                raise RequestError(f"grammar: {self.file.name} cannot be used: {error}") from None
            self._tokenizers[eos_token_ids] = made
        return self._tokenizers[eos_token_ids]


def _source(grammar: Grammar) -> str:
    """The grammar in the library's own form."""
    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(grammar.source, defaults=JSON_OPTIONS)
    if grammar.kind == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=JSON_OPTIONS)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.source)
    if grammar.kind == "choice":
        choices = json.loads(grammar.source)
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
            raise ValueError("want a list of at least one string")
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))
    lark = grammar.source if grammar.kind == "lark" else gbnf_to_lark.any_to_lark(grammar.source)
    return LLMatcher.grammar_from_lark(lark)
