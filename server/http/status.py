"""What the server says about itself: models, capacity, health, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import hdrs, web
from msgspec import Struct

import pilotfish
from pilotfish.engine.link.messages import Execution, HeadCheck, Ready, TrunkCheck
from pilotfish.server.handlers import SERVICE, is_known, json_answer
from pilotfish.server.http.drain import DRAIN
from pilotfish.server.http.page import PAGE, wants_page

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Shared:
    """A function called in a thread for all who ask: one call at a time, and everyone gets one that began after he
    asked."""

    def __init__(self, function: Callable[[], bytes]) -> None:
        self._function = function
        self._running: asyncio.Task[bytes] | None = None
        self._next: asyncio.Task[bytes] | None = None

    async def __call__(self) -> bytes:
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._call(self._running))
        return await asyncio.shield(self._next)

    async def _call(self, before: asyncio.Task[bytes] | None) -> bytes:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        return await asyncio.to_thread(self._function)


SCRAPE: web.AppKey[Shared] = web.AppKey("scrape", Shared)


class KvCacheStatus(Struct, frozen=True, kw_only=True):
    pages: int
    page_size: int
    tokens: int
    bytes_per_token: int


class PrefixCacheCapacity(Struct, frozen=True, kw_only=True):
    """Room for so many snapshots of a recurrent state; the keys and values beside them are pages of the KV cache."""

    enabled: bool
    snapshots: int
    snapshot_bytes: int


class Capacity(Struct, frozen=True, kw_only=True):
    """How many sequences may run, which limit says so, and where the memory went."""

    max_num_seqs: int
    binding_limit: str
    limits: dict[str, int]
    max_waiting: int
    num_open: int
    num_speculative_tokens: int
    rows_per_round: int
    max_model_len: int
    kv_cache: KvCacheStatus
    prefix_cache: PrefixCacheCapacity
    bytes_per_sequence: int
    memory: dict[str, int]
    device: str
    dtype: str
    execution: Execution | None


class PartStatus(Struct, frozen=True):
    status: str


class EnginePart(Struct, frozen=True, kw_only=True):
    """`part` and `message` after a failure: what failed, and how, which only who has a key is told.

    `seconds_silent`: how long it has owed an answer.
    """

    status: str
    part: str | None
    message: str | None
    seconds_silent: float


class Speculation(Struct, frozen=True, kw_only=True):
    enabled: bool
    num_speculative_tokens: int
    disabled_reason: str | None
    draft_head: str | None
    head_check: HeadCheck | None


class Health(Struct, frozen=True, kw_only=True):
    """`speculation` and `trunk_check` are null until the engine has loaded; the latter too where nothing was tested.
    `slow`: what runs far slower here than it could, and what would mend it."""

    status: str
    version: str
    http: PartStatus
    engine: EnginePart
    speculation: Speculation | None
    trunk_check: TrunkCheck | None
    slow: list[str]


class Readiness(Struct, frozen=True):
    ready: bool
    engine: str


class Version(Struct, frozen=True):
    version: str


async def capacity(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    ready = service.engine()
    return json_answer(
        Capacity(
            max_num_seqs=ready.max_num_seqs,
            binding_limit=ready.binding_limit,
            limits=ready.limits,
            max_waiting=ready.max_waiting,
            num_open=service.client.num_open,
            num_speculative_tokens=ready.num_speculative_tokens,
            rows_per_round=ready.max_num_seqs * (ready.num_speculative_tokens + 1),
            max_model_len=ready.max_model_len,
            kv_cache=KvCacheStatus(
                pages=ready.kv_pages_total,
                page_size=ready.page_size,
                tokens=ready.kv_pages_total * ready.page_size,
                bytes_per_token=ready.kv_bytes_per_token,
            ),
            prefix_cache=PrefixCacheCapacity(
                enabled=ready.prefix_caching,
                snapshots=ready.ledger.get("snapshots_bytes", 0) // max(1, ready.snapshot_bytes),
                snapshot_bytes=ready.snapshot_bytes,
            ),
            bytes_per_sequence=ready.bytes_per_sequence,
            memory=ready.ledger,
            device=ready.device,
            dtype=ready.dtype,
            execution=ready.execution,
        )
    )


async def health(request: web.Request) -> web.Response:
    """200 while the engine loads or serves; the body says which part fails."""
    service = request.app[SERVICE]
    client, ready, state = service.client, service.client.ready, _state(request)
    body = Health(
        status="ok" if state == "ready" else state,
        version=pilotfish.__version__,
        http=PartStatus("ok"),
        engine=EnginePart(
            status=client.state,
            part=client.failure.part if client.failure else None,
            message=client.failure.message if client.failure and is_known() else None,
            seconds_silent=round(client.seconds_silent, 3),
        ),
        speculation=_speculation(ready) if ready else None,
        trunk_check=ready.trunk_check if ready else None,
        slow=ready.execution.slow if ready and ready.execution else [],
    )
    return json_answer(body, status=200 if state in ("loading", "ready") else 503)


def _state(request: web.Request) -> str:
    """The engine's, but for a server that takes no more work, and an engine that does not answer."""
    client = request.app[SERVICE].client
    if request.app[DRAIN].begun and client.state != "failed":
        return "draining"
    return "stalled" if client.stalled else client.state


def _speculation(ready: Ready) -> Speculation:
    return Speculation(
        enabled=ready.num_speculative_tokens > 0,
        num_speculative_tokens=ready.num_speculative_tokens,
        disabled_reason=ready.speculation_disabled_reason,
        draft_head=ready.draft_head,
        head_check=ready.head_check,
    )


async def ready(request: web.Request) -> web.Response:
    """200 when requests are taken and move on, else 503 and why: a relay looks here."""
    state = _state(request)
    return json_answer(Readiness(state == "ready", state), 200 if state == "ready" else 503)


async def metrics(request: web.Request) -> web.Response:
    """Written in a thread, and one text at a time: scrapes come without a key, and in any number."""
    service = request.app[SERVICE]
    service.metrics.on_engine(service.client.state == "ready" and not service.client.stalled)
    return web.Response(body=await request.app[SCRAPE](), headers={"Content-Type": METRICS_TYPE})


async def root(request: web.Request) -> web.Response:
    """The page for people; the version for programs, and for all where there is no page."""
    answer = request.app[PAGE].document(request) if wants_page(request) else await version(request)
    answer.headers.add(hdrs.VARY, hdrs.ACCEPT)
    return answer


async def root_without_slash(request: web.Request) -> web.Response:
    """What is relative in the page is relative to the slash."""
    raise web.HTTPPermanentRedirect(request.path + "/")


async def version(request: web.Request) -> web.Response:
    return json_answer(Version(pilotfish.__version__))


async def ping(request: web.Request) -> web.Response:
    return web.Response(text="pong\n")
