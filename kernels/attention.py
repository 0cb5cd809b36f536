"""Attention of a window of rows over a paged context, split at absolute positions.

Page c of a sequence holds positions [c * PAGE, (c + 1) * PAGE): a page is a chunk. Every chunk is one product of fixed
shape (rows padded to a tile), chunks merge in order, and a column that a row must not see is an exact no-op for it (its
score is -inf, its V row loads as 0), so a row's bits do not depend on the window it came in.
h = heads, kv = key/value heads, g = h / kv, D = head width, P = pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pilotfish.kernels.linear import TILE_ROWS

if torch.backends.cuda.is_built():
    # not where there can be no GPU: all of torch.compile comes with it, which is half of a start's imports
    from torch.nn.attention.bias import causal_lower_right

PAGE = 256
LARGEST_FP8 = 448.0
_FP8_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""FP8 values by their byte."""


def pages_for(num_tokens: int) -> int:
    """Pages that a text of so many tokens takes."""
    return -(-num_tokens // PAGE)


def write_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pages: torch.Tensor,
    offsets: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Stores k, v [R, kv, D] at (pages[r], offsets[r]) of the caches [P, kv, PAGE, D], as `to_cache` has them."""
    for cache, values, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        _indexable(cache)[pages, :, offsets] = _indexable(to_cache(values, scale, cache.dtype))


def to_cache(values: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Values as a cache of `dtype` holds them: rounded, and for FP8 divided by the scale and kept inside its range,
    infinities too. NaN stays NaN."""
    if dtype != torch.float8_e4m3fn:
        return values.to(dtype)
    # a plain cast of what lies beyond gives NaN in some versions of torch
    return (values.float() / scale).clamp(-LARGEST_FP8, LARGEST_FP8).to(dtype)


def from_cache(stored: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a cache holds, in a dtype that has room for it; for FP8 still to be multiplied by the scale."""
    if stored.dtype == torch.float8_e4m3fn and stored.device.type == "cpu":
        # torch converts number by number there, six times slower
        stored = _FP8_VALUES.index_select(0, stored.view(torch.uint8).flatten().int()).view(stored.shape)
    return stored.to(dtype)


def _indexable(cache: torch.Tensor) -> torch.Tensor:
    """FP8 as bytes, since torch's indexing does not know it."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


@dataclass(frozen=True)
class RowTile:
    """At most TILE_ROWS consecutive rows of one sequence, and its pages up to the last of these rows, in order.

    For the chunks that some row does not see whole: `hidden` bool [TILE_ROWS, PAGE], columns past the row (padding rows
    see what the last row sees) or before the first entry, and `seen`, the columns that some row sees, from .. to.
    """

    first_row: int
    num_rows: int
    pages: list[int]
    hidden: dict[int, torch.Tensor]
    seen: dict[int, tuple[int, int]]


def row_tiles(
    starts: list[int], tables: list[list[int]], width: int, device: torch.device, lag: int = 0
) -> list[RowTile]:
    """The tiles of a window of `width` rows a sequence, sequence b's first at position starts[b]; for all layers whose
    caches hold position p at place p + lag."""
    columns = torch.arange(PAGE, device=device)
    tiles = []
    for b, (start, table) in enumerate(zip(starts, tables, strict=True)):
        for offset in range(0, width, TILE_ROWS):
            first, count = start + lag + offset, min(TILE_ROWS, width - offset)
            num_chunks = pages_for(first + count)
            rows = torch.arange(TILE_ROWS, device=device).clamp_(max=count - 1) + first
            partial = {*range(first // PAGE, num_chunks), *([0] if lag else [])}
            hidden = {c: columns + c * PAGE > rows[:, None] for c in partial}
            seen = {c: (0 if c else lag, min(PAGE, first + count - c * PAGE)) for c in partial}
            if lag:
                hidden[0] |= columns < lag
            tiles.append(RowTile(b * width + offset, count, table[:num_chunks], hidden, seen))
    return tiles


def window_attention(
    q_RhD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tiles: list[RowTile],
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """fp32 [R, h, D]: every row attends to its sequence up to its own position, whose KV is already written. q fp32."""
    outputs = [_attend(q_RhD, k_cache, v_cache, tile, k_scale) for tile in tiles]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)) * v_scale


def _attend(
    q_RhD: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, tile: RowTile, k_scale: float
) -> torch.Tensor:
    _, heads, dim = q_RhD.shape
    kv = k_cache.shape[1]
    group = heads // kv
    rows = q_RhD[tile.first_row : tile.first_row + tile.num_rows] * (dim**-0.5 * k_scale)
    q = F.pad(rows.view(-1, kv, group, dim).permute(1, 2, 0, 3), (0, 0, 0, TILE_ROWS - tile.num_rows))
    q = q.reshape(kv, group * TILE_ROWS, dim)
    best, weight, total = None, None, None
    for chunk, page in enumerate(tile.pages):
        # a draft's value may be NaN; rows before it give it weight 0, and 0 x NaN is NaN. Its own row's logits show it
        k, v = from_cache(k_cache[page]), from_cache(v_cache[page]).nan_to_num(0.0, 0.0, 0.0)
        scores = q @ k.mT
        if chunk in tile.hidden:
            # filled, not added: what an unwritten slot gave may be NaN
            scores.view(kv, group, TILE_ROWS, PAGE).masked_fill_(tile.hidden[chunk], float("-inf"))
            first, end = tile.seen[chunk]
            v[:, :first], v[:, end:] = 0, 0
        highest = scores.amax(-1, keepdim=True)
        new_best = highest if best is None else torch.maximum(best, highest)
        probabilities = scores.sub_(new_best).exp_()
        mass, part = probabilities.sum(-1, keepdim=True), probabilities @ v
        if best is None or weight is None or total is None:
            weight, total = mass, part
        else:
            shrink = (best - new_best).exp_()
            weight, total = weight * shrink + mass, total * shrink + part
        best = new_best
    assert total is not None and weight is not None
    output = total.div_(weight).view(kv, group, TILE_ROWS, dim)[:, :, : tile.num_rows]
    return output.permute(2, 0, 1, 3).flatten(1, 2)


def prefill_attention(
    q_ThD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: Sequence[int] | torch.Tensor,
    start: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    lag: int = 0,
) -> torch.Tensor:
    """fp32 [T, h, D] of T consecutive prompt rows from position `start`, their KV already written, position p at place
    p + lag. Bits depend on (start, T) and the values alone.

    On a GPU in 16 bits, by the library's flash kernel, without a mask in memory; elsewhere in fp32, with one.
    """
    rows, _, dim = q_ThD.shape
    end = start + rows + lag
    # one on the device already is not copied: a copy from the host would wait for all that came before
    pages = torch.as_tensor(table, device=q_ThD.device)[: pages_for(end)]
    dtype = prompt_dtype(k_cache.dtype, q_ThD.device)
    k, v = (
        from_cache(_indexable(cache)[pages].view(cache.dtype).transpose(0, 1).flatten(1, 2)[:, lag:end], dtype)
        for cache in (k_cache, v_cache)
    )
    return prefill_product(q_ThD.to(dtype), k, v, start, dim**-0.5 * k_scale).float() * v_scale


def prefill_product(q_ThD: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float) -> torch.Tensor:
    """[T, h, D] in q's dtype: rows from position `start` over k, v [kv, start + T, D] of that dtype."""
    rows, heads, _ = q_ThD.shape
    output = F.scaled_dot_product_attention(
        q_ThD.transpose(0, 1)[None],
        k[None],
        v[None],
        # the same mask at 0; the library's class cannot be made where a dispatch mode watches
        attn_mask=_causal_mask(rows, start, q_ThD.device) if start else None,
        is_causal=not start,
        scale=scale,
        enable_gqa=heads != k.shape[0],
    )
    return output[0].transpose(0, 1)


def _causal_mask(rows: int, start: int, device: torch.device) -> torch.Tensor:
    """Rows from position `start` see what is up to them. On a GPU torch's own class, which takes its flash kernels; on
    a CPU that would make this mask."""
    if device.type == "cpu":
        return torch.ones(rows, start + rows, dtype=torch.bool).tril(start)
    return causal_lower_right(rows, start + rows)


def prompt_dtype(cache_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What prefill multiplies in: e4m3 is exact in both 16-bit formats."""
    if device.type == "cpu" or cache_dtype == torch.float32:
        return torch.float32
    return torch.bfloat16 if cache_dtype == torch.float8_e4m3fn else cache_dtype
