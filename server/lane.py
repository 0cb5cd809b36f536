"""A way off the event loop for work that grows with what a client sends: few threads, in which keys take turns.

Reading, checking, rendering and tokenising a large body takes seconds; streams go on meanwhile. Python code gives the
interpreter's lock away every few milliseconds, but the loop wants it back several times for each token: so only one of
the threads runs Python code at a time, and the tokenizer, which needs no lock, works beside it. Single calls of C code
that hold the lock are bounded by their callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import functools
import gc
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")

NUM_THREADS = 2
TRIM_SECONDS = 1.0
"""The rest after which the allocator gives back what the work took: it keeps it by itself."""

_python = threading.Lock()
_thread = threading.local()


@contextlib.contextmanager
def without_lock() -> Iterator[None]:
    """Stands around a call that gives the interpreter's lock away: another thread of a lane may run Python code
    meanwhile."""
    if not getattr(_thread, "holds", False):
        yield
        return
    _python.release()
    try:
        yield
    finally:
        _python.acquire()


def _run_alone(function: Callable[[], Result]) -> Result:
    with _python:
        _thread.holds = True
        try:
            return function()
        finally:
            _thread.holds = False


class WorkLane:
    """Work that has begun keeps its thread until it ends, waited for or not; what waits for a thread can be dropped."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="lane")
        self._num_threads = self._free = num_threads
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._trim: asyncio.TimerHandle | None = None

    async def run(
        self, label: str, function: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result:
        """The function's result, from a thread. Labels that wait are served one after the other, each in its order."""
        await self._turn(label)
        loop = asyncio.get_running_loop()
        call = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
        work = loop.run_in_executor(self._executor, _run_alone, call)
        work.add_done_callback(self._release)
        try:
            # whoever leaves does not free the thread that still works for him
            return await asyncio.shield(work)
        finally:
            # an error's traceback holds this frame, which would hold the error: a ring that keeps the body
            del work, call, args, kwargs

    async def run_steps(self, label: str, steps: Generator[None, None, Result]) -> Result:
        """The generator's result. Others may have their turn wherever it yields."""
        while not (ended := await self.run(label, _advance, steps)):
            pass
        return ended[0]

    def close(self) -> None:
        """Work that has begun may end by itself."""
        if self._trim is not None:
            self._trim.cancel()
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
        if self._free == self._num_threads:
            self.tidy_soon()

    def tidy_soon(self) -> None:
        """Gives memory back after a moment's rest."""
        if self._trim is None:
            self._trim = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._tidy)

    def _tidy(self) -> None:
        self._trim = None
        # else whoever ends its work last asks for it
        if self._free == self._num_threads:
            asyncio.get_running_loop().run_in_executor(self._executor, _trim_memory)


def run_steps(steps: Generator[None, None, Result]) -> Result:
    """The generator's result, here and now."""
    while not (ended := _advance(steps)):
        pass
    return ended[0]


def _advance(steps: Generator[None, None, Result]) -> tuple[Result] | None:
    try:
        next(steps)
    except StopIteration as end:
        return (end.value,)
    return None


def _trim_memory() -> None:
    """What nobody refers to but itself, then what the allocator keeps: glibc's can be told, others do without."""
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
