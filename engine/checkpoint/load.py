"""Reads the weights of a recognised checkpoint, file by file, onto one device.

Packed weights stay packed, each matrix with the scales its file gives it. Experts come out one by one whatever form
the file has: fused 3-D tensors are split into views, gate rows first, then up. stream.py does the reading, and says
what host memory it takes.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Generator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from pilotfish.engine.checkpoint import fp8, gguf_file
from pilotfish.engine.checkpoint.copies import check_copies
from pilotfish.engine.checkpoint.fp8 import Fp8Weight
from pilotfish.engine.checkpoint.headers import TensorInfo
from pilotfish.engine.checkpoint.layouts import FP8, NVFP4_CT, NVFP4_MODELOPT, PACKED, Layout, Module, lynn_prefix
from pilotfish.engine.checkpoint.names import is_mtp
from pilotfish.engine.checkpoint.nvfp4 import LynnWeight, NvFp4Weight
from pilotfish.engine.checkpoint.plausible import SeenScales
from pilotfish.engine.checkpoint.recognise import Checkpoint, loaded_parts
from pilotfish.engine.checkpoint.stream import SMALL, TORCH_DTYPES, TensorPart, TensorPlace, stream
from pilotfish.engine.errors import CheckpointError, LayoutError

logger = logging.getLogger(__name__)

PackedWeight = NvFp4Weight | LynnWeight | Fp8Weight
Weight = torch.Tensor | PackedWeight

GGUF_SUFFIX = ".gguf"
GLOBAL_SCALES = (".weight_global_scale", ".weight_scale_2", ".global_scale")
EXPERT_PARTS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    **{name: (name,) for name in ("gate_proj", "up_proj", "down_proj")},
}
CODES = (".weight_packed", ".weight.packed", ".packed", ".weight")
SCALES = (".weight_scale", ".weight_scale_inv", ".weight.scale", ".scale")


def load_weights(
    checkpoint: Checkpoint, device: str | torch.device = "cpu", progress: bool = True
) -> dict[str, Weight]:
    """All weights by normalised tensor name, in the dtype the files have; the head's (`mtp.`) if it is complete.

    `model.layers.0.mlp.down_proj.weight` is a tensor, or a PackedWeight if stored packed; `lm_head.weight` is
    absent when tied. Nothing is shared with the files. `progress` draws a bar over bytes on a terminal.
    Raises CheckpointError if a file changed since it was opened, a copy of a shared matrix differs, a scale is not a
    finite number above 0, or scales say what no model's weights are;
    LayoutError for a layout that the device has no arithmetic for.
    """
    device = torch.device(device)
    _refuse_for_device(checkpoint, device)
    check_copies(checkpoint.copies)
    weights: dict[str, Weight] = {}
    seen, zeros = SeenScales(), []
    found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    wanted = {name: len(loaded_parts(module)) for name, module in checkpoint.modules.items()}
    with (
        tqdm(
            total=checkpoint.num_bytes,
            unit="B",
            unit_scale=True,
            desc="loading weights",
            # None: where nobody watches, a bar is one long line of a log
            disable=None if progress else True,
        ) as bar,
        closing(_read_all(checkpoint, device, seen)) as tensors,
    ):
        for module, suffix, info, tensor in tensors:
            parts = found[module.name]
            parts[suffix] = tensor
            bar.update(info.num_bytes)
            if len(parts) == wanted[module.name]:
                whole = found.pop(module.name)
                if not _is_sound(module, whole, seen):
                    zeros.append(module.raw_name)
                weights.update(_assemble(module, whole))
    if zeros:
        logger.warning("packed matrices that are 0 throughout: %d, the first is %s", len(zeros), zeros[0])
    assert not found, f"modules left half read: {list(found)[:3]}"
    if checkpoint.head is not None and checkpoint.head.absolute_norms:
        _to_deltas(weights)
    return weights


def _to_deltas(weights: dict[str, Weight]) -> None:
    """Turns the head's norms from 1 + w into w, in fp32: adding 1 again gives the bits of the file."""
    for name, weight in weights.items():
        if is_mtp(name) and "norm" in name and isinstance(weight, torch.Tensor):
            weights[name] = weight.float() - 1.0


