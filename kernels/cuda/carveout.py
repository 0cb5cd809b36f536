"""How a multiprocessor's memory is divided between shared memory and L1, for kernels that read x through L1.

A multiprocessor takes another division only while nothing runs on it, and a kernel that asks for none runs in the one
it finds. In a chain of dependent launches a multiprocessor is hardly ever empty: behind attention's items, for which
Triton asks for all shared memory there is, most products of a round took up to 1.7 times as long, and as long as alone
where they asked for more L1 (docs/measurements.md). So a product that reads much of x asks for its division.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from triton.compiler import CompiledKernel

PERCENT = 44
"""Of the shared memory that a multiprocessor may have: 100 of 228 KB on an H200, which leaves 156 KB to L1. Five
programs whose units are on their way in shared memory fit."""
PREFERRED_SHARED_MEMORY_CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of cuda.h."""
_asked: set[int] = set()
"""Functions on the device that have been asked for it."""


def leave_to_l1(kernel: Any) -> None:
    """From its next launch on a kernel has the division that leaves to L1 what products want.

    kernel: what a launch returns, which may also be one that has only been compiled, or will be: that is let alone.
    Raises RuntimeError if the driver refuses.
    """
    # a kernel that is still being compiled would be waited for
    if not isinstance(kernel, CompiledKernel) or kernel.function is None or kernel.function in _asked:
        return
    function = kernel.function
    code = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), PREFERRED_SHARED_MEMORY_CARVEOUT, PERCENT)
    if code:
        raise RuntimeError(f"cuFuncSetAttribute: want the carveout {PERCENT} for {kernel.name}, got CUDA error {code}")
    _asked.add(function)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
