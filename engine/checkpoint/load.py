"""Reads the weights of a recognised checkpoint, file by file, onto one device.

Packed weights stay packed. Experts come out one by one whatever form the file has: fused 3-D tensors are split
into views, gate rows first, then up. Beyond the result, host memory holds at most the mapped pages of the one
file that is being read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from pilotfish.engine.checkpoint.headers import TensorInfo
from pilotfish.engine.checkpoint.layouts import PACKED, Module
from pilotfish.engine.checkpoint.nvfp4 import NvFp4Weight
from pilotfish.engine.checkpoint.recognise import Checkpoint, loaded_parts
from pilotfish.engine.errors import CheckpointError

Weight = torch.Tensor | NvFp4Weight

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
LARGEST_SCALE_BYTE = 0x7E  # e4m3 448; above it come NaN and the negatives


def load_weights(
    checkpoint: Checkpoint, device: str | torch.device = "cpu", progress: bool = True
) -> dict[str, Weight]:
    """All weights by normalised tensor name, in the dtype the files have; the head's (`mtp.`) if it is complete.

    `model.layers.0.mlp.down_proj.weight` is a tensor, or an NvFp4Weight if stored packed; `lm_head.weight` is
    absent when tied. Nothing is shared with the files. `progress` draws a bar over bytes on stderr.
    Raises CheckpointError if a file changed since it was opened, or a scale is not a finite number above 0.
    """
    weights: dict[str, Weight] = {}
    parts: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    with tqdm(
        total=checkpoint.num_bytes, unit="B", unit_scale=True, desc="loading weights", disable=not progress
    ) as bar:
        for module, suffix, info, tensor in _read_all(checkpoint):
            loaded = parts[module.name]
            loaded[suffix] = _place(tensor, suffix, device)
            bar.update(info.num_bytes)
            if len(loaded) == len(loaded_parts(module)):
                weights.update(_assemble(module, parts.pop(module.name)))
    assert not parts, f"modules left half read: {list(parts)[:3]}"
    return weights


def _read_all(checkpoint: Checkpoint) -> Iterator[tuple[Module, str, TensorInfo, torch.Tensor]]:
    """Each tensor to load, as a view of its mapped file, in the order of files and of bytes in them."""
    by_file: dict[Path, list[tuple[int, str, str]]] = defaultdict(list)
    for module in checkpoint.modules.values():
        for suffix, info in loaded_parts(module).items():
            by_file[info.file].append((info.start, module.name, suffix))
    for file, entries in sorted(by_file.items()):
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                for _, name, suffix in sorted(entries):
                    module = checkpoint.modules[name]
                    info = module.parts[suffix]
                    yield module, suffix, info, _read_one(opened, info)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: changed or unreadable since it was opened: {error}") from error


def _read_one(opened: Any, info: TensorInfo) -> torch.Tensor:
    tensor: torch.Tensor = opened.get_tensor(info.name)
    if tuple(tensor.shape) != info.shape or tensor.dtype != TORCH_DTYPES[info.dtype]:
        got = f"{tensor.dtype} {list(tensor.shape)}"
        raise CheckpointError(f"{info.file}: {info.name} changed since it was opened: want {info}, got {got}")
    return tensor


def _place(tensor: torch.Tensor, suffix: str, device: str | torch.device) -> torch.Tensor:
    """An own copy on the device; a global scale stays on the host, where it becomes a number."""
    target = torch.device("cpu" if suffix == ".weight_global_scale" else device)
    own = torch.empty_like(tensor, device=target)
    if target.type != "cpu":
        return own.copy_(tensor)
    # Not copy_: it splits each small tensor over all threads, which on a busy machine takes ten times as long.
    np.copyto(_bytes(own), _bytes(tensor))
    return own


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous tensor's memory, uint8 [n]."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _assemble(module: Module, parts: dict[str, torch.Tensor]) -> dict[str, Weight]:
    if module.layout in PACKED:
        return {f"{module.name}.weight": _nvfp4(module, parts)}
    ((suffix, tensor),) = parts.items()
    prefix, _, last = module.name.rpartition(".experts.")
    if suffix == "" and prefix and last in ("gate_up_proj", "down_proj"):
        return _split_experts(f"{prefix}.experts", last, tensor)
    return {f"{module.name}{suffix}": tensor}


def _nvfp4(module: Module, parts: dict[str, torch.Tensor]) -> NvFp4Weight:
    scale = parts[".weight_scale"]
    if scale.numel() and int(scale.view(torch.uint8).max()) > LARGEST_SCALE_BYTE:
        raise CheckpointError(f"{module.raw_name}.weight_scale: want scales in [0, 448], got a NaN or a negative one")
    global_scale = float(parts[".weight_global_scale"].reshape(()))
    if not 0 < global_scale < float("inf"):
        raise CheckpointError(
            f"{module.raw_name}.weight_global_scale: want a finite divisor above 0, got {global_scale}"
        )
    return NvFp4Weight(parts[".weight_packed"], scale, global_scale)


def _split_experts(prefix: str, last: str, tensor: torch.Tensor) -> dict[str, Weight]:
    """Views of gate_up_proj [E, 2*Im, H] or down_proj [E, H, Im], one an expert and projection."""
    split: dict[str, Weight] = {}
    for i, matrix in enumerate(tensor.unbind(0)):
        if last == "down_proj":
            split[f"{prefix}.{i}.down_proj.weight"] = matrix
            continue
        gate, up = matrix.chunk(2)
        split[f"{prefix}.{i}.gate_proj.weight"] = gate
        split[f"{prefix}.{i}.up_proj.weight"] = up
    return split
