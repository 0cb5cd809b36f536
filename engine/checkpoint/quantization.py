"""Reads what config.json, and the files some writers put beside it, declare about quantisation.

One reader a writer: compressed-tensors (llm-compressor), ModelOpt in its two homes, Qwen's and DeepSeek's fp8,
lynn-engine. What would change the arithmetic and is not computed is refused by field name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pilotfish.engine.checkpoint.layouts import FP8, FP8_BLOCKS, NVFP4_CT, NVFP4_MODELOPT, SUPPORTED, Layout
from pilotfish.engine.checkpoint.rules import QuantGroup, QuantRules, Style
from pilotfish.engine.config import read_json_object
from pilotfish.engine.errors import ConfigError, LayoutError

MODELOPT_FILE = "hf_quant_config.json"
LYNN_FILE = "lynn_quant_manifest.json"
LYNN_SCHEMA = "lynn-variable-nvfp4-pack-v1"
LYNN_FORMAT = "nvfp4_e2m1_rowwise_per_16"
NVFP4_FORMAT = "nvfp4-pack-quantized"
FP8_FORMATS = ("float-quantized", "naive-quantized")

NVFP4_ARGS: dict[str, tuple[Any, ...]] = {
    "num_bits": (4,),
    "type": ("float",),
    "group_size": (16,),
    "strategy": ("tensor_group", "group"),
    "symmetric": (True,),
}
FP8_ARGS: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("tensor", "channel", "block"),
    "symmetric": (True,),
    "dynamic": (False, None),
}
FP8_STRATEGIES = {
    "tensor": frozenset({Layout.FP8_TENSOR}),
    "channel": frozenset({Layout.FP8_CHANNEL}),
    "block": frozenset({Layout.CT_FP8_BLOCK}),
}
MODELOPT_ALGORITHMS = {
    "NVFP4": NVFP4_MODELOPT,
    "W4A16_NVFP4": NVFP4_MODELOPT,
    "FP8": frozenset({Layout.FP8_TENSOR}),
    "FP8_PB_WO": FP8_BLOCKS,
    "FP8_PER_CHANNEL_PER_TOKEN": frozenset({Layout.FP8_CHANNEL}),
}
ALL_LINEAR = ("Linear",)


def read_rules(raw_config: Mapping[str, Any], folder: Path | None = None) -> QuantRules | None:
    """The rules of a parsed config.json and of the folder it lies in, None if nothing declares quantisation.

    Raises LayoutError if another method or format is declared than is read, or two files contradict each other;
    ConfigError if a declaration is malformed.
    """
    declared = _declaration(raw_config)
    beside = _modelopt_file(folder)
    manifest = _lynn_manifest(folder)
    method = declared.get("quant_method") if declared else None
    if manifest is not None and method not in (None, "lynn_native"):
        raise LayoutError(f"{LYNN_FILE} marks the checkpoint as {Layout.LYNN.value}, quant_method is {method!r}")
    if beside is not None and method not in (None, "modelopt"):
        raise LayoutError(f"{MODELOPT_FILE} marks the checkpoint as ModelOpt's, quant_method is {method!r}")
    if declared is None:
        return _modelopt(beside, MODELOPT_FILE) if beside else _lynn(None, manifest) if manifest else None
    reader = READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise LayoutError(f"quantization_config.quant_method: {method!r} is not read; want {SUPPORTED}")
    if method == "modelopt" and beside is not None and beside.get("quant_algo") != declared.get("quant_algo"):
        mine, other = declared.get("quant_algo"), beside.get("quant_algo")
        raise LayoutError(f"quantization_config.quant_algo is {mine!r}, in {MODELOPT_FILE} it is {other!r}")
    return _lynn(declared, manifest) if method == "lynn_native" else reader(declared, "quantization_config")


def _declaration(raw_config: Mapping[str, Any]) -> dict[str, Any] | None:
    text = raw_config.get("text_config")
    declared = raw_config.get("quantization_config") or (isinstance(text, dict) and text.get("quantization_config"))
    if not declared:
        return None
    if not isinstance(declared, dict):
        raise ConfigError(f"quantization_config: want an object, got {type(declared).__name__}")
    return declared


# compressed-tensors


def _compressed_tensors(declared: Mapping[str, Any], where: str) -> QuantRules:
    _refuse_extras(declared, where)
    groups = declared.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConfigError(f"{where}.config_groups: want an object with groups, got {groups!r:.80}")
    outer = declared.get("format")
    read = [_ct_group(f"{where}.config_groups.{name}", group, outer) for name, group in groups.items()]
    return QuantRules(tuple(read), _listed(declared, where, ("ignore",), Style.EXACT))


def _refuse_extras(declared: Mapping[str, Any], where: str) -> None:
    """Raises LayoutError for sparsity, transforms or weights that were never compressed."""
    sparsity = declared.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        raise LayoutError(f"{where}.sparsity_config: {sparsity.get('format')!r} is not read; want dense")
    if declared.get("transform_config"):
        raise LayoutError(f"{where}.transform_config: transformed weights are not read")
    if (status := declared.get("quantization_status")) not in (None, "compressed"):
        raise LayoutError(f"{where}.quantization_status: want 'compressed', got {status!r}")


def _ct_group(where: str, group: Any, outer_format: Any) -> QuantGroup:
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise ConfigError(f"{where}.weights: want an object, got {group!r:.80}")
    stored, weights = group.get("format") or outer_format, group["weights"]
    if stored != NVFP4_FORMAT and stored not in FP8_FORMATS:
        raise LayoutError(f"{where}: format {stored!r} for {group.get('targets')!r:.80} is not read; want {SUPPORTED}")
    for name, wanted in (NVFP4_ARGS if stored == NVFP4_FORMAT else FP8_ARGS).items():
        if (got := weights.get(name)) not in wanted:
            raise LayoutError(f"{where}.weights.{name}: want {' or '.join(map(repr, wanted))}, got {got!r:.80}")
    if weights["strategy"] == "block" and weights.get("block_structure") != [128, 128]:
        got = weights.get("block_structure")
        raise LayoutError(f"{where}.weights.block_structure: want [128, 128], got {got!r:.80}")
    layouts = NVFP4_CT if stored == NVFP4_FORMAT else FP8_STRATEGIES[weights["strategy"]]
    return QuantGroup(_patterns(f"{where}.targets", group.get("targets"), Style.EXACT), layouts)


# ModelOpt


def _modelopt_file(folder: Path | None) -> dict[str, Any] | None:
    """The `quantization` part of hf_quant_config.json; None if there is none, or it is of the KV cache only."""
    path = folder / MODELOPT_FILE if folder else None
    if path is None or not path.exists():
        return None
    nested = read_json_object(path).get("quantization")
    if nested is not None and not isinstance(nested, dict):
        raise ConfigError(f"{MODELOPT_FILE}: want quantization, an object, got {nested!r:.80}")
    return nested if nested and nested.get("quant_algo") is not None else None


def _modelopt(declared: Mapping[str, Any], where: str) -> QuantRules | None:
    """Excluded modules are `exclude_modules` in one home and `ignore` in the other."""
    algorithm = declared.get("quant_algo")
    if algorithm is None and (declared.get("kv_cache_quant_algo") or declared.get("kv_cache_scheme")):
        return None
    ignore = _listed(declared, where, ("exclude_modules", "ignore"), Style.GLOB)
    if algorithm == "MIXED_PRECISION":
        return QuantRules(
            _mixed_groups(declared.get("quantized_layers"), f"{where}.quantized_layers"), ignore, Style.GLOB
        )
    return QuantRules((QuantGroup(ALL_LINEAR, _algorithm_layouts(declared, where)),), ignore, Style.GLOB)


def _mixed_groups(raw: Any, where: str) -> tuple[QuantGroup, ...]:
    """One group for each entry; a key such as `...mlp.experts` covers all that lies in it."""
    if not isinstance(raw, dict) or not raw:
        raise ConfigError(f"{where}: want an object of modules, got {raw!r:.80}")
    groups = []
    for name, entry in raw.items():
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}.{name}: want an object, got {entry!r:.80}")
        groups.append(QuantGroup((name,), _algorithm_layouts(entry, f"{where}.{name}")))
    return tuple(groups)


def _algorithm_layouts(entry: Mapping[str, Any], where: str) -> frozenset[Layout]:
    algorithm = entry.get("quant_algo")
    # ModelOpt 0.47 itself writes fp8_pb_wo in small letters
    layouts = MODELOPT_ALGORITHMS.get(algorithm.upper()) if isinstance(algorithm, str) else None
    if layouts is None:
        raise LayoutError(f"{where}.quant_algo: {algorithm!r} is not read; want {SUPPORTED}")
    if layouts is NVFP4_MODELOPT and entry.get("group_size") not in (None, 16):
        raise LayoutError(f"{where}.group_size: want 16, got {entry.get('group_size')!r:.80}")
    return layouts


# Qwen's and DeepSeek's fp8


def _fp8(declared: Mapping[str, Any], where: str) -> QuantRules:
    block = declared.get("weight_block_size")
    if declared.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn", None):
        raise LayoutError(f"{where}.fmt: want 'e4m3', got {declared.get('fmt')!r:.80}")
    if block not in (None, [128, 128]):
        raise LayoutError(f"{where}.weight_block_size: want [128, 128], got {block!r:.80}")
    layouts = frozenset({Layout.FP8_BLOCK_INV, Layout.CT_FP8_BLOCK}) if block else FP8 - FP8_BLOCKS
    return QuantRules(
        (QuantGroup(ALL_LINEAR, layouts),),
        _listed(declared, where, ("modules_to_not_convert", "ignored_layers"), Style.PART),
        Style.PART,
        # some lists leave it out, and readers keep it plain all the same
        optional=frozenset({"lm_head"}),
    )


# lynn-engine


def _lynn_manifest(folder: Path | None) -> dict[str, Any] | None:
    path = folder / LYNN_FILE if folder else None
    if path is None or not path.exists():
        return None
    manifest = read_json_object(path)
    if manifest.get("schema_version") != LYNN_SCHEMA:
        raise LayoutError(
            f"{LYNN_FILE}: want schema_version {LYNN_SCHEMA!r}, got {manifest.get('schema_version')!r:.80}"
        )
    contract = manifest.get("runtime_contract")
    if isinstance(contract, dict) and contract.get("fallback_path_allowed") is False:
        path_name = contract.get("inference_path_required")
        raise LayoutError(f"{LYNN_FILE}: its weights are folded for the {path_name!r} path, which is not computed")
    if not isinstance(manifest.get("quantized_tensors"), dict):
        raise ConfigError(f"{LYNN_FILE}: want quantized_tensors, an object")
    return manifest


def _lynn(declared: Mapping[str, Any] | None, manifest: Mapping[str, Any] | None) -> QuantRules:
    """The manifest names every packed tensor; without one any Linear may be packed, and the headers say which."""
    if declared is not None and declared.get("format") != LYNN_FORMAT:
        raise LayoutError(f"quantization_config.format: want {LYNN_FORMAT!r}, got {declared.get('format')!r:.80}")
    layouts = frozenset({Layout.LYNN})
    if manifest is None:
        return QuantRules((QuantGroup(("Linear", "FusedExperts"), layouts),), exhaustive=False)
    names = tuple(name.removesuffix(".weight") for name in manifest["quantized_tensors"])
    return QuantRules((QuantGroup(names, layouts),))


READERS: dict[str, Callable[[Mapping[str, Any], str], QuantRules | None]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "fp8": _fp8,
    "lynn_native": lambda declared, where: _lynn(declared, None),
}


def _listed(declared: Mapping[str, Any], where: str, names: tuple[str, ...], style: Style) -> tuple[str, ...]:
    """The patterns of all lists that have these names; a missing one is empty."""
    return sum((_patterns(f"{where}.{name}", declared.get(name) or [], style) for name in names), ())


def _patterns(where: str, raw: Any, style: Style) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(item, str) for item in raw):
        raise ConfigError(f"{where}: want a list of strings, got {raw!r:.80}")
    for item in raw:
        is_expression = style is Style.PART or (style is Style.EXACT and item.startswith("re:"))
        try:
            re.compile(item.removeprefix("re:") if is_expression else "")
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"{where}: {item!r:.80} is no regular expression: {error}") from error
    return tuple(raw)
