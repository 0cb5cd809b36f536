"""What launchers would run on a GPU, compiled on a machine without one: its registers and its machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class _NoDevice:
    """A driver that says for which device to compile, and can run nothing."""

    def __init__(self, arch: int):
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        # Triton keeps what it has compiled by this number, and would give one architecture's kernels for another's
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextmanager
def compiling(arch: int = 90) -> Iterator[list[Any]]:
    """Within it launches compile and run nothing; the list takes the kernels, in the order of their launches."""
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_kernel(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return kernels[-1]

    # not by reset_active, which looks for a device
    before = driver._active
    driver.set_active(_NoDevice(arch))
    JITFunction.run = compile_kernel
    try:
        yield kernels
    finally:
        JITFunction.run = run
        driver._active = before


class Code:
    """A kernel's machine code, by its disassembly."""

    def __init__(self, kernel: Any):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            self.text = _run(CUOBJDUMP, "-sass", file.name)
            used = re.search(r"REG:(\d+) STACK:(\d+)", _run(CUOBJDUMP, "-res-usage", file.name))
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


def _run(*command: Any) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout
