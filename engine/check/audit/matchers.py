"""Grammars for the audit: a tokenizer for every checkpoint, and a matcher that goes one token at a time.

A checkpoint without a tokenizer gets one of single bytes over its first 256 ids. The engine's constraints are made at
once, since these grammars are known; the matcher is the library's own, with nothing of engine/grammar between: what the
engine allows a window's rows is held against it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pilotfish.engine.grammar.constraint import Constraint
from pilotfish.engine.grammar.form import compile_form, library_form, load_tokenizer
from pilotfish.engine.grammar.library import Ticket
from pilotfish.engine.grammar.steps import Steps
from pilotfish.engine.link.messages import JSON_OPTIONS, Grammar

NUM_BYTES = 256


class Matcher:
    """One request's grammar, and how far its text is in it."""

    def __init__(self, matcher: LLMatcher, after_token_id: int | None):
        self._matcher, self._after = matcher, after_token_id
        self._waits = after_token_id is not None

    def allowed(self, vocab_size: int) -> np.ndarray:
        """bool [V]: what may come next."""
        bits = allocate_token_bitmask(1, vocab_size)
        bits[:] = -1
        if not self._waits:
            fill_next_token_bitmask(self._matcher, bits, 0)
        return np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size].astype(bool)

    def take(self, token: int) -> None:
        if self._waits:
            self._waits = token != self._after
        elif not self._matcher.is_stopped():
            self._matcher.consume_token(token)


class Matchers:
    """Reads grammars with the checkpoint's tokenizer, for an engine (see GrammarLibrary) and for the book.

    `usable`: not so with too few ids, or with a tokenizer that the library cannot take; a server then refuses grammars
    too. `steps` are shared by all runs, for their threads do not end.
    """

    def __init__(self, folder: Path, vocab_size: int):
        self.vocab_size, self.usable = vocab_size, False
        self.steps = Steps(vocab_size)
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        file = folder / "tokenizer.json"
        if not file.exists() and vocab_size <= NUM_BYTES:
            return
        try:
            self.text = file.read_text(encoding="utf-8") if file.exists() else _byte_tokenizer(vocab_size).to_str()
            self._tokenizer((vocab_size - 1,))
            self.usable = True
        except (OSError, ValueError):
            pass

    def ask(self, grammar: Grammar, eos_token_ids: tuple[int, ...], *_: object) -> Ticket:
        """See GrammarLibrary: it is there at once."""
        matcher = compile_form(library_form(grammar), self._tokenizer(eos_token_ids))
        constraint = Constraint(matcher, grammar.after_token_id, grammar.min_tokens, grammar.ends)
        return Ticket(grammar, constraint=constraint, done=True)

    def drop(self, ticket: Ticket) -> None:
        """See GrammarLibrary: nothing is on its way."""

    def wait(self, seconds: float) -> None:
        """See GrammarLibrary: nobody waits."""

    def matcher(self, grammar: Grammar, eos_token_ids: tuple[int, ...]) -> Matcher:
        """A matcher for the book, at the start of its text."""
        if grammar.kind == "regex":
            source = LLMatcher.grammar_from_regex(grammar.source)
        else:
            assert grammar.kind == "json_schema", grammar.kind
            source = LLMatcher.grammar_from_json_schema(grammar.source, defaults=JSON_OPTIONS)
        return Matcher(LLMatcher(self._tokenizer(eos_token_ids), source), grammar.after_token_id)

    def _tokenizer(self, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
        if eos_token_ids not in self._tokenizers:
            self._tokenizers[eos_token_ids] = load_tokenizer(self.text, self.vocab_size, eos_token_ids)
        return self._tokenizers[eos_token_ids]


def _byte_tokenizer(vocab_size: int) -> Tokenizer:
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    # ids that no text is cut into
    vocabulary |= {f"Ā{i}": i for i in range(NUM_BYTES, vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
