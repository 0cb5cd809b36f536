"""Kernels are compiled from launches that run nothing, found again on disk, and every compilation is counted."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from pilotfish.kernels.cuda import warm
from pilotfish.kernels.cuda.warm import Compilations, compile_all, compile_only, prepare
from tests.support.compiled import compiling


@triton.jit
def add(x, y, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i) + tl.load(y + i))


@triton.jit
def broken(x):
    tl.store(x, tl.load(x, mask=missing))  # noqa: F821


def launch_two_kinds():
    x, y = torch.ones(256), torch.ones(256, dtype=torch.int32)
    for block in (64, 256):
        add[(1,)](x, y, x, BLOCK=block)
        add[(1,)](x, y, x, BLOCK=block)
    assert (x == 1).all()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    add.device_caches.clear()
    with compiling():
        yield tmp_path
    add.device_caches.clear()


def test_each_kernel_is_compiled_once_and_then_read_from_disk(cache):
    assert compile_all(launch_two_kinds, 2) == 2
    before = Compilations.now()
    assert compile_all(launch_two_kinds) == 0
    with compile_only():
        launch_two_kinds()
    # ready in this process: neither compiled nor read
    assert vars(Compilations.now() - before) == {"compiled": 0, "loaded": 0}
    add.device_caches.clear()
    assert compile_all(launch_two_kinds) == 0
    assert vars(Compilations.now() - before) == {"compiled": 0, "loaded": 2}


def test_a_kernel_that_was_not_foreseen_is_counted(cache):
    compile_all(launch_two_kinds)
    before = Compilations.now()
    x = torch.ones(256)
    add[(1,)](x, x, x, BLOCK=128)
    assert vars(Compilations.now() - before) == {"compiled": 1, "loaded": 0}


def test_a_launch_that_fails_leaves_launches_as_they_were(cache):
    with pytest.raises(ZeroDivisionError):
        compile_all(lambda: 1 / 0)
    assert compile_all(launch_two_kinds) == 2


def test_a_kernel_that_does_not_compile_is_an_error_where_it_is_launched(cache):
    x = torch.ones(64)
    assert compile_all(lambda: (broken[(1,)](x), add[(1,)](x, x, x, BLOCK=64))) == 1
    with pytest.raises(triton.CompilationError):
        # a launch that runs something asks Triton 3.7 for the result itself
        kernel = broken[(1,)](x)
        kernel.result()


def test_what_launches_each_kernel_is_made_ahead_on_request(cache):
    """Of kernels whose arguments have the same types one after the other: Triton 3.6 exchanges their modules."""
    made, busy = [], []

    def launcher(source, metadata):
        types = list(source.signature.values())
        assert types not in busy
        busy.append(types)
        time.sleep(0.1)
        busy.remove(types)
        made.append(metadata.name)
        return object()

    binary = object(), None, 32, 0, 1024
    driver = triton.runtime.driver.active
    driver.launcher_cls = launcher
    driver.utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 1 << 16}, load_binary=lambda *args: binary
    )
    compile_all(launch_two_kinds)
    assert made == []
    add.device_caches.clear()
    assert compile_all(launch_two_kinds, 4, load=True) == 0
    assert made == ["add", "add"]


class Driver:
    """In the place of Triton's, which looks for a device when it is asked for."""

    def __init__(self, problem=None):
        self.problem = problem

    @property
    def active(self):
        if self.problem is not None:
            raise self.problem
        return SimpleNamespace(get_current_target=lambda: None)


def test_kernels_are_kept_where_they_are_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr(warm, "driver", Driver())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    prepare()
    assert triton.knobs.cache.dir == "mine"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    prepare()
    assert triton.knobs.cache.dir == str(tmp_path / "pilotfish" / "kernels")
    monkeypatch.undo()


def test_what_triton_lacks_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for problem in (RuntimeError("Failed to find C compiler"), PermissionError("no such folder")):
        monkeypatch.setattr(warm, "driver", Driver(problem))
        with pytest.raises(RuntimeError, match=f"Triton cannot launch kernels here: {problem}"):
            prepare()
