"""Threads with room on their stacks, for a library that recurses."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

STACK_BYTES = 128 << 20
"""Mapped, not used: memory is taken where it is touched. A trial (worker.py) has a quarter of it, and what needs more
does not come here."""
_starting = threading.Lock()


class Threads:
    """Run jobs, the least costly first, those that cost the same in order; started with the first job."""

    def __init__(self, count: int, name: str, nice: int = 0, nice_apart: int = 0):
        self.count, self.name, self.nice, self.nice_apart = count, name, nice, nice_apart
        self._jobs: queue.PriorityQueue[tuple[float, int, Callable[[], None]]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._started = False
        self._apart: set[int] = set()
        self._parting = threading.Lock()

    def submit(self, job: Callable[[], None], cost: float = 0.0) -> None:
        """`job` must not raise."""
        self._jobs.put((cost, next(self._numbers), job))
        if not self._started:
            self._started = True
            for _ in range(self.count):
                start_with_room(self._run, self.name)

    def set_apart(self, thread: int) -> None:
        """The thread of that native id has a job that takes long: it goes on at `nice_apart`, which no thread can take
        back, and ends with the job. Another one takes its place at once."""
        with self._parting:
            if thread in self._apart:
                return
            self._apart.add(thread)
        _be_nice(thread, self.nice_apart)
        start_with_room(self._run, self.name)

    def _is_apart(self, thread: int) -> bool:
        with self._parting:
            is_apart = thread in self._apart
            self._apart.discard(thread)
        return is_apart

    def _run(self) -> None:
        thread = threading.get_native_id()
        _be_nice(thread, self.nice)
        while not self._is_apart(thread):
            job = self._jobs.get()[2]
            try:
                job()
            except BaseException:
                # a panic of Rust code is no Exception; the thread goes on
                logger.exception("a job of %s failed", self.name)
            # what a job held must not live until the next one comes
            del job


def _be_nice(thread: int, nice: int) -> None:
    if nice:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, thread, nice)


def start_with_room(target: Callable[[], None], name: str) -> None:
    """Starts a daemon thread. The size of stacks is a setting of the whole process: it is put back."""
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=target, name=name, daemon=True).start()
        finally:
            threading.stack_size(before)
