"""What the inner loop of an NVFP4 product takes on a GPU without its weights' way from memory: gate and up of the 27B.

    python tests/bench/bench_kernels_inner.py

Regime: as many units of 34816x5120 as a product has, unpacked from registers that differ from step to step, spread
evenly over the multiprocessors: no load of weights, no sum over warps, no tail. Of each warp's instruction (mma.sync,
as rounds have it) and of the warp group's (wgmma, weights from registers, x from shared memory): products alone, with
unpacking, and with x from L1. What a product takes beyond that, or beyond its bytes, is latency and balance. Medians of
launches on a card that has been busy; one JSON line a row.
"""

# Triton compiles no unpacking of tuples, and what grows in a loop has no type that mypy knows:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc, var-annotated"

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product as combinations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_init

from pilotfish.kernels.cuda import group_mma
from pilotfish.kernels.cuda.group_mma import CODES, ROWS_SHARED, SCALES, fragments, operand, sums, waited
from pilotfish.kernels.cuda.launch_shapes import SM_COUNT
from pilotfish.kernels.cuda.mma import BF16, NVFP4, in_order, load_x, multiply
from pilotfish.kernels.cuda.warm import compile_all

TILES, UNITS, STEPS = 2176, 40, 10
"""Of 34816x5120, and of a warp's share of K."""
PARTS = ("products", "unpacking", "x")
WARPS = ((1, 5, 96), (2, 4, 128), (4, 3, 168), (4, 4, 128))
"""Tiles of 8 rows, programs a multiprocessor, registers a thread."""
GROUPS = ((32, 2, 255), (32, 3, 168), (64, 3, 168))
"""Rows, programs a multiprocessor, registers a thread."""
REPEATS = 4
BUSY_MS = 100.0
_SPREAD = gl.constexpr(0x1E3779B1)


@gluon.jit
def _warps_kernel(out, x, num_steps, NT: gl.constexpr, PARTS: gl.constexpr, STEPS: gl.constexpr, K: gl.constexpr):
    """Two tiles and 8 NT rows a warp; x in the order of tiled_rows.py. Weights of BF16 are multiplied as they are."""
    WARPS: gl.constexpr = gl.num_warps()
    FORMAT: gl.constexpr = BF16 if PARTS == 1 else NVFP4
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])
    thread = gl.arange(0, WARPS * 32, gl.SliceLayout(1, layout))
    word = gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :]
    codes = thread[:, None] * _SPREAD + word * 0x05EBCA6B
    scales = (thread * 0x1234567)[:, None]
    where = x + ((thread // 32 * (STEPS * 512) + thread % 32 * 4)[:, None] + word)
    rows = ()
    for n in gl.static_range(NT):
        rows = rows + (where + n * (4 * K),)
    xs = load_x(rows, None, 0, NT, K, True)
    totals = ()
    for _ in gl.static_range(2 * NT):
        totals = totals + (gl.zeros([WARPS * 32, 4], gl.float32, layout),)
    pairs = ()
    for i in gl.static_range(8):
        pairs = pairs + (codes + i,)
    for step in range(num_steps):
        if PARTS > 2:
            now = ()
            for n in gl.static_range(NT):
                now = now + (rows[n] + step % STEPS * 512,)
            xs = load_x(now, None, 0, NT, K, True)
            in_order()
        units = ()
        for m in gl.static_range(2):
            packed = (codes ^ (step * 77 + m), codes + (step + m), scales ^ (step + m))
            units = units + (packed if PARTS > 1 else pairs,)
        totals = multiply(units, xs, totals, (), 0, 2, NT, FORMAT, False)
    total = totals[0]
    for i in gl.static_range(1, 2 * NT):
        total += totals[i]
    gl.store(out + gl.program_id(0) * (WARPS * 128) + thread[:, None] * 4 + word, total)


@gluon.jit
def _group_kernel(out, num_steps, ROWS: gl.constexpr, PARTS: gl.constexpr):
    """Eight tiles a program, four at a time: while some are multiplied others are unpacked."""
    rows = gl.allocate_shared_memory(gl.bfloat16, [ROWS, 128], ROWS_SHARED)
    rows.store(gl.full([ROWS, 128], 1.0, gl.bfloat16, gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])))
    fence_async_shared()
    codes = gl.arange(0, 4, gl.SliceLayout(1, CODES))[:, None] * _SPREAD
    codes += gl.arange(0, 256, gl.SliceLayout(0, CODES))[None, :] * 0x05EBCA6B
    scales = gl.arange(0, 4, gl.SliceLayout(1, SCALES))[:, None] * 7
    scales += gl.arange(0, 32, gl.SliceLayout(0, SCALES))[None, :] * 0x1234567
    low = (gl.zeros([64, ROWS], gl.float32, sums(ROWS, True)),)
    high = (warpgroup_mma_init(gl.zeros([64, ROWS], gl.float32, sums(ROWS, True))),)
    weights = fragments(codes, scales, operand(0, ROWS, True))
    for step in range(num_steps):
        if PARTS > 1:
            weights = fragments(codes ^ (step * 77), scales ^ step, operand(0, ROWS, True))
        in_order(True)
        high = waited(0, high, True)
        low = group_mma.multiply((rows,), weights, low, True)
        in_order(True)
        if PARTS > 1:
            weights = fragments(codes + step, scales + step, operand(0, ROWS, True))
        high = group_mma.multiply((rows,), weights, high, True)
        low = waited(1, low, True)
        in_order(True)
    total = low[0] + waited(0, high, True)[0]
    m = gl.arange(0, 64, gl.SliceLayout(1, sums(ROWS, True)))[:, None]
    n = gl.arange(0, ROWS, gl.SliceLayout(0, sums(ROWS, True)))[None, :]
    gl.store(out + gl.program_id(0) * (64 * ROWS) + m * ROWS + n, total)


