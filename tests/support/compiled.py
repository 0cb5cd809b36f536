"""What launchers would run on a GPU, compiled on a machine without one: its registers and its machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class _NoDevice:
    """A driver that says for which device to compile, and can run nothing."""

    def __init__(self, arch: int, later: bool = False):
        self.target = GPUTarget("cuda", arch, 32)
        self.later = later

    def get_current_device(self) -> int:
        # Triton keeps what it has compiled by this number, and would give one architecture's kernels for another's
        return int(self.target.arch) + 1000 * self.later

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


class _Later:
    """A kernel that is compiled when it is looked at. hash: of all that it is made of."""

    def __init__(self, src: Any, options: dict[str, Any], compile: Callable[[], Any]):
        self.src, self._compile = src, compile
        self.hash = f"{src.hash()} {sorted(options.items())}"

    def __getattr__(self, name: str) -> Any:
        if "_kernel" not in self.__dict__:
            self._kernel = self._compile()
        return getattr(self._kernel, name)


@contextmanager
def compiling(arch: int = 90, later: bool = False) -> Iterator[list[Any]]:
    """Within it launches compile and run nothing; the list takes the kernels, in the order of their launches. `later`:
    they are compiled when more of them is looked at than what they are made of, `src` and `hash`."""
    kernels: list[Any] = []
    run, do_compile = JITFunction.run, JITFunction._do_compile

    def compile_kernel(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return kernels[-1]

    def compile_later(self: Any, *args: Any) -> Any:
        def keep(src: Any, target: GPUTarget, options: dict[str, Any]) -> _Later:
            return _Later(src, options, lambda: compile(src, target=target, options=options))

        compile = self.compile
        self.compile = keep
        try:
            return do_compile(self, *args)
        finally:
            self.compile = compile

    # not by reset_active, which looks for a device
    before = driver._active
    driver.set_active(_NoDevice(arch, later))
    JITFunction.run = compile_kernel
    if later:
        JITFunction._do_compile = compile_later
    try:
        yield kernels
    finally:
        JITFunction.run, JITFunction._do_compile = run, do_compile
        driver._active = before


class Code:
    """A kernel's machine code, by its disassembly."""

    def __init__(self, kernel: Any):
        self.text = _disassembled(kernel.asm["cubin"])
        used = re.search(r"REG:(\d+) STACK:(\d+)", self.text)
        assert used is not None
        self.registers, self.stack = int(used[1]), int(used[2])
        self.instructions = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", self.text, re.M)

    def count(self, start: str) -> int:
        return sum(op.startswith(start) for op in self.instructions)

    @property
    def loads(self) -> Counter[str]:
        """Loads from device memory, by width and cache hint."""
        return Counter(op for op in self.instructions if op.startswith("LDG"))

    def before(self, first: str, then: str) -> int:
        """How many instructions that begin with `first` stand before the first that begins with `then`."""
        end = next(place for place, op in enumerate(self.instructions) if op.startswith(then))
        return sum(op.startswith(first) for op in self.instructions[:end])


@cache
def _disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-sass", "-res-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
