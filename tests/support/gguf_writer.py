"""Writes small GGUF files: F32, F16 and BF16 from values, block types from random bytes whose scales are small."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pilotfish.engine.checkpoint.gguf_file import TYPES

NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}
# bytes of a block that are 16-bit scales
SCALE_PLACES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]],
    *,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    """tensors: name -> (type name, shape with the fastest axis last, bytes)."""
    head = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    head += [_string(key) + _value(value) for key, value in metadata.items()]
    offset, data = 0, []
    for name, (kind, shape, raw) in tensors.items():
        axes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head.append(_string(name) + axes + struct.pack("<IQ", NUMBERS.get(kind, 99), offset))
        padded = raw + bytes(-len(raw) % alignment)
        data.append(padded)
        offset += len(padded)
    header = b"".join(head)
    path.write_bytes(header + bytes(-len(header) % alignment) + b"".join(data))
    return path


def stored(tensor: torch.Tensor, kind: str, generator: torch.Generator) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor's record; a block type keeps nothing of its values but the shape."""
    shape = tuple(tensor.shape)
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if kind in dtypes:
        return kind, shape, tensor.contiguous().to(dtypes[kind]).view(torch.uint8).numpy().tobytes()
    _, values, size = TYPES[NUMBERS[kind]]
    blocks = torch.randint(0, 256, (math.prod(shape) // values, size), generator=generator, dtype=torch.uint8)
    for place in SCALE_PLACES[kind]:
        scales = torch.rand(len(blocks), 1, generator=generator).half() / 64
        blocks[:, place : place + 2] = scales.view(torch.uint8)
    return kind, shape, blocks.numpy().tobytes()


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
