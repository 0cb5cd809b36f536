"""Tests of `attention_window` and `plan_rows`; run in Triton's interpreter and on a GPU by those that import them and
give `device`, `sizes` (heads, kv, D, rotary), `lengths` (of slots 1, 2, 3); the interpreter has dtypes of its own."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from pilotfish.kernels.attention import PAGE, to_cache, window_attention
from pilotfish.kernels.cuda import attention
from pilotfish.kernels.cuda.attention import AttentionScratch, RowPlan, attention_window, plan_rows
from pilotfish.kernels.cuda.tiled_rows import TiledRows
from pilotfish.kernels.rope import inverse_frequencies
from tests.support import kernel_references
from tests.support.kernel_references import attention_window_reference, plan_rows_reference

EPS = 1e-6
WIDEST = 9
SCALES = (0.5, 2.0)
"""Of keys and values in an FP8 cache."""
NAN = float("nan")
FP8 = torch.float8_e4m3fn


@pytest.fixture
def dtype():
    """Of activations."""
    return torch.bfloat16


@pytest.fixture(params=[torch.bfloat16, torch.float8_e4m3fn], ids=str)
def cache_dtype(request):
    return request.param


def product_dtype(cache_dtype):
    """What queries and probabilities are rounded to: e4m3 values are exact in fp16, which rounds the rest less."""
    return torch.float16 if cache_dtype == FP8 else cache_dtype


def draw(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def bits(values):
    return values.cpu().contiguous().view(torch.uint8)


@lru_cache(maxsize=12)
def written_pages(kv, dim, lengths, cache_dtype, scales):
    """Page tables int32 of slot 0 and one for each length, and the caches, keys and values."""
    each = (max(lengths) + 2 * WIDEST) // PAGE + 1
    order = torch.randperm(len(lengths) * each, generator=torch.Generator().manual_seed(2)) + 1
    tables = torch.cat((torch.zeros(1, each, dtype=torch.int64), order.view(len(lengths), each))).int()
    caches = []
    for seed, scale in enumerate(scales):
        cache = torch.full((len(lengths) * each + 1, kv, PAGE, dim), NAN)
        for slot, length in enumerate(lengths, 1):
            written = draw(length, kv, dim, seed=10 * slot + seed)
            for page, part in zip(tables[slot].tolist(), written.split(PAGE), strict=False):
                cache[page, :, : len(part)] = part.transpose(0, 1)
        caches.append(to_cache(cache, scale, cache_dtype))
    return tables, caches


class AttentionLayer:
    """A full-attention layer's weights and pages: random where `lengths` say that something was written, else NaN.

    Slot s > 0 holds lengths[s - 1] tokens; its pages are dealt out of order. `lag`: the first that many of its places
    are left out, and positions count from there on.
    """

    def __init__(self, sizes, lengths, dtype=torch.float32, cache_dtype=torch.float32, device="cpu", lag=0):
        self.heads, self.kv, self.dim, rotary = sizes
        self.dtype, self.cache_dtype, self.device = dtype, cache_dtype, torch.device(device)
        self.inv_freq = inverse_frequencies(rotary, 1e7).to(device)
        q_norm, k_norm = 1 + 0.1 * draw(2, self.dim, seed=1)
        self.qk_norm = torch.cat((q_norm.expand(self.heads, -1), k_norm.expand(self.kv, -1))).to(device)
        self.lag, self.lengths = lag, torch.tensor([0, *(length - lag for length in lengths)], device=device)
        self.scales = SCALES if cache_dtype == FP8 else (1.0, 1.0)
        tables, caches = written_pages(self.kv, self.dim, tuple(lengths), cache_dtype, self.scales)
        self.tables = tables.to(device, copy=True)
        self.caches = [cache.to(device, copy=True) for cache in caches]
        for cache in self.caches if lag else ():
            bits_of = cache.view(torch.uint8) if cache.element_size() == 1 else cache
            bits_of[self.tables[1:, 0].long(), :, :lag] = 0x7F if cache.element_size() == 1 else NAN

    def rows(self, num_rows, seed):
        return draw(num_rows, 2 * (self.heads + self.kv) * self.dim, seed=seed).to(self.dtype)

    def plan(self, slots, width, step=0, function=plan_rows):
        num_rows = len(slots) * width
        plan = RowPlan.empty(num_rows, len(slots), 2 * len(self.inv_freq), self.device)
        for buffer in (plan.cos, plan.sin):
            buffer.fill_(NAN)
        slots = torch.tensor(slots, dtype=torch.int32, device=self.device)
        function(slots, self.lengths, self.inv_freq, width, step, self.heads, self.kv, plan)
        return plan

    def scratch(self, num_sequences):
        num_pages, longest = len(self.caches[0]), int(self.lengths.max())
        sizes = (self.heads, self.kv, self.dim, self.device)
        scratch = AttentionScratch.empty(num_sequences, WIDEST, longest, num_pages, *sizes)
        for buffer in (scratch.partial, scratch.stats):
            buffer.fill_(NAN)
        return scratch

    def step(self, projected, slots, width, step=0, function=attention_window, tiled=False, **options):
        """The output of windows `step` positions past their slots' lengths, which is written as TiledRows if it is so
        wanted; writes their keys and values."""
        reference = function is attention_window_reference
        if not reference and self.device.type == "cpu":
            options.setdefault("num_programs", 2)
        plan = self.plan(slots, width, step, plan_rows_reference if reference else plan_rows)
        out = torch.full((len(projected), self.heads * self.dim), NAN, dtype=self.dtype, device=self.device)
        out = TiledRows.of(out) if tiled else out
        function(
            projected.to(self.device), torch.tensor(slots, dtype=torch.int32, device=self.device), plan, self.tables,
            *self.caches, self.qk_norm, EPS, width, self.scratch(len(slots)), out,
            k_scale=self.scales[0], v_scale=self.scales[1], lag=self.lag, **options,
        )  # fmt: skip
        return (out.plain() if tiled else out)[: len(slots) * width].cpu()

    def written(self, slot, first, count):
        """Bits of keys and values at positions [first, first + count) of a slot."""
        found = []
        for position in range(first, first + count):
            page = int(self.tables[slot, position // PAGE])
            found += [bits(cache[page, :, position % PAGE]) for cache in self.caches]
        return torch.cat([values.flatten() for values in found])


@pytest.fixture
def make(device, dtype, cache_dtype, sizes, lengths):
    return lambda lag=0: AttentionLayer(sizes, lengths, dtype, cache_dtype, device, lag)


def test_plan_matches_the_reference(make, monkeypatch):
    layer = make()
    for slots, width, step, size in (
        ([1, 2, 3], 4, 0, 0),
        ([0, 3], 1, 2, 3),
        ([2], 9, 0, 0),
        ([3, 1, 2] * 30, 1, 0, 5),
    ):
        monkeypatch.setattr(attention, "ITEM_UNITS", size)
        got, wanted = (layer.plan(slots, width, step, function) for function in (plan_rows, plan_rows_reference))
        for name in ("positions", "items"):
            assert torch.equal(getattr(got, name), getattr(wanted, name))
        # the library's sine is right to an ulp or two, whatever the angle
        for name in ("cos", "sin"):
            torch.testing.assert_close(getattr(got, name), getattr(wanted, name), rtol=0, atol=3e-7)


@pytest.mark.parametrize(("slots", "width", "lag"), (([1, 2, 3], 4, 0), ([3, 1], 1, 0), ([2, 3, 1], 3, 1)))
def test_matches_the_reference(make, sizes, lengths, dtype, cache_dtype, slots, width, lag):
    layer, other = make(lag), AttentionLayer(sizes, lengths, dtype, cache_dtype, lag=lag)
    rows = layer.rows(len(slots) * width, 3)
    got = layer.step(rows, slots, width)
    wanted = other.step(rows, slots, width, function=attention_window_reference)
    exact = product_dtype(cache_dtype) == torch.float32
    # products of 16 bits round queries and probabilities; an FP8 cache may round a key the other way
    close = {"rtol": 1e-4, "atol": 1e-5} if exact else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(got.float(), wanted.float(), **close)
    for slot in slots:
        first, count = lengths[slot - 1] // PAGE * PAGE, lengths[slot - 1] % PAGE
        assert torch.equal(layer.written(slot, first, count), other.written(slot, first, count))


def test_tiled_rows_have_the_bits_of_others(sizes, lengths, dtype, cache_dtype, device):
    heads, kv, dim, rotary = sizes
    # whole units of 128 columns
    sizes = sizes if heads * dim % 128 == 0 else (128 // dim, kv, dim, rotary)
    for slots, width in (([2], 1), ([1, 2, 3], 3)):
        ours, other = (AttentionLayer(sizes, lengths, dtype, cache_dtype, device) for _ in range(2))
        rows = ours.rows(len(slots) * width, 13)
        got = ours.step(rows, slots, width, tiled=True)
        assert got.isfinite().all() and torch.equal(got, other.step(rows, slots, width))


def test_windows_have_the_bits_of_single_rows(make, lengths):
    """Of one row, which takes the way of few query rows, and of as many as take the other."""
    wide = WIDEST
    assert make().heads // make().kv <= attention.NARROW < wide * make().heads // make().kv
    for slot, lag in ((1, 1), (2, 0)):
        rows = make().rows(wide, 4)
        alone, whole = make(lag), make(lag)
        wanted = torch.cat([alone.step(rows[j : j + 1], [slot], 1, step=j) for j in range(wide)])
        got = whole.step(rows, [slot], wide)
        assert torch.equal(got, wanted)
        assert torch.equal(whole.written(slot, lengths[slot - 1], wide), alone.written(slot, lengths[slot - 1], wide))
        for width in (2, 3):
            assert torch.equal(make(lag).step(rows[:width], [slot], width), wanted[:width]), width


@pytest.mark.parametrize("junk", (NAN, 3e38))
def test_what_a_lagging_cache_s_free_place_holds_is_not_seen(make, junk):
    rows = make().rows(2, 11)
    wanted = make(1).step(rows, [1], 2)
    layer = make(1)
    for cache in layer.caches:
        bits_of = cache.view(torch.uint8) if cache.element_size() == 1 else cache
        # in FP8 the largest number that is one
        bits_of[layer.tables[1, 0], :, 0] = 0x7E if cache.element_size() == 1 else junk
    assert torch.equal(layer.step(rows, [1], 2), wanted)
    assert bool(wanted.isfinite().all())


def test_bits_do_not_depend_on_how_the_work_is_dealt(make, monkeypatch):
    rows = make().rows(4, 5)
    wanted = make().step(rows, [2, 1], 2)
    assert torch.equal(make().step(rows, [2, 1], 2, num_programs=5), wanted)
    # items of any number of units: whole chunks, some of them, and parts that begin within one
    for size, num_programs in ((1, 1), (2, 7), (3, 2), (5, 3), (8, 5), (11, 4)):
        monkeypatch.setattr(attention, "ITEM_UNITS", size)
        assert torch.equal(make().step(rows, [2, 1], 2, num_programs=num_programs), wanted), size


@pytest.mark.parametrize("size", (0, 3))
def test_bits_do_not_depend_on_how_heads_are_merged(make, monkeypatch, size):
    """By a program for a few columns, for two heads, and for some blocks of them; in fp32, which shows an order."""
    monkeypatch.setattr(attention, "MERGED", 32)
    monkeypatch.setattr(attention, "FEW_CHUNKS", 8)
    monkeypatch.setattr(attention, "ITEM_UNITS", size)
    rows, slots, outs = make().rows(9, 16), [2, 3, 1], []
    for merges in (1 << 20, 1, 60):
        monkeypatch.setattr(attention, "MERGES", merges)
        layer = make()
        layer.dtype = torch.float32
        outs.append(layer.step(rows, slots, 3))
    assert torch.equal(outs[1], outs[0]) and torch.equal(outs[2], outs[0])


def test_sequences_have_the_bits_they_have_alone(make):
    width = 2
    rows = make().rows(5 * width, 6)
    # padding, twice, and neighbours that overflow
    slots = [2, 0, 1, 3, 0]
    rows[2:4], rows[8:] = NAN, 1e5
    rows[6:8] *= 1e5
    got = make().step(rows, slots, width)
    for place, slot in ((0, 2), (2, 1), (3, 3)):
        part = slice(place * width, (place + 1) * width)
        assert torch.equal(bits(make().step(rows[part], [slot], width)), bits(got[part])), slot


@pytest.mark.parametrize("junk", (NAN, float("inf")))
def test_a_draft_that_overflowed_is_invisible_to_the_rows_before_it(make, junk):
    # slot 3: all rows in one unit
    rows = make().rows(4, 7)
    wanted = make().step(rows, [3], 4)
    rows[2:] = junk
    assert torch.equal(make().step(rows, [3], 4)[:2], wanted[:2])


def test_what_rejected_slots_hold_is_not_seen(make, lengths):
    rows = make().rows(2, 8)
    wanted = make().step(rows, [3], 2)
    layer = make()
    page, offset = divmod(lengths[2] + 2, PAGE)
    for cache in layer.caches:
        bits_of = cache.view(torch.uint8) if cache.element_size() == 1 else cache
        # the largest number, in FP8 NaN
        bits_of[layer.tables[3, page], :, offset:] = 0x7F if cache.element_size() == 1 else 3e38
    assert torch.equal(layer.step(rows, [3], 2), wanted)


def test_what_an_fp8_page_cannot_hold_saturates(device, dtype, sizes, lengths, monkeypatch):
    def rounding_queries(q, *rest):
        """As the kernel has them: among scores in the hundreds that alone turns a near tie by several percent."""
        factor = attention._LOG2_E * q.shape[-1] ** -0.5
        return window_attention((q * factor).to(product_dtype(FP8)).float() / factor, *rest)

    monkeypatch.setattr(kernel_references, "window_attention", rounding_queries)
    layer, other = (AttentionLayer(sizes, lengths, dtype, FP8, place) for place in (device, "cpu"))
    first_value = (layer.heads + layer.kv) * layer.dim
    rows = layer.rows(3, 9)
    rows[:2, first_value : first_value + layer.kv * layer.dim] *= 1e5
    for made in (layer, other):
        made.qk_norm[made.heads :] *= 1e5
    got, wanted = layer.step(rows, [3], 3), other.step(rows, [3], 3, function=attention_window_reference)
    stored = layer.written(3, lengths[2], 2)
    assert torch.equal(stored, other.written(3, lengths[2], 2))
    largest = (stored & 0x7F) == 0x7E
    assert float(largest.float().mean()) > 0.9 and not bool(((stored & 0x7F) == 0x7F).any())
    assert bool(got.isfinite().all())
    torch.testing.assert_close(got.float(), wanted.float(), rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))


def test_a_key_that_is_no_number_stays_none_in_fp8(device, dtype, sizes, lengths):
    layer = AttentionLayer(sizes, lengths, dtype, FP8, device)
    rows = layer.rows(3, 10)
    wanted = layer.step(rows, [3], 3)
    rows[1, layer.heads * layer.dim : (layer.heads + layer.kv) * layer.dim] = NAN
    got = layer.step(rows, [3], 3)
    assert torch.equal(got[0], wanted[0])
    assert bool(got[1:].isnan().all())
