"""Gated attention of a prompt's rows between its two products: the library's kernel, among three launches of ours.

Norm, RoPE and the writes of keys and values as a decode window has them (project_kernel), then the context's pages in
one piece, the library's product, the output gate.
T = prompt rows, h / kv = query / key-value heads, D = head width, P = pages.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pilotfish.kernels.attention import PAGE, prefill_product, prompt_dtype
from pilotfish.kernels.cuda.attention_kernels import project_kernel

ROWS = 32
"""Positions of a program; a page is a multiple."""


@triton.jit(do_not_specialize=["end", "lag"])
def _gather_kernel(
    table,
    k_cache,
    v_cache,
    k_out,
    v_out,
    end,
    lag,
    KV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS places of one head's keys and values, of those in [lag, end)."""
    first = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    page = tl.load(table + first // PAGE).to(tl.int64)
    row = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, D)[None, :]
    there = (first + row >= lag) & (first + row < end)
    cell = ((page * KV + head) * PAGE + first % PAGE + row) * D + d
    target = (head.to(tl.int64) * (end - lag) + first + row - lag) * D + d
    k = tl.load(k_cache + cell, there, other=0.0)
    v = tl.load(v_cache + cell, there, other=0.0)
    tl.store(k_out + target, k.to(k_out.dtype.element_ty), there)
    tl.store(v_out + target, v.to(v_out.dtype.element_ty), there)


@triton.jit
def _gate_kernel(
    mixed, projected, out, v_scale, row_stride, head_stride, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr
):
    """One row: mixed [T, h, D] times the sigmoid of its gate."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, D)
    value = tl.load(mixed + row * row_stride + head.to(tl.int64) * head_stride + d).to(tl.float32) * v_scale
    gate = tl.load(projected + row * ((2 * H + 2 * KV) * D) + (H + 2 * KV) * D + head * D + d).to(tl.float32)
    value = value / (1.0 + tl.exp(-gate))
    tl.store(out + row * (H * D) + head * D + d, value.to(out.dtype.element_ty))


def attention_prompt(
    projected: torch.Tensor,
    positions: torch.Tensor,
    start: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    table: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qk_norm: torch.Tensor,
    eps: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    lag: int = 0,
) -> torch.Tensor:
    """[T, h D] in projected's dtype: attention times sigmoid(gate) of T rows from position `start`; writes the caches.

    projected  bf16 [T, (2h + 2kv) D]: q | k | v | gate
    positions  integers [T]: start, start + 1, ...
    cos, sin   fp32 [T, 1, rotary / 2]
    table      integers [>= pages of the context], on the device
    k_cache, v_cache, qk_norm, lag as for kernels.cuda.attention.attention_window; so too, what is not finite is stored
    as 0.
    """
    num_rows, kv, dim, half = len(projected), k_cache.shape[1], k_cache.shape[3], cos.shape[-1]
    heads, end, device = len(qk_norm) - kv, start + num_rows + lag, projected.device
    projected = projected.contiguous()
    assert projected.shape[1] == 2 * (heads + kv) * dim and len(positions) == num_rows and qk_norm.is_contiguous()
    assert all(t.is_contiguous() for t in (cos, sin, table, k_cache, v_cache)) and len(table) * PAGE >= end
    dtype = prompt_dtype(k_cache.dtype, device)
    q = torch.empty((num_rows, heads, dim), dtype=dtype, device=device)
    keys, values = torch.empty((2, kv, end - lag, dim), dtype=dtype, device=device)
    # one sequence's table: where the next would begin is no matter, nor which slot is read
    project_kernel[(num_rows * (heads + kv),)](
        projected, table, positions, cos, sin, table, qk_norm, k_cache, v_cache, q,
        eps, 1.0, k_scale, v_scale, num_rows, 0, lag,
        H=heads, KV=kv, D=dim, HALF=half, PAGE=PAGE, FP8=k_cache.element_size() == 1, PDL=False, num_warps=1,
    )  # fmt: skip
    _gather_kernel[(-(-end // ROWS), kv)](
        table, k_cache, v_cache, keys, values, end, lag, KV=kv, D=dim, PAGE=PAGE, ROWS=ROWS
    )
    mixed = prefill_product(q, keys, values, start, dim**-0.5 * k_scale)
    assert mixed.stride(2) == 1
    out = torch.empty((num_rows, heads * dim), dtype=projected.dtype, device=device)
    _gate_kernel[(num_rows, heads)](
        mixed, projected, out, v_scale, mixed.stride(0), mixed.stride(1), H=heads, KV=kv, D=dim, num_warps=1
    )
    return out
