"""The weights that `quantize` reads, one module at a time, and what becomes of a matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from safetensors import safe_open

from pilotfish.engine.checkpoint import fp8
from pilotfish.engine.checkpoint.headers import TensorInfo
from pilotfish.engine.checkpoint.load import ModuleReader, Weight
from pilotfish.engine.checkpoint.nvfp4 import NvFp4Weight, global_scale_for, quantize
from pilotfish.engine.convert.calibrate import Moments
from pilotfish.engine.convert.lora import Adapter, Pair
from pilotfish.engine.convert.recipe import TOGETHER, ConversionPlan, Form, Matrix, Recipe
from pilotfish.engine.errors import CheckpointError

BLOCK = 1 << 22
ROW_STEP = 128  # rows of an FP8 block, so that scales stay with their blocks


def pack(matrix: Matrix, form: Form, source: SourceWeights) -> tuple[list[torch.Tensor], dict[str, float]]:
    """The tensors of recipe.packed_entries, in that order, and how far they are from the source.

    With calibration also the error of what the matrix gives, before the search for scales and after it.
    """
    error = _Error(source.importance(matrix.name))
    if form == "nvfp4":
        tensors = _pack_nvfp4(matrix, source, error)
    elif source.modelopt:
        tensors = _pack_fp8_tensor(matrix, source, error)
    else:
        tensors = _pack_fp8_rows(matrix, source, error)
    return tensors, error.figures()


def _pack_nvfp4(matrix: Matrix, source: SourceWeights, error: _Error) -> list[torch.Tensor]:
    """nvfp4.quantize of all rows, some at a time."""
    rows, columns = matrix.shape
    weights = source.search_weights(matrix)
    global_scale = source.global_scale(matrix.name)
    codes = torch.empty((rows, columns // 2), dtype=torch.uint8)
    scales = torch.empty((rows, columns // 16), dtype=torch.float8_e4m3fn)
    for part, values in source.blocks(matrix.name):
        packed = quantize(values, global_scale, weights)
        codes[part], scales[part] = packed.packed, packed.scale
        error.add(values, packed, quantize(values, global_scale) if error.has_inputs else None)
    if source.modelopt:
        return [codes, scales, 1.0 / global_scale.reshape(())]
    return [codes, scales, global_scale.reshape(1)]


def _pack_fp8_rows(matrix: Matrix, source: SourceWeights, error: _Error) -> list[torch.Tensor]:
    weights = source.search_weights(matrix)
    codes = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty((matrix.shape[0], 1))
    for part, values in source.blocks(matrix.name):
        packed = fp8.quantize_rows(values, weights)
        codes[part], scales[part] = packed.weight, packed.scale
        error.add(values, packed, fp8.quantize_rows(values) if error.has_inputs else None)
    return [codes, scales]


def _pack_fp8_tensor(matrix: Matrix, source: SourceWeights, error: _Error) -> list[torch.Tensor]:
    """Packs with one scale for the matrix, from its largest value, and one for its inputs, from the largest seen."""
    scale = fp8.row_scales(source.shared_amax(matrix.name).reshape(1, 1))
    codes = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    for part, values in source.blocks(matrix.name):
        packed = fp8.quantize_under(values, scale)
        codes[part] = packed.weight
        error.add(values, packed, packed)
    inputs = fp8.row_scales(torch.tensor(source.moments[matrix.name].largest))
    return [codes, scale.reshape(()), inputs]


class _Error:
    """Sums over the parts of one matrix."""

    def __init__(self, importance: torch.Tensor | None):
        self._importance = importance
        self._squares = self._lost = self._largest = 0.0
        self._outputs, self._after, self._before = 0.0, 0.0, 0.0

    @property
    def has_inputs(self) -> bool:
        """Whether the matrix's inputs are known, so that the error without a search is of interest."""
        return self._importance is not None

    def add(self, values: torch.Tensor, packed: Packed, plain: Packed | None) -> None:
        away = values - packed.dequantize()
        self._squares += float(values.square().sum())
        self._lost += float(away.square().sum())
        self._largest = max(self._largest, float(away.abs().max()))
        if self._importance is not None and plain is not None:
            self._outputs += float((values.square() * self._importance).sum())
            self._after += float((away.square() * self._importance).sum())
            self._before += float(((values - plain.dequantize()).square() * self._importance).sum())

    def figures(self) -> dict[str, float]:
        found = {"relative": _ratio(self._lost, self._squares), "largest": self._largest}
        if self._importance is not None:
            found["output"] = _ratio(self._after, self._outputs)
            found["output_uncalibrated"] = _ratio(self._before, self._outputs)
        return {name: float(f"{value:.4g}") for name, value in found.items()}


def _ratio(lost: float, whole: float) -> float:
    return (lost / whole) ** 0.5 if whole else 0.0


Packed = NvFp4Weight | fp8.Fp8Weight


