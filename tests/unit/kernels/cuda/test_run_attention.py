"""`attention_window` over BF16 and FP8 pages, compiled for a GPU and run on the CPU by its PTX. Plans are those of the
reference: the kernel's sine is the library's."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pilotfish.kernels.attention import PAGE
from pilotfish.kernels.cuda import attention
from tests.support import attention_windows, kernel_references
from tests.support.attention_windows import *  # noqa: F403
from tests.support.ptx import running

del test_plan_matches_the_reference  # noqa: F821


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture
def sizes():
    return (2, 1, 32, 8)


@pytest.fixture
def lengths():
    return [PAGE - 2, PAGE + 62, 5]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Two units a chunk, so that few positions are several items, and rows in a second chunk are merged as of many."""
    monkeypatch.setattr(attention, "CHUNK", PAGE)
    monkeypatch.setattr(attention, "UNIT", PAGE // 2)
    monkeypatch.setattr(attention, "MERGED", 2)
    monkeypatch.setattr(attention, "FEW_CHUNKS", 1)
    monkeypatch.setattr(attention_windows, "plan_rows", kernel_references.plan_rows_reference)
    with running() as launched:
        yield
    assert set(launched) == {"items_kernel", "merge_kernel"}


@pytest.mark.parametrize("size", (1, 2))
def test_few_chunks_are_merged_as_many_are(make, monkeypatch, size):
    """With chunks as items and with units. Of a lane more than there are chunks, and of a chunk no row sees whole."""
    monkeypatch.setattr(attention, "MERGED", 32)
    monkeypatch.setattr(attention, "ITEM_UNITS", size)
    rows = make().rows(3, 12)
    wanted = make().step(rows, [2], 3)
    monkeypatch.setattr(attention, "FEW_CHUNKS", 8)
    assert torch.equal(make().step(rows, [2], 3), wanted)


@pytest.mark.parametrize("buffers", (1, 3))
def test_bits_do_not_depend_on_the_units_on_their_way(make, monkeypatch, buffers):
    rows = make().rows(4, 13)
    wanted = make().step(rows, [2, 1], 2, num_programs=1)
    monkeypatch.setattr(attention, "BUFFERS", buffers)
    assert torch.equal(make().step(rows, [2, 1], 2, num_programs=1, pdl=True, settled=True), wanted)


@pytest.mark.parametrize("first", (5, 6, 7, 60, 63))
def test_windows_that_begin_anywhere_see_their_own_rows(dtype, cache_dtype, first):
    """Of two blocks of eight positions, of two in one run of 16, and of two units; in three tiles of rows."""
    layer, other = (attention_windows.AttentionLayer((8, 1, 32, 8), [first], dtype, cache_dtype) for _ in range(2))
    rows = layer.rows(9, 14)
    got = layer.step(rows, [1], 9)
    wanted = other.step(rows, [1], 9, function=kernel_references.attention_window_reference)
    torch.testing.assert_close(got.float(), wanted.float(), rtol=2e-2, atol=2e-2)
    assert torch.equal(layer.written(1, first, 9), other.written(1, first, 9))


@pytest.mark.parametrize("size", (1, 2, 3, 5, 6))
def test_bits_do_not_depend_on_where_items_part_chunks(make, monkeypatch, size):
    """Of four units: items that end within a chunk, begin within one, lie within one, and hold several."""
    monkeypatch.setattr(attention, "UNIT", PAGE // 4)
    monkeypatch.setattr(attention, "ITEM_UNITS", 4)
    rows = make().rows(6, 15)
    wanted = make().step(rows, [2, 1], 3)
    monkeypatch.setattr(attention, "ITEM_UNITS", size)
    assert torch.equal(make().step(rows, [2, 1], 3, num_programs=3), wanted)
