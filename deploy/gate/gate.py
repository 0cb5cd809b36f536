"""What a gate is: a name, and a look at the server that says what was wanted and what came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pilotfish.deploy.gate.server import Metrics, Server


@dataclass(frozen=True)
class Found:
    passed: bool
    wanted: str
    came: str


class CannotRun(Exception):
    """What a gate needs is not there; it has then not passed."""


@dataclass(frozen=True)
class Wanted:
    """What the server was asked for; None: whatever it says it was asked for. `score` is of deploy/evaluate/quality.py,
    as it was recorded; None: any."""

    version: str
    k: int | None = None
    kv_dtype: str | None = None
    memory_margin: float = 0.1
    score: float | None = None
    score_margin: float = 0.04
    watch_seconds: float = 10.0


@dataclass
class Subject:
    """A server under the gates. What it said and counted when they began stays here."""

    server: Server
    expected: Wanted
    began: float
    before: Metrics = field(default_factory=lambda: Metrics(""))

    @cached_property
    def capacity(self) -> dict[str, Any]:
        return self.server.get("/v1/capacity")

    @cached_property
    def speculation(self) -> dict[str, Any]:
        found = self.server.get("/health").get("speculation")
        if found is None:
            raise CannotRun("/health does not speak of speculation")
        return found

    @cached_property
    def execution(self) -> dict[str, Any]:
        """Raises CannotRun for a server that does not watch itself."""
        found = self.capacity.get("execution")
        if found is None:
            raise CannotRun("/v1/capacity has no `execution`")
        return found

    @property
    def k(self) -> int:
        return self.speculation["num_speculative_tokens"]

    @property
    def k_was_chosen(self) -> bool:
        """No speculation because someone said so, not because something is missing."""
        said = self.expected.k == 0 or self.speculation["disabled_reason"] == "num_speculative_tokens is 0"
        return self.k == 0 and said

    @property
    def drafts_by_look_up(self) -> bool:
        return str(self.speculation.get("draft_head") or "").startswith("look-up")


@dataclass(frozen=True)
class Gate:
    name: str
    look: Callable[[Subject], Found]
