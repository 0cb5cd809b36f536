"""Attention of a window of rows over a paged context, split at absolute positions.

Page c of a sequence holds positions [c * PAGE, (c + 1) * PAGE): a page is a chunk. Every chunk is one product of fixed
shape, chunks merge in order, and a column that a row must not see is an exact no-op for it (its score is -inf, its V
row loads as 0), so a row's bits do not depend on the window it came in. W <= TILE_ROWS rows are padded to a tile.
h = heads, kv = key/value heads, g = h / kv, D = head width, P = pages.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pilotfish.kernels.linear import TILE_ROWS

PAGE = 256


def write_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pages: torch.Tensor,
    offsets: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Stores k, v [R, kv, D] at (pages[r], offsets[r]) of the caches [P, kv, PAGE, D]."""
    k_cache[pages, :, offsets] = k.to(k_cache.dtype)
    v_cache[pages, :, offsets] = v.to(v_cache.dtype)


def window_attention(
    q_BWhD: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, tables: list[list[int]], starts: list[int]
) -> torch.Tensor:
    """fp32 [B, W, h, D]: row j of sequence b attends to positions 0 .. starts[b] + j, its own KV already written.

    q fp32; tables[b] lists b's pages in order.
    """
    return torch.stack(
        [_attend(q, k_cache, v_cache, table, start) for q, table, start in zip(q_BWhD, tables, starts, strict=True)]
    )


def _attend(
    q_WhD: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: list[int], start: int
) -> torch.Tensor:
    width, heads, dim = q_WhD.shape
    kv = k_cache.shape[1]
    group = heads // kv
    scaled = (q_WhD * dim**-0.5).view(width, kv, group, dim).permute(1, 2, 0, 3)
    tile = F.pad(scaled, (0, 0, 0, TILE_ROWS - width)).reshape(kv, group * TILE_ROWS, dim)
    best = tile.new_full((kv, group * TILE_ROWS, 1), float("-inf"))
    weight = tile.new_zeros((kv, group * TILE_ROWS, 1))
    total = torch.zeros_like(tile)
    for chunk in range((start + width - 1) // PAGE + 1):
        k, v = k_cache[table[chunk]].float(), v_cache[table[chunk]].float()
        scores = tile @ k.mT
        if (chunk + 1) * PAGE > start + 1:
            visible, written = _chunk_masks(start - chunk * PAGE, width, tile.device)
            # masked_fill also replaces what unwritten slots gave: they may hold NaN
            scores = scores.view(kv, group, TILE_ROWS, PAGE).masked_fill(~visible, float("-inf")).view_as(scores)
            v = torch.where(written, v, 0.0)
        new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
        probabilities = (scores - new_best).exp_()
        shrink = (best - new_best).exp_()
        weight = weight * shrink + probabilities.sum(-1, keepdim=True)
        total = total * shrink + probabilities @ v
        best = new_best
    output = (total / weight).view(kv, group, TILE_ROWS, dim)[:, :, :width]
    return output.permute(2, 0, 1, 3).reshape(width, heads, dim)


def _chunk_masks(first: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """visible [TILE_ROWS, PAGE]: column <= first + row; written [PAGE, 1]: a column some row of the window sees.

    `first` is the first row's position relative to the chunk. Padding rows see what the last row sees.
    """
    columns = torch.arange(PAGE, device=device)
    rows = torch.arange(TILE_ROWS, device=device).clamp_(max=width - 1)
    return columns <= (first + rows)[:, None], (columns < first + width)[:, None]


def prefill_attention(
    q_ThD: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: list[int], start: int
) -> torch.Tensor:
    """fp32 [T, h, D] of T consecutive prompt rows from position `start`, their KV already written."""
    rows, heads, _ = q_ThD.shape
    end = start + rows
    pages = torch.tensor(table[: (end - 1) // PAGE + 1], device=q_ThD.device)
    k, v = (cache[pages].transpose(0, 1).flatten(1, 2)[:, :end].float() for cache in (k_cache, v_cache))
    columns = torch.arange(end, device=q_ThD.device)
    visible = columns <= torch.arange(start, end, device=q_ThD.device)[:, None]
    output = F.scaled_dot_product_attention(
        q_ThD.transpose(0, 1)[None], k[None], v[None], attn_mask=visible, enable_gqa=heads != k.shape[0]
    )
    return output[0].transpose(0, 1)
