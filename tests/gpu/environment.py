"""What a GPU machine has, and that a kernel can be compiled, launched and captured there at all: the first leg.

python -m tests.gpu.environment
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# transformers makes the tiny models of two files of tests, fla reads prompts
PACKAGES = (
    *("pytest", "pytest_timeout", "transformers", "fla", "msgspec", "safetensors", "tokenizers"),
    *("llguidance", "aiohttp", "jinja2"),
)
CHAIN, REPLAYS = 50, 20


@triton.jit
def _add_one(x, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gdc_launch_dependents()
    gdc_wait()
    tl.store(x + place, tl.load(x + place) + 1)


def launch(x: torch.Tensor) -> None:
    for _ in range(CHAIN):
        _add_one[(len(x) // 1024,)](x, BLOCK=1024, launch_pdl=True)


def check_chain() -> None:
    """Dependent launches keep their order, from the host and in a graph."""
    x = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    launch(x)
    assert bool((x == CHAIN).all()), "a chain of launches gave other values"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(x)
    for _ in range(REPLAYS):
        graph.replay()
    assert bool((x == CHAIN * (1 + REPLAYS)).all()), "a captured chain of launches gave other values"


def main() -> int:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__} for CUDA {torch.version.cuda}")
    print(f"triton {triton.__version__}, C compiler {compiler or 'MISSING: Triton 3.6 launches nothing without one'}")
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    print(f"{headers} {'there' if headers.exists() else 'MISSING: Triton 3.6 launches nothing without it'}")
    print(", ".join(f"{package} {'there' if find_spec(package) else 'MISSING'}" for package in PACKAGES))
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return 1
    free, total = torch.cuda.mem_get_info()
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    print(f"{name}, capability {capability}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    check_chain()
    print("dependent launches and their graph are in order")
    return 0


if __name__ == "__main__":
    sys.exit(main())
