"""Compressed bodies, unpacked piece by piece: what a client packed small is bounded as it grows.

Not by aiohttp, which tells a client that a library of ours is missing, logs a traceback for each body that is damaged,
and leaves one that breaks off without an answer.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Protocol

from pilotfish.server.errors import BadRequest, from_status

PIECE_BYTES = 256 << 10
"""Bytes that are unpacked at once: a millisecond's work."""
GZIP, ZLIB, RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
"""What `zlib` calls them."""


class Decoder(Protocol):
    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        """What a chunk of the body says, unpacked, in pieces. Raises BadRequest for what is no such data."""
        ...

    def end(self) -> None:
        """The body has ended. Raises BadRequest if it broke off."""
        ...


def decoder_of(encoding: str) -> Decoder:
    """Of a Content-Encoding header, "" if there is none. Raises 415 for another one than gzip and deflate."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return _Plain()
    if name in ("gzip", "x-gzip", "deflate"):
        return _Packed(name)
    error = from_status(415, f"Want Content-Encoding: gzip, deflate or none, got {encoding[:100]}.")
    error.code = "unsupported_content_encoding"
    raise error


class _Plain:
    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        yield chunk

    def end(self) -> None:
        pass


class _Packed:
    def __init__(self, name: str) -> None:
        self._name = name
        self._unpacker = zlib.decompressobj(GZIP) if name != "deflate" else None

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        if self._unpacker is None:
            # deflate is zlib's form by its standard, and without a head from some clients
            self._unpacker = zlib.decompressobj(ZLIB if chunk[0] & 0x0F == 8 else RAW)
        while chunk:
            try:
                piece = self._unpacker.decompress(chunk, PIECE_BYTES)
            except zlib.error as error:
                raise self._refusal(str(error)) from error
            if self._unpacker.unused_data:
                raise self._refusal("more follows its end")
            chunk = self._unpacker.unconsumed_tail
            yield piece

    def end(self) -> None:
        if self._unpacker is None or not self._unpacker.eof:
            raise self._refusal("it breaks off")

    def _refusal(self, why: str) -> BadRequest:
        return BadRequest(f"The body is no {self._name}, as Content-Encoding says: {why}.", code="invalid_body")
