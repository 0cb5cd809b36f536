"""Gated attention of a decode window over paged keys and values, split at absolute positions.

B = sequences, W = window rows, R = B * W, row r belongs to sequence r // W. S = slots, P = pages, h / kv = query /
key-value heads, D = head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from pilotfish.kernels.attention import PAGE
from pilotfish.kernels.cuda.attention_items import MAX_WIDTH, WARPS, items_kernel
from pilotfish.kernels.cuda.attention_kernels import merge_kernel, plan_kernel
from pilotfish.kernels.cuda.launch_shapes import SM_COUNT
from pilotfish.kernels.cuda.tiled_rows import AnyRows, stored

CHUNK = 512
"""Positions of one partial result where there are many. A multiple of PAGE."""
UNIT = 64
"""Positions of one product; a chunk is the fold of its units in order, whoever folds them."""
TILE = 32
"""Query rows (window rows x heads of a group) of one product."""
NARROW = 16
"""Those of a product where a window has no more. No bit depends on it."""
PROGRAMS = SM_COUNT
"""Programs that a plan has in mind: an item is as many units as have them done first. No bit depends on it, and any
grid takes what was dealt."""
ITEM_UNITS = 0
"""Units of an item where tests and benches say so; 0: the plan does. No bit depends on it."""
MERGED = 32
"""Chunks that the merge folds side by side."""
FEW_CHUNKS = 8
"""Of a row that has no more chunks the merge looks at as many: a quarter of the work. No bit depends on it."""
MERGES = 512
"""Programs of a merge, some 4 a multiprocessor: where one for each 64 columns would be more, a program has two heads or
a part of them. No bit depends on it."""
MERGE_REGISTERS = 128
"""Of a thread of the merge, so that four programs fit a multiprocessor; nothing spills."""
MAX_SEQUENCES = 256
MAX_LAG = 1
"""How far past its position a cache may store an entry (a draft head's does)."""
BUFFERS = 2
"""Units whose keys and values are in shared memory or on their way there, 64 KB each; 1 where multiprocessors have less
than 160 KB. No bit depends on it."""
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class RowPlan:
    """Where a window's rows stand, for all layers of a pass: written by `plan_rows` on the device.

    positions int32 [R]; cos, sin fp32 [R, rotary / 2]; items int32 [2B + 3]: places of an item, then where each
    sequence's items begin, then their number, then the same two of chunks. They reach MAX_LAG places past the last row,
    so that one plan is right for all caches.
    """

    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    items: torch.Tensor

    @classmethod
    def empty(cls, max_rows: int, max_sequences: int, rotary_dim: int, device: torch.device) -> RowPlan:
        cos, sin = (torch.zeros((max_rows, rotary_dim // 2), device=device) for _ in range(2))
        positions = torch.zeros(max_rows, dtype=torch.int32, device=device)
        items = torch.zeros(2 * max_sequences + 3, dtype=torch.int32, device=device)
        return cls(positions, cos, sin, items)


@dataclass(frozen=True)
class AttentionScratch:
    """What a layer's items leave for the merge; one for all layers.

    partial fp32 [partials, TILE, D], stats fp32 [partials, TILE, 2].
    """

    partial: torch.Tensor
    stats: torch.Tensor

    @classmethod
    def empty(
        cls,
        max_sequences: int,
        max_width: int,
        max_model_len: int,
        num_pages: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> AttentionScratch:
        """Memory for every batch of up to max_sequences windows of up to max_width rows whose contexts fit the
        pages."""
        partials = max_partials(max_sequences, max_width, max_model_len, num_pages, num_heads, num_kv_heads)
        return cls(
            torch.zeros((partials, TILE, head_dim), dtype=torch.float32, device=device),
            torch.zeros((partials, TILE, 2), dtype=torch.float32, device=device),
        )

    @property
    def num_bytes(self) -> int:
        return self.partial.nbytes + self.stats.nbytes


def num_tiles(width: int, group: int) -> int:
    """Products that hold a window's rows x the heads of a group."""
    return -(-width * group // TILE)


def max_partials(
    max_sequences: int, max_width: int, max_model_len: int, num_pages: int, num_heads: int, num_kv_heads: int
) -> int:
    """The most partial results that one call can write. Null sequences (padding) hold one chunk each."""
    # a window's entries may end max_width places past the last position of the model
    each = -(-(max_model_len + max_width) // CHUNK)
    chunks = min(max_sequences * each, num_pages // (CHUNK // PAGE) + max_sequences)
    chunks *= num_kv_heads * num_tiles(max_width, num_heads // num_kv_heads)
    units = CHUNK // UNIT
    return chunks + min(chunks * units, PROGRAMS) * (units - 1)


def plan_rows(
    slots: torch.Tensor,
    length: torch.Tensor,
    inv_freq: torch.Tensor,
    width: int,
    step: int,
    num_heads: int,
    num_kv_heads: int,
    plan: RowPlan,
    pdl: bool = False,
) -> None:
    """Writes `plan` for a window whose row b * W + j stands at position length[slots[b]] + step + j.

    slots int32 [B], length int [S], inv_freq fp32 [rotary / 2].
    """
    batch, half = len(slots), len(inv_freq)
    assert batch <= MAX_SEQUENCES and len(plan.items) >= 2 * batch + 3 and len(plan.positions) >= batch * width
    assert plan.cos.shape[1] == half
    plan_kernel[(batch * width + 1,)](
        slots, length, inv_freq, plan.positions, plan.cos, plan.sin, plan.items, batch, width, step,
        ITEM_UNITS, HALF=half, BLOCK_HALF=triton.next_power_of_2(half), BLOCK_B=MAX_SEQUENCES,
        GROUP=num_heads // num_kv_heads, KV=num_kv_heads, MAX_LAG=MAX_LAG, TILE=TILE, UNIT=UNIT, CHUNK=CHUNK,
        PROGRAMS=PROGRAMS, PDL=pdl, num_warps=4, **_options(pdl),
    )  # fmt: skip


def attention_window(
    projected: torch.Tensor,
    slots: torch.Tensor,
    plan: RowPlan,
    tables: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qk_norm: torch.Tensor,
    eps: float,
    width: int,
    scratch: AttentionScratch,
    out: AnyRows,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    lag: int = 0,
    num_programs: int | None = None,
    settled: bool = False,
    pdl: bool = False,
) -> None:
    """One full-attention layer's mixer between its two products; changes the caches, scratch and out.

    projected  bf16 [>= R, (2h + 2kv) D]: q | k | v | gate of the window's rows
    slots      int32 [B]; slot 0 may repeat (padding), others may not
    plan       what `plan_rows` wrote for this window
    tables     int32 [S, max_pages]: page c of a slot holds positions [c PAGE, (c + 1) PAGE)
    k_cache, v_cache [P, kv, PAGE, D], bf16, or float8_e4m3fn holding value / scale
    qk_norm    fp32 [h + kv, D]: 1 + w of q_norm, the same for each query head, then of k_norm for each key head
    out        bf16 [>= R, h D]: attention times sigmoid(gate); may be TiledRows
    lag        position p is stored at place p + lag <= p + MAX_LAG; the places before lag are not read
    num_programs (default: one a multiprocessor) changes no bit.
    settled    with pdl: since slots, plan, tables and old keys and values were written, a kernel of the chain has let
               the next one start only after its own wait; they are then asked for while the product still runs
    A value that is not finite is stored as 0: a row before it in the window gives it weight 0, and 0 x NaN is NaN.
    """
    kv, dim = k_cache.shape[1], k_cache.shape[3]
    heads, half, batch = len(qk_norm) - kv, plan.cos.shape[1], len(slots)
    num_rows, fp8 = batch * width, k_cache.element_size() == 1
    assert 0 <= lag <= MAX_LAG and CHUNK <= 2 * PAGE and width <= MAX_WIDTH
    _check(projected, tables, k_cache, v_cache, qk_norm, out, num_rows)
    most_programs, buffers = _limits(projected.device)
    sizes = {"H": heads, "KV": kv, "D": dim, "PDL": pdl}
    options = _options(pdl)
    items_kernel[(num_programs or most_programs,)](
        projected, slots, plan.positions, plan.cos, plan.sin, plan.items, tables, qk_norm, k_cache, v_cache,
        scratch.partial, scratch.stats,
        eps, dim**-0.5 * _LOG2_E, k_scale, v_scale, batch, width, tables.shape[1], lag,
        HALF=half, PAGE=PAGE, UNIT=UNIT, CHUNK=CHUNK, TILE=TILE, NARROW=NARROW, BUFFERS=buffers, FP8=fp8,
        SETTLED=settled, num_warps=WARPS, **sizes, **options,
    )  # fmt: skip
    block, (memory, tiled) = min(dim, 64), stored(out)
    # 4 columns a thread of 4 warps
    pairs = max(512 // dim, 1)
    groups = -(-num_rows * heads // pairs)
    merge_kernel[(groups * _shares(groups, pairs * dim // block),)](
        projected, plan.positions, plan.items, scratch.partial, scratch.stats, memory, v_scale, batch, width, lag,
        BLOCK_D=block, TILED=tiled, UNIT=UNIT, CHUNK=CHUNK, TILE=TILE, MERGED=MERGED, FEW=min(FEW_CHUNKS, MERGED),
        PAIRS=pairs, num_warps=4, maxnreg=MERGE_REGISTERS, **sizes, **options,
    )  # fmt: skip


def _shares(groups: int, most: int) -> int:
    """Programs for each of a merge's groups of heads: a power of two, `most` if one has a block of columns."""
    shares = most
    while shares > 1 and groups * shares > MERGES:
        shares //= 2
    return shares


def _limits(device: torch.device) -> tuple[int, int]:
    """Programs that run at once, and the buffers that fit."""
    if device.type != "cuda":
        return 1, BUFFERS
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return properties["multiprocessor_count"], BUFFERS if properties["max_shared_mem"] >= 160 << 10 else 1


def _options(pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if pdl else {}


def check_sizes(num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int) -> None:
    """Raises ValueError naming the first size that the kernels do not hold."""
    if head_dim not in (32, 64, 128, 256):
        raise ValueError(f"head_dim: the GPU kernels want 32, 64, 128 or 256, got {head_dim}")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads: want a multiple of {num_kv_heads}, got {num_heads}")
    if rotary_dim > head_dim:
        raise ValueError(f"partial_rotary_factor: want at most head_dim {head_dim} dimensions, got {rotary_dim}")


def _check(
    projected: torch.Tensor,
    tables: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qk_norm: torch.Tensor,
    out: AnyRows,
    num_rows: int,
) -> None:
    _, kv, page, dim = k_cache.shape
    heads = len(qk_norm) - kv
    assert v_cache.shape == k_cache.shape and v_cache.dtype == k_cache.dtype and page == PAGE
    assert tables.dtype == torch.int32 and qk_norm.dtype == torch.float32 and qk_norm.shape[1] == dim
    assert projected.shape[1] == 2 * (heads + kv) * dim and out.shape[1] == heads * dim
    assert min(len(projected), len(out)) >= num_rows
    assert all(t.is_contiguous() for t in (projected, tables, k_cache, v_cache, qk_norm))
