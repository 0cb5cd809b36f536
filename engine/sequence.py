"""One request inside the engine: what it asked for, what it holds, how far it is. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from pilotfish.engine.guard import Guarded
from pilotfish.engine.link.messages import Submit
from pilotfish.engine.loop_guard import LoopGuard


@dataclass(eq=False)
class Sequence:
    """`limit` counts all its tokens, prompt included. `slot` and `pages` are empty until it is admitted.
    `allowed`: the only ids that it may write, if there is such a limit."""

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
        """Waiting has ended."""
        self.queue_seconds = perf_counter() - self.arrived

    def take_queue_seconds(self) -> float | None:
        """Once; None after that."""
        seconds, self.queue_seconds = self.queue_seconds, None
        return seconds

    @property
    def is_prefilled(self) -> bool:
        return self.num_prefilled == len(self.prompt)
