"""One request inside the engine: what it asked for, what it holds, how far it is. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from pilotfish.engine.guard import Guarded
from pilotfish.engine.link.messages import Submit
from pilotfish.engine.requests.loop_guard import LoopGuard


@dataclass(eq=False)
class Sequence:
    """One request inside the engine. `limit`: the most tokens that it may have, prompt included. `num_pages`: KV pages
    that are reserved when it is admitted, and taken into `pages` as they are needed; it gets its `slot` then too.
    `allowed`: the only ids that it may write, None for all."""

    request: Submit
    limit: int
    own_k: int
    num_pages: int
    constraint: Guarded | None = None
    allowed: frozenset[int] | None = None
    loop_guard: LoopGuard | None = None
    slot: int = 0
    pages: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    num_written: int = 0
    """Tokens that it has written, as far as they were read."""
    uses_cache: bool = True
    """Whether it may go on from what others have read, and leave what it reads."""
    chunks: list[bytes] | None = None
    """Its prompt's tokens from boundary to boundary, once somebody has looked for them."""
    restore: int | None = None
    """The snapshot to go on from, until the step that copies it to the slot has ended."""
    num_cached: int = 0
    """Prompt tokens that were found, of which somebody is told once."""
    cached_told: bool = False
    arrived: float = field(default_factory=perf_counter)
    queue_seconds: float | None = None
    """How long it waited to be admitted, until somebody was told."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt(self) -> list[int]:
        return self.request.prompt_token_ids

    def admitted(self) -> None:
        """Notes how long it has waited until now."""
        self.queue_seconds = perf_counter() - self.arrived

    def take_queue_seconds(self) -> float | None:
        """How long it waited to be admitted: at the first call, None at later ones."""
        seconds, self.queue_seconds = self.queue_seconds, None
        return seconds

    def take_num_cached(self) -> int | None:
        """How many tokens of its prompt were found: at the first call, None at later ones."""
        told, self.cached_told = self.cached_told, True
        return None if told else self.num_cached

    @property
    def is_prefilled(self) -> bool:
        """Whether its prompt is read, and the first token of one that was found whole launched."""
        return self.num_prefilled == len(self.prompt) and self.restore is None
