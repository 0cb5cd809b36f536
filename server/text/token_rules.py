"""Fields that are rules about token ids: bad words, a thinking budget, and what ends a text that repeats itself."""

from __future__ import annotations

from typing import Literal

from pilotfish.engine.link.messages import LoopRule, ThinkingBudget
from pilotfish.server.calls.parser import END_THINK, THINK
from pilotfish.server.errors import BadRequest
from pilotfish.server.model_files import ModelFiles
from pilotfish.server.protocol import LoopGuardField, RepetitionField
from pilotfish.server.text.tokenizer import Tokenizer


def bad_words_ids(words: list[str], tokenizer: Tokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Each word as it begins a text and, if that is another sequence of as many tokens, as it follows a space."""
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        bare = word.lstrip()
        if not bare:
            raise BadRequest("Want a word that is not blank.", param=f"bad_words[{index}]")
        alone = tokenizer.encode(bare, add_special_tokens=False)
        inside = tokenizer.encode(" " + bare, add_special_tokens=False)
        found[tuple(alone)] = None
        if len(inside) == len(alone) and inside[0] != alone[0]:
            found[tuple(inside)] = None
    for ids in found:
        if any(token_id >= vocab_size for token_id in ids):
            raise BadRequest(f"Want words of ids below {vocab_size}, got {list(ids)}.", param="bad_words")
    return tuple(found)


def loop_rule(
    guard: bool | LoopGuardField | None, repetition: RepetitionField | None, default: LoopRule | None
) -> LoopRule | None:
    """What a request wants, else the server's default. Raises BadRequest."""
    if guard is not None and repetition is not None:
        raise BadRequest("Want one of 'loop_guard' and 'repetition_detection'.", param="repetition_detection")
    if isinstance(guard, LoopGuardField):
        return LoopRule(guard.repeats, guard.tokens)
    if guard is not None:
        return (default or LoopRule()) if guard else None
    if repetition is None:
        return default
    if repetition.max_pattern_size == 0:
        return None
    lowest = max(1, repetition.min_pattern_size)
    if lowest > repetition.max_pattern_size or repetition.min_count < 2:
        raise BadRequest("Want min_pattern_size <= max_pattern_size and min_count >= 2.", param="repetition_detection")
    return LoopRule(repetition.min_count, 0, lowest, repetition.max_pattern_size)


UNBOUNDED = 1 << 30
"""A thinking budget that no text spends: the block is closed for another reason, if at all."""


def closable_thinking(
    thinking: Literal["none", "look", "open"] | None, files: ModelFiles, vocab_size: int
) -> ThinkingBudget | None:
    """A block that may go on for ever, as a rule that can end it; None where reasoning is not told apart."""
    try:
        return thinking_budget(UNBOUNDED, thinking, files, vocab_size)
    except BadRequest:
        return None


def thinking_budget(
    num_tokens: int | None, thinking: Literal["none", "look", "open"] | None, files: ModelFiles, vocab_size: int
) -> ThinkingBudget | None:
    """`thinking` is what the answer's rules say, None where there are none. Raises BadRequest without such a block."""
    if num_tokens is None:
        return None
    end, start = files.tokenizer.token_to_id(END_THINK), files.tokenizer.token_to_id(THINK)
    if not files.parses_reasoning or thinking is None:
        raise BadRequest("This model's reasoning is not told apart here.", param="thinking_token_budget")
    if end is None or start is None or max(end, start) >= vocab_size:
        raise BadRequest(f"This model has no tokens {THINK} and {END_THINK}.", param="thinking_token_budget")
    if thinking == "none":
        # a call that is demanded comes without thought
        return None
    return ThinkingBudget(
        num_tokens=num_tokens,
        start_token_id=None if thinking == "open" else start,
        end_token_id=end,
        closing=tuple(files.tokenizer.encode(files.reasoning_end, add_special_tokens=False)),
    )
