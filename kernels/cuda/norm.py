"""Norms of the decode path, with what stands before them: token embedding, residual sum, the MTP head's pair of rows.

h = x * rsqrt(mean(x^2) + eps) * scale in fp32, rounded to h's dtype. One program a row (two for a pair), one tile and
one reduction order for every number of rows. Launch-bound: at H = 2048 a row moves 24 KB.

An embedding is a matrix, or stands in the order of the product with it (lm_head, where the two are tied): a row is then
64 bytes here and there, whole sectors, at the same price.

R = rows, B = sequences, W = window rows of each, H = hidden, S = slots, V = vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pilotfish.kernels.cuda.packing import PackedRows
from pilotfish.kernels.cuda.tiled_rows import AnyRows, at, stored


@triton.jit
def _normed(x, scale, eps, H):
    """x holds zeros past H."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / H + eps) * scale


@triton.jit
def _row_of(embedding, token, cols, H, UNITS: tl.constexpr):
    """Where the numbers of a token's row are: in UNITS of 128 columns as packing.py has them; 0: in one piece."""
    if UNITS == 0:
        return embedding + token * H + cols
    else:
        # tile, row half and row of eight; unit, half, octet, q and column of eight
        row = (token >> 4) * (UNITS * 2048) + ((token >> 3) & 1) * 1024 + (token & 7) * 32
        octet = ((cols >> 7) * 2048 + ((cols >> 6) & 1) * 512) + (((cols >> 3) & 1) * 256 + ((cols >> 4) & 3) * 8)
        return embedding + row + tl.max_contiguous(tl.multiple_of(octet + (cols & 7), 8), 8)


