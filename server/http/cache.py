"""GET /v1/cache: what the prefix cache has saved, and of the newest misses each one's reason.

A key sees the misses of its own requests. What text stands where a prompt leaves the nearest kept one is shown with
`--log-prompts` alone, and the other prompt's only where it cannot be another key's.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET, Struct

from pilotfish.engine.link.messages import CacheMiss, PrefixCacheStats, Ready, StepReport
from pilotfish.server.handlers import KEY, SERVICE, json_answer
from pilotfish.server.http.auth import NO_KEY

MAX_MISSES = 256
"""Misses that are remembered."""


class Miss(Struct, frozen=True, kw_only=True):
    """`request`: the answer's id and the number of its choice. `allowed_tokens`: what the cuts would have let it take
    from the cache. `here` and `there`: what this prompt and the nearest kept one have from the first difference on."""

    request: str
    seconds_ago: float
    reason: str
    prompt_tokens: int
    cached_tokens: int
    allowed_tokens: int
    first_difference: int | None
    here: str | msgspec.UnsetType = UNSET
    there: str | msgspec.UnsetType = UNSET


class CacheStatus(Struct, frozen=True, kw_only=True):
    """Counts since this engine started, in tokens; `misses` by reason, `last_misses` of this key, the newest first.
    `chunk_tokens`: the longest piece in which prompts are read. A snapshot takes `snapshot_bytes`."""

    enabled: bool
    isolation: str
    chunk_tokens: int
    queried_tokens: int
    hit_tokens: int
    snapshots: int
    snapshot_bytes: int
    bytes: int
    capacity_bytes: int
    evictions: int
    misses: dict[str, int]
    last_misses: list[Miss]


class CacheLog:
    """What reports say of the cache, added up."""

    def __init__(
        self,
        *,
        isolates_keys: bool = False,
        text_of: Callable[[Sequence[int]], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._isolates_keys = isolates_keys
        self._text_of = text_of
        self._clock = clock
        self.on_start()

    def on_start(self) -> None:
        """Another engine begins with nothing."""
        self._now = PrefixCacheStats()
        self._queried = self._hits = self._evictions = 0
        self._reasons: Counter[str] = Counter()
        self._misses: deque[tuple[float, CacheMiss]] = deque(maxlen=MAX_MISSES)

    def on_report(self, report: StepReport) -> None:
        cache = report.stats.prefix_cache
        if cache is None:
            return
        self._now = cache
        self._queried += cache.num_queried_tokens
        self._hits += cache.num_hit_tokens
        self._evictions += cache.num_evictions
        self._reasons.update(miss.reason for miss in cache.misses)
        now = self._clock()
        self._misses.extend((now, miss) for miss in cache.misses)

    def status(self, ready: Ready, key: str) -> CacheStatus:
        """What somebody with this key may see of the cache."""
        now = self._clock()
        return CacheStatus(
            enabled=ready.prefix_caching,
            isolation="key" if self._isolates_keys else "none",
            chunk_tokens=ready.prefill_chunk,
            queried_tokens=self._queried,
            hit_tokens=self._hits,
            snapshots=self._now.num_snapshots,
            snapshot_bytes=ready.snapshot_bytes,
            bytes=self._now.num_bytes,
            capacity_bytes=self._now.capacity_bytes,
            evictions=self._evictions,
            misses=dict(sorted(self._reasons.items())),
            last_misses=[self._show(miss, now - then) for then, miss in reversed(self._misses) if miss.key == key],
        )

    def _show(self, miss: CacheMiss, seconds: float) -> Miss:
        text_of = self._text_of if miss.first_difference is not None else None
        is_own = self._isolates_keys or miss.key == NO_KEY
        return Miss(
            request=miss.request_id,
            seconds_ago=round(seconds, 3),
            reason=miss.reason,
            prompt_tokens=miss.num_prompt_tokens,
            cached_tokens=miss.num_cached_tokens,
            allowed_tokens=miss.num_allowed_tokens,
            first_difference=miss.first_difference,
            here=text_of(miss.here) if text_of is not None else UNSET,
            there=text_of(miss.there) if text_of is not None and is_own else UNSET,
        )


CACHE: web.AppKey[CacheLog] = web.AppKey("cache", CacheLog)


async def cache(request: web.Request) -> web.Response:
    ready = request.app[SERVICE].engine()
    return json_answer(request.app[CACHE].status(ready, KEY.get()))
