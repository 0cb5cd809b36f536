"""Prompts as a server asks them of its engine: how much of each the cuts allow to be cached, and how much was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serving import Server

from pilotfish.engine.cache.grid import Grid


@dataclass
class Sent:
    """`system` is what the engine was told of it, `cached` what it then said."""

    ids: list[int]
    salt: str
    system: int | None
    cached: int | None = None


def record(server: Server) -> list[Sent]:
    """A list to which each prompt comes from now on."""
    sent: list[Sent] = []
    client = server.service.client
    submit = client.submit

    def watched(request: Any, receive: Any) -> None:
        entry = Sent(request.prompt_token_ids, request.cache_salt, request.system_tokens)
        sent.append(entry)

        def feed(output: Any) -> Any:
            if output.num_cached_tokens is not None:
                entry.cached = output.num_cached_tokens
            return receive(output)

        submit(request, feed)

    client.submit = watched  # type: ignore[method-assign]
    return sent


def grid_of(server: Server) -> Grid:
    ready = server.service.client.ready
    assert ready is not None
    return Grid(ready.prefill_chunk, ready.page_size)


def shared(sent: list[Sent], number: int) -> int:
    """How many tokens a prompt begins with that one before it began with, under the same salt."""
    own = sent[number]
    return max((_common(own.ids, other.ids) for other in sent[:number] if other.salt == own.salt), default=0)


def allowed(sent: list[Sent], number: int, grid: Grid) -> int:
    """What the cuts let this prompt take from those before it."""
    return grid.last_boundary(shared(sent, number))


def _common(one: list[int], other: list[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count
