"""What one API key may ask for: sequences at a time, and requests a minute.

State is kept by label, so that the keys of one label share it, and survives a change of the key file.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from pilotfish.server.errors import BadRequest, TooManyRequests

CONCURRENCY_RETRY_SECONDS = 1


class Limits(msgspec.Struct, frozen=True):
    """None: no limit."""

    concurrent: int | None = None
    per_minute: int | None = None


NO_LIMITS = Limits()
WhenGone = Callable[[Callable[[], None]], None]


class _Bucket(msgspec.Struct):
    """Requests that may come at once; it fills up evenly in a minute."""

    level: float
    seen: float


class Limiter:
    def __init__(
        self, limits_of: Callable[[str], Limits] = lambda label: NO_LIMITS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits_of = limits_of
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        self.num_held = 0
        self._buckets: dict[str, _Bucket] = {}

    @contextlib.contextmanager
    def admit(self, label: str, num_sequences: int, when_gone: WhenGone | None = None) -> Iterator[None]:
        """Counts the sequences of one request while it runs: the first as the request that `count` has counted, each
        further one as a request more. `when_gone` is told at the end, and calls back for each sequence: what a client
        leaves behind counts as long as the engine has it.

        Raises TooManyRequests, or BadRequest for what could never be admitted.
        """
        self.check(label, num_sequences)
        self.count(label, num_sequences - 1)
        self._running[label] += num_sequences
        try:
            yield
        finally:
            if when_gone is not None:
                when_gone(lambda: self._leave(label))
            else:
                self._leave(label, num_sequences)

    def _leave(self, label: str, num_sequences: int = 1) -> None:
        self._running[label] -= num_sequences

    def check_place(self, label: str) -> None:
        """Raises TooManyRequests where the key's places are taken or held: it cannot have one more."""
        most = self._limits_of(label).concurrent
        if most is not None and self._running[label] + self._held[label] >= most:
            raise TooManyRequests(f"This key may run {most} sequences at a time.", CONCURRENCY_RETRY_SECONDS)

    @contextlib.contextmanager
    def hold_place(self, label: str) -> Iterator[None]:
        """Holds a place while it is worked out how many sequences a request asks for: of many that come while one place
        is free, one is worked on. What has been worked out is judged by `admit` alone."""
        self._held[label] += 1
        self.num_held += 1
        try:
            yield
        finally:
            self._held[label] -= 1
            self.num_held -= 1

    def check(self, label: str, num_sequences: int) -> None:
        """Raises what `admit` would raise for a key that has sent nothing else, and for one whose places are taken."""
        limits = self._limits_of(label)
        self._check_concurrent(label, num_sequences, limits.concurrent)
        if limits.per_minute is not None and num_sequences > limits.per_minute:
            raise BadRequest(
                f"This key may send {limits.per_minute} requests a minute, and each of the {num_sequences} sequences "
                "counts as one.",
                param="n",
            )

    def count(self, label: str, num_requests: int = 1) -> None:
        """Takes so many requests from what the key may send in a minute, whatever becomes of them.

        Raises TooManyRequests.
        """
        per_minute = self._limits_of(label).per_minute
        if per_minute is not None and num_requests:
            self._take(label, per_minute, num_requests)

    def _check_concurrent(self, label: str, num_sequences: int, most: int | None) -> None:
        if most is None:
            return
        if num_sequences > most:
            raise BadRequest(f"This key may run {most} sequences at a time, got {num_sequences}.", param="n")
        if self._running[label] + num_sequences > most:
            raise TooManyRequests(f"This key may run {most} sequences at a time.", CONCURRENCY_RETRY_SECONDS)

    def _take(self, label: str, per_minute: int, amount: int) -> None:
        now, per_second = self._clock(), per_minute / 60
        bucket = self._buckets.setdefault(label, _Bucket(per_minute, now))
        bucket.level = min(per_minute, bucket.level + (now - bucket.seen) * per_second)
        bucket.seen = now
        if bucket.level < amount:
            wait = math.ceil((amount - bucket.level) / per_second)
            raise TooManyRequests(f"This key may send {per_minute} requests a minute.", wait)
        bucket.level -= amount