@triton.jit(do_not_specialize=["W", "num_rows", "max_depth"])
def _embed_rows_kernel(
    embedding,
    scale,
    slots,
    last_token,
    drafts,
    length,
    tokens_out,
    positions_out,
    x_out,
    h_out,
    eps,
    W,
    num_rows,
    max_depth,
    UNITS: tl.constexpr,
    TILED: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    w = tl.load(scale + cols, mask, other=0.0)
    if PDL:
        gdc_wait()
        # not before: whoever comes later in the round may read early what the round before it wrote
        gdc_launch_dependents()
    # rows past the window are zeros: finite, and read by nobody
    x = tl.zeros((BLOCK,), tl.float32)
    position = tl.zeros((), tl.int64)
    token = tl.zeros((), tl.int64)
    if row < num_rows:
        slot = tl.load(slots + row // W).to(tl.int64)
        j = row % W
        position = tl.load(length + slot).to(tl.int64) + j
        token = tl.load(last_token + slot) if j == 0 else tl.load(drafts + slot * max_depth + j - 1)
        x = tl.load(_row_of(embedding, token, cols, H, UNITS), mask, other=0.0).to(tl.float32)
    row = row.to(tl.int64)
    tl.store(tokens_out + row, token)
    tl.store(positions_out + row, position.to(positions_out.dtype.element_ty))
    tl.store(x_out + row * H + cols, x, mask)
    tl.store(h_out + at(row, cols, H, TILED), _normed(x, w, eps, H).to(h_out.dtype.element_ty), mask)


def embed_rows(
    embedding_VH: torch.Tensor | PackedRows,
    scale_H: torch.Tensor,
    eps: float,
    slots_B: torch.Tensor,
    last_token_S: torch.Tensor,
    drafts_SK: torch.Tensor,
    length_S: torch.Tensor,
    width: int,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    x: torch.Tensor,
    h: AnyRows,
    pdl: bool = False,
) -> None:
    """Starts a round: row b * width + j is the last token (j = 0) or draft j of slots[b], at position length + j.

    Writes tokens int64 and positions (int32 or int64), the residual stream x fp32 and the first layer's norm h; all
    have one number of rows, at least B * width: those past the window become zeros. scale_H fp32 is the effective
    factor. The embedding may also be a PackedRows, and h TiledRows.
    """
    (rows, hidden), (memory, tiled) = x.shape, stored(h)
    embedding, units = _stored(embedding_VH)
    num_rows = len(slots_B) * width
    assert rows >= num_rows and len(h) == len(tokens) == len(positions) == rows
    assert 1 <= width <= drafts_SK.shape[1] + 1 and drafts_SK.is_contiguous()
    _embed_rows_kernel[(rows,)](
        embedding,
        scale_H,
        slots_B,
        last_token_S,
        drafts_SK,
        length_S,
        tokens,
        positions,
        x,
        memory,
        eps,
        width,
        num_rows,
        drafts_SK.shape[1],
        UNITS=units,
        TILED=tiled,
        **_options(hidden, pdl),
    )


@gluon.jit
def normed(x, scale, eps, H):
    """_normed in Gluon, which says how many numbers a thread has."""
    return x * gl.rsqrt(gl.sum(x * x, 0) / H + eps) * scale


@gluon.jit
def _add_norm_kernel(
    x,
    delta,
    scale,
    rows,
    h_out,
    eps,
    ADD: gl.constexpr,
    STORE: gl.constexpr,
    GATHER: gl.constexpr,
    TILED: gl.constexpr,
    H: gl.constexpr,
    BLOCK: gl.constexpr,
    PDL: gl.constexpr,
):
    # 8 numbers a thread in all loads and stores: that of x alone would have 4, and waits for all warps to come by them
    cols = gl.arange(0, BLOCK, gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    row = gl.program_id(0).to(gl.int64)
    mask = cols < H
    w = gl.load(scale + cols, mask, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = row
    if GATHER:
        source = gl.load(rows + row).to(gl.int64)
    value = gl.load(x + source * H + cols, mask, other=0.0).to(gl.float32)
    if ADD:
        value += gl.load(delta + source * H + cols, mask, other=0.0).to(gl.float32)
    if STORE:
        gl.store(x + row * H + cols, value, mask)
    gl.store(h_out + at(row, cols, H, TILED), normed(value, w, eps, H).to(h_out.dtype.element_ty), mask)


def add_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    scale_H: torch.Tensor,
    eps: float,
    h: AnyRows,
    rows: torch.Tensor | None = None,
    store: bool = True,
    pdl: bool = False,
) -> None:
    """x += delta, then h = rms_norm(x) * scale, for as many rows as h has.

    x fp32 or bf16 [R, H]; delta bf16 or fp32 [R, H], None: nothing is added; h bf16, may be TiledRows. `store=False`
    leaves x as it was: the stream's last norm needs no sum kept. `rows` int32 or int64: h[i] is of row rows[i] (x is
    not stored then): the MTP head's last norm, of one row a sequence.
    """
    assert x.shape[1] == h.shape[1] and (delta is None or (delta.shape[1] == h.shape[1] and delta.is_contiguous()))
    assert x.is_contiguous() and (rows is None or len(rows) == len(h))
    memory, tiled = stored(h)
    _add_norm_kernel[(len(h),)](
        x,
        delta,
        scale_H,
        rows,
        memory,
        eps,
        ADD=delta is not None,
        STORE=store and delta is not None and rows is None,
        GATHER=rows is not None,
        TILED=tiled,
        **_options(h.shape[1], pdl),
    )


@triton.jit
def _pair_norm_kernel(
    tokens,
    embedding,
    hidden,
    embedding_scale,
    hidden_scale,
    out,
    eps,
    UNITS: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    w = tl.load(embedding_scale + cols, mask & (half == 0), other=0.0)
    w += tl.load(hidden_scale + cols, mask & (half == 1), other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if half == 0:
        token = tl.load(tokens + row).to(tl.int64)
        x = tl.load(_row_of(embedding, token, cols, H, UNITS), mask, other=0.0).to(tl.float32)
    else:
        x = tl.load(hidden + row * H + cols, mask, other=0.0).to(tl.float32)
    target = out + row * (2 * H) + half * H + cols
    tl.store(target, _normed(x, w, eps, H).to(out.dtype.element_ty), mask)


def pair_norm(
    tokens_R: torch.Tensor,
    embedding_VH: torch.Tensor | PackedRows,
    hidden_RH: torch.Tensor,
    embedding_scale_H: torch.Tensor,
    hidden_scale_H: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    num_rows: int,
    pdl: bool = False,
) -> None:
    """What the MTP head's fc reads: out[r] = [norm(embedding[tokens[r]]) | norm(hidden[r])] for the first num_rows
    rows.

    tokens int64 or int32; hidden and embedding, a matrix or a PackedRows, of one dtype; out [>= num_rows, 2H], whose
    other rows stay as they were.
    """
    hidden = hidden_RH.shape[1]
    embedding, units = _stored(embedding_VH)
    assert out.shape[1] == 2 * hidden and min(len(out), len(hidden_RH), len(tokens_R)) >= num_rows
    assert embedding.dtype == hidden_RH.dtype and hidden_RH.is_contiguous() and out.is_contiguous()
    _pair_norm_kernel[(num_rows, 2)](
        tokens_R,
        embedding,
        hidden_RH,
        embedding_scale_H,
        hidden_scale_H,
        out,
        eps,
        UNITS=units,
        **_options(hidden, pdl),
    )


def _stored(embedding_VH: torch.Tensor | PackedRows) -> tuple[torch.Tensor, int]:
    """The numbers, and the units of a row in the order of packing.py; 0 for a matrix."""
    if isinstance(embedding_VH, PackedRows):
        return embedding_VH.packed.data.view(torch.bfloat16), embedding_VH.packed.num_units
    assert embedding_VH.is_contiguous()
    return embedding_VH, 0


def _options(hidden: int, pdl: bool) -> dict[str, int | bool]:
    """The tile and the number of warps depend on the width alone, and the order of a row's sum on them."""
    # not by Triton's own function, made for kernels: it takes 4 us
    block = 1 << (hidden - 1).bit_length()
    warps = min(16, max(1, block // 512))
    return {"H": hidden, "BLOCK": block, "PDL": pdl, "num_warps": warps, "launch_pdl": pdl}
