"""The aiohttp application: routes, middlewares, and the life of the engine process beside it."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from aiohttp import hdrs, web
from prometheus_client import CollectorRegistry

import pilotfish
from pilotfish.engine.link.client import EngineClient
from pilotfish.engine.link.messages import Ready, StepReport
from pilotfish.engine.link.process import DEFAULT_CORE
from pilotfish.engine.link.supervisor import RestartBudget, Supervisor
from pilotfish.metrics.collectors import Collector
from pilotfish.metrics.history import History
from pilotfish.server import handlers
from pilotfish.server.errors import ApiError, BadRequest, from_status
from pilotfish.server.handlers import SERVICE, Service
from pilotfish.server.http import cache, models, openapi, status, watch
from pilotfish.server.http.auth import Keys
from pilotfish.server.http.bodies import JSON, MAX_BODY_BYTES, Bodies
from pilotfish.server.http.connections import MAX_CONNECTIONS, Runner, note_known
from pilotfish.server.http.cors import Cors
from pilotfish.server.http.drain import DRAIN, Drain
from pilotfish.server.http.limits import Limiter
from pilotfish.server.http.pace import Pace
from pilotfish.server.http.page import PAGE, Page
from pilotfish.server.http.request_log import REQUEST_ID, RequestLog, client_id, note_error
from pilotfish.server.http.routing import check_target, guarded
from pilotfish.server.http.throughput import ThroughputLog
from pilotfish.server.http.turns import Turns
from pilotfish.server.messages.answer import error_body
from pilotfish.server.model_files import ModelFiles
from pilotfish.server.protocol import encode

if TYPE_CHECKING:
    from pilotfish.engine.options import EngineOptions

logger = logging.getLogger(__name__)

PUBLIC = frozenset({"", "/", "/health", "/ready", "/metrics", "/version", "/ping"})
"""Probes and scrapes come without keys, and the page's own parts; everything else wants one, whether it exists or
not."""

MESSAGES = "/v1/messages"
"""Here, errors have Anthropic's shape."""

