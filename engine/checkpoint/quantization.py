"""What config.json says about quantisation, held against what the headers show.

The headers decide how a module is read; the config must agree about the trunk, or the checkpoint is refused:
one of the two is wrong, and a guess would serve garbage. Of the head only a packed module that the config
leaves out is refused: writers' configs cover the classes they loaded, and those have no head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotfish.engine.checkpoint.inventory import PACKABLE_KINDS, Inventory, Kind
from pilotfish.engine.checkpoint.layouts import PACKED, SUPPORTED, Module
from pilotfish.engine.checkpoint.names import is_mtp
from pilotfish.engine.config import read_json_object
from pilotfish.engine.errors import ConfigError, LayoutError

NVFP4_FORMAT = "nvfp4-pack-quantized"
WEIGHT_ARGS: dict[str, tuple[Any, ...]] = {
    "num_bits": (4,),
    "type": ("float",),
    "group_size": (16,),
    "strategy": ("tensor_group", "group"),
    "symmetric": (True,),
}
# Files that mark a whole checkpoint as another writer's, whatever config.json says.
MARKER_FILES = {"hf_quant_config.json": "ModelOpt", "lynn_quant_manifest.json": "Lynn native NVFP4"}


@dataclass(frozen=True)
class Rules:
    """Which modules the config calls packed: those that match a target and are not ignored."""

    targets: tuple[str, ...]
    ignore: tuple[str, ...]

    def packs(self, names: Iterable[str], kind: Kind) -> bool:
        names = tuple(names) + (("Linear",) if kind in PACKABLE_KINDS else ())
        return matches(self.targets, names) and not matches(self.ignore, names)


def matches(patterns: Iterable[str], names: Iterable[str]) -> bool:
    """Whether a pattern fits one of the names: `re:` ones match from the start, others exactly."""
    names = tuple(names)
    for pattern in patterns:
        if pattern.startswith("re:"):
            if any(re.match(pattern.removeprefix("re:"), name) for name in names):
                return True
        elif pattern in names:
            return True
    return False


def read_rules(raw_config: Mapping[str, Any]) -> Rules | None:
    """The rules of a parsed config.json, None if it declares no quantisation.

    Raises LayoutError if it declares another method or format than is read, ConfigError if it is malformed.
    """
    text = raw_config.get("text_config")
    declared = raw_config.get("quantization_config") or (isinstance(text, dict) and text.get("quantization_config"))
    if not declared:
        return None
    if not isinstance(declared, dict):
        raise ConfigError(f"quantization_config: want an object, got {type(declared).__name__}")
    method = declared.get("quant_method")
    if method != "compressed-tensors":
        raise LayoutError(f"quantization_config.quant_method: {method!r} is not read; want {SUPPORTED}")
    _refuse_extras(declared)
    groups = declared.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConfigError(f"quantization_config.config_groups: want an object with groups, got {groups!r:.80}")
    targets: list[str] = []
    for name, group in groups.items():
        targets += _group_targets(f"quantization_config.config_groups.{name}", group, declared.get("format"))
    return Rules(tuple(targets), _patterns("quantization_config.ignore", declared.get("ignore") or []))


def _refuse_extras(declared: Mapping[str, Any]) -> None:
    """Raises LayoutError for sparsity, transforms or weights that were never compressed."""
    sparsity = declared.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        raise LayoutError(f"quantization_config.sparsity_config: {sparsity.get('format')!r} is not read; want dense")
    if declared.get("transform_config"):
        raise LayoutError("quantization_config.transform_config: transformed weights are not read")
    if (status := declared.get("quantization_status")) not in (None, "compressed"):
        raise LayoutError(f"quantization_config.quantization_status: want 'compressed', got {status!r}")


def _group_targets(where: str, group: Any, outer_format: Any) -> tuple[str, ...]:
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise ConfigError(f"{where}.weights: want an object, got {group!r:.80}")
    stored = group.get("format") or outer_format
    if stored != NVFP4_FORMAT:
        raise LayoutError(f"{where}: format {stored!r} for {group.get('targets')!r:.80} is not read; want {SUPPORTED}")
    for name, wanted in WEIGHT_ARGS.items():
        if (got := group["weights"].get(name)) not in wanted:
            raise LayoutError(f"{where}.weights.{name}: want {' or '.join(map(repr, wanted))}, got {got!r:.80}")
    return _patterns(f"{where}.targets", group.get("targets"))


def _patterns(where: str, raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(item, str) for item in raw):
        raise ConfigError(f"{where}: want a list of strings, got {raw!r:.80}")
    for item in raw:
        try:
            re.compile(item.removeprefix("re:") if item.startswith("re:") else "")
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"{where}: {item!r:.80} is no regular expression: {error}") from error
    return tuple(raw)


def check_agreement(rules: Rules | None, modules: Mapping[str, Module], inventory: Inventory) -> None:
    """Raises LayoutError naming the first module of which headers and config say different things."""
    for name, module in modules.items():
        packed = module.layout in PACKED
        kind = inventory[name].kind
        declared = rules is not None and rules.packs(_spellings(module), kind)
        if packed and not declared:
            why = "has no quantization_config" if rules is None else "leaves it unquantised"
            raise LayoutError(f"{module.raw_name}: stored as {module.layout.value}, but config.json {why}")
        # Whether a router counts as a Linear differs between versions of the model class.
        if declared and not packed and not is_mtp(name) and kind is not Kind.ROUTER:
            raise LayoutError(f"{module.raw_name}: stored plain ({module.dtype}), but config.json has it quantised")


def _spellings(module: Module) -> tuple[str, ...]:
    """The names an ignore list may know it by: the file's, the text-only one, the wrapper's."""
    wrapped = module.name.replace("model.", "model.language_model.", 1) if module.name.startswith("model.") else ""
    return tuple(dict.fromkeys(name for name in (module.raw_name, module.name, wrapped) if name))


def refuse_marker_files(folder: Path) -> None:
    """Raises LayoutError if a file of the folder says that another writer quantised it."""
    for file_name, layout in MARKER_FILES.items():
        path = folder / file_name
        if not path.exists():
            continue
        nested = read_json_object(path).get("quantization")
        algorithm = nested.get("quant_algo") if isinstance(nested, dict) else None
        if file_name != "hf_quant_config.json" or algorithm is not None:
            raise LayoutError(f"{path}: marks the checkpoint as {layout} ({algorithm or 'manifest'}); want {SUPPORTED}")
