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
    GGUF = "GGUF"
    CT_INT_PACKED = "compressed-tensors pack-quantized integers"
    GPTQ_AWQ = "GPTQ or AWQ integers"
    MLX_PACKED = "MLX affine-quantised integers"
    MX = "MXFP4 or MXFP8 (shared exponents)"
    TRANSFORMERS_NVFP4 = "transformers' own nvfp4"
    OTHER_DTYPE = "unquantised, of a dtype that is not BF16, F16 or F32"
    UNKNOWN = "an unknown combination of tensors"


NVFP4_CT = frozenset({Layout.CT_NVFP4, Layout.CT_NVFP4_W4A4})
NVFP4_MODELOPT = frozenset({Layout.MODELOPT_NVFP4, Layout.MODELOPT_NVFP4_W4A4})
FP8_BLOCKS = frozenset({Layout.FP8_BLOCK_INV, Layout.CT_FP8_BLOCK, Layout.MODELOPT_FP8_BLOCK})
FP8 = FP8_BLOCKS | {Layout.FP8_TENSOR, Layout.FP8_CHANNEL}
PACKED = NVFP4_CT | NVFP4_MODELOPT | FP8 | {Layout.LYNN}
READ = PACKED | {Layout.PLAIN}
SUPPORTED = "plain BF16/F16/F32, NVFP4 (compressed-tensors, ModelOpt, lynn-engine) or FP8 e4m3 (tensor, channel, block)"

ACTIVATION_SCALES = frozenset({".input_scale", ".input_global_scale"})
"""Parts that are not read: activations stay 16-bit."""


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
    shape = _fp8_shape(layout, parts) if layout in FP8 else _nvfp4_shape(layout, parts)
    return Module(name, raw_name, layout, shape, _main_part(layout, parts).dtype, parts)


def classify(parts: Mapping[str, TensorInfo]) -> Layout:
    """The layout of a module with these tensors by suffix; shapes are checked only where they tell layouts apart."""
    suffixes = set(parts)
    dtypes = {suffix: info.dtype for suffix, info in parts.items()}
    if suffixes in ({""}, {".weight"}):
        return _classify_single(next(iter(dtypes.values())))
    if suffixes & {".packed", ".weight.packed"}:
        return _classify_lynn(dtypes)
    if suffixes & {".qweight", ".qzeros"}:
        return Layout.GPTQ_AWQ
    if ".scales" in suffixes and dtypes.get(".weight") == "U32":
        return Layout.MLX_PACKED
    if suffixes & {".weight_sf", ".weight_sf_rowmajor"}:
        return Layout.TRANSFORMERS_NVFP4
    if dtypes.get(".weight_scale") in ("U8", "F8_E8M0") or ".weight_blocks" in suffixes:
        return Layout.MX
    if ".weight_packed" in suffixes:
        return _classify_ct_packed(suffixes, dtypes)
    if ".weight" in suffixes:
        return _classify_scaled_weight(parts)
    return Layout.UNKNOWN


def _classify_lynn(dtypes: Mapping[str, str]) -> Layout:
    """All three parts carry the full tensor's name, which ends in .weight but for fused experts."""
    names = {".packed": "U8", ".scale": "F16", ".global_scale": "F32"}
    forms = (names, {f".weight{suffix}": dtype for suffix, dtype in names.items()})
    return Layout.LYNN if dtypes in forms else Layout.UNKNOWN


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
    if suffixes == {".weight", ".weight_scale", ".weight_scale_2"}:
        if [parts[s].dtype for s in (".weight", ".weight_scale", ".weight_scale_2")] != ["U8", "F8_E4M3", "F32"]:
            return Layout.UNKNOWN
        return Layout.MODELOPT_NVFP4_W4A4 if ".input_scale" in parts else Layout.MODELOPT_NVFP4
    if weight.dtype != "F8_E4M3":
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


def _main_part(layout: Layout, parts: Mapping[str, TensorInfo]) -> TensorInfo:
    """The tensor that holds the codes."""
    suffix = {Layout.CT_NVFP4: ".weight_packed", Layout.CT_NVFP4_W4A4: ".weight_packed"}.get(layout, ".weight")
    if layout is Layout.LYNN:
        suffix = lynn_prefix(parts) + ".packed"
    return parts[suffix]


def lynn_prefix(parts: Mapping[str, object]) -> str:
    """What stands between a module's name and lynn-engine's suffixes: nothing for fused experts."""
    return "" if ".packed" in parts else ".weight"


def _nvfp4_shape(layout: Layout, parts: Mapping[str, TensorInfo]) -> tuple[int, int]:
    """(N, K) of an NVFP4 module whose parts fit each other; leading axes are flattened in a lynn-engine pack."""
    packed = _main_part(layout, parts)
    lynn = layout is Layout.LYNN
    scale = parts[f"{lynn_prefix(parts)}.scale" if lynn else ".weight_scale"]
    if len(packed.shape) != 2 or packed.shape[1] * 2 % GROUP:
        raise CheckpointError(f"{packed.name}: want [N, K/2] with K a multiple of {GROUP}, got {packed}")
    rows, columns = packed.shape[0], packed.shape[1] * 2
    if scale.shape != (rows, columns // GROUP):
        raise CheckpointError(f"{scale.name}: want shape {[rows, columns // GROUP]}, got {scale}")
    _check_single_numbers(parts, but=(packed, scale))
    return rows, columns


def _fp8_shape(layout: Layout, parts: Mapping[str, TensorInfo]) -> tuple[int, int]:
    """(N, K) of an FP8 module whose scales fit its layout; their number told per tensor and channel apart already."""
    weight = parts[".weight"]
    scale = parts[".weight_scale_inv" if layout is Layout.FP8_BLOCK_INV else ".weight_scale"]
    if len(weight.shape) != 2:
        raise CheckpointError(f"{weight.name}: want [N, K], got {weight}")
    rows, columns = weight.shape
    if scale.dtype not in ("BF16", "F32"):
        raise CheckpointError(f"{scale.name}: want BF16 or F32 scales, got {scale}")
    if layout in FP8_BLOCKS:
        blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        wanted = (blocks[0], 1, blocks[1], 1) if layout is Layout.MODELOPT_FP8_BLOCK else blocks
        if scale.shape != wanted:
            raise CheckpointError(f"{scale.name}: want shape {list(wanted)}, got {scale}")
    _check_single_numbers(parts, but=(weight, scale))
    return rows, columns


def _check_single_numbers(parts: Mapping[str, TensorInfo], but: tuple[TensorInfo, ...]) -> None:
    """Raises CheckpointError unless every other part holds one number."""
    for info in parts.values():
        if info not in but and info.shape not in ((), (1,), (1, 1)):
            raise CheckpointError(f"{info.name}: want one number, got {info}")
