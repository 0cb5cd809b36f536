"""Which compiled kernel each launch of a round is, on a machine without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from tests.support.compiled import compiling

Numbers = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Launch:
    """A launch, by all that decides what is compiled for it.

    kernel: module and function, of which two have one name. hash: of what is compiled, its source, constants, warps,
    and which arguments are 1 or begin at multiples of 16. numbers: the integers that were looked at for that; where
    they differ there may be one binary today, and two for other values.
    """

    kernel: str
    hash: str
    numbers: Numbers
    constants: str = field(compare=False)
    compiled: Any = field(compare=False, repr=False)

    @property
    def uses_floats(self) -> bool:
        return re.search(r"\.(f16|bf16|f32|f64|f16x2|bf16x2|tf32|e4m3\w*)\b", self.compiled.asm["ptx"]) is not None


def launches_of(work: Callable[[], object]) -> list[Launch]:
    """What `work` launches, in order; nothing runs, and nothing is compiled before its code is looked at."""
    with _numbers_looked_at() as numbers, torch.inference_mode(), compiling(later=True) as kernels:
        work()
    return [_launch(kernel, given) for kernel, given in zip(kernels, numbers, strict=True)]


def _launch(kernel: Any, numbers: Numbers) -> Launch:
    function = kernel.src.fn
    module = function.fn.__module__.rpartition(".")[2]
    constants = (
        f"{function.arg_names[path[0]]}{path[1:] or ''}={value}" for path, value in kernel.src.constants.items()
    )
    return Launch(f"{module}.{function.fn.__name__}", kernel.hash, numbers, " ".join(constants), kernel)


@contextmanager
def _numbers_looked_at() -> Iterator[list[Numbers]]:
    found: list[Numbers] = []
    run = JITFunction.run

    def note(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        names = [p.name for p in self.params if not (p.is_constexpr or p.do_not_specialize)]
        found.append(tuple((name, given[name]) for name in names if isinstance(given.get(name), int)))
        return run(self, *args, **kwargs)

    JITFunction.run = note
    try:
        yield found
    finally:
        JITFunction.run = run
