"""What the machine has, and what its allocators mean when they refuse: too much for ever, or for now."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import torch

from pilotfish.engine.errors import BusyError, OptionError

OTHERS_SHARE = 0.05
"""A share of a GPU's memory that, in use beyond our own, belongs to other processes, which may end."""
REFUSALS = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed", "out of memory")
"""Words of torch's allocator for a CPU, which raises plain RuntimeError."""


def total_bytes(device: torch.device) -> int:
    """All memory of the device, whoever uses it now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def refusals_told() -> Iterator[None]:
    """An allocator's refusal inside becomes an OptionError, or a BusyError where others hold what is missing."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        others = total - free - torch.cuda.memory_reserved()
        if others > OTHERS_SHARE * total:
            raise BusyError(
                f"memory: other processes hold {gib(others)} of {gib(total)}: {_first_line(error)}"
            ) from error
        raise OptionError(_advice(error, total)) from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in REFUSALS):
            raise
        raise OptionError(_advice(error, total_bytes(torch.device("cpu")))) from error


def _advice(error: BaseException, total: int) -> str:
    wanted = re.search(r"tried to allocate (\d+) bytes", str(error))
    what = f"{gib(int(wanted[1]))} at once" if wanted else _first_line(error)
    return f"memory: refused {what}, of {gib(total)} in all; lower kv_cache_tokens, max_model_len or max_num_seqs"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
