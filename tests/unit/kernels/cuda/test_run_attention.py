"""`attention_window` over BF16 and FP8 pages, compiled for a GPU and run on the CPU by its PTX. Plans are those of the
reference: the kernel's sine is the library's."""

from __future__ import annotations

import pytest

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
    """Two units a chunk, so that few positions are several items."""
    monkeypatch.setattr(attention, "CHUNK", PAGE)
    monkeypatch.setattr(attention, "UNIT", PAGE // 2)
    monkeypatch.setattr(attention, "MERGED", 2)
    monkeypatch.setattr(attention_windows, "plan_rows", kernel_references.plan_rows_reference)
    with running() as launched:
        yield
    assert set(launched) == {"project_kernel", "items_kernel", "merge_kernel"}
