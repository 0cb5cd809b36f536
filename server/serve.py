"""`pilotfish serve`: the event loop, signals, logging, and an orderly end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import logging
import math
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from aiohttp import web

from pilotfish.engine.link.client import EngineUnavailable
from pilotfish.server.handlers import SERVICE
from pilotfish.server.http.app import SUPERVISOR, ServerOptions, make_app, make_metrics_app, make_runner
from pilotfish.server.http.bounded_log import Bounded
from pilotfish.server.http.connections import TcpSite, UnixSite, room_for_connections
from pilotfish.server.http.cors import Cors
from pilotfish.server.http.drain import DRAIN
from pilotfish.server.http.page import PAGE
from pilotfish.server.http.tls import TlsError, TlsFiles, make_context, refresh
from pilotfish.server.model_files import ModelFiles, load_model_files

if TYPE_CHECKING:
    from pilotfish.engine.options import EngineOptions

logger = logging.getLogger("pilotfish")

LAST_WORDS_SECONDS = 1.0
"""The time for the error of a request that has not ended in time to reach its client."""
MAY_PASS = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, socket.EAI_AGAIN)
"""Why an address cannot be listened on now and may be later: another process, a network or a resolver."""
CLOSE_SECONDS = 10.0
"""The time for the engine to end, before it is killed."""


def serve_forever(args: argparse.Namespace, engine: EngineOptions, api_keys: Sequence[str]) -> int:
    """Serves until SIGINT, SIGTERM or SIGHUP, or until the engine has failed for good. The exit status.

    Raises PilotfishError for files that cannot be used.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(Bounded())
    # its errors are malformed requests; what fails in a handler is logged by ours
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    files = load_model_files(
        Path(args.model),
        generation_config=args.generation_config,
        override=args.override_generation_config,
        chat_template=args.chat_template,
        reasoning_parser=args.reasoning_parser,
        tool_call_parser=args.tool_call_parser,
        reasoning_end=args.reasoning_end,
        late_system=args.late_system,
        loop_rule=args.loop_guard,
        volatile_lines=args.volatile_lines,
        template_values=args.default_chat_template_kwargs,
    )
    if args.enable_prefix_caching:
        tell_of_reasoning(files)
    tls = _tls(args)
    cors = Cors(
        origins=None if args.allowed_origins is None else tuple(args.allowed_origins),
        hosts=tuple(args.allowed_hosts),
        methods=tuple(args.allowed_methods),
        headers=tuple(args.allowed_headers),
        credentials=args.allow_credentials,
    )
    names = tuple(args.served_model_name or [Path(args.model).resolve().name])
    app = make_app(
        ServerOptions(
            served_names=names,
            api_keys=tuple(api_keys),
            api_key_file=args.api_key_file,
            root_path=args.root_path,
            any_model_name=args.any_model_name,
            strict_fields=args.strict_fields,
            stream_tool_arguments=args.stream_tool_arguments,
            core=args.core,
            restart_engine=args.restart_engine,
            engine_timeout=args.engine_timeout or math.inf,
            log_requests=args.log_requests or args.log_prompts,
            log_prompts=args.log_prompts,
            isolates_keys=args.prefix_cache_isolation == "key",
            metrics_apart=args.metrics_port is not None,
            page=not args.no_page,
            cors=cors,
        ),
        engine,
        files,
    )
    _quiet_collector()
    logger.info("serving %s with %s", ", ".join(names), engine)
    addresses = {app: Address(args.host, args.port, args.uds, *tls)}
    if args.metrics_port is not None:
        addresses[make_metrics_app(app)] = Address(args.metrics_host or args.host, args.metrics_port, None)
    return asyncio.run(_run(app, addresses, args.shutdown_timeout, room_for_connections(args.max_connections)))


def tell_of_reasoning(files: ModelFiles) -> None:
    """Says once where what a conversation shares with its last turn ends early, and what to do about it."""
    template, values = files.chat_template, files.template_values
    if template is None or not files.parses_reasoning or template.keeps_history(values):
        return
    switch = "preserve_thinking"
    kept = switch in template.variables and template.keeps_history({**values, switch: True})
    remedy = f"--default-chat-template-kwargs '{{\"{switch}\": true}}' keeps it" if kept else "no switch of it keeps it"
    logger.warning(
        "the chat template drops earlier turns' reasoning at each new user message: a conversation is read anew from"
        " the first dropped block on (%s)",
        remedy,
    )


