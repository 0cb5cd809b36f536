"""Matrix product whose bits, for a row, depend on that row alone.

y = x W^T over tiles of exactly TILE_ROWS rows: the library sees one shape per weight whatever the number
of rows, so it issues the same instructions in the same order for each of them. The caller pads.

A row-parallel product (attention's and GatedDeltaNet's output, a dense layer's down), which devices may share by K, is
the sum of contiguous segments of K, each a product of its own, by one tree: so no bit depends on who has which.
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
MAX_SEGMENTS = 8
UNIT = 128
"""Columns of K that stay together in a segment."""


def cpu_multiplies_bf16() -> bool:
    """Whether oneDNN has bf16 products for this CPU (AVX-512 at least); without them bf16 is slow, and fp32 better."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def padded_rows(num_rows: int) -> int:
    """The next multiple of TILE_ROWS, at least one tile."""
    return max(1, -(-num_rows // TILE_ROWS)) * TILE_ROWS


def segments(width: int, num_heads: int = MAX_SEGMENTS) -> int:
    """How many segments of K a row-parallel product of this width adds: 8, 4, 2 or 1, as many as fall on units of UNIT
    columns and on heads."""
    return next(n for n in (8, 4, 2, 1) if n == 1 or (width % (UNIT * n) == 0 and num_heads % n == 0))


def in_tree(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), of a power of two of them."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


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
    `F.linear`, which re-orders on every call). Of several segments each product is rounded to the dtype, as the library
    gives it, and they are added in fp32.
    """

    def __init__(self, weight_NK: torch.Tensor, num_segments: int = 1):
        if weight_NK.dim() != 2:
            raise ValueError(f"want a weight [N, K], got shape {tuple(weight_NK.shape)}")
        self.out_features, self.in_features = weight_NK.shape
        self.dtype = weight_NK.dtype
        self.num_bytes = weight_NK.numel() * weight_NK.element_size()
        self.packed = weight_NK.device.type == "cpu" and self.dtype == torch.bfloat16 and cpu_multiplies_bf16()
        parts = [part.contiguous() for part in weight_NK.chunk(num_segments, dim=1)]
        self._weights = [torch.ops.mkldnn._reorder_linear_weight(p, TILE_ROWS) for p in parts] if self.packed else parts

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if len(self._weights) == 1:
            return self._segment(x, self._weights[0])
        parts = x.chunk(len(self._weights), dim=1)
        products = [self._segment(part, weight) for part, weight in zip(parts, self._weights, strict=True)]
        return in_tree([product.float() for product in products]).to(x.dtype)

    def _segment(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")
        return F.linear(x, weight)

    def rows(self, x_RK: torch.Tensor) -> torch.Tensor:
        """[R, N] in x's dtype; row-invariant. R must be a multiple of TILE_ROWS."""
        num_rows = x_RK.shape[0]
        assert num_rows % TILE_ROWS == 0, f"want whole tiles of {TILE_ROWS} rows, got {num_rows}"
        if num_rows == TILE_ROWS:
            return self._product(x_RK)
        return torch.cat([self._product(tile) for tile in x_RK.split(TILE_ROWS)])

    def bulk(self, x_TK: torch.Tensor) -> torch.Tensor:
        """[T, N] for prefill: any T, one product; bits depend on T.

        Whole tiles here too: for each number of rows that oneDNN meets it makes programs, which take some hundred KiB
        and are kept, a thousand of them in each of two caches.
        """
        if not self.packed:
            return self._product(x_TK)
        num_rows = x_TK.shape[0]
        return self._product(F.pad(x_TK, (0, 0, 0, padded_rows(num_rows) - num_rows)))[:num_rows]


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

    def __init__(self, parts: Sequence[QuantizedMatrix | torch.Tensor], dtype: torch.dtype, num_segments: int = 1):
        self.parts, self.dtype, self.num_segments = parts, dtype, num_segments
        self.out_features, self.in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
        self.num_bytes = sum(_num_bytes(part) for part in parts)

    def rows(self, x_RK: torch.Tensor) -> torch.Tensor:
        """[R, N]; R a multiple of TILE_ROWS."""
        weights = [_expand(part, self.dtype) for part in self.parts]
        tiles = x_RK.split(TILE_ROWS)
        return torch.cat([torch.cat([self._product(tile, w) for w in weights], -1) for tile in tiles])

    def bulk(self, x_TK: torch.Tensor) -> torch.Tensor:
        """[T, N] for prefill: any T."""
        return torch.cat([self._product(x_TK, _expand(part, self.dtype)) for part in self.parts], -1)

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.num_segments == 1:
            return F.linear(x, weight)
        pairs = zip(*(matrix.chunk(self.num_segments, dim=1) for matrix in (x, weight)), strict=True)
        return in_tree([F.linear(part, columns).float() for part, columns in pairs]).to(x.dtype)


def _expand(part: QuantizedMatrix | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return part.to(dtype) if isinstance(part, torch.Tensor) else part.dequantize(dtype)


def _num_bytes(part: QuantizedMatrix | torch.Tensor) -> int:
    return part.nbytes if isinstance(part, torch.Tensor) else part.num_bytes


def make_linear(
    parts: Sequence[QuantizedMatrix | torch.Tensor], dtype: torch.dtype, device: torch.device, num_segments: int = 1
) -> AnyLinear:
    """One product for the rows of all parts; `num_segments`: of a row-parallel one, as `segments` gives it. On a GPU
    packed parts stay packed; on the CPU they are expanded once to `dtype` (rounded there as the format's own library
    does), since no CPU instruction reads them."""
    if device.type != "cpu" and not all(isinstance(part, torch.Tensor) for part in parts):
        return QuantizedLinear(parts, dtype, num_segments)
    expanded = [_expand(part, dtype) for part in parts]
    return Linear(expanded[0] if len(expanded) == 1 else torch.cat(expanded), num_segments)
