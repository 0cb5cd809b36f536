"""A draft head from a file of its own, beside a trunk that lacks one or has another.

A folder or file of safetensors with the head's 15 (dense), 19 (fused experts) or 17 + 3E (single experts) tensors in
any layout that trunks may have, as released (`mtp.*`) or as MLX converters write them (`language_model.mtp.*`, or bare
names); or a GGUF file with a next-token block. Whether norms hold w or 1 + w goes by the container alone: values do not
tell (a small gain looks like a delta). Embedding and lm_head are always the trunk's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotfish.engine.checkpoint import inventory
from pilotfish.engine.checkpoint.copies import take_copies
from pilotfish.engine.checkpoint.gguf_file import BLOCKS, PREFIX, GgufHeader, read_gguf
from pilotfish.engine.checkpoint.headers import Header, TensorInfo, read_header
from pilotfish.engine.checkpoint.inventory import Inventory
from pilotfish.engine.checkpoint.layouts import Layout, Module
from pilotfish.engine.checkpoint.names import is_mtp
from pilotfish.engine.checkpoint.recognise import (
    MTP_FOLDER,
    Checkpoint,
    HeadSource,
    check_modules,
    describe_all,
    experts_by_layer,
)
from pilotfish.engine.config import ModelConfig
from pilotfish.engine.errors import CheckpointError, LayoutError

_PREFIXED = re.compile(r"(?:language_model\.|model\.)*mtp\.(.+)")
_BARE = re.compile(r"(?:fc|norm|pre_fc_norm_embedding|pre_fc_norm_hidden|layers\.0)\..+")
_MLX_EXPERTS = re.compile(r"\.mlp\.switch_mlp\.(gate|up|down)_proj\.weight$")

GGUF_ARCHITECTURES = {"qwen35": False, "qwen35moe": True}
"""llama.cpp's names of the family -> whether it is a mixture of experts."""

# Names inside the next-token block -> ours; a name without a suffix is a 3-D tensor of experts.
GGUF_NAMES = {
    "nextn.eh_proj.weight": "fc.weight",
    "nextn.enorm.weight": "pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "norm.weight",
    "attn_norm.weight": "layers.0.input_layernorm.weight",
    "post_attention_norm.weight": "layers.0.post_attention_layernorm.weight",
    "attn_q.weight": "layers.0.self_attn.q_proj.weight",
    "attn_k.weight": "layers.0.self_attn.k_proj.weight",
    "attn_v.weight": "layers.0.self_attn.v_proj.weight",
    "attn_output.weight": "layers.0.self_attn.o_proj.weight",
    "attn_q_norm.weight": "layers.0.self_attn.q_norm.weight",
    "attn_k_norm.weight": "layers.0.self_attn.k_norm.weight",
    "ffn_gate.weight": "layers.0.mlp.gate_proj.weight",
    "ffn_up.weight": "layers.0.mlp.up_proj.weight",
    "ffn_down.weight": "layers.0.mlp.down_proj.weight",
    "ffn_gate_inp.weight": "layers.0.mlp.gate.weight",
    "ffn_gate_inp_shexp.weight": "layers.0.mlp.shared_expert_gate.weight",
    "ffn_gate_shexp.weight": "layers.0.mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "layers.0.mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "layers.0.mlp.shared_expert.down_proj.weight",
    "ffn_gate_exps.weight": "layers.0.mlp.experts.gate_proj",
    "ffn_up_exps.weight": "layers.0.mlp.experts.up_proj",
    "ffn_down_exps.weight": "layers.0.mlp.experts.down_proj",
    "ffn_gate_up_exps.weight": "layers.0.mlp.experts.gate_up_proj",
}
# A block may carry these of its own; the trunk's are used.
GGUF_NOT_USED = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")


@dataclass(frozen=True)
class _Head:
    source: HeadSource
    modules: Mapping[str, Module]
    unused: list[TensorInfo]
    num_files: int


