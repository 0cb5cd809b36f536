"""Prompts as ids: text, texts, ids or lists of ids, each checked for its length."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from pilotfish.engine.messages import Ready
from pilotfish.server.errors import BadRequest
from pilotfish.server.protocol import CompletionRequest
from pilotfish.server.tokenizer import Tokenizer

MAX_SEQUENCES = 128
SLOW_TEXT = 8192
"""Longer texts are tokenised in a thread, so that other streams go on."""
MAX_COMPOSED = 4
"""Characters that a normaliser may join into one."""


class Prompt(msgspec.Struct, frozen=True):
    """`text` is kept only where it is echoed."""

    token_ids: list[int]
    text: str = ""


async def read_prompts(request: CompletionRequest, tokenizer: Tokenizer, ready: Ready) -> list[Prompt]:
    """text, [text, ...], [id, ...] or [[id, ...], ...]."""
    given, echo = request.prompt, bool(request.echo)
    if given is None or given == []:
        raise BadRequest("Want a prompt.", param="prompt", code="missing_parameter")
    entries: list[Any] = [given] if isinstance(given, str) or _is_id(given[0]) else given
    if len(entries) > MAX_SEQUENCES:
        raise BadRequest(f"Want at most {MAX_SEQUENCES} prompts, got {len(entries)}.", param="prompt")
    prompts = []
    for index, entry in enumerate(entries):
        where = "prompt" if entry is given else f"prompt[{index}]"
        if isinstance(entry, str):
            special = request.add_special_tokens is not False
            ids = await tokenize(entry, tokenizer, ready, where, add_special_tokens=special)
            prompts.append(Prompt(ids, entry if echo else ""))
        elif isinstance(entry, list):
            prompts.append(_id_prompt(entry, tokenizer, ready, where, echo))
        else:
            raise BadRequest(f"Want text or token ids, got {type(entry).__name__}.", param=where)
    return prompts


def _id_prompt(entry: list[Any], tokenizer: Tokenizer, ready: Ready, where: str, echo: bool) -> Prompt:
    _check_length(len(entry), ready, where)
    for token_id in entry:
        if not _is_id(token_id):
            raise BadRequest(f"Want token ids, got {type(token_id).__name__}.", param=where)
        check_id(token_id, ready.vocab_size, where)
    # a prompt is shown as it was given, special tokens included
    return Prompt(entry, tokenizer.decode(entry, skip_special_tokens=False) if echo else "")


async def tokenize(text: str, tokenizer: Tokenizer, ready: Ready, where: str, *, add_special_tokens: bool) -> list[int]:
    # so many tokens it has at least: a giant text is refused before it is tokenised
    _check_length(len(text) // (MAX_COMPOSED * tokenizer.longest_token) + 1, ready, where)
    ids = await encode(text, tokenizer, add_special_tokens=add_special_tokens)
    _check_length(len(ids), ready, where)
    return ids


async def encode(text: str, tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[int]:
    if len(text) > SLOW_TEXT:
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _check_length(num_tokens: int, ready: Ready, where: str) -> None:
    if num_tokens == 0:
        raise BadRequest("Want at least one token, got an empty prompt.", param=where, code="empty_prompt")
    if num_tokens >= ready.max_model_len:
        raise BadRequest(
            f"This model's maximum context length is {ready.max_model_len} tokens, "
            f"but the prompt has {num_tokens} and at least 1 is to be generated.",
            param=where,
            code="context_length_exceeded",
        )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_id(token_id: int, vocab_size: int, where: str) -> None:
    if not 0 <= token_id < vocab_size:
        raise BadRequest(f"Want token ids in 0..{vocab_size - 1}, got {token_id}.", param=where, code="invalid_value")


def check_ids(token_ids: list[int], vocab_size: int) -> None:
    """Raises BadRequest naming `tokens` for an id that is none."""
    if token_ids:
        check_id(max(token_ids), vocab_size, "tokens")
