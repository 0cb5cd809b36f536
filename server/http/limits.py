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
        self._buckets: dict[str, _Bucket] = {}

    @contextlib.contextmanager
    def admit(self, label: str, num_sequences: int) -> Iterator[None]:
        """Counts the sequences of one request while it runs.

        Raises TooManyRequests, or BadRequest for what could never be admitted.
        """
        limits = self._limits_of(label)
        self._check_concurrent(label, num_sequences, limits.concurrent)
        if limits.per_minute is not None:
            self._take(label, limits.per_minute)
        self._running[label] += num_sequences
        try:
            yield
        finally:
            self._running[label] -= num_sequences

    def _check_concurrent(self, label: str, num_sequences: int, most: int | None) -> None:
        if most is None:
            return
        if num_sequences > most:
            raise BadRequest(f"This key may run {most} sequences at a time, got {num_sequences}.", param="n")
        if self._running[label] + num_sequences > most:
            raise TooManyRequests(f"This key may run {most} sequences at a time.", CONCURRENCY_RETRY_SECONDS)

    def _take(self, label: str, per_minute: int) -> None:
        now, per_second = self._clock(), per_minute / 60
        bucket = self._buckets.setdefault(label, _Bucket(per_minute, now))
        bucket.level = min(per_minute, bucket.level + (now - bucket.seen) * per_second)
        bucket.seen = now
        if bucket.level < 1:
            wait = math.ceil((1 - bucket.level) / per_second)
            raise TooManyRequests(f"This key may send {per_minute} requests a minute.", wait)
        bucket.level -= 1
