"""silu(gate) * up of a product that a library made, in one launch: in fp32, rounded once.

Reads 4 bytes a number, writes 2; bound by that, 16 bytes a lane at a time where N and rows' distances are multiples of
16: the mask's bound is looked at for it, for the compiler sees no other sign that 8 columns are masked alike.
T = rows, N = columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 1024
"""Columns that a program computes, of one row."""


@triton.jit
def _silu_product_kernel(gate, up, out, gate_stride, up_stride, out_stride, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < width
    x = tl.load(gate + row * gate_stride + column, mask, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + column, mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, (x / (1.0 + tl.exp(-x)) * y).to(out.dtype.element_ty), mask)


def silu_product(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> None:
    """Writes out [T, N] = silu(gate) * up, of one shape; the numbers of a row are contiguous in each."""
    assert gate.shape == up.shape == out.shape and gate.stride(1) == up.stride(1) == out.stride(1) == 1, out.shape
    rows, width = out.shape
    _silu_product_kernel[(rows, -(-width // COLUMNS))](
        gate, up, out, gate.stride(0), up.stride(0), out.stride(0), width, COLUMNS=COLUMNS, num_warps=4
    )
