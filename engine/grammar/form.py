"""A grammar in llguidance's own form, and how much the library may do at a time.

Only the process that may be lost (worker.py) makes forms; the engine compiles what comes back.
"""

from __future__ import annotations

import json

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, gbnf_to_lark

from pilotfish.engine.link.messages import JSON_OPTIONS, Grammar

LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""The library counts what it does for a mask (14 ms of automata, 50 000 items), and ends in an error beyond that; the
states of a sequence's automaton take about 100 MB at most."""


def library_form(grammar: Grammar) -> str:
    """Raises Exception, of whatever kind the library's converters do, for a malformed grammar."""
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
    return LLMatcher.grammar_from_lark("\n".join([lark, *(_rule(*schema) for schema in grammar.schemas)]))


def _rule(name: str, schema: str, simpler: str) -> str:
    return f"{name}: %json {schema if _is_readable(schema) else simpler}"


def _is_readable(schema: str) -> bool:
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(f"start: %json {schema}"))


def compile_form(form: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Raises ValueError with the library's words, cut short."""
    matcher = LLMatcher(tokenizer, form, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise ValueError(first_words(matcher.get_error()))
    return matcher


def first_words(error: str) -> str:
    """The library quotes what it was given, and its own state after that."""
    text = error.partition("<state>")[0].strip()
    return text if len(text) <= 500 else text[:500] + " ..."


def load_tokenizer(text: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """The matcher's tokenizer of a tokenizer.json's text. Raises ValueError. Keeps the interpreter's lock meanwhile."""
    return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))
