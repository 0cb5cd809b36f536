"""Matrices that a folder holds twice: stored again by a trainer though config.json has them shared.

A copy that equals the matrix it stands for is left. One that differs contradicts the config, and only its maker can say
which of the two is meant. Shapes are compared when a folder is opened, values when its weights are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pilotfish.engine.checkpoint.headers import DTYPE_BITS, TensorInfo
from pilotfish.engine.checkpoint.layouts import Layout, Module
from pilotfish.engine.config import ModelConfig
from pilotfish.engine.errors import CheckpointError, LayoutError

PIECE = 1 << 22
"""Elements compared at a time."""
EMBEDDING, OUTPUT = "model.embed_tokens", "lm_head"


@dataclass(frozen=True)
class Copy:
    """A module that stands for `meant`."""

    module: Module
    meant: Module


def meant_by(config: ModelConfig) -> dict[str, str]:
    """Modules that the config has shared, and whose weight each of them is."""
    output = EMBEDDING if config.tie_word_embeddings else OUTPUT
    found = {"mtp.embed_tokens": EMBEDDING, "mtp.lm_head": output}
    return found | ({OUTPUT: EMBEDDING} if config.tie_word_embeddings else {})


def take_copies(modules: dict[str, Module], config: ModelConfig) -> tuple[Copy, ...]:
    """Takes the copies out of the modules. Raises CheckpointError or LayoutError where a header alone tells that one
    differs."""
    names = {name: meant for name, meant in meant_by(config).items() if name in modules and meant in modules}
    found = tuple(Copy(modules[name], modules[meant]) for name, meant in names.items())
    for copy in found:
        _check_form(copy)
        del modules[copy.module.name]
    return found


def _check_form(copy: Copy) -> None:
    module, meant = copy.module, copy.meant
    if module.layout is not meant.layout or set(module.parts) != set(meant.parts):
        raise LayoutError(f"{_name(module)}: stored as {module.layout.value}, {_advice(copy)}")
    for suffix, part in module.parts.items():
        if part.shape != meant.parts[suffix].shape:
            raise CheckpointError(f"{part.name}: {part}, {_advice(copy)}")


def check_copies(copies: tuple[Copy, ...]) -> None:
    """Reads both. Raises CheckpointError for a copy that differs."""
    for copy in copies:
        for suffix, part in copy.module.parts.items():
            if not _equal(part, copy.meant.parts[suffix]):
                raise CheckpointError(f"{part.name}: other values than {_name(copy.meant)}, {_advice(copy)}")


def _advice(copy: Copy) -> str:
    """What the config says of it, and what would make the folder whole."""
    if copy.module.name == OUTPUT:
        said = f"but config.json has tie_word_embeddings true, so that it should be {_name(copy.meant)}"
        return f"{said}; false there serves it as it is, and without it the model is tied"
    return f"want {_name(copy.meant)}'s: embeddings of a head's own (mtp_use_dedicated_embeddings) are not read"


def _name(module: Module) -> str:
    return next(iter(module.parts.values())).name if module.layout is Layout.PLAIN else module.raw_name


def _equal(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether the values are the same, piece by piece; of other dtypes, in fp32."""
    count = math.prod(one.shape)
    for begin in range(0, count, PIECE):
        first, second = (_piece(info, begin, min(PIECE, count - begin)) for info in (one, other))
        if one.dtype != other.dtype:
            first, second = _float32(first, one.dtype), _float32(second, other.dtype)
        if not np.array_equal(first, second):
            return False
    return True


def _piece(info: TensorInfo, begin: int, count: int) -> np.ndarray:
    """A piece's bytes, uint8."""
    size = DTYPE_BITS[info.dtype] // 8
    try:
        return np.fromfile(info.file, np.uint8, count * size, offset=info.start + begin * size)
    except OSError as error:
        raise CheckpointError(f"{info.file}: changed or unreadable since it was opened: {error}") from error


def _float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Values of BF16, F16 or F32, as plain modules have them."""
    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float16 if dtype == "F16" else np.float32).astype(np.float32)
