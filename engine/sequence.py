"""One request inside the engine: what it asked for, what it holds, how far it is. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from pilotfish.engine.guard import Guarded
from pilotfish.engine.link.messages import Submit


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
    slot: int = 0
    pages: list[int] = field(default_factory=list)
    num_prefilled: int = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt(self) -> list[int]:
        return self.request.prompt_token_ids

    @property
    def is_prefilled(self) -> bool:
        return self.num_prefilled == len(self.prompt)
