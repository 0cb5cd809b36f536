"""Routes whose refusals have our shape too: unknown paths, other methods, and expectations that nobody can meet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

from aiohttp import HttpVersion11, hdrs, web

from pilotfish.server.errors import BadRequest, from_status

JSON = "application/json"


def guarded(routes: Sequence[web.RouteDef]) -> list[web.RouteDef]:
    """The routes with our answer to Expect headers, then each path with any other method, then any other path.

    aiohttp's own answers come before the middlewares: they are plain text, and fail at an Expect that is not UTF-8.
    """
    other = [("*", path, _wrong_method(methods)) for path, methods in _methods(routes).items()]
    other.append(("*", "/{any:.*}", _unknown))
    return [
        web.RouteDef(method, path, handler, {**extra, "expect_handler": _expect})
        for method, path, handler, extra in (
            *((route.method, route.path, route.handler, route.kwargs) for route in routes),
            *((*entry, {}) for entry in other),
        )
    ]


def check_target(request: web.BaseRequest, root_path: str = "") -> None:
    """Raises BadRequest for a path that is not written as our routes are: as other rules, a relay's, may read it.

    `/metrics#x`, `/%6detrics` and their like are `/metrics` to us and something else to a relay that denies it. The
    names of models may hold what must be escaped.
    """
    target = request.raw_path
    if target.startswith(("http://", "https://")):
        target = "/" + target.partition("://")[2].partition("/")[2]
    path = target.partition("?")[0]
    escapes = path.removeprefix(root_path).startswith("/v1/models/")
    if "#" in target or (path != request.path and not escapes):
        raise BadRequest("Want a path without escapes, and no '#'.", code="invalid_path")


def _methods(routes: Sequence[web.RouteDef]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for route in routes:
        found.setdefault(route.path, []).append(route.method)
    return found


def _wrong_method(allowed: list[str]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handler(request: web.Request) -> NoReturn:
        raise web.HTTPMethodNotAllowed(request.method, allowed)

    return handler


async def _unknown(request: web.Request) -> NoReturn:
    raise web.HTTPNotFound


def waits_to_send(request: web.Request) -> bool:
    """Whether the client sends its body once it is told to go on."""
    return request.version >= HttpVersion11 and request.headers.get(hdrs.EXPECT, "").lower() == "100-continue"


async def _expect(request: web.Request) -> web.Response | None:
    """None: go on to the handler, which asks for the body once it wants one (http/bodies.py)."""
    if request.version < HttpVersion11 or waits_to_send(request):
        return None
    error = from_status(417, f"Cannot do what Expect asks for: {request.headers[hdrs.EXPECT]}")
    return web.Response(body=error.body(), status=417, content_type=JSON)