def _read_all(
    checkpoint: Checkpoint, device: torch.device, seen: SeenScales
) -> Generator[tuple[Module, str, TensorInfo, torch.Tensor], None, None]:
    """Each tensor to load, on the device but for global scales, which become numbers on the host."""
    files: dict[Path, list[TensorPart]] = defaultdict(list)
    for module in checkpoint.modules.values():
        for suffix, info in loaded_parts(module).items():
            if info.file.suffix == GGUF_SUFFIX:
                yield module, suffix, info, _decode(module, info).to(device)
            else:
                files[info.file].append(
                    TensorPart(module, suffix, info, _place(module, suffix, info), suffix in SCALES)
                )
    with closing(stream(dict(sorted(files.items())), device, partial(_see, seen))) as tensors:
        for part, tensor in tensors:
            yield part.module, part.suffix, part.info, tensor


def _place(module: Module, suffix: str, info: TensorInfo) -> TensorPlace:
    """Packed matrices are re-ordered or kept all alike, so that small ones may share memory; plain ones are not."""
    if suffix.endswith(GLOBAL_SCALES):
        return TensorPlace.HOST
    return TensorPlace.OWN if module.layout is Layout.PLAIN or info.num_bytes > SMALL else TensorPlace.SHARED


def _see(seen: SeenScales, part: TensorPart, raw: memoryview) -> None:
    seen.see(part.module, part.suffix, np.frombuffer(raw, np.uint8))


def _is_sound(module: Module, parts: dict[str, torch.Tensor], seen: SeenScales) -> bool:
    """Whether the module is more than zeros as far as scales tell. Raises CheckpointError for what no model has."""
    if module.layout not in PACKED:
        return True
    number = next((suffix for suffix in parts if suffix.endswith(GLOBAL_SCALES)), None)
    codes = next(parts[suffix] for suffix in CODES if suffix in parts)
    return seen.check(module, codes, (number, _number(module, number, parts)) if number else None)


def _decode(module: Module, info: TensorInfo) -> torch.Tensor:
    return torch.from_numpy(gguf_file.decode(info)).view(module.shape)


class ModuleReader:
    """Modules one by one, on the host: views of the mapped files where they lie there as plain numbers.

    The files stay open and mapped until `close`.
    """

    def __init__(self) -> None:
        self._opened: dict[Path, Any] = {}

    def read(self, module: Module) -> dict[str, Weight]:
        """A module's weights by normalised tensor name, experts one by one. Raises CheckpointError as load_weights
        does."""
        parts = {suffix: self._tensor(module, info) for suffix, info in loaded_parts(module).items()}
        seen = SeenScales()
        for suffix, tensor in parts.items():
            if suffix in SCALES:
                seen.see(module, suffix, tensor.reshape(-1).view(torch.uint8).numpy())
        _is_sound(module, parts, seen)
        return _assemble(module, parts)

    def close(self) -> None:
        self._opened.clear()

    def _tensor(self, module: Module, info: TensorInfo) -> torch.Tensor:
        if info.file.suffix == GGUF_SUFFIX:
            return _decode(module, info)
        try:
            if info.file not in self._opened:
                self._opened[info.file] = safe_open(info.file, framework="pt", device="cpu")
            return _read_one(self._opened[info.file], info)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{info.file}: changed or unreadable since it was opened: {error}") from error


def _read_one(opened: Any, info: TensorInfo) -> torch.Tensor:
    tensor: torch.Tensor = opened.get_tensor(info.name)
    if tuple(tensor.shape) != info.shape or tensor.dtype != TORCH_DTYPES[info.dtype]:
        got = f"{tensor.dtype} {list(tensor.shape)}"
        raise CheckpointError(f"{info.file}: {info.name} changed since it was opened: want {info}, got {got}")
    return tensor


