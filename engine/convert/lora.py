"""A LoRA adapter as PEFT saves it: W + scaling * B A for each matrix it names, in fp32.

What would need more than that sum (DoRA, biases, trained copies of whole modules, adapters of convolutions, embeddings,
norms or bare parameters, initialisations that change the base) is refused by name. No pickle is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pilotfish.engine.checkpoint.expressions import Deadline
from pilotfish.engine.checkpoint.headers import Header, TensorInfo, read_header
from pilotfish.engine.checkpoint.names import normalise
from pilotfish.engine.config import read_json_object
from pilotfish.engine.errors import CheckpointError, ConfigError, LayoutError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PAIR = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)(?:\.default)?\.weight")
_BASE = re.compile(r"base_model\.model\.(.+)\.base_layer\.weight")
MERGED_AS_A_SUM = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base's weights as they are."""
MUST_BE_EMPTY = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "target_parameters",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "megatron_config",
    "use_qalora",
)


@dataclass(frozen=True)
class Pair:
    """The two factors of one matrix's change, fp32 [r, K] and [N, r], the second one scaled."""

    a: torch.Tensor
    b: torch.Tensor

    @property
    def changes(self) -> bool:
        """Whether it is more than zeros."""
        return bool(self.a.any()) and bool(self.b.any())

    def rows(self, part: slice) -> torch.Tensor:
        return self.b[part] @ self.a


@dataclass(frozen=True)
class Adapter:
    """An adapter's pairs by normalised name of the matrix, experts one by one.

    `bases`: copies of whole matrices from before the change, which PEFT adds for lm_head; they must be the source's.
    """

    path: Path
    pairs: Mapping[str, Pair]
    bases: Mapping[str, TensorInfo]

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path / CONFIG_FILE, self.path / WEIGHTS_FILE)


def read_adapter(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Adapter:
    """`shapes`: of the matrices that may be changed, by normalised name.

    Raises ConfigError (an adapter that is more than a sum), LayoutError (tensors that are no LoRA pair, or of another
    weight) or CheckpointError (missing or wrong files, shapes, values; an adapter that changes nothing).
    """
    config = read_json_object(folder / CONFIG_FILE)
    _check_config(folder / CONFIG_FILE, config)
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        raise CheckpointError(f"{folder}: want {WEIGHTS_FILE}; other forms of an adapter are not read")
    pairs, header, deadline = {}, read_header(file), Deadline()
    bases = {match[1]: info for info in header.tensors.values() if (match := _BASE.fullmatch(info.name))}
    with safe_open(file, framework="pt", device="cpu") as opened:
        for spelled, name, a, b in _pairs(header):
            _check_shapes(name, a, b, shapes)
            factors = [opened.get_tensor(info.name).float() for info in (a, b)]
            if not all(bool(factor.isfinite().all()) for factor in factors):
                raise CheckpointError(f"{a.name}: want finite values, in it and in its lora_B")
            pairs[name] = Pair(factors[0], factors[1] * _scaling(config, spelled, a.shape[0], deadline))
    if not pairs:
        raise CheckpointError(f"{file}: holds no LoRA pair")
    if not any(pair.changes for pair in pairs.values()):
        why = "lora_alpha is 0" if not config["lora_alpha"] else "each lora_A or lora_B is 0, as before any training"
        raise CheckpointError(f"{folder}: the adapter changes nothing: {why}")
    return Adapter(folder, pairs, {normalise(name) or name: info for name, info in bases.items()})


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: want peft_type 'LORA', got {config.get('peft_type')!r:.40}")
    for field in MUST_BE_EMPTY:
        if config.get(field):
            raise ConfigError(f"{path}: {field} {config[field]!r:.80} is not merged; want a plain LoRA")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"{path}: bias {config['bias']!r:.40} is not merged; want 'none'")
    if (start := config.get("init_lora_weights")) not in MERGED_AS_A_SUM:
        raise ConfigError(
            f"{path}: init_lora_weights {start!r:.40} changes the base's weights; want it converted first"
        )
    if not isinstance(config.get("lora_alpha"), int | float):
        raise ConfigError(f"{path}: want a number lora_alpha, got {config.get('lora_alpha')!r:.40}")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(isinstance(value, int | float) for value in patterns.values()):
        raise ConfigError(f"{path}: want alpha_pattern an object of numbers, got {patterns!r:.80}")
    for pattern in patterns:
        try:
            _alpha_expression(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"{path}: alpha_pattern {pattern!r:.80} is no regular expression: {error}") from error


def _alpha_expression(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")


def _pairs(header: Header) -> Iterator[tuple[str, str, TensorInfo, TensorInfo]]:
    """(name as PEFT spells it, normalised name, lora_A, lora_B)."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for info in header.tensors.values():
        if _BASE.fullmatch(info.name):
            continue
        match = _PAIR.fullmatch(info.name)
        if match is None:
            raise LayoutError(f"{info.name} ({info}, {info.file}): want lora_A and lora_B of matrices alone")
        found.setdefault(match[1], {})[match[2]] = info
    for spelled, factors in found.items():
        if set(factors) != {"A", "B"}:
            raise CheckpointError(f"{header.file}: {spelled}: want lora_A and lora_B, got {', '.join(factors)}")
        yield spelled, normalise(spelled) or spelled, factors["A"], factors["B"]


def _check_shapes(name: str, a: TensorInfo, b: TensorInfo, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if name not in shapes:
        raise LayoutError(f"{a.name}: the checkpoint has no such matrix to change; want linear layers of its trunk")
    rows, columns = shapes[name]
    rank = a.shape[0] if a.shape else 0
    if rank < 1 or a.shape != (rank, columns) or b.shape != (rows, rank):
        wanted = f"[r, {columns}] and [{rows}, r]"
        raise CheckpointError(f"{a.name}: want factors {wanted}, got {list(a.shape)} and {list(b.shape)}")


def _scaling(config: Mapping[str, Any], name: str, rank: int, deadline: Deadline) -> float:
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if deadline.match(_alpha_expression(pattern), name):
            alpha = value
            break
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
