"""What `pilotfish quantize` makes of each tensor of a checkpoint, decided from the headers alone.

Experts, shared experts, dense MLPs, lm_head and, unless told otherwise, the projections of attention and GatedDeltaNet
become NVFP4; lm_head, these projections and the head may become FP8 instead. Routers, shared_expert_gate, in_proj_a and
in_proj_b, convolutions, norms, embeddings, mtp.fc and all vision weights stay what they are; FP8 matrices that stay
plain become BF16.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from pilotfish.engine.checkpoint.headers import TensorInfo, read_header
from pilotfish.engine.checkpoint.layouts import FP8, GROUP, PACKED, Layout, Module
from pilotfish.engine.checkpoint.load import EXPERT_PARTS
from pilotfish.engine.checkpoint.names import is_mtp, normalise, split
from pilotfish.engine.checkpoint.recognise import MTP_FOLDER, Checkpoint
from pilotfish.engine.convert.write import TensorEntry
from pilotfish.engine.errors import CheckpointError, LayoutError

MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
MIXERS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"})
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("in_proj_qkv", "in_proj_z"), ("gate_proj", "up_proj"))
"""Matrices that servers compute as one, and of whose global scales vLLM then uses a single one."""

GRAFTED_FILE = "model-mtp.safetensors"

Form = Literal["nvfp4", "fp8", "bf16"]
Writer = Literal["compressed-tensors", "modelopt"]


@dataclass(frozen=True)
class Recipe:
    """`attention` includes GatedDeltaNet; `head` is the MTP head's layer. `shared_scales`: as TOGETHER says. FP8 is per
    channel in compressed-tensors' files, per tensor with a scale of the inputs in ModelOpt's. `search_scales`: search
    for the scales under which a group is off the least, also where nothing is known of its inputs."""

    attention: Form = "nvfp4"
    lm_head: Form = "nvfp4"
    head: Form = "bf16"
    shared_scales: bool = True
    writer: Writer = "compressed-tensors"
    search_scales: bool = False

    def form(self, name: str) -> Form:
        """What the matrix of this normalised name, experts one by one, becomes; "bf16": it is left plain."""
        if name == "lm_head":
            return self.lm_head
        last = name.rpartition(".")[2]
        if last not in MLP | MIXERS:
            return "bf16"
        if is_mtp(name):
            return self.head
        return "nvfp4" if last in MLP else self.attention

    @property
    def needs_inputs(self) -> bool:
        """Whether scales of the inputs are written, which only calibration tells."""
        return self.writer == "modelopt" and "fp8" in (self.attention, self.lm_head, self.head)


class Action(Enum):
    COPY = "as it is"
    PACK = "packed"
    PLAIN = "unpacked"


@dataclass(frozen=True)
class Matrix:
    """One weight, experts one by one. name: normalised; raw_name: as the output spells it."""

    name: str
    raw_name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """One module of the source, or one tensor that is no module's, and what it becomes.

    `main` is its largest tensor, in whose file's counterpart the output lies. `to_deltas`: it holds 1 + w.
    """

    action: Action
    main: TensorInfo
    matrices: tuple[Matrix, ...]
    entries: tuple[TensorEntry, ...]
    module: Module | None = None
    to_deltas: bool = False
    form: Form = "bf16"

    @property
    def num_bytes(self) -> int:
        return self.module.num_bytes if self.module else self.main.num_bytes


ConversionPlan = dict[str, list[Job]]
"""Output file -> its jobs, in the order of the source's bytes."""


def plan_conversion(checkpoint: Checkpoint, recipe: Recipe, changed: Collection[str] = ()) -> ConversionPlan:
    """What to do with every tensor of the folder, and of the head that was attached; `changed` matrices are not copied.

    Raises LayoutError for a source that is packed in four bits, CheckpointError if nothing is left to pack.
    """
    plan: ConversionPlan = defaultdict(list)
    for module in checkpoint.modules.values():
        _refuse_packed(module, checkpoint, recipe)
        job = _job(module, checkpoint, recipe, changed)
        plan[_output_file(job.main, checkpoint, _is_grafted(module, checkpoint))].append(job)
    for info in _others(checkpoint):
        entry = TensorEntry(info.name, info.dtype, info.shape)
        plan[_output_file(info, checkpoint, False)].append(Job(Action.COPY, info, (), (entry,)))
    if not any(job.action is Action.PACK for jobs in plan.values() for job in jobs):
        raise CheckpointError(f"{checkpoint.path}: no matrix of it would become NVFP4")
    return {file: sorted(plan[file], key=lambda job: (job.main.file, job.main.start)) for file in sorted(plan)}


def _refuse_packed(module: Module, checkpoint: Checkpoint, recipe: Recipe) -> None:
    if module.layout not in PACKED - FP8 or (_is_grafted(module, checkpoint) and recipe.head == "bf16"):
        return
    raise LayoutError(f"{module.raw_name}: already stored as {module.layout.value}; want BF16, F16, F32 or FP8")