def _refuse_for_device(checkpoint: Checkpoint, device: torch.device) -> None:
    """Raises LayoutError for lynn-engine packs on a GPU: their fp16 scales times codes do not fit 16 bits."""
    module = next((module for module in checkpoint.modules.values() if module.layout is Layout.LYNN), None)
    if module is not None and device.type != "cpu":
        raise LayoutError(f"{module.raw_name}: stored as {Layout.LYNN.value}, which is read on the CPU only")


def _assemble(module: Module, parts: dict[str, torch.Tensor]) -> dict[str, Weight]:
    if module.layout is Layout.LYNN:
        return _split_if_experts(module, _lynn(module, parts))
    if module.layout not in (Layout.PLAIN, Layout.GGUF):
        return {f"{module.name}.weight": _packed(module, parts)}
    ((suffix, tensor),) = parts.items()
    return _split_if_experts(module, tensor) if suffix == "" else {f"{module.name}{suffix}": tensor}


def _packed(module: Module, parts: dict[str, torch.Tensor]) -> PackedWeight:
    if module.layout in FP8:
        return _fp8(module, parts)
    assert module.layout in NVFP4_CT | NVFP4_MODELOPT, module.layout
    scale = parts[".weight_scale"]
    if module.layout in NVFP4_MODELOPT:
        return NvFp4Weight(parts[".weight"], scale, _number(module, ".weight_scale_2", parts), True)
    return NvFp4Weight(parts[".weight_packed"], scale, _number(module, ".weight_global_scale", parts))


def _fp8(module: Module, parts: dict[str, torch.Tensor]) -> Fp8Weight:
    suffix = ".weight_scale_inv" if module.layout is Layout.FP8_BLOCK_INV else ".weight_scale"
    if module.layout is Layout.FP8_TENSOR:
        return fp8.per_tensor(parts[".weight"], parts[suffix])
    make = fp8.per_channel if module.layout is Layout.FP8_CHANNEL else fp8.per_block
    return make(parts[".weight"], parts[suffix])


def _lynn(module: Module, parts: dict[str, torch.Tensor]) -> LynnWeight:
    prefix = lynn_prefix(parts)
    number = _number(module, f"{prefix}.global_scale", parts)
    return LynnWeight(parts[f"{prefix}.packed"], parts[f"{prefix}.scale"], number)


def _number(module: Module, suffix: str, parts: dict[str, torch.Tensor]) -> float:
    number, what = float(parts[suffix].reshape(())), "divisor" if module.layout in NVFP4_CT else "factor"
    if not 0 < number < float("inf"):
        raise CheckpointError(f"{module.raw_name}{suffix}: want a finite {what} above 0, got {number}")
    return number


def _split_if_experts(module: Module, weight: torch.Tensor | LynnWeight) -> dict[str, Weight]:
    """Fused experts one by one under the names of single ones, as views; another weight under its own name."""
    prefix, _, last = module.name.rpartition(".experts.")
    if not prefix or last not in EXPERT_PARTS:
        return {f"{module.name}.weight" if isinstance(weight, LynnWeight) else module.name: weight}
    parts = EXPERT_PARTS[last]
    num_experts, height = module.shape[0], module.shape[1] // len(parts)
    flat = weight if isinstance(weight, LynnWeight) else weight.flatten(0, 1)
    return {
        f"{prefix}.experts.{i}.{part}.weight": _rows(flat, (i * len(parts) + j) * height, height)
        for i in range(num_experts)
        for j, part in enumerate(parts)
    }


def _rows(weight: torch.Tensor | LynnWeight, begin: int, count: int) -> torch.Tensor | LynnWeight:
    part = slice(begin, begin + count)
    if isinstance(weight, torch.Tensor):
        return weight[part]
    return LynnWeight(weight.packed[part], weight.scale[part], weight.global_scale)