SUPERVISOR: web.AppKey[Supervisor] = web.AppKey("supervisor", Supervisor)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the application itself is told. `core` names another engine core (tests do).

    `root_path` is a prefix under which a relay may forward, stripped or not; "" for none.
    `restart_engine` is how often within 10 minutes a failed engine is started again; one that has not answered for
    `engine_timeout` seconds has failed. `isolates_keys`: what was read of one key's prompts is no other's.
    `metrics_apart`: /metrics is not here, but in `make_metrics_app`. `page`: GET / shows one to people.
    """

    served_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None
    root_path: str = ""
    any_model_name: bool = False
    strict_fields: bool = False
    stream_tool_arguments: bool = False
    core: str = DEFAULT_CORE
    engine_environment: Mapping[str, str] | None = None
    close_seconds: float = 10.0
    restart_engine: int = 0
    engine_timeout: float = math.inf
    metrics_apart: bool = False
    page: bool = True
    log_requests: bool = False
    log_prompts: bool = False
    isolates_keys: bool = False
    cors: Cors = msgspec.field(default_factory=Cors)


def make_app(
    options: ServerOptions, engine: EngineOptions, files: ModelFiles, registry: CollectorRegistry | None = None
) -> web.Application:
    """Starting the application starts the engine process; it answers from then on, /ready once it has loaded.

    Raises KeyFileError.
    """
    metrics = Collector(registry or CollectorRegistry(), pilotfish.__version__)
    throughput = ThroughputLog()
    cache_log = cache.CacheLog(
        isolates_keys=options.isolates_keys,
        text_of=partial(files.tokenizer.decode, skip_special_tokens=False) if options.log_prompts else None,
    )

    def on_report(report: StepReport) -> None:
        metrics.on_report(report)
        cache_log.on_report(report)
        throughput.on_report(report)

    engine = msgspec.structs.replace(engine, eos_token_ids=files.eos_token_ids)
    client = EngineClient(
        engine,
        core=options.core,
        on_report=on_report,
        environment=options.engine_environment,
        timeout=options.engine_timeout,
    )
    keys = Keys(options.api_keys, options.api_key_file)
    drain, turns = Drain(), Turns()
    has_keys = bool(options.api_keys) or options.api_key_file is not None
    page = Page(keys=has_keys) if options.page else None
    cors = msgspec.structs.replace(options.cors, keyless=not has_keys)
    public = PUBLIC | page.paths if page is not None else PUBLIC
    probes = public | {options.root_path + path for path in public}
    middlewares = [
        Pace().middleware(handlers.KEY.get, exempt=probes),
        _errors(metrics, options.root_path),
        cors.guard(),
        _auth(keys, options.root_path, public),
        turns.middleware(handlers.KEY.get),
        drain.middleware(),
    ]
    if options.log_requests:
        log = RequestLog(handlers.KEY.get, files.tokenizer, prompts=options.log_prompts)
        middlewares.insert(0, log.middleware(options.root_path))
    # outside of keys and log: a preflight has no key, and is no request for text
    middlewares.insert(0, cors.middleware())
    app = web.Application(
        middlewares=middlewares,
        client_max_size=MAX_BODY_BYTES,
    )
    app[SERVICE] = Service(
        client=client,
        files=files,
        metrics=metrics,
        served_names=options.served_names,
        started=int(time.time()),
        any_model_name=options.any_model_name,
        strict_fields=options.strict_fields,
        tool_pieces=options.stream_tool_arguments,
        isolates_keys=options.isolates_keys,
        limiter=Limiter(keys.limits),
        bodies=Bodies(shared=has_keys),
        turns=turns,
    )
    app[status.SCRAPE] = status.Shared(metrics.exposition)
    app[DRAIN] = drain
    app[cache.CACHE] = cache_log
    app[watch.HISTORY] = History(metrics)
    app.cleanup_ctx.append(watch.sampling)
    if page is not None:
        app[PAGE] = page
    app[openapi.DOCUMENT] = encode(openapi.openapi_document(options.root_path))
    budget = RestartBudget(options.restart_engine)
    app[SUPERVISOR] = Supervisor(client, budget, on_ready=_on_ready(metrics, cache_log), on_restart=metrics.on_restart)
    app.cleanup_ctx.append(_engine(options.close_seconds))
    prepare = [_add_request_id, handlers.tell_ignored_fields, cors.add_headers, drain.close_connections]
    app.on_response_prepare.extend(prepare)
    roots = ("", options.root_path) if options.root_path else ("",)
    routes = [route for root in roots for route in (*_routes(root), *(page.routes(root) if page else ()))]
    if options.root_path:
        routes.append(web.get(options.root_path, status.root_without_slash))
    if options.metrics_apart:
        routes = [route for route in routes if route.handler is not status.metrics]
    app.add_routes(guarded(routes))
    return app


def make_metrics_app(app: web.Application) -> web.Application:
    """/metrics of that application and nothing else, for an address that clients do not reach."""
    apart = web.Application(middlewares=[_errors(app[SERVICE].metrics, "")])
    apart[SERVICE], apart[status.SCRAPE] = app[SERVICE], app[status.SCRAPE]
    apart.add_routes(guarded([web.get("/metrics", status.metrics)]))
    return apart


async def _add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """The client's own id comes back, errors included; else the answer's, else a new one. Anthropic's clients look for
    it under a name of their own."""
    given = client_id(request)
    if given is not None:
        response.headers[REQUEST_ID] = given
    else:
        response.headers.setdefault(REQUEST_ID, secrets.token_hex(12))
    if models.ANTHROPIC_VERSION in request.headers:
        response.headers["request-id"] = response.headers[REQUEST_ID]


def _routes(root: str) -> Sequence[web.RouteDef]:
    return [
        web.post(root + "/v1/completions", handlers.completions),
        web.post(root + "/v1/chat/completions", handlers.chat_completions),
        web.post(root + "/v1/responses", handlers.responses),
        web.post(root + "/v1/responses/input_tokens", handlers.count_input),
        web.post(root + MESSAGES, handlers.messages),
        web.post(root + MESSAGES + "/count_tokens", handlers.count_tokens),
        web.post(root + "/tokenize", handlers.tokenize),
        web.post(root + "/detokenize", handlers.detokenize),
        web.get(root + "/v1/models", models.models),
        web.get(root + "/v1/models/{name:.+}", models.model),
        web.get(root + "/v1/capacity", status.capacity),
        web.get(root + "/v1/cache", cache.cache),
        web.get(root + "/v1/watch", watch.watch),
        web.get(root + "/health", status.health),
        web.get(root + "/ready", status.ready),
        web.get(root + "/metrics", status.metrics),
        # clients, too, ask for the address itself before they begin (Claude Code's HEAD /)
        web.get(root + "/", status.root),
        web.get(root + "/version", status.version),
        web.get(root + "/ping", status.ping),
        web.get(root + "/openapi.json", openapi.openapi),
    ]


def make_runner(
    app: web.Application, *, shutdown_seconds: float, max_connections: int = MAX_CONNECTIONS
) -> web.AppRunner:
    def on_refused() -> None:
        app[SERVICE].metrics.on_rejection("connections")

    return Runner(app, shutdown_seconds=shutdown_seconds, most=max_connections, on_refused=on_refused)


def _engine(close_seconds: float) -> Callable[[web.Application], AsyncIterator[None]]:
    async def context(app: web.Application) -> AsyncIterator[None]:
        await app[SUPERVISOR].start()
        try:
            yield
        finally:
            await app[SUPERVISOR].close(close_seconds)
            app[SERVICE].lane.close()

    return context


def _on_ready(metrics: Collector, cache_log: cache.CacheLog) -> Callable[[Ready], None]:
    def on_ready(ready: Ready) -> None:
        metrics.on_ready(ready)
        cache_log.on_start()
        logger.info(
            "ready: %s on %s, up to %d sequences (%s), %d tokens each",
            ready.model_type,
            ready.device,
            ready.max_num_seqs,
            ready.binding_limit,
            ready.max_model_len,
        )
        if ready.speculation_disabled_reason is not None:
            logger.warning("serving WITHOUT speculation: %s", ready.speculation_disabled_reason)
        else:
            logger.info("speculation: %d drafted tokens a round", ready.num_speculative_tokens)

    return on_ready


def _errors(metrics: Collector, root_path: str) -> Callable:
    """Every error leaves in the shape of the API that was asked; only our own faults are 500, and those are logged."""

    def refuse(request: web.Request, error: ApiError) -> web.Response:
        metrics.on_rejection(error.reason)
        if handlers.is_known():
            error.reveal()
        note_error(error.code or error.reason)
        path = request.path.removeprefix(root_path)
        anthropic = path.startswith(MESSAGES)
        anthropic = anthropic or (path.startswith("/v1/models") and models.ANTHROPIC_VERSION in request.headers)
        body = error_body(error) if anthropic else error.body()
        return web.Response(body=body, status=error.status, content_type=JSON, headers=error.headers)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            return refuse(request, error)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            shown = f"{error.reason}: {request.method} {request.path[:200]}"
            if error.status == 404:
                shown += f" ({root_path}/openapi.json lists what there is)"
            refusal = from_status(error.status, shown)
            if hdrs.ALLOW in error.headers:
                refusal.headers = {hdrs.ALLOW: error.headers[hdrs.ALLOW]}
            return refuse(request, refusal)
        except RecursionError:
            return refuse(request, BadRequest("The body is nested too deeply.", code="invalid_json"))
        except ConnectionError:
            raise
        except Exception:
            given = client_id(request) or "none"
            logger.exception("%s %s failed (request id: %s)", request.method, request.path, given)
            return refuse(request, ApiError("Internal error."))

    return middleware


def _auth(keys: Keys, root_path: str, public_paths: Set[str]) -> Callable:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        check_target(request, root_path)
        public = request.path.removeprefix(root_path) in public_paths
        look = keys.find if public else keys.check
        handlers.KEY.set(look(request.headers.get("Authorization"), request.headers.get("x-api-key")))
        if not public:
            note_known(request)
        return await handler(request)

    return middleware
