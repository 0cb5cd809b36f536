"""Kernels compiled before they are needed, in parallel, into Triton's cache on disk; and a count of what was compiled.

Triton keys its cache by source, constants and versions; it stands in TRITON_CACHE_DIR. No list of kernels is kept: what
launches them is run once with launches that only compile, so what is compiled is what will be launched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


def prepare() -> None:
    """Ahead of the first kernel, and of reading weights. Compiled ones stay in ~/.cache/pilotfish/kernels, unless the
    user has chosen another folder by TRITON_CACHE_DIR; and Triton makes its driver, with a C compiler the first time.
    Raises RuntimeError with what it lacks."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "pilotfish" / "kernels"
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder))
    try:
        driver.active.get_current_target()
    except Exception as error:
        # a compiler that is missing, headers that are, a folder that cannot be written: each has its own kind
        raise RuntimeError(f"Triton cannot launch kernels here: {error}") from error


@contextmanager
def compile_only() -> Iterator[None]:
    """Within it a kernel's launch compiles what it would run, and runs nothing. For one thread at a time."""
    launch = JITFunction.run

    def compile_kernel(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_kernel
    try:
        yield
    finally:
        JITFunction.run = launch


def compile_all(launch: Callable[[], object], num_threads: int | None = None, load: bool = False) -> int:
    """Compiles every kernel that `launch` launches, on several threads; the number of those that were not on disk.

    The kernels of the process that called are ready afterwards: its next launches neither compile nor read the disk.
    `load`: nor do they load code onto the device or, with Triton 3.6, have a C compiler make what launches each; needs
    a device. A kernel that does not compile is an error where it is launched.
    """
    before = Compilations.now()
    threads = num_threads or min(16, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        with triton.AsyncCompileMode(pool, ignore_errors=True) as compiling, compile_only():
            launch()
        kernels = [kernel for future in compiling.future_kernels.values() if (kernel := future.kernel) is not None]
        if load:
            _load(kernels, pool)
    return (Compilations.now() - before).compiled


def _load(kernels: list[Any], pool: Executor) -> None:
    """Loads kernels onto the device, on several threads.

    What launches kernels with arguments of the same types is one extension module of Triton 3.6, and all such modules
    have one name. Python gives who loads one again the module that was loaded last, with its contents exchanged: so
    what has been loaded already is asked for when nobody else loads.
    """
    first: dict[str, Any] = {}
    for kernel in kernels:
        first.setdefault(str(list(kernel.src.signature.values())), kernel)
    # reading it loads it
    list(pool.map(lambda kernel: kernel.run, first.values()))
    for kernel in kernels:
        kernel.run  # noqa: B018


class Compilations:
    """How many kernels this process has compiled, and how many it has read from disk, since `watch`."""

    _total: Compilations | None = None

    def __init__(self, compiled: int, loaded: int):
        self.compiled, self.loaded = compiled, loaded

    def __sub__(self, other: Compilations) -> Compilations:
        return Compilations(self.compiled - other.compiled, self.loaded - other.loaded)

    @classmethod
    def now(cls) -> Compilations:
        """The counts so far; the first call starts counting."""
        if cls._total is None:
            cls._total = cls(0, 0)
            previous = triton.knobs.compilation.listener
            total = cls._total

            def listener(*, cache_hit: bool, **details: Any) -> None:
                if cache_hit:
                    total.loaded += 1
                else:
                    total.compiled += 1
                if previous is not None:
                    previous(cache_hit=cache_hit, **details)

            triton.knobs.compilation.listener = listener
        return cls(cls._total.compiled, cls._total.loaded)
