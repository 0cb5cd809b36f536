"""Lines that clients put into system prompts for other services' books, and that change with every request.

One such line at a prompt's head leaves nothing of it to share with the request before. They say nothing to a model,
and only these are left out: whole patterns, anchored, in system messages; what a user or an assistant says is never
touched. docs/api.md has the list, and `--volatile-lines keep` leaves everything as it came.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

BILLING_HEADER = "billing_header"
TOKEN_COUNTER = "token_counter"
LINES = (BILLING_HEADER, TOKEN_COUNTER)
"""What metrics call them."""

_HEAD = re.compile(r"\s*x-anthropic-billing-header:(?:[ \t]*[a-z_]+=[^;\s]*(?:;|(?=[ \t]*(?:\n|\Z))))+[ \t]*\n?")
"""Claude Code's, at the head: `x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;`. What
follows its last pair on the same line stays: some relays join blocks without a break."""
_COUNTER = re.compile(r"[ \t]*<total_tokens>[0-9]{1,12} tokens left</total_tokens>")
"""Claude Code's, lines at the end, or a message of their own: `<total_tokens>14999436 tokens left</total_tokens>`."""


def without_volatile(messages: list[dict[str, Any]], note: Callable[[str], None]) -> list[dict[str, Any]]:
    """The messages without such lines, and without those that had nothing else; `note` gets each line's name.

    A conversation that would be left without any message stays as it is.
    """
    kept: list[dict[str, Any]] = []
    found: list[str] = []
    for message in messages:
        if message["role"] != "system":
            kept.append(message)
            continue
        text, names = _without(message["content"])
        found += names
        if text or not names:
            kept.append({**message, "content": text} if names else message)
    if not kept:
        return messages
    for name in found:
        note(name)
    return kept


def _without(text: str) -> tuple[str, list[str]]:
    """The rest, and the names of the lines that were left out. Texts may be long, and made of nothing else: each
    character is looked at once."""
    names = []
    start, end = 0, len(text)
    while (head := _HEAD.match(text, start)) is not None:
        start = head.end()
        names.append(BILLING_HEADER)
    while (line := _last_line(text, start, end)) is not None and _COUNTER.fullmatch(text, *line):
        end = line[0]
        names.append(TOKEN_COUNTER)
    return text[start:end].rstrip() if end < len(text) else text[start:], names


def _last_line(text: str, start: int, end: int) -> tuple[int, int] | None:
    """Where the last line that has anything begins, and where its text ends."""
    while end > start and text[end - 1].isspace():
        end -= 1
    return (max(start, text.rfind("\n", start, end) + 1), end) if end > start else None