def _blocks(weight: Weight) -> Iterator[tuple[slice, torch.Tensor]]:
    """fp32 values of some rows at a time."""
    rows = weight.shape[0]
    step = max(ROW_STEP, BLOCK // max(1, weight.shape[-1]) // ROW_STEP * ROW_STEP)
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        if isinstance(weight, torch.Tensor):
            yield part, weight[part].float()
        else:
            yield part, weight.take_rows(torch.arange(part.start, part.stop)).dequantize()


def _differs(one: tuple[slice, torch.Tensor], other: tuple[slice, torch.Tensor]) -> bool:
    return not torch.equal(one[1].bfloat16(), other[1].bfloat16())


class SourceWeights:
    """Weights of the source by normalised name, experts one by one, and the global scales they get."""

    def __init__(
        self,
        plan: ConversionPlan,
        recipe: Recipe,
        adapter: Adapter | None,
        moments: Mapping[str, Moments] | None = None,
    ):
        self._pairs: Mapping[str, Pair] = adapter.pairs if adapter else {}
        jobs = [job for some in plan.values() for job in some if job.module is not None]
        self._modules = {matrix.name: job.module for job in jobs for matrix in job.matrices}
        self._forms = {matrix.name: job.form for job in jobs for matrix in job.matrices}
        self._shared = recipe.shared_scales
        self._search = recipe.search_scales or bool(moments)
        self.modelopt = recipe.writer == "modelopt"
        self.moments = moments or {}
        self._reader = ModuleReader()
        self._last: tuple[str, dict[str, Weight]] = ("", {})
        self._largest: dict[tuple[str, ...], torch.Tensor] = {}
        for name, info in (adapter.bases if adapter else {}).items():
            self._check_base(name, info)

    def blocks(self, name: str) -> Iterator[tuple[slice, torch.Tensor]]:
        """fp32 values of some rows at a time, changed by the adapter if it names the matrix."""
        pair = self._pairs.get(name)
        for part, values in _blocks(self._read(name)):
            yield part, values if pair is None else values + pair.rows(part)

    def changed(self) -> int:
        """How many of the matrices that the adapter names it changes, rounded to 16 bits as files hold them.

        Raises CheckpointError if it is none.
        """
        count = sum(any(map(_differs, _blocks(self._read(name)), self.blocks(name))) for name in self._pairs)
        if self._pairs and not count:
            names = f"{len(self._pairs)} matrices"
            raise CheckpointError(f"the adapter changes nothing: lost in the rounding of {names} to 16 bits")
        return count

    def _check_base(self, name: str, info: TensorInfo) -> None:
        """Raises CheckpointError unless the adapter was made for this matrix."""
        if name not in self._modules:
            raise CheckpointError(f"{info.name} ({info}, {info.file}): the checkpoint has no such matrix")
        with safe_open(info.file, framework="pt", device="cpu") as opened:
            base = opened.get_tensor(info.name)
        same = base.shape == self._read(name).shape
        if not same or not all(bool((base[p] == v.to(base.dtype)).all()) for p, v in _blocks(self._read(name))):
            raise CheckpointError(f"{info.name} ({info.file}): not the checkpoint's; want the adapter's own base model")

    def _read(self, name: str) -> Weight:
        module = self._modules[name]
        assert module is not None
        if self._last[0] != module.name:
            self._last = (module.name, self._reader.read(module))
        return self._last[1][f"{name}.weight"]

    def global_scale(self, name: str) -> torch.Tensor:
        return global_scale_for(self.shared_amax(name))

    def shared_amax(self, name: str) -> torch.Tensor:
        """The largest magnitude of the matrix, or of all that are computed together with it and packed alike."""
        form = self._forms[name]
        alike = tuple(other for other in together(name) if self._forms.get(other) == form)
        names = alike if self._shared else (name,)
        if names not in self._largest:
            self._largest[names] = torch.stack([self.amax(other) for other in names]).max()
        return self._largest[names]

    def amax(self, name: str) -> torch.Tensor:
        """The largest magnitude. Raises CheckpointError if a value is not finite."""
        amax = torch.stack([values.abs().max() for _, values in self.blocks(name)]).max()
        if not amax.isfinite():
            raise CheckpointError(f"{name}: want finite values")
        return amax

    def importance(self, name: str) -> torch.Tensor | None:
        """Mean squares of the matrix's inputs, if they were looked at and seen often enough."""
        return self.moments[name].importance if name in self.moments else None

    def search_weights(self, matrix: Matrix) -> torch.Tensor | None:
        """What the search for scales weights the columns by: importance, or alike; None: there is no search."""
        importance = self.importance(matrix.name)
        return torch.ones(matrix.shape[1]) if importance is None and self._search else importance

    def release(self) -> None:
        """Unmaps the files."""
        self._last = ("", {})
        self._reader.close()


def together(name: str) -> tuple[str, ...]:
    """The matrix and those that are computed as one with it."""
    stem, _, last = name.rpartition(".")
    for group in TOGETHER:
        if last in group:
            return tuple(f"{stem}.{part}" for part in group)
    return (name,)
