"""Writes safetensors files whose size is known before any value is: tensors may come in any order, one at a time.

Small elements lie behind large ones, so that every tensor is aligned to its own element size, as the safetensors
library lays files out. A file takes its name only when it is complete and on the disk.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from pilotfish.engine.checkpoint.headers import DTYPE_BITS, TensorInfo

COPY_BYTES = 1 << 24
HEADER_ALIGNMENT = 8
HEADER_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file to be written. `dtype` as in a safetensors header ("BF16")."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


class TensorFile:
    """An open file that waits for its tensors' bytes. `put` and `copy` take each name once."""

    def __init__(self, file: BinaryIO, entries: Iterable[TensorEntry]):
        ordered = sorted(entries, key=lambda entry: (-DTYPE_BITS[entry.dtype], entry.name))
        self._file = file
        self._waiting: dict[str, tuple[int, TensorEntry]] = {}
        header = _header(ordered)
        file.write(header)
        offset = len(header)
        for entry in ordered:
            assert entry.name not in self._waiting, entry.name
            self._waiting[entry.name] = (offset, entry)
            offset += entry.num_bytes
        file.truncate(offset)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor on the host, of the shape and size that was announced."""
        entry = self._seek(name)
        assert tuple(tensor.shape) == entry.shape and tensor.nbytes == entry.num_bytes, (entry, tensor.shape)
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def copy(self, name: str, info: TensorInfo) -> None:
        """The bytes of a tensor of another file, a piece at a time."""
        entry = self._seek(name)
        assert info.num_bytes == entry.num_bytes, (entry, info)
        with info.file.open("rb") as source:
            source.seek(info.start)
            left = info.num_bytes
            while left:
                piece = source.read(min(left, COPY_BYTES))
                if not piece:
                    raise OSError(f"{info.file}: ends inside {info.name}")
                self._file.write(piece)
                left -= len(piece)

    def check_complete(self) -> None:
        assert not self._waiting, f"tensors that were never written: {list(self._waiting)[:3]}"

    def _seek(self, name: str) -> TensorEntry:
        offset, entry = self._waiting.pop(name)
        self._file.seek(offset)
        return entry


@contextmanager
def tensor_file(path: Path, entries: Iterable[TensorEntry]) -> Iterator[TensorFile]:
    """A file to fill; it is called `path` only after the block ends without an error."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        opened = TensorFile(file, entries)
        yield opened
        opened.check_complete()
        sync(file)
    partial.replace(path)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A file of these tensors, wherever they are; it is called `path` only when it is whole."""
    entries = [TensorEntry(name, HEADER_DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
    with tensor_file(path, entries) as opened:
        for name, tensor in tensors.items():
            opened.put(name, tensor.detach().cpu())


def write_text(path: Path, text: str) -> None:
    """Text that is there as a whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(text.encode())
        sync(file)
    partial.replace(path)


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _header(ordered: Iterable[TensorEntry]) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in ordered:
        end = offset + entry.num_bytes
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    body = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    body += b" " * (-len(body) % HEADER_ALIGNMENT)
    return len(body).to_bytes(8, "little") + body
