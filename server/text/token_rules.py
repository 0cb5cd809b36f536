"""`bad_words`, `allowed_token_ids` and `thinking_token_budget` as rules about token ids, as vLLM reads them."""

from __future__ import annotations

from typing import Literal

from pilotfish.engine.link.messages import ThinkingBudget
from pilotfish.server.calls.parser import END_THINK, THINK
from pilotfish.server.errors import BadRequest
from pilotfish.server.model_files import ModelFiles
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
