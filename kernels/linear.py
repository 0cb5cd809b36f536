"""Matrix product whose bits, for a row, depend on that row alone.

y = x W^T over tiles of exactly TILE_ROWS rows: the library sees one shape per weight whatever the number
of rows, so it issues the same instructions in the same order for each of them. The caller pads.
R = rows (a multiple of TILE_ROWS), K = input width, N = output width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

TILE_ROWS = 8
"""Chosen by measurement (docs/measurements.md): with AVX-512 but no AMX a bf16 product of 16 rows costs 1.5-2x one of
8, one of 4 hardly less than one of 8."""


def cpu_multiplies_bf16() -> bool:
    """Whether oneDNN has bf16 products for this CPU (AVX-512 at least); without them bf16 is slow, and fp32 better."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def padded_rows(num_rows: int) -> int:
    """The next multiple of TILE_ROWS, at least one tile."""
    return max(1, -(-num_rows // TILE_ROWS)) * TILE_ROWS


class AnyLinear(Protocol):
    """A weight [N, K] of a product y = x W^T, in the form that one table of operators reads: that table alone calls it.

    `rows` is row-invariant; `bulk`, for prefill, is not. Those of plain torch: x [R, K] -> [R, N], R whole tiles, and x
    [T, K] -> [T, N]. Those of packed weights take memory too (kernels.cuda.linear).
    """

    in_features: int
    out_features: int
    num_bytes: int

    @property
    def rows(self) -> Callable[..., Any]: ...

    @property
    def bulk(self) -> Callable[..., torch.Tensor]: ...


class Linear:
    """A weight [N, K] in the form the device's matrix product reads.

    On the CPU in bf16 the weight is re-ordered once for oneDNN (same values, 1.3-2x faster at 16 rows than
    `F.linear`, which re-orders on every call).
    """

    def __init__(self, weight_NK: torch.Tensor):
        if weight_NK.dim() != 2:
            raise ValueError(f"want a weight [N, K], got shape {tuple(weight_NK.shape)}")
        self.out_features, self.in_features = weight_NK.shape
        self.dtype = weight_NK.dtype
        self.num_bytes = weight_NK.numel() * weight_NK.element_size()
        self.packed = weight_NK.device.type == "cpu" and self.dtype == torch.bfloat16 and cpu_multiplies_bf16()
        weight_NK = weight_NK.contiguous()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_NK, TILE_ROWS) if self.packed else weight_NK

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.default(x, self._weight, None, "none", [], "")
        return F.linear(x, self._weight)

    def rows(self, x_RK: torch.Tensor) -> torch.Tensor:
        """[R, N] in x's dtype; row-invariant. R must be a multiple of TILE_ROWS."""
        num_rows = x_RK.shape[0]
        assert num_rows % TILE_ROWS == 0, f"want whole tiles of {TILE_ROWS} rows, got {num_rows}"
        if num_rows == TILE_ROWS:
            return self._product(x_RK)
        return torch.cat([self._product(tile) for tile in x_RK.split(TILE_ROWS)])

    def bulk(self, x_TK: torch.Tensor) -> torch.Tensor:
        """[T, N] for prefill: any T, one product; bits depend on T."""
        return self._product(x_TK)


class QuantizedMatrix(Protocol):
    """A packed weight [N, K]; what a checkpoint's loader hands over."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def num_bytes(self) -> int: ...

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor: ...


class QuantizedLinear:
    """Weights that stay packed; each part keeps its own global scale. Expanded into scratch, one part at a time, for
    each product: the plain torch reference of the fused kernels, right but slow."""

    def __init__(self, parts: Sequence[QuantizedMatrix | torch.Tensor], dtype: torch.dtype):
        self.parts, self.dtype = parts, dtype
        self.out_features, self.in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
        self.num_bytes = sum(_num_bytes(part) for part in parts)

    def rows(self, x_RK: torch.Tensor) -> torch.Tensor:
        """[R, N]; R a multiple of TILE_ROWS."""
        weights = [_expand(part, self.dtype) for part in self.parts]
        return torch.cat([torch.cat([F.linear(tile, w) for w in weights], -1) for tile in x_RK.split(TILE_ROWS)])

    def bulk(self, x_TK: torch.Tensor) -> torch.Tensor:
        """[T, N] for prefill: any T."""
        return torch.cat([F.linear(x_TK, _expand(part, self.dtype)) for part in self.parts], -1)


def _expand(part: QuantizedMatrix | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return part.to(dtype) if isinstance(part, torch.Tensor) else part.dequantize(dtype)


def _num_bytes(part: QuantizedMatrix | torch.Tensor) -> int:
    return part.nbytes if isinstance(part, torch.Tensor) else part.num_bytes


def make_linear(parts: Sequence[QuantizedMatrix | torch.Tensor], dtype: torch.dtype, device: torch.device) -> AnyLinear:
    """One product for the rows of all parts. On a GPU packed parts stay packed; on the CPU they are expanded once to
    `dtype` (rounded there as the format's own library does), since no CPU instruction reads them."""
    if device.type != "cpu" and not all(isinstance(part, torch.Tensor) for part in parts):
        return QuantizedLinear(parts, dtype)
    expanded = [_expand(part, dtype) for part in parts]
    return Linear(expanded[0] if len(expanded) == 1 else torch.cat(expanded))
