"""Starts a failed engine again, a bounded number of times; no torch.

Requests are never taken over: those of the dead engine have ended with an error, and its successor starts empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable

from pilotfish.engine.link.client import EngineClient, EngineUnavailable
from pilotfish.engine.link.messages import Ready

logger = logging.getLogger(__name__)

WINDOW_SECONDS = 600.0
"""Restarts older than this are forgotten."""


class RestartBudget:
    """Allows at most `limit` restarts in any `window` seconds."""

    def __init__(self, limit: int, window: float = WINDOW_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        if limit < 0:
            raise ValueError(f"want a limit of at least 0, got {limit}")
        self.limit = limit
        self.window = window
        self._clock = clock
        self._taken: deque[float] = deque()

    @property
    def num_taken(self) -> int:
        while self._taken and self._clock() - self._taken[0] >= self.window:
            self._taken.popleft()
        return len(self._taken)

    def take(self) -> bool:
        """False: none is left, and nothing is taken."""
        if self.num_taken >= self.limit:
            return False
        self._taken.append(self._clock())
        return True


class Supervisor:
    """Watches one client. A first load that fails is final, and so is any that would fail again."""

    def __init__(
        self,
        client: EngineClient,
        budget: RestartBudget,
        *,
        on_ready: Callable[[Ready], None],
        on_restart: Callable[[], None],
    ) -> None:
        self._client = client
        self._budget = budget
        self._on_ready = on_ready
        self._on_restart = on_restart
        self._gave_up = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the engine, and watches it until `close`."""
        await self._client.start()
        self._watching = asyncio.create_task(self.run())

    async def close(self, timeout: float) -> None:
        """Ends the engine, within `timeout` if it listens. May be called twice."""
        if self._watching is not None:
            # first, or it would start what is being closed
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        await self._client.close(timeout)

    async def wait_gave_up(self) -> None:
        """Returns when the engine has failed and will not be started again."""
        await self._gave_up.wait()

    async def run(self) -> None:
        """Returns when the engine is closed, or has failed for good."""
        has_served = await self._serve_once()
        while self._client.state == "failed":
            failure = self._client.failure
            if not has_served or (failure is not None and failure.permanent) or not self._budget.take():
                self._give_up()
                return
            budget = self._budget
            shown = f"{budget.num_taken} of {budget.limit} restarts in {budget.window / 60:g} minutes"
            logger.warning("starting the engine again (%s)", shown)
            self._on_restart()
            try:
                await self._client.restart()
            except EngineUnavailable:
                self._give_up()
                return
            await self._serve_once()

    async def _serve_once(self) -> bool:
        """Serves until the engine ends; whether it had loaded."""
        try:
            ready = await self._client.wait_ready()
        except EngineUnavailable:
            return False
        self._on_ready(ready)
        await self._client.wait_ended()
        return True

    def _give_up(self) -> None:
        # the client has told the reason
        logger.error("the engine has failed and is not started again")
        self._gave_up.set()
