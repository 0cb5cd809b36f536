"""GET /: the page in server/page, and what a browser may do with it.

Its parts are public, as the page asks for the key itself. All addresses in it are relative, so that it works under any
prefix. Nothing comes from elsewhere, no script or style stands in the document, and only text can be put into it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from aiohttp import hdrs, web
from msgspec import Struct

FOLDER = Path(__file__).resolve().parent.parent / "page"
DOCUMENT = "index.html"
FOLDER_PATH = "/page/"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # looked at again each time: another version of the server may stand at the same address
    "Cache-Control": "no-cache",
}


class Part(Struct, frozen=True):
    """A file as it is sent."""

    body: bytes
    kind: str
    etag: str


class Page:
    """The document and its parts, read once. `keys`: requests want one, so that the page asks for it first."""

    def __init__(self, *, keys: bool) -> None:
        self._parts = {
            file.relative_to(FOLDER).as_posix(): _part(file.read_bytes(), TYPES[file.suffix])
            for file in sorted(FOLDER.rglob("*"))
            if file.suffix in TYPES
        }
        document = self._parts.pop(DOCUMENT)
        marked = document.body.replace(b'data-keys="no"', b'data-keys="yes"' if keys else b'data-keys="no"')
        self._document = _part(marked, document.kind)

    @property
    def paths(self) -> frozenset[str]:
        """The addresses of its parts, without a prefix."""
        return frozenset(FOLDER_PATH + name for name in self._parts)

    def routes(self, root: str) -> list[web.RouteDef]:
        """Routes of its parts; the document has the server's own address."""
        return [web.get(root + path, self._part) for path in sorted(self.paths)]

    def document(self, request: web.Request) -> web.Response:
        return _answer(request, self._document)

    async def _part(self, request: web.Request) -> web.Response:
        return _answer(request, self._parts[request.path.rpartition(FOLDER_PATH)[2]])


PAGE: web.AppKey[Page] = web.AppKey("page", Page)


def wants_page(request: web.Request) -> bool:
    """Whoever takes HTML gets it; a program that asks for JSON, and nothing else, gets that."""
    accepted = request.headers.get(hdrs.ACCEPT, "*/*")
    return PAGE in request.app and ("text/html" in accepted or "application/json" not in accepted)


def _part(body: bytes, kind: str) -> Part:
    return Part(body, kind, hashlib.sha256(body).hexdigest()[:32])


def _answer(request: web.Request, part: Part) -> web.Response:
    known = any(tag.value in (part.etag, "*") for tag in request.if_none_match or ())
    response = web.Response(status=304) if known else web.Response(body=part.body)
    if not known:
        response.content_type, response.charset = part.kind, "utf-8"
    response.etag = part.etag
    response.headers.update(HEADERS)
    return response