def _is_grafted(module: Module, checkpoint: Checkpoint) -> bool:
    return checkpoint.head is not None and is_mtp(module.name)


def _job(module: Module, checkpoint: Checkpoint, recipe: Recipe, changed: Collection[str]) -> Job:
    main = max(module.parts.values(), key=lambda info: info.num_bytes)
    grafted = _is_grafted(module, checkpoint)
    stem = module.name if grafted else module.raw_name
    matrices = tuple(_matrices(module, stem))
    form = recipe.form(matrices[0].name)
    if form == "fp8" or (form == "nvfp4" and module.shape[-1] % GROUP == 0):
        packed = tuple(entry for matrix in matrices for entry in packed_entries(matrix, form, recipe.writer))
        return Job(Action.PACK, main, matrices, packed, module, form=form)
    head = checkpoint.head
    to_deltas = grafted and head is not None and head.absolute_norms and "norm" in module.name
    apart = grafted and len(matrices) > 1 and not _is_fused(module, checkpoint)
    is_changed = any(matrix.name in changed for matrix in matrices)
    if module.layout is Layout.PLAIN and not (to_deltas or apart or is_changed):
        suffix = next(iter(module.parts))
        return Job(Action.COPY, main, matrices, (TensorEntry(f"{stem}{suffix}", main.dtype, main.shape),), module)
    dtype = "F32" if len(module.shape) == 1 else module.dtype if module.layout is Layout.PLAIN else "BF16"
    plain = tuple(TensorEntry(f"{matrix.raw_name}.weight", dtype, matrix.shape) for matrix in matrices)
    return Job(Action.PLAIN, main, matrices, plain, module, to_deltas)


def changeable(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The trunk's linear matrices that an adapter may change, experts one by one, by normalised name."""
    return {
        matrix.name: matrix.shape
        for module in checkpoint.modules.values()
        if len(module.shape) > 1 and not is_mtp(module.name) and not module.name.endswith(("embed_tokens", "conv1d"))
        for matrix in _matrices(module, module.raw_name)
    }


def _is_fused(module: Module, checkpoint: Checkpoint) -> bool:
    """Whether experts are in the two tensors of released files, not in three of a converter's."""
    return f"{module.name.rpartition('.')[0]}.gate_up_proj" in checkpoint.modules


def packed_entries(matrix: Matrix, form: Form, writer: Writer) -> tuple[TensorEntry, ...]:
    """The tensors of a packed matrix; what pack.py gives comes in this order."""
    rows, columns = matrix.shape
    modelopt = writer == "modelopt"
    if form == "nvfp4":
        codes, number, shape = (
            ("weight", "weight_scale_2", ()) if modelopt else ("weight_packed", "weight_global_scale", (1,))
        )
        return (
            TensorEntry(f"{matrix.raw_name}.{codes}", "U8", (rows, columns // 2)),
            TensorEntry(f"{matrix.raw_name}.weight_scale", "F8_E4M3", (rows, columns // GROUP)),
            TensorEntry(f"{matrix.raw_name}.{number}", "F32", shape),
        )
    weight = TensorEntry(f"{matrix.raw_name}.weight", "F8_E4M3", (rows, columns))
    if not modelopt:
        return weight, TensorEntry(f"{matrix.raw_name}.weight_scale", "F32", (rows, 1))
    return weight, *(TensorEntry(f"{matrix.raw_name}.{part}_scale", "F32", ()) for part in ("weight", "input"))


def _matrices(module: Module, stem: str) -> Iterator[Matrix]:
    prefix, _, last = module.name.rpartition(".experts.")
    if not prefix or last not in EXPERT_PARTS:
        yield Matrix(module.name, stem, module.shape)
        return
    parts, raw = EXPERT_PARTS[last], stem.removesuffix(last)
    shape = (module.shape[1] // len(parts), module.shape[2])
    for i in range(module.shape[0]):
        for part in parts:
            yield Matrix(f"{prefix}.experts.{i}.{part}", f"{raw}{i}.{part}", shape)


def _others(checkpoint: Checkpoint) -> Iterator[TensorInfo]:
    """Tensors of the folder that are no part of what is loaded, and stay: vision, scales of a KV cache."""
    folder, seen = checkpoint.path, set()
    copies = {copy.module.name for copy in checkpoint.copies}
    for file in sorted(folder.glob("*.safetensors")) + sorted((folder / MTP_FOLDER).glob("*.safetensors")):
        if file in checkpoint.left_aside:
            continue
        for info in read_header(file).tensors.values():
            name = normalise(info.name)
            module = split(name)[0] if name else info.name
            replaced = checkpoint.head is not None and is_mtp(module)
            if module not in checkpoint.modules and module not in copies and not replaced and info.name not in seen:
                seen.add(info.name)
                yield info


def _output_file(info: TensorInfo, checkpoint: Checkpoint, grafted: bool) -> str:
    """The source's file names, without folders: readers look into none. A head from elsewhere has its own."""
    if grafted:
        return GRAFTED_FILE
    return info.file.relative_to(checkpoint.path).as_posix().replace("/", "-")