def microseconds(launch: Callable[[], object], busy_ms: float) -> float:
    """Of a launch: the median of nine, behind others that take so long, for a card raises its clock by and by."""
    times: list[float] = []
    while sum(times) < busy_ms or len(times) < 9:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(times[-9:])


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_kernels_inner: needs a CUDA device")
    out = torch.empty(SM_COUNT * 5 * 64 * 64, device="cuda")
    x = torch.randn(32 * UNITS * 128, device="cuda").bfloat16().view(torch.int32)
    launches: list[tuple[dict[str, object], Callable[[], object]]] = []
    for (row_tiles, programs, registers), number in combinations(WARPS, (1, 2, 3)):
        about = {"instruction": "mma.sync", "rows": 8 * row_tiles}
        steps = round(REPEATS * TILES // 2 * UNITS / (SM_COUNT * programs * 4))
        run = partial(
            _warps_kernel[(SM_COUNT * programs,)], out, x, steps, NT=row_tiles, PARTS=number, STEPS=STEPS,
            K=UNITS * 128, num_warps=4,
            maxnreg=registers, enable_fp_fusion=False,
        )  # fmt: skip
        launches.append((about | {"programs": programs, "parts": PARTS[:number]}, run))
    for (rows, programs, registers), number in combinations(GROUPS, (1, 2)):
        about = {"instruction": "wgmma", "rows": rows}
        steps = round(REPEATS * TILES // 8 * UNITS / (SM_COUNT * programs))
        run = partial(
            _group_kernel[(SM_COUNT * programs,)], out, steps, ROWS=rows, PARTS=number, num_warps=4, maxnreg=registers,
            enable_fp_fusion=False,
        )  # fmt: skip
        launches.append((about | {"programs": programs, "parts": PARTS[:number]}, run))
    compile_all(lambda: [run() for _, run in launches])
    for about, run in launches:
        print(json.dumps(about | {"us": round(microseconds(run, BUSY_MS) / REPEATS, 1)}), flush=True)


if __name__ == "__main__":
    main()
