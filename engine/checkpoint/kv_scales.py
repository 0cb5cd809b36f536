"""Scales that a checkpoint brings for an FP8 key-value cache: keys and values are divided by them as they are stored.

One number each for a layer's keys and values, under `self_attn.k_scale` (compressed-tensors) or
`self_attn.k_proj.k_scale` (ModelOpt). They are read only where the cache is FP8.
"""

from __future__ import annotations

from collections import defaultdict

from safetensors import SafetensorError, safe_open

from pilotfish.engine.checkpoint import names
from pilotfish.engine.checkpoint.headers import TensorInfo
from pilotfish.engine.checkpoint.recognise import Checkpoint
from pilotfish.engine.errors import CheckpointError, LayoutError

KvScales = dict[str, tuple[float, float]]
"""(k_scale, v_scale) by attention module, such as model.layers.3.self_attn."""


def load_kv_scales(checkpoint: Checkpoint) -> KvScales:
    """Scales of the layers that have them; for the others 1 is meant. An attached head has none.

    Raises LayoutError for what one factor a layer cannot express (scales by head, zero points) and for one scale
    without the other, CheckpointError for a number that is no finite one above 0.
    """
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for info in checkpoint.kv_scales:
        attention, what = names.kv_scale(names.normalise(info.name) or "") or ("", "")
        if checkpoint.head is not None and names.is_mtp(attention):
            continue
        if what.endswith("zero_point"):
            raise LayoutError(
                f"{info.name}: want an FP8 KV cache without zero points; --kv-cache-dtype auto ignores it"
            )
        if what in found[attention]:
            raise LayoutError(f"{info.name}: want one {what} for {attention}, got two")
        found[attention][what] = _number(info)
    for attention, scales in found.items():
        if len(scales) == 1:
            raise LayoutError(f"{attention}: want k_scale and v_scale, got {next(iter(scales))} alone")
    return {attention: (scales["k_scale"], scales["v_scale"]) for attention, scales in found.items()}


def _number(info: TensorInfo) -> float:
    if info.shape not in ((), (1,)):
        raise LayoutError(f"{info.name}: want one scale for a layer's KV cache, got {info}")
    try:
        with safe_open(info.file, framework="pt", device="cpu") as opened:
            number = float(opened.get_tensor(info.name))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{info.file}: changed or unreadable since it was opened: {error}") from error
    if not 0 < number < float("inf"):
        raise CheckpointError(f"{info.name}: want a finite scale above 0, got {number}")
    return number