def attach_head(checkpoint: Checkpoint, path: str | Path) -> Checkpoint:
    """The checkpoint with the head that `path` holds in place of its own; no tensor is read.

    Raises HeaderError (a damaged file), LayoutError (a layout or container that is not read) or CheckpointError (no
    head, a part of one, or the head of a model of other sizes).
    """
    path = _gguf_of(Path(path))
    head = _from_gguf(path, checkpoint.config) if path.suffix == ".gguf" else _from_safetensors(path)
    trunk = {name: module for name, module in checkpoint.modules.items() if not is_mtp(name)}
    whole = trunk | dict(head.modules)
    copies = take_copies(whole, checkpoint.config)
    found = {name: module for name, module in whole.items() if is_mtp(name)}
    wanted = inventory.mtp(checkpoint.config, experts_by_layer(found, checkpoint.config))
    _check(path, found, wanted)
    own = {name: module for name, module in checkpoint.modules.items() if is_mtp(name)}
    dropped = {what: row for what, row in checkpoint.dropped.items() if what != "incomplete head"}
    for what, infos in (
        ("replaced head", [part for module in own.values() for part in module.parts.values()]),
        ("not the head's", head.unused + [part for copy in copies for part in copy.module.parts.values()]),
    ):
        if infos:
            dropped[what] = (len(infos), sum(info.num_bytes for info in infos))
    modules = {name: dataclasses.replace(found[name], shape=wanted[name].shape) for name in wanted}
    return dataclasses.replace(
        checkpoint,
        modules=trunk | modules,
        has_mtp=True,
        mtp_problem=None,
        dropped=dropped,
        num_files=checkpoint.num_files + head.num_files,
        num_head_weights=len(wanted),
        head=head.source,
        copies=tuple(copy for copy in checkpoint.copies if not is_mtp(copy.module.name)) + copies,
    )


def _check(path: Path, modules: Mapping[str, Module], wanted: Inventory) -> None:
    """Raises CheckpointError or LayoutError unless these are exactly the head's weights, in its shapes."""
    if not modules:
        raise CheckpointError(f"{path}: holds no draft head: no mtp.* tensor, and none under an MLX converter's names")
    try:
        check_modules(modules, wanted)
    except CheckpointError as error:
        raise type(error)(f"{path}: no head for this model: {error}") from None
    missing = [name for name in wanted if name not in modules]
    if missing:
        count = f"{len(missing)} of its {len(wanted)} weights are missing, first {missing[0]}"
        raise CheckpointError(f"{path}: the head is incomplete: {count}")


# safetensors


def _from_safetensors(path: Path) -> _Head:
    headers = [read_header(file) for file in _safetensors_of(path)]
    prefixed = any(_PREFIXED.fullmatch(name) for header in headers for name in header.tensors)
    pattern = _PREFIXED if prefixed else _BARE
    found: dict[str, TensorInfo] = {}
    unused: list[TensorInfo] = []
    absolute: set[bool] = set()
    for header in headers:
        ours = [info for info in header.tensors.values() if pattern.fullmatch(info.name)]
        unused += [info for info in header.tensors.values() if not pattern.fullmatch(info.name)]
        absolute |= {_holds_one_plus_w(header, ours, prefixed)} if ours else set()
        for info in ours:
            name = _normalise(info.name, prefixed)
            if (other := found.setdefault(name, info)) is not info:
                raise CheckpointError(
                    f"{info.name} in {info.file} and {other.name} in {other.file} are the same weight"
                )
    if len(absolute) > 1:
        raise LayoutError(f"{path}: norms hold w in one file and 1 + w in another; want one writer's files")
    container = "MLX safetensors" if True in absolute else "safetensors"
    source = HeadSource(path, container, True in absolute)
    return _Head(source, describe_all(found), unused, len({info.file for info in found.values()}))


