"""Compressed bodies: what clients write is read whatever the pieces it comes in, all else is refused in words."""

from __future__ import annotations

import gzip
import random
import zlib

import pytest

from pilotfish.server.errors import ApiError, BadRequest
from pilotfish.server.http.encodings import PIECE_BYTES, decoder_of

TEXT = b'{"prompt": "' + bytes(random.Random(1).choices(b"abcdefgh", k=3 * PIECE_BYTES)) + b'"}'


def raw(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


FORMS = {
    "identity": ("identity", bytes),
    "gzip": ("gzip", gzip.compress),
    "x-gzip": (" X-Gzip ", gzip.compress),
    "zlib": ("deflate", zlib.compress),
    "raw deflate": ("deflate", raw),
}


def read(encoding: str, chunks: list[bytes]) -> list[bytes]:
    decoder = decoder_of(encoding)
    pieces = [piece for chunk in chunks for piece in decoder.pieces(chunk)]
    decoder.end()
    return pieces


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 1000, 10**9])
def test_what_was_packed_comes_out(form, size):
    encoding, pack = FORMS[form]
    text = TEXT if size > 1 else TEXT[:2000]
    data = pack(text)
    pieces = read(encoding, [data[i : i + size] for i in range(0, len(data), size)])
    assert b"".join(pieces) == text
    assert form == "identity" or max(map(len, pieces)) <= PIECE_BYTES


def test_a_body_that_grows_is_unpacked_a_piece_at_a_time():
    decoder, packed = decoder_of("gzip"), gzip.compress(bytes(64 << 20))
    pieces = decoder.pieces(packed)
    assert len(packed) < PIECE_BYTES and [len(next(pieces)) for _ in range(3)] == [PIECE_BYTES] * 3


@pytest.mark.parametrize(
    ("encoding", "data", "why"),
    [
        ("gzip", b"not gzip", "incorrect header check"),
        ("gzip", gzip.compress(TEXT)[:-1], "it breaks off"),
        ("gzip", gzip.compress(TEXT) + b"more", "more follows its end"),
        ("gzip", gzip.compress(TEXT)[:-8] + bytes(8), "incorrect data check"),
        ("gzip", b"", "it breaks off"),
        ("deflate", b"", "it breaks off"),
        ("deflate", b"not that", "no deflate"),
        ("deflate", zlib.compress(TEXT)[:-9], "it breaks off"),
    ],
)
def test_what_is_none_is_told(encoding, data, why):
    with pytest.raises(BadRequest, match=why) as refused:
        read(encoding, [data] if data else [])
    assert refused.value.code == "invalid_body"


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, br", "gzip, gzip"])
def test_other_encodings_are_415(encoding):
    with pytest.raises(ApiError, match=f"gzip, deflate or none, got {encoding}") as refused:
        decoder_of(encoding)
    assert refused.value.status == 415
