"""The body of /v1/completions, and its prompts as ids."""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated, Any

from msgspec import Meta

from pilotfish.engine.link.messages import Ready
from pilotfish.server.errors import BadRequest
from pilotfish.server.protocol import MAX_LOGPROBS, SamplingFields
from pilotfish.server.text.prompts import MAX_SEQUENCES, Prompt, check_id, checked, is_id, tokenize
from pilotfish.server.text.tokenizer import Tokenizer


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/completions. `prompt`: text, texts, ids, or lists of ids."""

    prompt: str | list[Any] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None


def prompt_entries(request: CompletionRequest) -> list[Any]:
    """text, [text, ...], [id, ...] or [[id, ...], ...]: one entry a prompt, still unread."""
    given = request.prompt
    if given is None or given == []:
        raise BadRequest("Want a prompt.", param="prompt", code="missing_parameter")
    entries: list[Any] = [given] if isinstance(given, str) or is_id(given[0]) else given
    if len(entries) > MAX_SEQUENCES:
        raise BadRequest(f"Want at most {MAX_SEQUENCES} prompts, got {len(entries)}.", param="prompt")
    return entries


def read_prompts(
    request: CompletionRequest, entries: list[Any], tokenizer: Tokenizer, ready: Ready, last: int | None = None
) -> Generator[None, None, list[Prompt]]:
    """Each entry as ids, the `last` ones; others may have their turn between two entries."""
    echo, prompts = bool(request.echo), list[Prompt]()
    for index, entry in enumerate(entries):
        if prompts:
            yield
        where = "prompt" if entry is request.prompt else f"prompt[{index}]"
        if isinstance(entry, str):
            special = request.add_special_tokens is not False
            ids = tokenize(entry, tokenizer, ready, where, add_special_tokens=special, last=last)
            text = entry if last is None else tokenizer.decode(ids, skip_special_tokens=False)
            prompts.append(Prompt(ids, text if echo else ""))
        elif isinstance(entry, list):
            prompts.append(_id_prompt(entry, tokenizer, ready, where, echo, last))
        else:
            raise BadRequest(f"Want text or token ids, got {type(entry).__name__}.", param=where)
    return prompts


def _id_prompt(
    entry: list[Any], tokenizer: Tokenizer, ready: Ready, where: str, echo: bool, last: int | None
) -> Prompt:
    entry = checked(entry, ready, where, last)
    for token_id in entry:
        if not is_id(token_id):
            raise BadRequest(f"Want token ids, got {type(token_id).__name__}.", param=where)
        check_id(token_id, ready.vocab_size, where)
    # a prompt is shown as it was given, special tokens included
    return Prompt(entry, tokenizer.decode(entry, skip_special_tokens=False) if echo else "")
