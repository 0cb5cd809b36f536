"""Request bodies as they arrive: within a deadline, and within a budget over all of them and for each key."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

from aiohttp import web

from pilotfish.server.errors import ApiError, BadRequest, Overloaded, TooManyRequests, from_status
from pilotfish.server.http.encodings import PIECE_BYTES, decoder_of
from pilotfish.server.http.routing import waits_to_send

JSON = "application/json"
MAX_BODY_BYTES = 32 << 20
FREE_BYTES = 65536
"""Bytes of each body that are always read, whatever others hold. The cap on connections bounds them."""
MOST_BYTES = 256 << 20
"""Bytes of all bodies that are being read or worked on, beyond the free ones."""
KEYS_SHARE = 4
"""One key may hold the fourth part of it."""
BODY_SECONDS = 20.0
BODY_BYTES_PER_SECOND = 256 << 10
"""A body has so many seconds, and one more for each of so many bytes that have come."""
RETRY_SECONDS = 1


class HeldBytes:
    """What one request holds of the budget: `counted` of the `num_read` bytes that have come."""

    def __init__(self, bodies: Bodies, label: str) -> None:
        self._bodies, self._label = bodies, label
        self.num_read = self.counted = 0

    def add(self, num_bytes: int) -> None:
        """Raises Overloaded or TooManyRequests where they are too many."""
        self.num_read += num_bytes
        more = max(0, self.num_read - FREE_BYTES) - self.counted
        self._bodies.take(self._label, more)
        self.counted += more


class Bodies:
    """`shared`: there are several keys, and none may use up the budget of all."""

    def __init__(self, *, shared: bool, most: int = MOST_BYTES) -> None:
        self._most, self._most_of_key = most, most // KEYS_SHARE if shared else most
        self._held: Counter[str] = Counter()
        self.num_bytes = 0

    @contextlib.contextmanager
    def hold(self, label: str, on_end: Callable[[], None] = lambda: None) -> Iterator[HeldBytes]:
        """Holds the bytes of one request, until it is worked out what it asks for; `on_end` hears if any were
        counted."""
        held = HeldBytes(self, label)
        try:
            yield held
        finally:
            self.take(label, -held.counted)
            if held.counted:
                on_end()

    def take(self, label: str, num_bytes: int) -> None:
        if num_bytes > 0 and self.num_bytes + num_bytes > self._most:
            raise Overloaded(f"Requests of {self.num_bytes} bytes are being read. Try again later.", RETRY_SECONDS)
        if num_bytes > 0 and self._held[label] + num_bytes > self._most_of_key:
            raise TooManyRequests(f"This key may send {self._most_of_key} bytes at a time.", RETRY_SECONDS)
        self.num_bytes += num_bytes
        self._held[label] += num_bytes
        if not self._held[label]:
            del self._held[label]


async def read_body(request: web.Request, held: HeldBytes) -> list[bytearray]:
    """The body of a JSON request, counted as it comes, in parts: a buffer that grew to 30 MB held the event
    loop for a tenth of a second.

    Raises BadRequest for another content type, 415 for another encoding than gzip and deflate, 413 before a byte is
    read where its length is known, 408 for one that comes too slowly.
    """
    kind = request.content_type
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise from_status(413, f"Want at most {MAX_BODY_BYTES} bytes, got {request.content_length}.")
    if "Content-Type" in request.headers and not (kind == JSON or kind.endswith("+json")):
        how = f"curl sends it with -H 'Content-Type: {JSON}'"
        raise BadRequest(f"Want Content-Type: {JSON}, got {kind[:100]}; {how}.", code="unsupported_content_type")
    decoder = decoder_of(request.headers.get("Content-Encoding", ""))
    if waits_to_send(request):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # the answer itself has not begun
        request.writer.output_size = 0
    began, parts = asyncio.get_running_loop().time(), [bytearray()]
    try:
        while True:
            async with asyncio.timeout_at(began + BODY_SECONDS + held.num_read / BODY_BYTES_PER_SECOND):
                chunk = await request.content.readany()
            if not chunk:
                decoder.end()
                return parts
            for piece in decoder.pieces(chunk):
                held.add(len(piece))
                if len(parts[-1]) >= PIECE_BYTES:
                    parts.append(bytearray())
                parts[-1] += piece
                if held.num_read > MAX_BODY_BYTES:
                    raise from_status(413, f"Want at most {MAX_BODY_BYTES} bytes.")
                if len(piece) == PIECE_BYTES:
                    await asyncio.sleep(0)
    except TimeoutError:
        raise _too_slow(held.num_read) from None
    except web.RequestPayloadError as error:
        raise BadRequest(f"The body cannot be read: {error}", code="invalid_body") from error


def _too_slow(num_bytes: int) -> ApiError:
    error = from_status(408, f"The body came too slowly: {num_bytes} bytes were read.")
    error.code, error.reason = "request_timeout", "too_slow"
    error.headers = {"Connection": "close"}
    return error