def _safetensors_of(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(path.glob("*.safetensors")) + sorted((path / MTP_FOLDER).glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{path}: want a *.safetensors or one *.gguf file in it, got none")
        return files
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: want a folder, a .safetensors or a .gguf file")
    return [path]


def _holds_one_plus_w(header: Header, infos: Iterable[TensorInfo], prefixed: bool) -> bool:
    """What the writer calls itself decides; where it does not, MLX's names do."""
    if (writer := header.metadata.get("format")) in ("mlx", "pt"):
        return writer == "mlx"
    return not prefixed or any(info.name.startswith("language_model.") for info in infos)


def _normalise(name: str, prefixed: bool) -> str:
    if prefixed:
        name = re.sub(r"^(?:language_model\.|model\.)*mtp\.", "", name)
    return "mtp." + _MLX_EXPERTS.sub(r".mlp.experts.\1_proj", name)


# GGUF


def _gguf_of(path: Path) -> Path:
    """The one GGUF file of a folder without safetensors, else the path itself."""
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise CheckpointError(f"{path}: {len(files)} GGUF files; name the one that holds the head")
    return files[0] if files else path


def _from_gguf(path: Path, config: ModelConfig) -> _Head:
    header = read_gguf(path)
    prefix = f"blk.{_nextn_block(header, config)}."
    modules: dict[str, Module] = {}
    unused: list[TensorInfo] = []
    for name, info in header.tensors.items():
        local = name.removeprefix(prefix)
        if not name.startswith(prefix) or local in GGUF_NOT_USED:
            unused.append(info)
            continue
        if local not in GGUF_NAMES:
            raise CheckpointError(f"{path}: {name} ({info}): a head has no such tensor")
        module = _gguf_module(GGUF_NAMES[local], info)
        modules[module.name] = module
    if "mtp.norm" not in modules and (final := header.tensors.get("output_norm.weight")) is not None:
        # llama.cpp's own rule for blocks without a norm at their end
        modules["mtp.norm"] = _gguf_module("norm.weight", final)
        unused.remove(final)
    return _Head(HeadSource(path, "GGUF", True), modules, unused, 1)


def _nextn_block(header: GgufHeader, config: ModelConfig) -> int:
    """The number of the block that is the head. Raises LayoutError or CheckpointError if the file has none for us."""
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES or GGUF_ARCHITECTURES[architecture] != config.is_moe:
        wanted = "qwen35moe" if config.is_moe else "qwen35"
        raise LayoutError(f"{header.file}: want general.architecture {wanted!r}, got {architecture!r:.80}")
    count = _integer(metadata, f"{architecture}.nextn_predict_layers")
    if count != 1:
        raise CheckpointError(f"{header.file}: want {architecture}.nextn_predict_layers 1, got {count}: it has no head")
    block = _integer(metadata, f"{architecture}.block_count") - 1
    if block != config.num_hidden_layers:
        raise CheckpointError(
            f"{header.file}: its head is block {block}, behind as many layers; the trunk has {config.num_hidden_layers}"
        )
    return block


def _integer(metadata: Mapping[str, Any], key: str) -> int:
    value = metadata.get(key)
    return value if isinstance(value, int) else 0


def _gguf_module(name: str, info: TensorInfo) -> Module:
    if info.dtype.removeprefix(PREFIX) not in BLOCKS:
        raise LayoutError(f"{info.name}: stored as {info.dtype} ({info.file}); want {', '.join(BLOCKS)}")
    suffix = ".weight" if name.endswith(".weight") else ""
    # one row, whose axis of 1 GGUF drops
    shape = (1, *info.shape) if name.endswith("shared_expert_gate.weight") and len(info.shape) == 1 else info.shape
    full = f"mtp.{name.removesuffix('.weight')}"
    return Module(full, info.name.removesuffix(".weight"), Layout.GGUF, shape, info.dtype, {suffix: info})
