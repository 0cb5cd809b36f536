"""A way off the event loop for work that grows with what a client sends: few threads, in which keys take turns.

Reading, checking, rendering and tokenising a large body takes seconds; streams go on meanwhile, since Python code gives
the interpreter's lock away every few milliseconds and the tokenizer does not hold it. Single calls of C code that do
hold it are bounded by their callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")

NUM_THREADS = 2
SMALL_BODY = 4096
"""Bodies up to this size are worked on where they are: a few milliseconds at most."""


class Lane:
    """Work that has begun keeps its thread until it ends, waited for or not; what waits for a thread can be dropped."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="lane")
        self._free = num_threads
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def run(
        self, label: str, function: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result:
        """The function's result, from a thread. Labels that wait are served one after the other, each in its order."""
        await self._turn(label)
        loop = asyncio.get_running_loop()
        call = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
        work = loop.run_in_executor(self._executor, call)
        work.add_done_callback(self._release)
        # whoever leaves does not free the thread that still works for him
        return await asyncio.shield(work)

    def close(self) -> None:
        """Work that has begun may end by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, label: str) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(label, deque())
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()
            else:
                self._forget(label, turn)
            raise

    def _forget(self, label: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(label, deque())
        with contextlib.suppress(ValueError):
            queue.remove(turn)
        if not queue:
            self._waiting.pop(label, None)

    def _release(self, work: asyncio.Future) -> None:
        if not work.cancelled():
            work.exception()  # whether anyone waits for it or not, it counts as seen
        self._next()

    def _next(self) -> None:
        while self._waiting:
            label, queue = next(iter(self._waiting.items()))
            turn = queue.popleft()
            # to the end of the line, where it waits for its next one
            del self._waiting[label]
            if queue:
                self._waiting[label] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
