"""Reads safetensors headers and trusts nothing in them.

A file is an 8-byte little-endian length, that many bytes of JSON, then the tensors' bytes. The JSON maps a
name to {dtype, shape, data_offsets [begin, end)}, offsets counted from the end of the JSON; "__metadata__"
maps strings to strings. A header is accepted only if its tensors tile the rest of the file exactly: none
overlap, none lies outside, no byte is left over (so a truncated file is found before it is used).
Reads the header bytes only and never follows anything a file says to another file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from pilotfish.engine.checkpoint.foreign import SNIFFED_BYTES, broken_link, what_file
from pilotfish.engine.errors import HeaderError

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
MAX_TENSORS = 120_000
"""Tensors of one file at most: a 35B model in single experts has 92 000 in all. A tensor has at most this many marks in
JSON:"""
MAX_MARKS = {b":": 4, b",": 16, b"[": 2, b"{": 1}
MARKS_TO_SPARE = 1000  # in metadata
MAX_NAME_LENGTH = 512
MAX_DIMS = 8
FIELDS = {"dtype", "shape", "data_offsets"}

DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its header describes it.

    `start` and `end` are byte offsets in `file`; `fingerprint` is that of the file, see below.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int
    fingerprint: bytes = b""

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Header:
    """The tensors of one file by name, and its `__metadata__`."""

    file: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]


def read_header(path: Path) -> Header:
    """The header of one safetensors file (a symbolic link is followed).

    Raises HeaderError, naming the file and the fault, unless every check of the module's docstring holds.
    """
    body, file_size = _read_raw(path)
    entries = _parse(path, body)
    metadata = _metadata(path, entries.pop("__metadata__", None))
    data_start, digest = 8 + len(body), _digest(body, file_size)
    tensors = {name: _tensor_info(path, name, entry, data_start, digest) for name, entry in entries.items()}
    _check_tiling(path, tensors.values(), data_start, file_size)
    return Header(path, tensors, metadata)


def fingerprint(path: Path) -> bytes:
    """What a file's tensors have as theirs for as long as neither its header nor its size has changed.

    Raises HeaderError if the header's bytes cannot be read.
    """
    return _digest(*_read_raw(path))


def _digest(body: bytes, file_size: int) -> bytes:
    return blake2b(body, digest_size=16, salt=file_size.to_bytes(16, "little")).digest()


def _read_raw(path: Path) -> tuple[bytes, int]:
    """The header's bytes, and the size of the file."""
    try:
        # Looked at before it is opened: opening a pipe would wait for its writer.
        if not path.is_file():
            raise HeaderError(f"{path}: {broken_link(path) or 'want a regular file'}")
        with path.open("rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            return _read_body(path, file, file_size), file_size
    except OSError as error:
        raise HeaderError(f"{path}: cannot be read: {error.strerror}") from error


def _read_body(path: Path, file: BinaryIO, file_size: int) -> bytes:
    start = file.read(SNIFFED_BYTES)
    length = int.from_bytes(start[:8], "little")
    fits = len(start) >= 8 and 2 <= length <= min(MAX_HEADER_BYTES, file_size - 8)
    if not (fits and start[8:9] == b"{") and (what := what_file(start)):
        raise HeaderError(f"{path}: {what}")
    if len(start) < 8:
        raise HeaderError(f"{path}: want at least 8 bytes, got {len(start)}")
    if not fits:
        room = f"in [2, {MAX_HEADER_BYTES}] and inside the file of {file_size} bytes"
        raise HeaderError(f"{path}: want a header length {room}, got {length}")
    file.seek(8)
    body = file.read(length)
    if len(body) != length or body[:1] != b"{":
        raise HeaderError(f"{path}: want a header of {length} bytes that begins with '{{', got {body[:16]!r}")
    return body


def _parse(path: Path, body: bytes) -> dict[str, Any]:
    # a small file can hold a header that takes minutes and gigabytes to parse
    if any(body.count(mark) > MARKS_TO_SPARE + most * MAX_TENSORS for mark, most in MAX_MARKS.items()):
        raise HeaderError(f"{path}: want a header of at most {MAX_TENSORS} tensors, got one of {len(body)} bytes")
    try:
        entries: dict[str, Any] = json.loads(body, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"{path}: header is not acceptable JSON: {str(error)[:200]}") from error
    return entries


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise ValueError(f"key {key[:80]!r} occurs twice")
        entries[key] = value
    return entries


def _metadata(path: Path, raw: Any) -> dict[str, str]:
    if raw is None:
        return {}
    if not isinstance(raw, dict) or not all(isinstance(value, str) for value in raw.values()):
        raise HeaderError(f"{path}: want __metadata__ to map strings to strings")
    return raw


def _tensor_info(path: Path, name: str, entry: Any, data_start: int, digest: bytes) -> TensorInfo:
    if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise HeaderError(f"{path}: want printable names of 1 to {MAX_NAME_LENGTH} characters, got {name[:80]!r}")
    if not isinstance(entry, dict) or entry.keys() != FIELDS:
        raise HeaderError(f"{path}: {name}: want exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise HeaderError(f"{path}: {name}: unknown dtype {str(dtype)[:40]!r}")
    if not _is_size_list(shape) or len(shape) > MAX_DIMS:
        raise HeaderError(f"{path}: {name}: want a shape of at most {MAX_DIMS} sizes, got {str(shape)[:80]}")
    if not _is_size_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise HeaderError(f"{path}: {name}: want data_offsets [begin, end], got {str(offsets)[:80]}")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    begin, end = offsets
    if bits % 8 or end - begin != bits // 8:
        raise HeaderError(f"{path}: {name}: {dtype} {shape} takes {bits / 8:g} bytes, its offsets span {end - begin}")
    return TensorInfo(name, dtype, tuple(shape), path, data_start + begin, data_start + end, digest)


def _is_size_list(value: Any) -> bool:
    """Whether it is a list of integers in [0, 2^48): larger ones describe no file there is."""
    if not isinstance(value, list):
        return False
    for item in value:  # noqa: SIM110 - a generator costs more than the look
        if type(item) is not int or not 0 <= item < 1 << 48:
            return False
    return True


def _check_tiling(path: Path, tensors: Iterable[TensorInfo], data_start: int, file_size: int) -> None:
    """Raises HeaderError unless the tensors cover [data_start, file_size) without gap or overlap."""
    reached, before = data_start, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.end > file_size:
            raise HeaderError(f"{path}: {tensor.name} ends at byte {tensor.end} of a file of {file_size}")
        if tensor.start != reached:
            what = "overlaps" if tensor.start < reached else "leaves a gap after"
            raise HeaderError(f"{path}: {tensor.name} {what} {before} (begins at {tensor.start}, want {reached})")
        reached, before = tensor.end, tensor.name
    if reached != file_size:
        raise HeaderError(f"{path}: {file_size - reached} bytes after the last tensor belong to none")
