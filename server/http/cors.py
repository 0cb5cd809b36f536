"""CORS, as the Fetch standard has it: what a browser lets pages of other origins ask this server and read.

Where there are no keys, a page may ask for nothing unless it is of this machine or its origin is named: a browser sends
what a page wants before it looks who may read the answer, and a page may reach this server by a name of its own (DNS
rebinding). What no browser sends for a page has no Origin, and is not looked at. Our own page may, by any address and
by names that are ours: a page whose origin is the address it asks was served from there.

A preflight comes without a key, by that standard, and is answered before keys are looked at. All other answers get
their headers as they are sent: streams, refusals and failures alike.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import hdrs, web

from pilotfish.engine.errors import PilotfishError
from pilotfish.server.errors import BadRequest, Forbidden

ANY = "*"
METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
"""What "*" stands for. More than our routes take, so that a page sees our 405 and not a network error."""
SAFE_HEADERS = ("Accept", "Accept-Language", "Content-Language", "Content-Type")
"""Allowed whatever the list says, as in Starlette: browsers ask for some values of theirs, JSON's type among them."""
MAX_AGE_SECONDS = 600
"""How long a browser may remember the answer to a preflight: Starlette's."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class CorsError(PilotfishError):
    """Flags that together would let in whom the operator cannot mean."""


class Cors(msgspec.Struct, frozen=True, kw_only=True):
    """What pages of other origins may do; "*" in a list is any. Without origins no page may do anything.

    `origins` None: any, or, where the server is `keyless`, none but this machine's. Pages
    may call a keyless server by names of this machine and by `hosts`.
    `credentials`: browsers may send cookies and client certificates along. Raises CorsError beside the origin "*".
    Browsers refuse that pair as it stands; to echo every origin, as Starlette does, hides it from them, and any page
    could then use what a browser holds for this server.
    """

    origins: tuple[str, ...] | None = None
    hosts: tuple[str, ...] = ()
    methods: tuple[str, ...] = (ANY,)
    headers: tuple[str, ...] = (ANY,)
    credentials: bool = False
    keyless: bool = False

    def __post_init__(self) -> None:
        if self.credentials and (self.origins is None or ANY in self.origins):
            raise CorsError('--allow-credentials wants --allowed-origins that name each origin, got "*"')

    @property
    def _origins(self) -> tuple[str, ...]:
        return self.origins if self.origins is not None else () if self.keyless else (ANY,)

    def guard(self) -> Callable:
        """The middleware that refuses what a page must not ask of a keyless server."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self.keyless and hdrs.ORIGIN in request.headers and not self._is_own_page(request):
                if not self._allows_origin(request):
                    raise Forbidden("origin", "Pages of this origin may not call this server: --allowed-origins.")
                if not self._allows_host(request):
                    raise Forbidden("host", "Pages may not call this server by this name: --allowed-hosts.")
            return await handler(request)

        return middleware

    def middleware(self) -> Callable:
        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            asks = hdrs.ORIGIN in request.headers and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
            if request.method == hdrs.METH_OPTIONS and asks:
                return self._preflight(request)
            return await handler(request)

        return middleware

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Adds the headers; a signal of `on_response_prepare`."""
        if ANY not in self._origins:
            # whoever asked: a cache must not give the answer to one origin to another
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if not self._allows_origin(request):
            return
        allowed = ANY if ANY in self._origins else request.headers[hdrs.ORIGIN]
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = allowed
        if self.credentials:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_CREDENTIALS] = "true"

    def _allows_origin(self, request: web.Request) -> bool:
        origins = request.headers.getall(hdrs.ORIGIN, [])
        return bool(origins) and all(map(self._is_allowed, origins))

    def _is_allowed(self, origin: str) -> bool:
        if ANY in self._origins or origin in self._origins:
            return True
        host = re.fullmatch(r"[a-z][a-z0-9+.-]*://([^/@]+)", origin)
        return self.keyless and host is not None and is_local(host[1])

    def _allows_host(self, request: web.Request) -> bool:
        hosts = request.headers.getall(hdrs.HOST, [])
        return bool(hosts) and all(ANY in self.hosts or is_local(host) or self._is_named(host) for host in hosts)

    def _is_own_page(self, request: web.Request) -> bool:
        """Whether a page that this server served asks. A name may be made to lead here after its page was loaded from
        elsewhere, an address cannot."""
        hosts, origins = request.headers.getall(hdrs.HOST, []), request.headers.getall(hdrs.ORIGIN, [])
        if len(hosts) != 1 or {origin.partition("://")[2].lower() for origin in origins} != {hosts[0].lower()}:
            return False
        return is_address(hosts[0]) or is_local(hosts[0]) or self._is_named(hosts[0])

    def _is_named(self, host: str) -> bool:
        """Written with its port or without."""
        named = {name.lower() for name in self.hosts}
        return host.lower() in named or _without_port(host) in named

    def _preflight(self, request: web.Request) -> web.Response:
        """204, or a 400 that names what is not allowed: to a browser any other status than 2xx is a no."""
        methods = METHODS if ANY in self.methods else self.methods
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "").split(",")
        asked = [name for name in map(str.strip, asked) if name]
        # a "*" in the answer would not cover Authorization, so what was asked for is repeated, if it can be
        any_header = [name for name in asked if name.isascii() and name.isprintable()]
        headers = any_header if ANY in self.headers else [*SAFE_HEADERS, *self.headers]
        refused = {
            "origin": not self._allows_origin(request),
            "host": self.keyless and not self._allows_host(request),
            "method": request.headers[hdrs.ACCESS_CONTROL_REQUEST_METHOD] not in methods,
            "headers": not {name.lower() for name in asked} <= {name.lower() for name in headers},
        }
        if any(refused.values()):
            named = ", ".join(name for name, wrong in refused.items() if wrong)
            error = BadRequest(f"Not allowed across origins: {named}.", code="cors")
            return web.Response(body=error.body(), status=error.status, content_type="application/json")
        answer = web.Response(status=204)
        answer.headers[hdrs.ACCESS_CONTROL_ALLOW_METHODS] = ", ".join(methods)
        if headers:
            answer.headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = ", ".join(headers)
        answer.headers[hdrs.ACCESS_CONTROL_MAX_AGE] = str(MAX_AGE_SECONDS)
        return answer


def is_address(host: str) -> bool:
    """Whether a host, with a port or without, is no name."""
    return _address(_without_port(host)) is not None


def is_local(host: str) -> bool:
    """Whether a host, with a port or without, can be nothing but this machine."""
    name = _without_port(host).removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _address(name)
    if address is None:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def _without_port(host: str) -> str:
    return re.sub(r":\d*$", "", host.lower())
