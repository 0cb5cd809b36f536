"""Reads GGUF headers and trusts nothing in them; decodes single tensors.

A file is "GGUF", a version, two counts, the metadata, one record for each tensor (name, sizes with the fastest axis
first, type, offset), and after padding the tensors' bytes. Only scalars and strings of the metadata are kept: the
arrays (a vocabulary and its merges) are stepped over. Block types are decoded by the gguf package, which is optional.
"""

from __future__ import annotations

import importlib
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pilotfish.engine.checkpoint.foreign import look_at
from pilotfish.engine.checkpoint.headers import MAX_DIMS, MAX_NAME_LENGTH, TensorInfo
from pilotfish.engine.errors import HeaderError, LayoutError

VERSIONS = (2, 3)
MAX_TENSORS = 1 << 20
MAX_METADATA = 1 << 16
MAX_STRING = 64 << 20
MAX_ARRAY = 1 << 21
"""All strings of all arrays together: a vocabulary of 250 000 and its merges are a quarter of it."""
ALIGNMENT = 32
PREFIX = "GGUF "

# ggml's number -> name, values a block holds, bytes a block takes
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
}
BLOCKS = {name: (values, size) for name, values, size in TYPES.values()}

# metadata value types: numbers of 1 to 8 bytes, bool, then string (8) and array (9)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufHeader:
    """Tensors by name, dtypes as "GGUF Q4_K", shapes with the fastest axis last; types without a name end at start."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def read_gguf(path: Path) -> GgufHeader:
    """The header of one GGUF file. Raises HeaderError, naming the file and the fault."""
    try:
        if not path.is_file():
            raise HeaderError(f"{path}: want a regular file")
        with path.open("rb") as file:
            reader = _Reader(path, file, os.fstat(file.fileno()).st_size)
            return reader.header()
    except OSError as error:
        raise HeaderError(f"{path}: cannot be read: {error.strerror}") from error


class _Reader:
    def __init__(self, path: Path, file: BinaryIO, size: int):
        self.path, self.file, self.size = path, file, size
        self.num_strings = 0

    def header(self) -> GgufHeader:
        if self.take(4) != b"GGUF":
            what = look_at(self.path)
            raise self.fault("want it to begin with 'GGUF'" + (f", got {what}" if what else ""))
        if (version := self.number("I")) not in VERSIONS:
            raise self.fault(f"want version {' or '.join(map(str, VERSIONS))}, little-endian, got {version}")
        num_tensors, num_values = self.number("Q"), self.number("Q")
        if num_tensors > MAX_TENSORS or num_values > MAX_METADATA:
            raise self.fault(f"{num_tensors} tensors and {num_values} metadata values are more than a model has")
        metadata = self.metadata(num_values)
        records = [self.record() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise self.fault(f"want general.alignment, a number of bytes, got {alignment!r:.80}")
        start = -(-self.file.tell() // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in records:
            if name in tensors:
                raise self.fault(f"{name} occurs twice")
            tensors[name] = self.tensor(name, shape, kind, start + offset)
        return GgufHeader(self.path, metadata, tensors)

    def metadata(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _ in range(count):
            key, kind = self.string(MAX_NAME_LENGTH), self.number("I")
            value = self.value(kind)
            if kind != _ARRAY:
                values[key] = value
        return values

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string(MAX_STRING)
        if kind != _ARRAY:
            raise self.fault(f"metadata of unknown type {kind}")
        inner, length = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            return self.skip(length * struct.calcsize("<" + _SCALARS[inner]))
        if inner != _STRING:
            raise self.fault(f"metadata of unknown type {inner}")
        self.num_strings += length
        if self.num_strings > MAX_ARRAY:
            raise self.fault(f"an array of {length} strings")
        for _ in range(length):
            self.skip(self.number("Q"))
        return None

    def record(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string(MAX_NAME_LENGTH)
        num_axes = self.number("I")
        if not name.isprintable() or not name or num_axes > MAX_DIMS:
            raise self.fault(f"tensor {name[:80]!r} of {num_axes} axes")
        sizes = tuple(self.number("Q") for _ in range(num_axes))
        return name, sizes[::-1], self.number("I"), self.number("Q")

    def tensor(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> TensorInfo:
        if kind not in TYPES:
            return TensorInfo(name, f"{PREFIX}type {kind}", shape, self.path, begin, begin)
        type_name, values, size = TYPES[kind]
        if math.prod(shape) >= 1 << 48 or (shape[-1] if shape else 1) % values:
            raise self.fault(f"{name}: want rows of whole blocks of {values}, got shape {list(shape)}")
        end = begin + math.prod(shape) // values * size
        if end > self.size:
            raise self.fault(f"{name} ends at byte {end} of a file of {self.size}")
        return TensorInfo(name, f"{PREFIX}{type_name}", shape, self.path, begin, end)

    def string(self, limit: int) -> str:
        length = self.number("Q")
        if length > limit:
            raise self.fault(f"a string of {length} bytes")
        return self.take(length).decode("utf-8", errors="replace")

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def skip(self, count: int) -> None:
        if self.file.tell() + count > self.size:
            raise self.fault("it ends within its header")
        self.file.seek(count, os.SEEK_CUR)

    def take(self, count: int) -> bytes:
        raw = self.file.read(count) if count <= self.size else b""
        if len(raw) != count:
            raise self.fault("it ends within its header")
        return raw

    def fault(self, what: str) -> HeaderError:
        return HeaderError(f"{self.path}: no readable GGUF: {what}")


def decode(info: TensorInfo) -> np.ndarray:
    """fp32 values of a tensor, in its shape. Raises LayoutError without the gguf package that its type needs."""
    kind = info.dtype.removeprefix(PREFIX)
    _, size = BLOCKS[kind]
    raw = np.fromfile(info.file, dtype=np.uint8, count=info.num_bytes, offset=info.start)
    if len(raw) != info.num_bytes:
        raise HeaderError(f"{info.file}: changed since it was opened: {info.name} ends early")
    if kind in ("F32", "F16"):
        values = raw.view({"F32": "<f4", "F16": "<f2"}[kind]).astype(np.float32)
    elif kind == "BF16":
        values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = _decode_blocks(info, kind, raw.reshape(-1, size))
    return values.reshape(info.shape)


def _decode_blocks(info: TensorInfo, kind: str, blocks: np.ndarray) -> np.ndarray:
    try:
        gguf = importlib.import_module("gguf")
    except ImportError as error:
        raise LayoutError(
            f"{info.name}: decoding {info.dtype} needs the gguf package: pip install 'pilotfish[gguf]' ({info.file})"
        ) from error
    values: np.ndarray = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return values.astype(np.float32, copy=False)