def _quiet_collector() -> None:
    """What was loaded is never looked at again, and new objects later: the collector holds the interpreter's lock.

    By default a large body's objects had it walk all of them over and over, 50 to 150 ms at a time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def _tls(args: argparse.Namespace) -> tuple[ssl.SSLContext | None, TlsFiles | None]:
    """The context, and the files to watch. Raises TlsError."""
    if args.ssl_certfile is None:
        if args.ssl_keyfile or args.ssl_ca_certs or args.ssl_cert_reqs or args.enable_ssl_refresh:
            raise TlsError("the other --ssl flags want --ssl-certfile")
        return None, None
    files = TlsFiles(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs, args.ssl_cert_reqs)
    return make_context(files), files if args.enable_ssl_refresh else None


class Address(NamedTuple):
    """`socket`, where there is one, is listened on in place of host and port; `watched` are the files behind `tls`."""

    host: str
    port: int
    socket: Path | None
    tls: ssl.SSLContext | None = None
    watched: TlsFiles | None = None

    def __str__(self) -> str:
        return str(self.socket) if self.socket else f"{self.host}:{self.port}"

    def site(self, runner: web.AppRunner) -> web.BaseSite:
        """Raises OSError for a socket that another process listens on, and where the path is no socket's; what a dead
        one left is replaced."""
        if self.socket is None:
            return TcpSite(runner, self.host, self.port, ssl_context=self.tls)
        if self.socket.exists() and not self.socket.is_socket():
            raise FileExistsError(errno.EEXIST, "no socket, but a file or folder")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(os.fsencode(self.socket)) == 0:
                raise OSError(errno.EADDRINUSE, "another process listens there")
        return UnixSite(runner, self.socket, ssl_context=self.tls)


async def _run(
    app: web.Application, addresses: Mapping[web.Application, Address], shutdown_seconds: float, max_connections: int
) -> int:
    address, stop = addresses[app], asyncio.Event()
    _stop_on_signals(stop)
    runners = {
        one: make_runner(one, shutdown_seconds=LAST_WORDS_SECONDS, max_connections=max_connections) for one in addresses
    }
    beside = []
    if address.tls is not None and address.watched is not None:
        beside.append(asyncio.create_task(refresh(address.tls, address.watched)))
    try:
        for one, runner in runners.items():
            if (failed := await _set_up(runner) or await _listen(addresses[one], runner)) is not None:
                return failed
        beside.append(asyncio.create_task(_tell_page(app, runners[app], address.tls)))
        try:
            status = await _until_stopped(app, stop)
            await _drain(app, runners[app], shutdown_seconds)
            return status
        finally:
            if address.socket is not None:
                address.socket.unlink(missing_ok=True)
    finally:
        for task in beside:
            task.cancel()
        # those that only look, last
        for runner in runners.values():
            await runner.cleanup()


async def _set_up(runner: web.AppRunner) -> int | None:
    """The exit status where the engine process cannot be started: a full disk, a folder that cannot be written."""
    try:
        await runner.setup()
    except OSError as error:
        print(f"pilotfish: the engine cannot be started: {error}", file=sys.stderr)
        await runner.app[SUPERVISOR].close(0)
        return 1
    return None


async def _listen(address: Address, runner: web.AppRunner) -> int | None:
    """The exit status where it cannot."""
    try:
        await address.site(runner).start()
    except OSError as error:
        # asyncio's own words repeat the address, and a resolver's numbers are no errno's
        known = error.errno is not None and not isinstance(error, socket.gaierror)
        reason = os.strerror(error.errno or 0) if known else error.strerror or error
        print(f"pilotfish: cannot listen on {address}: {reason}", file=sys.stderr)
        return 1 if error.errno in MAY_PASS else 2
    urls = ", ".join(_url(place, address.tls) for place in runner.addresses)
    logger.info("listening on %s, loading the model" if SUPERVISOR in runner.app else "metrics on %s", urls)
    return None


async def _tell_page(app: web.Application, runner: web.AppRunner, tls: ssl.SSLContext | None) -> None:
    """The last line of a start: the address that is worth opening."""
    places = [place for place in runner.addresses if not isinstance(place, str)]
    if PAGE not in app or not places:
        return
    with contextlib.suppress(EngineUnavailable):
        await app[SERVICE].client.wait_ready()
        host, *rest = places[0]
        # what listens everywhere is reached here by this name
        host = "localhost" if host in ("0.0.0.0", "::") else host
        logger.info("open %s/ in a browser to see it write", _url((host, *rest), tls))


async def _drain(app: web.Application, runner: web.AppRunner, shutdown_seconds: float) -> None:
    """Running work ends, or is ended; new work is refused. Probes and scrapes are answered until the engine is gone."""
    drain, began = app[DRAIN], time.monotonic()
    drain.begin()
    if not await drain.wait(shutdown_seconds):
        app[SERVICE].client.abort_all()
        await drain.wait(LAST_WORDS_SECONDS)
    await app[SUPERVISOR].close(CLOSE_SECONDS)
    left = began + shutdown_seconds + LAST_WORDS_SECONDS - time.monotonic()
    if runner.server is not None:
        # connections that wait for a next request, then whole answers that are still being read; 0 would be without end
        runner.server.pre_shutdown()
        await runner.server.shutdown(max(0.1, left))


async def _until_stopped(app: web.Application, stop: asyncio.Event) -> int:
    """A load that fails, or an engine that fails too often, ends the server: with 2 where another start would fail
    again, else with 1, for a service manager to start it."""
    stopping = asyncio.create_task(stop.wait())
    failing = asyncio.create_task(app[SUPERVISOR].wait_gave_up())
    _, pending = await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    if not stop.is_set():
        failure = app[SERVICE].client.failure
        return 2 if failure is not None and failure.permanent else 1
    logger.info("stopping: running requests may end first; a second signal ends them now")
    return 0


def _stop_on_signals(stop: asyncio.Event) -> None:
    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    # the terminal is gone, which kernel and shell may both say; nohup has it ignored
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, stop.set)


def _url(address: tuple | str, tls: ssl.SSLContext | None) -> str:
    if isinstance(address, str):
        return f"unix:{address}"
    host, port = address[:2]
    return f"http{'s' if tls else ''}://" + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
