"""Sizes that nothing can give: told by the flag at fault, and apart from what others hold only now."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pilotfish.engine import memory, plan
from pilotfish.engine.errors import BusyError, OptionError
from pilotfish.engine.memory import refusals_told, total_bytes
from pilotfish.engine.options import EngineOptions
from pilotfish.engine.start import make_core
from tests.support.tiny_models import build_tiny

GIB = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("memory"), "dense")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_tokens": 99_999_999_999}, "kv_cache_tokens: 99999999999 tokens take .* GiB, the device has .* GiB"),
        ({"kv_cache_tokens": (1 << 63) - 1}, "kv_cache_tokens: "),
        ({"kv_cache_tokens": 100}, "kv cache: 0 pages of 256 tokens, want at least 9"),
        ({"max_num_seqs": 300}, "max_num_seqs: want 1.."),
        ({"max_num_seqs": (1 << 63) - 1}, "max_num_seqs: want 1.."),
        ({"num_threads": 1_000_000}, "num_threads: want 1..1024, got 1000000"),
        ({"num_speculative_tokens": 99}, "num_speculative_tokens: want 0..8, got 99"),
        ({"max_model_len": (1 << 63) - 1}, "max_model_len: want 2.."),
    ],
)
def test_sizes_beyond_all_are_named(folder, options, words):
    with pytest.raises(OptionError, match=words):
        make_core(EngineOptions(model=str(folder), **options))


@pytest.mark.parametrize(
    "ask",
    [
        lambda: torch.empty(1 << 55, dtype=torch.uint8),
        lambda: torch.empty((1 << 40, 1 << 40), dtype=torch.float64),
        lambda: np.empty(1 << 55, dtype=np.uint8),
        lambda: bytearray(1 << 60),
    ],
    ids=["torch", "torch, more than can be counted", "numpy", "python"],
)
def test_what_an_allocator_refuses_is_an_option(ask):
    with pytest.raises(OptionError, match=r"memory: refused .* GiB in all; lower kv_cache_tokens"), refusals_told():
        ask()


def test_other_errors_are_left_alone():
    with pytest.raises(RuntimeError, match="shapes"), refusals_told():
        raise RuntimeError("shapes differ")
    with pytest.raises(OptionError, match="as it was"), refusals_told():
        raise OptionError("as it was")


@pytest.mark.parametrize(("free", "kind"), [(1, BusyError), (58, OptionError)])
def test_a_full_gpu_is_busy_where_others_hold_it(monkeypatch, free, kind):
    """60 GiB in all, 2 of them ours."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free * GIB, 60 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 2 * GIB)
    with pytest.raises(kind, match="memory: "), refusals_told():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 GiB")


@pytest.mark.parametrize(("free", "kind"), [(1, BusyError), (60, OptionError)])
def test_a_gpu_without_room_for_the_cache_is_busy_where_others_hold_it(folder, monkeypatch, free, kind):
    from pilotfish.engine.checkpoint.recognise import open_checkpoint

    total = 60 * GIB if kind is BusyError else GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (min(free * GIB, total), total))
    options, cuda = EngineOptions(model=str(folder)), torch.device("cuda")
    with pytest.raises(kind, match="kv cache: 0 pages"):
        plan._num_pages(options, open_checkpoint(str(folder)), 3, torch.bfloat16, 512, 4, cuda)


def test_on_a_gpu_pages_and_snapshots_share_what_is_left(folder, monkeypatch):
    """Three quarters and one; without a prefix cache no more than sequences can need."""
    from pilotfish.engine.checkpoint.recognise import open_checkpoint

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (60 * GIB, 60 * GIB))
    checkpoint, cuda, dtype = open_checkpoint(str(folder)), torch.device("cuda"), torch.bfloat16
    page = plan.page_bytes(checkpoint.config, dtype, with_head=True)
    room = 0.9 * 60 * GIB - checkpoint.num_bytes - plan.GPU_RESERVE_BYTES
    room -= plan.buffer_bytes(checkpoint.config, 3, 4)
    pages = {
        on: plan._num_pages(
            EngineOptions(model=str(folder), enable_prefix_caching=on), checkpoint, 3, dtype, 512, 4, cuda
        )
        for on in (True, False)
    }
    assert pages[False] == 4 * plan.reserved_pages(512, 3)
    assert pages[True] * page == pytest.approx(0.75 * room, rel=1e-3)
    for count in (8, pages[True]):
        found = plan.num_snapshots(checkpoint.config, dtype, count, count * page)
        least = count * page // 3 // plan.snapshot_bytes(checkpoint.config, dtype)
        assert found == min(least, count, plan.MAX_SNAPSHOTS)


def test_the_machine_s_memory_is_counted():
    assert total_bytes(torch.device("cpu")) > GIB and memory.gib(3 * GIB // 2) == "1.5 GiB"
    if sys.platform == "linux":
        first = Path("/proc/meminfo").read_text().split()[1]
        assert abs(total_bytes(torch.device("cpu")) - 1024 * int(first)) < GIB
