"""Attention over pages: right against float64, and a window's rows have the bits they have one at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from pilotfish.kernels.attention import (
    PAGE,
    from_cache,
    prefill_attention,
    prefill_product,
    row_tiles,
    to_cache,
    window_attention,
    write_kv,
)

NAN = float("nan")
SHAPES = ((4, 2, 32), (6, 1, 16), (2, 2, 8), (8, 2, 64))
"""Query heads, key/value heads, head width."""
TABLE = [5, 1, 6, 3]
NUM_PAGES = 8
FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, FP8)
BORDERS = (PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def caches(kv, dim, dtype, k, v, table=TABLE):
    """Pages that hold NaN everywhere but at the positions of k and v [T, kv, D]."""
    return [paged(values.to(dtype), kv, dim, table) for values in (k, v)]


def paged(values, kv, dim, table):
    cache = torch.full((NUM_PAGES, kv, PAGE, dim), NAN, dtype=values.dtype)
    for page, part in zip(table, values.split(PAGE), strict=False):
        cache[page, :, : len(part)] = part.transpose(0, 1)
    return cache


def attend(q, cache, tables, starts, *scales):
    """[B, W, h, D] of windows q [B, W, h, D] that begin at `starts`."""
    tiles = row_tiles(starts, tables, q.shape[1], q.device)
    return window_attention(q.flatten(0, 1), *cache, tiles, *scales).view_as(q)


def reference(q, k, v, position):
    """One row [h, D] in float64 over positions 0..position."""
    heads, dim = q.shape
    group = heads // k.shape[1]
    outputs = []
    for head in range(heads):
        keys, values = (t[: position + 1, head // group].double() for t in (k, v))
        weights = (keys @ q[head].double() * dim**-0.5).softmax(0)
        outputs.append(weights @ values)
    return torch.stack(outputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv", "dim"), SHAPES)
@pytest.mark.parametrize("start", (0, 3, PAGE - 2, 2 * PAGE - 1))
def test_a_window_matches_float64(heads, kv, dim, dtype, start):
    width = 5
    k, v = (draw(start + width, kv, dim, seed=s).to(dtype) for s in (1, 2))
    q = draw(1, width, heads, dim)
    output = attend(q, caches(kv, dim, dtype, k, v), [TABLE], [start])[0]
    wanted = torch.stack([reference(q[0, j], k, v, start + j) for j in range(width)])
    # fp32 throughout: the cache's own rounding is in the reference too
    torch.testing.assert_close(output.double(), wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", (torch.float32, FP8))
@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize(("heads", "kv", "dim"), SHAPES[:2])
def test_a_window_has_the_bits_of_its_rows_one_at_a_time(heads, kv, dim, border, dtype):
    start, widest = border - 4, 9
    k, v = (draw(start + widest, kv, dim, seed=s).to(dtype) for s in (1, 2))
    q = draw(1, widest, heads, dim)

    def written(end):
        return caches(kv, dim, k.dtype, k[:end], v[:end])

    alone = [
        # later rows are not written yet: NaN
        attend(q[:, j : j + 1], written(start + j + 1), [TABLE], [start + j])[0, 0]
        for j in range(widest)
    ]
    for width in range(1, widest + 1):
        rows = attend(q[:, :width], written(start + width), [TABLE], [start])[0]
        for j in range(width):
            assert torch.equal(rows[j], alone[j]), (width, j)


@pytest.mark.parametrize("start", (7, PAGE - 3, PAGE))
def test_what_rejected_slots_hold_is_not_seen(start):
    heads, kv, dim, width = 4, 2, 32, 3
    k, v = (draw(start + width, kv, dim, seed=s) for s in (1, 2))
    q = draw(1, width, heads, dim)
    clean = caches(kv, dim, k.dtype, k, v)
    wanted = attend(q, clean, [TABLE], [start])
    for junk in (1e30, float("inf"), -3.5):
        pages = [cache.clone() for cache in clean]
        for position in range(start + width, start + width + 9):
            for cache in pages:
                cache[TABLE[position // PAGE], :, position % PAGE] = junk
        assert torch.equal(attend(q, pages, [TABLE], [start]), wanted), junk


def test_a_draft_that_overflowed_is_invisible_to_the_rows_before_it():
    heads, kv, dim, width, start = 4, 2, 32, 4, 20
    k, v = (draw(start + width, kv, dim, seed=s) for s in (1, 2))
    q = draw(1, width, heads, dim)
    wanted = attend(q, caches(kv, dim, k.dtype, k, v), [TABLE], [start])
    for junk in (NAN, float("inf")):
        k[start + 2 :], v[start + 2 :] = junk, junk
        rows = attend(q, caches(kv, dim, k.dtype, k, v), [TABLE], [start])
        assert torch.equal(rows[0, :2], wanted[0, :2])


def test_sequences_of_a_batch_have_the_bits_they_have_alone():
    heads, kv, dim, width = 4, 2, 32, 4
    tables, starts = [[5, 1], [2, 7], [3, 4]], [PAGE - 2, 0, PAGE + 40]
    pages = [torch.full((NUM_PAGES, kv, PAGE, dim), NAN) for _ in range(2)]
    for table, start in zip(tables, starts, strict=True):
        for cache, seed in zip(pages, (start, start + 1), strict=True):
            cache[table] = paged(draw(start + width, kv, dim, seed=seed), kv, dim, table)[table]
    q = draw(3, width, heads, dim)
    together = attend(q, pages, tables, starts)
    for b in range(3):
        assert torch.equal(attend(q[b : b + 1], pages, [tables[b]], [starts[b]])[0], together[b])


@pytest.mark.parametrize("start", (PAGE + 3, 2 * PAGE - 1))
def test_the_order_of_pages_does_not_matter(start):
    heads, kv, dim = 4, 2, 32
    k, v = (draw(start + 2, kv, dim, seed=s) for s in (1, 2))
    q = draw(1, 2, heads, dim)
    outputs = [
        attend(q, caches(kv, dim, k.dtype, k, v, table), [table], [start])
        for table in ([1, 2, 3], [7, 1, 4], [4, 6, 2])
    ]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_leaves_the_caches_as_they_are(dtype):
    k, v = draw(40, 2, 8), draw(40, 2, 8, seed=1)
    cache = caches(2, 8, dtype, k, v)
    before = [t.clone() for t in cache]
    attend(draw(1, 3, 2, 8), cache, [TABLE], [30])
    prefill_attention(draw(10, 2, 8), *cache, TABLE, 30)
    assert all(torch.equal(t.view(torch.uint8), b.view(torch.uint8)) for t, b in zip(cache, before, strict=True))


def test_an_fp8_cache_is_read_as_torch_reads_it():
    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    assert torch.equal(from_cache(every).view(torch.int32), every.float().view(torch.int32))
    part = draw(4, 6, 8).to(FP8).transpose(0, 1)[:, 1:]
    assert torch.equal(from_cache(part), part.float())


@pytest.mark.parametrize("scale", (1.0, 0.5, 3e-4))
def test_what_an_fp8_cache_cannot_hold_saturates(scale):
    limit = 448 * scale
    values = torch.tensor([limit, 1.03 * limit, 1.1 * limit, 1e4 * limit, 3e38, float("inf")])
    for sign in (1, -1):
        stored = to_cache(sign * values, scale, FP8)
        assert stored.dtype == FP8 and torch.equal(from_cache(stored), torch.full((6,), sign * 448.0))
    assert bool(from_cache(to_cache(torch.tensor([NAN]), scale, FP8)).isnan())
    # to the nearest: half a step of three bits of mantissa, or of the smallest subnormal
    inside = draw(1000) * 100 * scale
    torch.testing.assert_close(
        from_cache(to_cache(inside, scale, FP8)) * scale, inside, rtol=2**-4, atol=2**-10 * scale
    )


@pytest.mark.parametrize("start", (3, PAGE - 2))
def test_scales_are_multiplied_back_in(start):
    heads, kv, dim, width, scales = 4, 2, 32, 5, (0.25, 3.0)
    k, v = (draw(start + width, kv, dim, seed=s) for s in (1, 2))
    stored = [to_cache(values, scale, FP8) for values, scale in zip((k, v), scales, strict=True)]
    held = [from_cache(values) * scale for values, scale in zip(stored, scales, strict=True)]
    q = draw(1, width, heads, dim)
    pages = caches(kv, dim, FP8, *stored)
    wanted = torch.stack([reference(q[0, j], *held, start + j) for j in range(width)])
    rows = attend(q, pages, [TABLE], [start], *scales)[0]
    span = prefill_attention(q[0], *pages, TABLE, start, *scales)
    for got in (rows, span):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=5e-6)


def test_large_scores_do_not_overflow():
    k, v = draw(300, 1, 16) * 100, draw(300, 1, 16, seed=1)
    q = draw(1, 1, 2, 16, seed=2) * 100
    output = attend(q, caches(1, 16, torch.float32, k, v), [TABLE], [299])[0, 0]
    torch.testing.assert_close(output.double(), reference(q[0, 0], k, v, 299), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv", "dim"), SHAPES[:2])
@pytest.mark.parametrize(("start", "rows"), ((0, 1), (0, PAGE + 9), (PAGE, 5), (PAGE - 1, 2), (2 * PAGE, 1)))
def test_a_prompt_span_matches_float64(heads, kv, dim, dtype, start, rows):
    k, v = (draw(start + rows, kv, dim, seed=s).to(dtype) for s in (1, 2))
    q = draw(rows, heads, dim)
    output = prefill_attention(q, *caches(kv, dim, dtype, k, v), TABLE, start)
    for j in {0, rows // 2, rows - 1}:
        torch.testing.assert_close(output[j].double(), reference(q[j], k, v, start + j), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("start", "rows"), ((1, 1), (70, 40), (PAGE, PAGE + 9)))
def test_a_prompt_has_the_bits_of_torch_s_own_mask(start, rows):
    q, k, v = draw(rows, 4, 32), draw(2, start + rows, 32, seed=1), draw(2, start + rows, 32, seed=2)
    own = causal_lower_right(rows, start + rows)
    want = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=own, scale=0.1, enable_gqa=True
    )
    assert torch.equal(prefill_product(q, k, v, start, 0.1), want[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", (torch.bfloat16, FP8))
def test_write_kv_touches_only_its_slots(dtype):
    k_cache, v_cache = (torch.full((3, 2, PAGE, 4), NAN, dtype=dtype) for _ in range(2))
    pages, offsets = torch.tensor([2, 1, 1]), torch.tensor([255, 0, 7])
    k, v = draw(3, 2, 4), draw(3, 2, 4, seed=1)
    write_kv(k_cache, v_cache, pages, offsets, k, v)
    for cache, values in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache.float()[pages, :, offsets], values.to(dtype).float())
        assert int(cache.float().isfinite().sum()) == values.numel()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", (0, PAGE - 3))
def test_a_lagging_cache_gives_what_its_entries_give_and_hides_its_free_place(dtype, start):
    heads, kv, dim, width = 4, 2, 32, 5
    k, v = (draw(start + width, kv, dim, seed=s).to(dtype) for s in (1, 2))
    q = draw(1, width, heads, dim)
    wanted = torch.stack([reference(q[0, j], k, v, start + j) for j in range(width)])
    found = []
    for junk in (NAN, 400.0):
        cache = caches(kv, dim, dtype, *(torch.cat((torch.full_like(t[:1], junk), t)) for t in (k, v)))
        tiles = row_tiles([start], [TABLE], width, q.device, lag=1)
        found.append((window_attention(q[0], *cache, tiles), prefill_attention(q[0], *cache, TABLE, start, lag=1)))
    for got, again in zip(*found, strict=True):
        assert torch.equal(got, again)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=5e-6)
