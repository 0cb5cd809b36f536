"""Tests of `project_prompt` and `attend_prompt`; run in Triton's interpreter and on a GPU by those that import them and
give `device`, `dtype` and `cache_dtype` (None: that of all else)."""

from __future__ import annotations

import pytest
import torch

from pilotfish.engine.cache.tensors import KvCache
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.round.spans import Span
from pilotfish.engine.round.torch_table import TorchOperators
from pilotfish.kernels.attention import PAGE, from_cache, prompt_dtype
from pilotfish.kernels.cuda.attention_prompt import attend_prompt, project_prompt
from pilotfish.kernels.rope import inverse_frequencies


@pytest.mark.parametrize(
    ("start", "rows", "lag", "padding"),
    (
        (0, 1, 0, 24),
        (0, 70, 0, 0),
        (PAGE, 40, 0, 24),
        (2 * PAGE - 30, 70, 0, 0),
        (2 * PAGE - 1, 1, 0, 0),
        (0, 69, 1, 24),
        (PAGE - 1, 40, 1, 0),
    ),
)
def test_a_prompt_s_attention_matches_the_torch_table(start, rows, lag, padding, cache_dtype, device, dtype):
    heads, kv, dim, rotary = 4, 2, 32, 16
    generator = torch.Generator().manual_seed(start + rows)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    projected, norm = draw(rows, (2 * heads + 2 * kv) * dim).to(dtype), 1 + 0.1 * draw(heads + kv, dim)
    more = draw(padding, projected.shape[1]).to(dtype)
    scales = (1.0, 1.0) if cache_dtype is None else (0.5, 2.0)
    # what the context does not reach is never read
    caches = [draw(4, kv, PAGE, dim).to(cache_dtype or dtype) for _ in range(2)]
    for cache in caches:
        last = start + rows + lag - 1
        cache[3 - last // PAGE, :, last % PAGE + 1 :] = float("nan")
        cache[0] = float("nan")
        cache[3, :, :lag] = float("nan")
    # pages from the last to the first
    table = [3, 2, 1]
    layer = GatedAttention(None, None, norm, heads, kv, dim, 1e-6, dtype)
    inv_freq = inverse_frequencies(rotary, 1e4)
    own = [cache.clone() for cache in caches]
    span, cache = Span.build(1, start, rows, table, inv_freq), KvCache(*own, *scales, lag)
    q, want = torch.empty(rows, heads, dim), torch.empty(rows, heads * dim, dtype=dtype)
    TorchOperators().project_prompt(layer, projected, span, cache, q)
    TorchOperators().attend_prompt(layer, q, projected, span, cache, want)
    moved, (norm, more) = [cache.to(device) for cache in caches], (t.to(device) for t in (norm, more))
    # padding holds anything, and its keys go to page 0
    padded = torch.cat((projected.to(device), more))
    span = Span.build(1, start, rows, table, inv_freq.to(device), rows + padding)
    q = torch.full((len(padded), heads, dim), float("nan"), dtype=prompt_dtype(moved[0].dtype, norm.device)).to(device)
    place = (span.positions, span.cos, span.sin, span.table, *moved)
    project_prompt(padded, *place, norm, 1e-6, q, *scales, lag)
    got = torch.full((len(padded), heads * dim), float("nan"), dtype=dtype, device=device)
    attend_prompt(q, padded, start, rows, span.table, *moved, got, *scales, lag)
    got = got[:rows]
    for cache in moved:
        cache[0] = float("nan")
    # FP8 has 3 bits behind the point: what lies between two numbers may become either
    near = 1e-4 if dtype == torch.float32 else 2e-2 if cache_dtype is None else 0.13
    torch.testing.assert_close(got.cpu().float(), want.float(), rtol=near, atol=near * float(want.abs().max()))
    for mine, theirs in zip(moved, own, strict=True):
        torch.testing.assert_close(from_cache(mine.cpu()), from_cache(theirs), rtol=near, atol=1e-2, equal_nan=True)
