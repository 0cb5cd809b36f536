"""GET /v1/watch: the last minutes in numbers, for a person who looks; the page at / draws them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator

from aiohttp import web
from msgspec import Struct

from pilotfish.metrics.history import INTERVAL_SECONDS, History, Point
from pilotfish.server.errors import BadRequest
from pilotfish.server.handlers import SERVICE, json_answer

HISTORY: web.AppKey[History] = web.AppKey("history", History)


class Watch(Struct, frozen=True, kw_only=True):
    """`points`: the newest last, one each `interval_seconds`, of the last `span_seconds`. What the engine says at its
    start is null until then."""

    time: float
    interval_seconds: float
    span_seconds: float
    num_speculative_tokens: int | None
    max_num_seqs: int | None
    kv_pages: int | None
    state_slots: int | None
    points: list[Point]


async def watch(request: web.Request) -> web.Response:
    ready, history = request.app[SERVICE].client.ready, request.app[HISTORY]
    after = _after(request)
    answer = Watch(
        time=time.time(),
        interval_seconds=INTERVAL_SECONDS,
        span_seconds=history.seconds,
        num_speculative_tokens=ready.num_speculative_tokens if ready else None,
        max_num_seqs=ready.max_num_seqs if ready else None,
        kv_pages=ready.kv_pages_total if ready else None,
        state_slots=ready.limits.get("state slots", ready.max_num_seqs) if ready else None,
        points=[point for point in history.points if point.time > after],
    )
    return json_answer(answer)


def _after(request: web.Request) -> float:
    """The time after which points are wanted: a client that has the others asks for new ones. Raises BadRequest."""
    given = request.query.get("after", "0")
    try:
        after = float(given)
    except ValueError:
        after = math.nan
    if not math.isfinite(after):
        raise BadRequest(f"Want 'after' as a time in seconds, got {given[:40]!r}.", param="after")
    return after


async def sampling(app: web.Application) -> AsyncIterator[None]:
    """A point each interval, as long as the application lives."""
    task = asyncio.create_task(_sample(app[HISTORY]))
    try:
        yield
    finally:
        task.cancel()


async def _sample(history: History) -> None:
    clock = asyncio.get_running_loop()
    at = clock.time()
    while True:
        # by the clock, so that points do not drift; one that a busy loop missed is not made up for, nor does the next
        # one follow at once
        at = max(at + INTERVAL_SECONDS, clock.time() + INTERVAL_SECONDS / 2)
        await asyncio.sleep(at - clock.time())
        history.sample()
