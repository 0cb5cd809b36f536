"""CORS, as the Fetch standard has it: what a browser lets pages of other origins ask this server and read.

A preflight comes without a key, by that standard, and is answered before keys are looked at. All other answers get
their headers as they are sent: streams, refusals and failures alike.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import hdrs, web

from pilotfish.engine.errors import PilotfishError
from pilotfish.server.errors import BadRequest

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

    `credentials`: browsers may send cookies and client certificates along. Raises CorsError beside the origin "*".
    Browsers refuse that pair as it stands; to echo every origin, as Starlette does, hides it from them, and any page
    could then use what a browser holds for this server.
    """

    origins: tuple[str, ...] = (ANY,)
    methods: tuple[str, ...] = (ANY,)
    headers: tuple[str, ...] = (ANY,)
    credentials: bool = False

    def __post_init__(self) -> None:
        if self.credentials and ANY in self.origins:
            raise CorsError('--allow-credentials wants --allowed-origins that name each origin, got "*"')

    def middleware(self) -> Callable:
        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            asks = hdrs.ORIGIN in request.headers and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
            if request.method == hdrs.METH_OPTIONS and asks:
                return self._preflight(request)
            return await handler(request)

        return middleware

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """For `on_response_prepare`."""
        if ANY not in self.origins:
            # whoever asked: a cache must not give the answer to one origin to another
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if not self._allows_origin(request):
            return
        allowed = ANY if ANY in self.origins else request.headers[hdrs.ORIGIN]
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = allowed
        if self.credentials:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_CREDENTIALS] = "true"

    def _allows_origin(self, request: web.Request) -> bool:
        origin = request.headers.get(hdrs.ORIGIN)
        return origin is not None and (ANY in self.origins or origin in self.origins)

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
