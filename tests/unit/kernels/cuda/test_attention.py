"""The reference of `attention_window` means what the torch table means. The kernels are compared with it by their PTX
(test_run_attention.py), `plan_rows` in Triton's interpreter, in a process of its own (interpret_attention.py)."""

from __future__ import annotations

import pytest
import torch

from pilotfish.engine.cache.tensors import KvCache
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.round.torch_table import TorchOperators, TorchScratch, Window
from pilotfish.kernels.attention import PAGE
from pilotfish.kernels.cuda.attention import CHUNK, PROGRAMS, UNIT, RowPlan, check_sizes, max_partials
from tests.support.attention_windows import EPS, AttentionLayer
from tests.support.interpreter import run_interpreted
from tests.support.kernel_references import attention_window_reference, plan_rows_reference

SIZES = (4, 2, 32, 8)
LENGTHS = [PAGE - 2, 2 * PAGE + 60, 5]


def step_torch(layer, projected, slots, width):
    """The torch table on the same weights and pages."""
    starts, tables = layer.lengths[slots].tolist(), layer.tables[slots].tolist()
    scratch = TorchScratch(Window.build(width, starts, tables, layer.inv_freq))
    mixer = GatedAttention(None, None, layer.qk_norm, layer.heads, layer.kv, layer.dim, EPS, layer.dtype)
    out = torch.empty(len(projected), layer.heads * layer.dim, dtype=layer.dtype)
    cache = KvCache(*layer.caches, *layer.scales)
    TorchOperators().attention_window(mixer, projected, torch.tensor(slots), width, layer.tables, cache, scratch, out)
    return out[: len(slots) * width]


@pytest.mark.parametrize("cache_dtype", (torch.float32, torch.float8_e4m3fn))
@pytest.mark.parametrize(("slots", "width"), (([1, 2, 3], 4), ([2], 9), ([3, 1], 1)))
def test_the_reference_is_the_torch_table(slots, width, cache_dtype):
    ours, theirs = (AttentionLayer(SIZES, LENGTHS, cache_dtype=cache_dtype) for _ in range(2))
    num_rows = len(slots) * width
    projected = ours.rows(num_rows + -num_rows % 8, seed=3)
    got = ours.step(projected, slots, width, function=attention_window_reference)
    torch.testing.assert_close(got, step_torch(theirs, projected, slots, width), rtol=1e-5, atol=1e-6)
    for mine, other in zip(ours.caches, theirs.caches, strict=True):
        torch.testing.assert_close(mine.float(), other.float(), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_an_fp8_cache_holds_values_over_their_scale():
    ours = AttentionLayer(SIZES, LENGTHS, cache_dtype=torch.float8_e4m3fn)
    exact = AttentionLayer(SIZES, LENGTHS)
    rows = ours.rows(2, seed=3)
    got = ours.step(rows, [1], 2, function=attention_window_reference)
    wanted = exact.step(rows, [1], 2, function=attention_window_reference)
    # three bits of mantissa, over some 250 positions
    torch.testing.assert_close(got, wanted, rtol=0.1, atol=0.02)
    page, offset = ours.tables[1, 0], LENGTHS[0]
    for cache, plain, scale in zip(ours.caches, exact.caches, ours.scales, strict=True):
        stored = cache[page, :, offset].float() * scale
        torch.testing.assert_close(stored, plain[page, :, offset], rtol=2**-4, atol=2**-9)


def test_plans_in_the_interpreter():
    run_interpreted(__file__, "interpret_attention.py")


@pytest.mark.parametrize("width", (1, 4, 9))
@pytest.mark.parametrize("lengths", ([1], [5, 300, 511], [4095] * 3, [20000, 1], [3 * 512 - 4] * 16))
def test_scratch_holds_every_item(width, lengths):
    heads, kv = 16, 2
    layer = AttentionLayer((heads, kv, 32, 8), LENGTHS)
    layer.lengths = torch.tensor(lengths)
    plan = layer.plan(range(len(lengths)), width, function=plan_rows_reference)
    # a text has one token more than its caches, and a lagging cache's entries end one place later
    num_pages = sum(-(-(n + 1 + width) // PAGE) for n in lengths)
    most = max_partials(len(lengths), width, max(lengths) + 1, num_pages, heads, kv)
    span, num_items, num_chunks = (int(plan.items[place]) for place in (0, 1 + len(lengths), 2 + 2 * len(lengths)))
    alone = num_items * (CHUNK // UNIT - 1) if span % CHUNK else 0
    assert 0 < num_chunks <= num_chunks + alone <= most


def planned(lengths, heads, kv, width=4):
    """Units of an item, and how many items there are."""
    plan = RowPlan.empty(len(lengths) * width, len(lengths), 8, torch.device("cpu"))
    slots, inv_freq = torch.arange(len(lengths)), torch.ones(4)
    plan_rows_reference(slots, torch.tensor(lengths), inv_freq, width, 0, heads, kv, plan)
    return int(plan.items[0]) // UNIT, int(plan.items[1 + len(lengths)])


@pytest.mark.parametrize(
    ("lengths", "heads", "kv", "wanted"),
    (
        # as few units as give a program one item
        ([1100], 16, 2, (1, 36)),
        ([1100] * 4, 24, 4, (3, 96)),
        ([1100] * 8, 24, 4, (5, 128)),
        ([1100] * 16, 16, 2, (5, 128)),
        ([1100] * 16, 24, 4, (9, 128)),
        ([32000], 16, 2, (8, 126)),
        # more streams than programs, which take turns: whole chunks
        ([1100] * 64, 24, 4, (56, 256)),
        # a long text among short ones
        ([100_000] + [1100] * 7, 24, 4, (64, 128)),
    ),
)
def test_items_are_dealt_evenly(lengths, heads, kv, wanted):
    assert planned(lengths, heads, kv) == wanted


def test_items_that_part_chunks_are_no_more_than_the_scratch_holds():
    generator = torch.Generator().manual_seed(5)
    for number in range(200):
        batch, longest = number % 64 + 1, 2 ** (6 + number % 11)
        lengths = torch.randint(1, longest, (batch,), generator=generator).tolist()
        size, items = planned(lengths, 24, 4)
        assert size * UNIT % CHUNK == 0 or items <= PROGRAMS, lengths


@pytest.mark.parametrize(
    ("sizes", "field"),
    (((6, 4, 64, 16), "num_attention_heads"), ((8, 2, 96, 24), "head_dim"), ((8, 2, 64, 128), "partial_rotary_factor")),
)
def test_sizes_that_the_kernels_do_not_hold_are_refused_by_name(sizes, field):
    check_sizes(24, 4, 256, 64)
    with pytest.raises(ValueError, match=f"^{field}: "):
        check_sizes(*sizes)
