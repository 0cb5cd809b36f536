"""Prompts as ids: text, texts, ids or lists of ids, each checked for its length."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from pilotfish.engine.link.messages import Ready
from pilotfish.server.errors import BadRequest
from pilotfish.server.text.tokenizer import Tokenizer

MAX_SEQUENCES = 128
SLOW_TEXT = 8192
"""Longer texts are tokenised in a thread, so that other streams go on."""
MAX_COMPOSED = 4
"""Characters that a normaliser may join into one."""


class Prompt(msgspec.Struct, frozen=True):
    """`text` is kept only where it is echoed."""

    token_ids: list[int]
    text: str = ""


async def tokenize(text: str, tokenizer: Tokenizer, ready: Ready, where: str, *, add_special_tokens: bool) -> list[int]:
    # so many tokens it has at least: a giant text is refused before it is tokenised
    check_length(len(text) // (MAX_COMPOSED * tokenizer.longest_token) + 1, ready, where)
    ids = await encode(text, tokenizer, add_special_tokens=add_special_tokens)
    check_length(len(ids), ready, where)
    return ids


async def encode(text: str, tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[int]:
    if len(text) > SLOW_TEXT:
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def check_length(num_tokens: int, ready: Ready, where: str) -> None:
    if num_tokens == 0:
        raise BadRequest("Want at least one token, got an empty prompt.", param=where, code="empty_prompt")
    if num_tokens >= ready.max_model_len:
        raise BadRequest(
            f"This model's maximum context length is {ready.max_model_len} tokens, "
            f"but the prompt has {num_tokens} and at least 1 is to be generated.",
            param=where,
            code="context_length_exceeded",
        )


def is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_id(token_id: int, vocab_size: int, where: str) -> None:
    if not 0 <= token_id < vocab_size:
        raise BadRequest(f"Want token ids in 0..{vocab_size - 1}, got {token_id}.", param=where, code="invalid_value")


def check_ids(token_ids: list[int], vocab_size: int) -> None:
    """Raises BadRequest naming `tokens` for an id that is none."""
    if token_ids:
        check_id(max(token_ids), vocab_size, "tokens")
