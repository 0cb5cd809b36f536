"""Gated attention of a prompt's rows between its two products: the library's kernel, among three launches of ours.

`project_prompt`: norm, RoPE and the writes of keys and values as a decode window has them (project_kernel). It looks at
nothing on the host and may be captured. `attend_prompt`, which is told how long the context is: its pages in one piece,
the library's product, the output gate.
T = prompt rows, the last of which may be padding; h / kv = query / key-value heads, D = head width, P = pages.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pilotfish.kernels.attention import PAGE, prefill_product
from pilotfish.kernels.cuda.attention_kernels import project_kernel

ROWS = 32
"""Positions of a program; a page is a multiple."""


@triton.jit(do_not_specialize=["end", "padded_end", "lag"])
def _gather_kernel(
    table,
    k_cache,
    v_cache,
    k_out,
    v_out,
    end,
    padded_end,
    lag,
    KV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS places of one head's keys and values, of those in [lag, padded_end): zeros from `end` on."""
    first = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    page = tl.load(table + first // PAGE, first < end, other=0).to(tl.int64)
    row = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, D)[None, :]
    there = (first + row >= lag) & (first + row < end)
    wanted = (first + row >= lag) & (first + row < padded_end)
    cell = ((page * KV + head) * PAGE + first % PAGE + row) * D + d
    target = (head.to(tl.int64) * (padded_end - lag) + first + row - lag) * D + d
    k = tl.load(k_cache + cell, there, other=0.0)
    v = tl.load(v_cache + cell, there, other=0.0)
    tl.store(k_out + target, k.to(k_out.dtype.element_ty), wanted)
    tl.store(v_out + target, v.to(v_out.dtype.element_ty), wanted)


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


def project_prompt(
    projected: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    table: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qk_norm: torch.Tensor,
    eps: float,
    q: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    lag: int = 0,
) -> None:
    """q [T, h, D], in a prompt's dtype (kernels.attention.prompt_dtype); writes the caches.

    projected  bf16 [T, (2h + 2kv) D]: q | k | v | gate
    positions  integers [T]: start, start + 1, ...; of padding those of a page that nobody reads
    cos, sin   fp32 [T, 1, rotary / 2]
    table      integers [>= pages of all positions], on the device
    k_cache, v_cache, qk_norm, lag as for kernels.cuda.attention.attention_window; so too, what is not finite is stored
    as 0.
    """
    num_rows, kv, dim, half = len(projected), k_cache.shape[1], k_cache.shape[3], cos.shape[-1]
    heads = len(qk_norm) - kv
    assert projected.shape[1] == 2 * (heads + kv) * dim and len(positions) == num_rows and q.shape[0] == num_rows
    assert all(t.is_contiguous() for t in (projected, cos, sin, table, k_cache, v_cache, qk_norm, q))
    # one sequence's table: where the next would begin is no matter, nor which slot is read
    project_kernel[(num_rows * (heads + kv),)](
        projected, table, positions, cos, sin, table, qk_norm, k_cache, v_cache, q,
        eps, 1.0, k_scale, v_scale, num_rows, 0, lag,
        H=heads, KV=kv, D=dim, HALF=half, PAGE=PAGE, FP8=k_cache.element_size() == 1, PDL=False, num_warps=1,
    )  # fmt: skip


def attend_prompt(
    q: torch.Tensor,
    projected: torch.Tensor,
    start: int,
    length: int,
    table: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    lag: int = 0,
) -> None:
    """out [T, h D] in projected's dtype: attention times sigmoid(gate) of T rows from position `start`, of which
    `length` are no padding; q, projected and the caches as `project_prompt` has them and left them."""
    (num_rows, heads, dim), kv = q.shape, k_cache.shape[1]
    end, padded_end = start + length + lag, start + num_rows + lag
    assert all(t.is_contiguous() for t in (q, projected, table, k_cache, v_cache, out)) and len(table) * PAGE >= end
    keys, values = torch.empty((2, kv, padded_end - lag, dim), dtype=q.dtype, device=q.device)
    _gather_kernel[(-(-padded_end // ROWS), kv)](
        table, k_cache, v_cache, keys, values, end, padded_end, lag, KV=kv, D=dim, PAGE=PAGE, ROWS=ROWS
    )
    mixed = prefill_product(q, keys, values, start, dim**-0.5 * k_scale)
    assert mixed.stride(2) == 1
    _gate_kernel[(num_rows, heads)](
        mixed, projected, out, v_scale, mixed.stride(0), mixed.stride(1), H=heads, KV=kv, D=dim, num_warps=1
    )
