"""How the tensors of one module are stored, told from their suffixes, dtypes and shapes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pilotfish.engine.checkpoint.headers import TensorInfo
from pilotfish.engine.errors import CheckpointError, LayoutError

PLAIN_DTYPES = ("BF16", "F16", "F32")
FP8_DTYPES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
GROUP = 16
FP8_BLOCK = 128


class Layout(Enum):
    """The layouts that released checkpoints of this family come in; the value is how messages call it."""

    PLAIN = "plain"
    CT_NVFP4 = "compressed-tensors NVFP4 (W4A16)"
    CT_NVFP4_W4A4 = "compressed-tensors NVFP4 (W4A4)"
    MODELOPT_NVFP4 = "ModelOpt NVFP4"
    MODELOPT_NVFP4_W4A4 = "ModelOpt NVFP4 (W4A4)"
    FP8_BLOCK_INV = "Qwen/DeepSeek FP8 block (weight_scale_inv)"
    CT_FP8_BLOCK = "compressed-tensors FP8 block"
    MODELOPT_FP8_BLOCK = "ModelOpt FP8 block (FP8_PB_WO)"
    FP8_TENSOR = "FP8 per tensor"
    FP8_CHANNEL = "FP8 per output channel"
    FP8_BARE = "FP8 without a scale"
    LYNN = "Lynn native NVFP4"
    CT_INT_PACKED = "compressed-tensors pack-quantized integers"
    GPTQ_AWQ = "GPTQ or AWQ integers"
    MX = "MXFP4 or MXFP8 (shared exponents)"
    TRANSFORMERS_NVFP4 = "transformers' own nvfp4"
    OTHER_DTYPE = "unquantised, of a dtype that is not BF16, F16 or F32"
    UNKNOWN = "an unknown combination of tensors"


READ = frozenset({Layout.PLAIN, Layout.CT_NVFP4, Layout.CT_NVFP4_W4A4})
PACKED = frozenset({Layout.CT_NVFP4, Layout.CT_NVFP4_W4A4})
SUPPORTED = "plain BF16/F16/F32 and compressed-tensors NVFP4 (nvfp4-pack-quantized)"


@dataclass(frozen=True)
class Module:
    """One weight as the files hold it.

    name: normalised; raw_name: as the checkpoint spells it. shape: of the weight it stands for, [N, K] for packed
    ones. dtype: of the stored weight tensor. parts: its tensors by suffix (".weight", ".weight_scale", "" ...).
    """

    name: str
    raw_name: str
    layout: Layout
    shape: tuple[int, ...]
    dtype: str
    parts: Mapping[str, TensorInfo]

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted({part.file for part in self.parts.values()}))

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts.values())


def describe(name: str, raw_name: str, parts: Mapping[str, TensorInfo]) -> Module:
    """The module these tensors make up.

    Raises LayoutError for a layout that is not read, CheckpointError for parts that do not fit each other; both
    name the module and a file.
    """
    layout = classify(parts)
    if layout not in READ:
        stored = ", ".join(f"{suffix or 'tensor'} {info}" for suffix, info in sorted(parts.items()))
        file = next(iter(parts.values())).file
        raise LayoutError(f"{raw_name}: stored as {layout.value} ({stored}; {file}); want {SUPPORTED}")
    if layout is Layout.PLAIN:
        (info,) = parts.values()
        return Module(name, raw_name, layout, info.shape, info.dtype, parts)
    return Module(name, raw_name, layout, _packed_shape(raw_name, parts), parts[".weight_packed"].dtype, parts)


def classify(parts: Mapping[str, TensorInfo]) -> Layout:
    """The layout of a module with these tensors by suffix; shapes are checked only where they tell layouts apart."""
    suffixes = set(parts)
    dtypes = {suffix: info.dtype for suffix, info in parts.items()}
    if suffixes in ({""}, {".weight"}):
        return _classify_single(next(iter(dtypes.values())))
    if suffixes & {".packed", ".weight.packed"}:
        return Layout.LYNN
    if suffixes & {".qweight", ".qzeros"}:
        return Layout.GPTQ_AWQ
    if suffixes & {".weight_sf", ".weight_sf_rowmajor"}:
        return Layout.TRANSFORMERS_NVFP4
    if dtypes.get(".weight_scale") in ("U8", "F8_E8M0") or ".weight_blocks" in suffixes:
        return Layout.MX
    if ".weight_packed" in suffixes:
        return _classify_ct_packed(suffixes, dtypes)
    if ".weight" in suffixes:
        return _classify_scaled_weight(parts)
    return Layout.UNKNOWN


def _classify_single(dtype: str) -> Layout:
    if dtype in PLAIN_DTYPES:
        return Layout.PLAIN
    return Layout.FP8_BARE if dtype in FP8_DTYPES else Layout.OTHER_DTYPE


def _classify_ct_packed(suffixes: set[str], dtypes: Mapping[str, str]) -> Layout:
    if dtypes[".weight_packed"] == "I32" or ".weight_shape" in suffixes:
        return Layout.CT_INT_PACKED
    wanted = {".weight_packed": "U8", ".weight_scale": "F8_E4M3", ".weight_global_scale": "F32"}
    if dtypes == wanted:
        return Layout.CT_NVFP4
    if dtypes == wanted | {".input_global_scale": "F32"}:
        return Layout.CT_NVFP4_W4A4
    return Layout.UNKNOWN


def _classify_scaled_weight(parts: Mapping[str, TensorInfo]) -> Layout:
    weight = parts[".weight"]
    suffixes = set(parts) - {".input_scale"}
    if suffixes == {".weight", ".weight_scale", ".weight_scale_2"} and weight.dtype == "U8":
        return Layout.MODELOPT_NVFP4_W4A4 if ".input_scale" in parts else Layout.MODELOPT_NVFP4
    if weight.dtype not in FP8_DTYPES:
        return Layout.UNKNOWN
    if suffixes == {".weight", ".weight_scale_inv"}:
        return Layout.FP8_BLOCK_INV
    if suffixes == {".weight", ".weight_scale"}:
        return _classify_fp8_scale(weight.shape, parts[".weight_scale"].shape)
    return Layout.UNKNOWN


def _classify_fp8_scale(weight: tuple[int, ...], scale: tuple[int, ...]) -> Layout:
    """Told by the scale's shape; a [1, 1] scale of a matrix with one block reads as per tensor, which is equal."""
    if len(scale) == 4:
        return Layout.MODELOPT_FP8_BLOCK
    if math.prod(scale) == 1:
        return Layout.FP8_TENSOR
    if len(weight) == 2 and scale in ((weight[0], 1), (weight[0],)):
        return Layout.FP8_CHANNEL
    if len(weight) == 2 and scale == tuple(-(-size // FP8_BLOCK) for size in weight):
        return Layout.CT_FP8_BLOCK
    return Layout.UNKNOWN


def _packed_shape(raw_name: str, parts: Mapping[str, TensorInfo]) -> tuple[int, int]:
    """(N, K) of a compressed-tensors NVFP4 module whose parts fit each other."""
    packed, scale = parts[".weight_packed"], parts[".weight_scale"]
    if len(packed.shape) != 2 or packed.shape[1] * 2 % GROUP:
        raise CheckpointError(f"{raw_name}.weight_packed: want [N, K/2] with K a multiple of {GROUP}, got {packed}")
    rows, columns = packed.shape[0], packed.shape[1] * 2
    if scale.shape != (rows, columns // GROUP):
        raise CheckpointError(f"{raw_name}.weight_scale: want shape {[rows, columns // GROUP]}, got {scale}")
    for suffix in (".weight_global_scale", ".input_global_scale"):
        if suffix in parts and parts[suffix].shape not in ((), (1,)):
            raise CheckpointError(f"{raw_name}{suffix}: want one number, got {parts[suffix]}")
    return rows, columns
