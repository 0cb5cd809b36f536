"""The face of an engine that the engine process drives: the real one and scripted ones in tests."""

from __future__ import annotations

from typing import Protocol

from pilotfish.engine.link.messages import Ready, StepReport, Submit


class EngineCore(Protocol):
    """An engine, as its process drives it: one thread calls all of these; none of them raises for what a client sent.

    `submit` queues a request (a bad one, one beyond the queue's bound, or one at which a library fails ends with
    finish_reason "error" and a message in the next report). `step` runs one prefill chunk or one round and returns what
    happened, or None if there was nothing to do. An exception out of `step` is fatal: the process reports `Fatal` and
    exits.
    """

    ready: Ready

    def submit(self, request: Submit) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def has_work(self) -> bool: ...

    def step(self) -> StepReport | None: ...
