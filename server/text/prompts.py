"""Prompts as ids: text, texts, ids or lists of ids, each checked for its length."""

from __future__ import annotations

from typing import Any

import msgspec

from pilotfish.engine.cache.grid import Grid
from pilotfish.engine.link.messages import Ready
from pilotfish.server.errors import BadRequest, ContextExceeded
from pilotfish.server.text.tokenizer import Tokenizer

MAX_SEQUENCES = 128
MIN_COUNTED = 131072
"""Tokens that may be counted, or turned into text, however short the context is."""
LIKELY_BYTES = 8
"""Texts of at most so many characters for each token of the bound are tokenised without a count before."""


class Prompt(msgspec.Struct, frozen=True):
    """`text` is kept only where it is echoed. `system_tokens`: so many of the first ids are system prompt and tools.
    `num_kept`: once it has been read, so many of the first ids need not be read again."""

    token_ids: list[int]
    text: str = ""
    system_tokens: int | None = None
    num_kept: int = 0


def most_tokens(ready: Ready) -> int:
    """The most tokens of a prompt and its answer: the cache holds all of them and one window of drafts, reserved before
    they start."""
    return min(ready.max_model_len, ready.kv_pages_total * ready.page_size - ready.num_speculative_tokens - 1)


def kept_tokens(num_tokens: int, ready: Ready) -> int:
    """How much of a prompt is kept: to the last boundary at or below its end."""
    if not ready.prefix_caching or ready.prefill_chunk == 0:
        return 0
    return Grid(ready.prefill_chunk, ready.page_size).last_boundary(num_tokens)


def tokenize(
    text: str, tokenizer: Tokenizer, ready: Ready, where: str, *, add_special_tokens: bool, last: int | None = None
) -> list[int]:
    """The ids of a prompt, of which the `last` ones are kept where that is given. A text that cannot fit is refused
    before it is tokenised."""
    if last is not None:
        ids = count_tokens(text, tokenizer, ready, where, add_special_tokens=add_special_tokens)
        return checked(ids, ready, where, last)
    if (least := _at_least(text, tokenizer, ready.max_model_len)) >= ready.max_model_len:
        check_length(least, ready, where, "at least ")
    return checked(tokenizer.encode(text, add_special_tokens=add_special_tokens), ready, where, None)


def checked(ids: list[int], ready: Ready, where: str, last: int | None) -> list[int]:
    """The last ids, if they are of a prompt's length."""
    ids = ids if last is None else ids[len(ids) - last :] if last < len(ids) else ids
    check_length(len(ids), ready, where)
    return ids


def most_counted(ready: Ready) -> int:
    """Tokens that are counted or shown where nothing is generated: more than the context, so that clients see how much
    too long a conversation is."""
    return max(2 * ready.max_model_len, MIN_COUNTED)


def count_tokens(text: str, tokenizer: Tokenizer, ready: Ready, where: str, *, add_special_tokens: bool) -> list[int]:
    """The ids of a text that need not fit the context, but `most_counted`."""
    most = most_counted(ready)
    least = _at_least(text, tokenizer, most)
    if least <= most:
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if (least := len(ids)) <= most:
            return ids
    raise too_many("tokens", least, most, where)


def _at_least(text: str, tokenizer: Tokenizer, limit: int) -> int:
    return 0 if len(text) <= LIKELY_BYTES * limit else tokenizer.at_least(text, limit)


def too_many(what: str, got: int, most: int, where: str) -> BadRequest:
    """What is beyond any use that the context allows."""
    return BadRequest(f"Want at most {most} {what}, got {got}.", param=where, code="context_length_exceeded")


def check_num_messages(messages: list[Any], most: int) -> None:
    """Each message is a token at least: more of them than tokens need not be rendered."""
    if len(messages) > most:
        raise too_many("messages", len(messages), most, "messages")


def check_length(num_tokens: int, ready: Ready, where: str, about: str = "") -> None:
    if num_tokens == 0:
        raise BadRequest("Want at least one token, got an empty prompt.", param=where, code="empty_prompt")
    if num_tokens >= ready.max_model_len:
        raise ContextExceeded(num_tokens, ready.max_model_len, param=where, about=about)


def is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_id(token_id: int, vocab_size: int, where: str) -> None:
    if not 0 <= token_id < vocab_size:
        raise BadRequest(f"Want token ids in 0..{vocab_size - 1}, got {token_id}.", param=where, code="invalid_value")


def check_ids(token_ids: list[int], ready: Ready) -> None:
    """Raises BadRequest naming `tokens` for an id that is none, or too many of them."""
    if len(token_ids) > (most := most_counted(ready)):
        raise too_many("ids", len(token_ids), most, "tokens")
    if token_ids:
        check_id(max(token_ids), ready.vocab_size, "tokens")
