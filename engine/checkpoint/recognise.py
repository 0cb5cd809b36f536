"""Recognises a checkpoint folder from config.json and the headers of all its files, before any tensor is read.

Every `*.safetensors` of the folder and of its `mtp/` sub-folder counts, listed in the index or not: heads often
lie in side files that no index knows. What is not understood in full is refused with the module's name. Imports
no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotfish.engine.checkpoint import foreign, inventory, names, quantization, rules
from pilotfish.engine.checkpoint.copies import Copy, take_copies
from pilotfish.engine.checkpoint.headers import Header, TensorInfo, read_header
from pilotfish.engine.checkpoint.inventory import (
    PACKABLE_KINDS,
    Expected,
    ExpertForm,
    Experts,
    ExpertsOf,
    Inventory,
    Kind,
)
from pilotfish.engine.checkpoint.layouts import ACTIVATION_SCALES, PACKED, Layout, Module, describe
from pilotfish.engine.config import ModelConfig, read_json_object
from pilotfish.engine.errors import CheckpointError, ConfigError, LayoutError

INDEX_FILE = "model.safetensors.index.json"
MTP_FOLDER = "mtp"
LAYERS = "model.layers."
VARIABLE_FILE = "lynn_engine_variable_expert_spec.json"


@dataclass(frozen=True)
class HeadSource:
    """Where a head came from that was attached. `absolute_norms`: its norms hold 1 + w, as MLX and GGUF files do."""

    path: Path
    container: str
    absolute_norms: bool


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A folder that was opened and recognised; no tensor of it has been read.

    `modules` maps normalised names to what load_weights will read, trunk first, then the head. `has_mtp` says
    that the whole head is there; `mtp_problem` is one sentence on a head that the config declares and that is absent,
    or incomplete, and None otherwise. `dropped` counts what is in the files
    and not loaded: "vision", "incomplete head", "kv scales and rope caches", "activation scales", "copied" to
    (tensors, bytes). `num_head_weights` is what a whole head has. `head` is set where the head was attached from
    elsewhere (sidecar.py). `kv_scales` are the numbers that came for a quantised KV cache: kv_scales.py reads them.
    `copies` are matrices that were stored again though the config has them shared: copies.py compares their values.
    `left_aside` are files of another set of the same layers, which the index does not list.
    """

    path: Path
    config: ModelConfig
    modules: Mapping[str, Module]
    has_mtp: bool
    mtp_problem: str | None
    dropped: Mapping[str, tuple[int, int]]
    num_files: int
    num_head_weights: int
    kv_scales: tuple[TensorInfo, ...] = ()
    head: HeadSource | None = None
    copies: tuple[Copy, ...] = ()
    left_aside: tuple[Path, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that load_weights reads."""
        return sum(part.num_bytes for module in self.modules.values() for part in loaded_parts(module).values())

    def summary(self) -> str:
        """One line for the log."""
        config = self.config
        kind = f"MoE of {config.num_experts} experts" if config.is_moe else "dense"
        layouts = ", ".join(f"{row['modules']} {layout}" for layout, row in census(self).items())
        origin = f" from {self.head.path} ({self.head.container})" if self.head else ""
        head = f"with MTP head{origin}" if self.has_mtp else f"without MTP head ({self.mtp_problem or 'none declared'})"
        parts = [
            f"{self.path}: {config.model_type} {kind}, {config.num_hidden_layers} layers"
            f" ({len(config.full_layers)} full attention), hidden {config.hidden_size}, {head}"
            + (f", positions by YaRN, factor {config.yarn.factor:g}" if config.yarn else ""),
            f"{self.num_bytes / 1e6:.1f} MB in {self.num_files} file(s): {layouts}",
        ]
        for what, (count, size) in self.dropped.items():
            parts.append(f"not loaded as weights: {count} {what} tensors, {size / 1e6:.1f} MB")
        if self.left_aside:
            others = ", ".join(file.name for file in self.left_aside)
            parts.append(f"read: the files of {INDEX_FILE}; not read: {others}, another set of the same layers")
        return "; ".join(parts)


def loaded_parts(module: Module) -> dict[str, TensorInfo]:
    """The tensors of a module that are read: activation scales are not, for activations stay 16-bit."""
    return {suffix: info for suffix, info in module.parts.items() if suffix not in ACTIVATION_SCALES}


def census(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """Modules, tensors and bytes to be loaded, by layout and stored dtype ("plain BF16", "... NVFP4 (W4A16)")."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for module in checkpoint.modules.values():
        parts = loaded_parts(module)
        row = rows[_census_name(module)]
        row.update(modules=1, tensors=len(parts), bytes=sum(part.num_bytes for part in parts.values()))
    return {layout: dict(row) for layout, row in sorted(rows.items())}


def _census_name(module: Module) -> str:
    if module.layout is Layout.GGUF:
        return module.dtype
    return f"{module.layout.value} {module.dtype}" if module.layout is Layout.PLAIN else module.layout.value


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Recognises the folder and checks it in full: names, shapes, dtypes, layouts, index, config.

    Raises ConfigError (config.json), HeaderError (a damaged file), LayoutError (a layout that is not read, or not
    the one that config.json states) or CheckpointError (missing, unexpected or contradicting tensors).
    """
    folder = Path(folder)
    config = ModelConfig.load(folder)
    headers = _read_headers(folder)
    index = _read_index(folder, headers)
    headers, others = _leave_aside(headers, index, folder)
    _refuse_foreign_metadata(headers)
    found = _Found.collect(_choose_copies(headers, index, folder))
    modules = describe_all(found.tensors)
    copied = take_copies(modules, config)
    experts_of = experts_by_layer(modules, config, _drops_experts(folder, modules))
    trunk, head = inventory.trunk(config, experts_of), inventory.mtp(config, experts_of)
    check_modules(modules, trunk | head)
    _require_all(trunk, modules, folder)
    problem = _mtp_problem(config, modules, head)
    if problem is not None and (elsewhere := next(filter(_has_head, others), None)) is not None:
        problem += f"; {elsewhere.file}, another set that is not read, has one: --draft-head takes it"
    has_mtp = all(name in modules for name in head)
    wanted = trunk | head if has_mtp else trunk
    # lynn-engine flattens the leading axes of fused experts: here they get them back
    loaded = {name: dataclasses.replace(modules[name], shape=expected.shape) for name, expected in wanted.items()}
    rules.check_agreement(_read_rules(folder), loaded, trunk | head)
    return Checkpoint(
        path=folder,
        config=config,
        modules=loaded,
        has_mtp=has_mtp,
        mtp_problem=problem,
        dropped=_dropped(found, modules, loaded, copied),
        num_files=len(headers),
        num_head_weights=len(head),
        kv_scales=tuple(info for info in found.tolerated if names.kv_scale(names.normalise(info.name) or "")),
        copies=copied,
        left_aside=tuple(header.file for header in others),
    )


def _read_headers(folder: Path) -> list[Header]:
    files = sorted(folder.glob("*.safetensors")) + sorted((folder / MTP_FOLDER).glob("*.safetensors"))
    if not files:
        what = foreign.what_folder(folder)
        raise CheckpointError(
            f"{folder}: want at least one *.safetensors file, got none" + (f": {what}" if what else "")
        )
    return [read_header(file) for file in files]


def _leave_aside(headers: list[Header], index: Mapping[str, str], folder: Path) -> tuple[list[Header], list[Header]]:
    """The files to read, and those of another set of weights: not in the index, with layers that the index has too.

    A side file with a head, and be it with copies of the embedding, is none.
    """
    listed = set(index.values())
    layers = {module for module in map(_module_of, index) if module.startswith(LAYERS)}

    def is_another_set(header: Header) -> bool:
        unlisted = header.file.relative_to(folder).as_posix() not in listed
        return unlisted and any(_module_of(name) in layers for name in header.tensors)

    others = [header for header in headers if is_another_set(header)]
    return [header for header in headers if header not in others], others


def _has_head(header: Header) -> bool:
    return any(names.is_mtp(names.normalise(name) or "") for name in header.tensors)


def _module_of(name: str) -> str:
    """The normalised module of a tensor, "" in the vision tower."""
    return names.split(names.normalise(name) or "")[0]


def _refuse_foreign_metadata(headers: list[Header]) -> None:
    """Raises LayoutError for an adapter, and for a file whose writer says that its values follow other conventions."""
    for header in headers:
        if any(name.startswith(foreign.ADAPTER_PREFIX) for name in header.tensors):
            raise LayoutError(f"{header.file}: a PEFT adapter; {foreign.MERGE}, or move it out of the folder")
        mlx = header.metadata.get("format") == "mlx"
        name = next((name for name in header.tensors if mlx or names.is_mlx(name)), None)
        if name is not None:
            why = "its norms hold 1 + w and its convolutions are transposed"
            raise LayoutError(f"{name}: stored in MLX's form ({header.file}), where {why}; want the original export")


def _read_index(folder: Path, headers: list[Header]) -> dict[str, str]:
    """The index's tensor -> file map, {} without an index. Raises CheckpointError if a file or tensor is not there."""
    path = folder / INDEX_FILE
    if not path.exists():
        return {}
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{path}: want weight_map, an object of strings")
    by_file = {header.file.relative_to(folder).as_posix(): header for header in headers}
    for name, file in weight_map.items():
        if file not in by_file:
            raise CheckpointError(f"{path}: {name} should be in {file!r:.200}, and there is no such file")
        if name not in by_file[file].tensors:
            raise CheckpointError(f"{path}: {name} should be in {file}, and is not")
    return weight_map


def _choose_copies(headers: list[Header], index: Mapping[str, str], folder: Path) -> list[TensorInfo]:
    """One entry for each tensor name: of equal copies the one that the index lists.

    Raises CheckpointError if copies differ in shape or dtype, or the index does not say which one is meant.
    """
    chosen: dict[str, TensorInfo] = {}
    for info in (info for header in headers for info in header.tensors.values()):
        other = chosen.setdefault(info.name, info)
        if other is info:
            continue
        if (info.shape, info.dtype) != (other.shape, other.dtype):
            raise CheckpointError(f"{info.name}: {other} in {other.file}, but {info} in {info.file}")
        if info.name not in index:
            raise CheckpointError(f"{info.name}: in both {other.file} and {info.file}, and no index says which to take")
        if info.file == folder / index[info.name]:
            chosen[info.name] = info
    return list(chosen.values())


@dataclass(frozen=True)
class _Found:
    """Tensors by normalised name, and those that are left aside."""

    tensors: dict[str, TensorInfo]
    vision: list[TensorInfo]
    tolerated: list[TensorInfo]

    @classmethod
    def collect(cls, infos: list[TensorInfo]) -> _Found:
        found = cls({}, [], [])
        for info in infos:
            name = names.normalise(info.name)
            if name is None:
                found.vision.append(info)
            elif names.is_tolerated(name):
                found.tolerated.append(info)
            elif (other := found.tensors.setdefault(name, info)) is not info:
                raise CheckpointError(
                    f"{info.name} in {info.file} and {other.name} in {other.file} are the same weight"
                )
        return found


def describe_all(tensors: Mapping[str, TensorInfo]) -> dict[str, Module]:
    parts: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in tensors.items():
        module, suffix = names.split(name)
        parts[module][suffix] = info
    return {name: describe(name, _raw_module(some), some) for name, some in parts.items()}


def _raw_module(parts: Mapping[str, TensorInfo]) -> str:
    """The module's name as the checkpoint spells it."""
    suffix, info = next(iter(parts.items()))
    return info.name.removesuffix(suffix) if suffix else info.name


def _drops_experts(folder: Path, modules: Mapping[str, Module]) -> bool:
    """Whether layers may have fewer experts than the config says: lynn-engine's packs, before and after packing."""
    return (folder / VARIABLE_FILE).exists() or any(module.layout is Layout.LYNN for module in modules.values())


def experts_by_layer(modules: Mapping[str, Module], config: ModelConfig, variable: bool = False) -> ExpertsOf:
    """The form of each layer's experts, told from the modules' names; if `variable`, their number from the router's."""

    def experts_of(prefix: str) -> Experts:
        router = modules.get(f"{prefix}gate")
        count = router.shape[0] if variable and router is not None else config.num_experts
        if count < config.num_experts_per_tok:
            raise CheckpointError(
                f"{prefix}gate: want at least num_experts_per_tok {config.num_experts_per_tok} experts, got {count}"
            )
        return Experts(_expert_form(prefix, modules), count)

    return experts_of


def _expert_form(prefix: str, names: Container[str]) -> ExpertForm:
    if f"{prefix}experts.gate_proj" in names:
        return ExpertForm.STACKED
    fused = f"{prefix}experts.gate_up_proj" in names or f"{prefix}experts.down_proj" in names
    return ExpertForm.FUSED if fused else ExpertForm.SINGLE


def check_modules(modules: Mapping[str, Module], expected: Inventory) -> None:
    """Raises CheckpointError or LayoutError unless each module found is expected, with its shape and layout."""
    for name, module in modules.items():
        if name not in expected:
            spelled = next(iter(module.parts.values()))
            raise CheckpointError(f"{spelled.name} ({spelled}, {spelled.file}): the config implies no such tensor")
        _check_module(module, expected[name])


def _check_module(module: Module, wanted: Expected) -> None:
    if module.layout in PACKED and not _may_be_packed(module.layout, wanted.kind):
        raise LayoutError(
            f"{module.raw_name}: {module.layout.value} of a weight of kind {wanted.kind.value}; want it plain"
        )
    if module.layout is Layout.PLAIN and set(module.parts) != {wanted.suffix}:
        got = next(iter(module.parts.values())).name
        raise CheckpointError(f"{got}: want it to be called {module.raw_name}{wanted.suffix}")
    shape = wanted.shape if module.layout is not Layout.LYNN else (math.prod(wanted.shape[:-1]), wanted.shape[-1])
    if module.shape != shape:
        raise CheckpointError(f"{module.raw_name}: want shape {list(shape)}, got {list(module.shape)}")


def _may_be_packed(layout: Layout, kind: Kind) -> bool:
    return kind in PACKABLE_KINDS or (layout is Layout.LYNN and kind is Kind.FUSED_EXPERTS)


def _require_all(wanted: Inventory, modules: Mapping[str, Module], folder: Path) -> None:
    missing = [name for name in wanted if name not in modules]
    if missing == ["lm_head"]:
        raise CheckpointError(f"{folder}: lm_head is missing; want it, or tie_word_embeddings true in config.json")
    if missing:
        raise CheckpointError(f"{folder}: {len(missing)} weight(s) of the trunk are missing, the first is {missing[0]}")


def _mtp_problem(config: ModelConfig, modules: Mapping[str, Module], head: Inventory) -> str | None:
    """One sentence on a head that cannot be used though it is declared, or there in part."""
    missing = [name for name in head if name not in modules]
    if not missing:
        return None
    if len(missing) < len(head):
        return f"the MTP head is incomplete: {len(missing)} of its {len(head)} weights are missing, first {missing[0]}"
    if config.num_mtp_layers:
        return "config.json declares an MTP head (mtp_num_hidden_layers 1), but no file holds any mtp.* tensor"
    return None


def _read_rules(folder: Path) -> rules.QuantRules | None:
    path = folder / "config.json"
    try:
        return quantization.read_rules(read_json_object(path), folder)
    except (ConfigError, LayoutError) as error:
        raise type(error)(f"{path}: {error}") from None


def _dropped(
    found: _Found, modules: Mapping[str, Module], loaded: Mapping[str, Module], copied: tuple[Copy, ...]
) -> dict[str, tuple[int, int]]:
    head = [part for name, module in modules.items() if name not in loaded for part in module.parts.values()]
    scales = [part for module in loaded.values() for name, part in module.parts.items() if name in ACTIVATION_SCALES]
    rows: dict[str, list[Any]] = {
        "vision": found.vision,
        "incomplete head": head,
        "kv scales and rope caches": found.tolerated,
        "activation scales": scales,
        "copied": [part for copy in copied for part in copy.module.parts.values()],
    }
    return {what: (len(infos), sum(info.num_bytes for info in infos)) for what, infos in rows.items() if infos}
