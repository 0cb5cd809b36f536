"""A prompt's products with packed weights (`bulk` in linear.py), by how much of a matrix is expanded at a time.

    python tests/bench/bench_kernels_bulk.py [--rows 256,1024,2048,4096] [--sizes 16777216,67108864,..] [--passes 5]

Regime: the products of the 27B in NVFP4 (b and a of GatedDeltaNet in BF16), each slice's expansion, product and, of
gate_up, silu in a graph, the device kept busy: slice sizes take turns, and a time is the median of all passes. The
limits: an expansion moves 2.6 bytes a weight, at 4.15 TB/s; a product 2 FLOP a weight and row, at 989 TFLOP/s of bf16
or what the device's power allows, which is less.

`all`: as `bulk` does it; `expand`, `product` (with silu): that part alone; `beside`: the next slice is expanded on a
stream of its own while one is multiplied, into memory of its own. `equal`: whether the bits are those of slices of 2^27
numbers.
First what must hold: two inputs together have the bits that each has alone. One JSON line a row, and at the end the
milliseconds of a piece's products through all layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from unittest.mock import patch

import torch

from pilotfish.engine.checkpoint.nvfp4 import NvFp4Weight
from pilotfish.kernels.cuda import linear
from pilotfish.kernels.cuda.linear import PackedLinear
from pilotfish.kernels.cuda.packing import TILE

PRODUCTS = {
    "gate_up": (64, ((17408, 17408), 5120)),
    "down": (64, ((5120,), 17408)),
    "in_proj": (48, ((16384, -96), 5120)),
    "qkvg": (16, ((14336,), 5120)),
    "output": (64, ((5120,), 6144)),
}
"""How many layers have it, the rows of its parts (of BF16, where below 0) and its width."""
SIZES = (1 << 24, 1 << 25, 8448 * 5120, 1 << 26, 16896 * 5120, 1 << 27, 1 << 28)
"""Numbers of bf16. 8448 rows of 5120 are two whole waves of tiles of 128 x 256 on 132 multiprocessors at 1 024 rows."""
NOW = linear.BULK_NUMBERS
SECONDS = 0.008
"""Of replays of one graph at a time."""


def weight(rows: int, columns: int) -> torch.Tensor | NvFp4Weight:
    """NVFP4 of normal numbers as a quantizer leaves them, more or less: what a product takes depends on its numbers."""
    if rows < 0:
        return torch.randn(-rows, columns, dtype=torch.bfloat16, device="cuda") * 0.02
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(0x60, 0x70, (rows, columns // 16), dtype=torch.uint8, device="cuda")
    return NvFp4Weight(codes, scales.view(torch.float8_e4m3fn), 5e3)


def beside(product: PackedLinear, x: torch.Tensor, memory: torch.Tensor, out: torch.Tensor) -> None:
    """`bulk` in two places of memory in turn, expanding on one stream and multiplying on another."""
    span = 2 if product.swiglu else 1
    halves = memory.view(2, -1)
    step = halves.shape[1] // (TILE * product.in_features) // span * span
    num_tiles = sum(part.num_tiles for part in product.ranges)
    multiplying, expanding = torch.cuda.current_stream(), torch.cuda.Stream()
    expanding.wait_stream(multiplying)
    done: list[torch.cuda.Event] = []
    for number, begin in enumerate(range(0, num_tiles, step)):
        end = min(begin + step, num_tiles)
        with torch.cuda.stream(expanding):
            if number > 1:
                expanding.wait_event(done[number - 2])
            matrix = product._expand(begin, end, halves[number % 2])
            expanded = expanding.record_event()
        multiplying.wait_event(expanded)
        product._multiply(x, matrix, begin // span, end // span, out)
        done.append(multiplying.record_event())


def only(part: str) -> AbstractContextManager[object]:
    """`bulk` without the rest."""
    if part == "product":
        return patch.object(linear, "expand", lambda *_: None)
    if part == "expand":
        return patch.object(PackedLinear, "_multiply", lambda *_: None)
    return nullcontext()


def graph_of(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replays(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Seconds of one of so many."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def measure(
    product: PackedLinear, x: torch.Tensor, memory: torch.Tensor, sizes: list[int], passes: int, parts: list[str]
) -> dict[tuple[int, str], dict[str, float | bool]]:
    """By the size of slices and what is timed."""
    out = torch.empty((len(x), -(-product.out_features // 8) * 8), dtype=torch.bfloat16, device="cuda")
    product.bulk(x, memory[:NOW], out)
    now, graphs = out.clone(), {}
    found: dict[tuple[int, str], dict[str, float | bool]] = {}
    seen: set[int] = set()
    span = 2 if product.swiglu else 1
    num_tiles = sum(part.num_tiles for part in product.ranges)
    for size in sizes:
        step = min(num_tiles, size // (TILE * product.in_features) // span * span)
        if step in seen:
            continue
        seen.add(step)
        scratch = memory[:size]
        out.fill_(float("nan"))
        product.bulk(x, scratch, out)
        row = {"slices": -(-num_tiles // step), "equal": torch.equal(out, now)}
        works: dict[str, Callable[[], object]] = {"all": lambda s=scratch: product.bulk(x, s, out)}  # type: ignore[misc]
        works |= dict.fromkeys(parts, works["all"])
        if step < num_tiles:
            works["beside"] = lambda s=memory[: 2 * size]: beside(product, x, s, out)  # type: ignore[misc]
        for name, work in works.items():
            with only(name):
                graphs[size, name] = graph_of(work)
            found[size, name] = dict(row)
    counts = {key: max(1, round(SECONDS / replays(graph, 2))) for key, graph in graphs.items()}
    times = defaultdict(list)
    for _ in range(passes):
        for key, graph in graphs.items():
            times[key].append(replays(graph, counts[key]))
    for key, row in found.items():
        row["us"] = round(statistics.median(times[key]) * 1e6, 1)
        row["spread"] = round((max(times[key]) - min(times[key])) / statistics.median(times[key]), 3)
    return found


def check(product: PackedLinear, memory: torch.Tensor) -> None:
    xs = [torch.randn(rows, product.in_features, device="cuda").bfloat16() for rows in (1024, 256)]
    alone = [product.bulk(x, memory[:NOW]) for x in xs]
    together = product.bulk_each(xs, memory[:NOW])
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    assert all(out.isfinite().all() for out in alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="256,1024,2048,4096")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--passes", type=int, default=5)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    began = perf_counter()
    sizes = [int(size) for size in args.sizes.split(",")]
    # `beside` takes two slices
    memory = torch.full((2 * max(*sizes, NOW),), float("nan"), dtype=torch.bfloat16, device="cuda")
    sums: dict[tuple[int, int, str], float] = defaultdict(float)
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    for name, (layers, (heights, width)) in PRODUCTS.items():
        product = PackedLinear([weight(rows, width) for rows in heights], swiglu=name == "gate_up")
        check(product, memory)
        weights = width * sum(map(abs, heights))
        parts = ["product", "expand"]
        for rows in map(int, args.rows.split(",")):
            x = torch.randn(rows, width, device="cuda").bfloat16()
            found = measure(product, x, memory, sizes, args.passes, parts)
            for (size, part), row in found.items():
                if part == "expand":
                    rate = {"tb_s": round(2.5625e-6 * weights / float(row["us"]), 2)}
                else:
                    rate = {"tflop_s": round(2e-6 * weights * rows / float(row["us"]))}
                print(json.dumps({"name": name, "rows": rows, "size": size, "part": part, **row, **rate}))
            last: dict[str, float] = {}
            for size in sizes:
                # one that makes no other slices than the one before it was not timed again
                last |= {part: float(row["us"]) for (other, part), row in found.items() if other == size}
                for part in ("all", *parts):
                    sums[rows, size, part] += layers * last[part] / 1e3
            # expansion does not depend on the rows
            parts = ["product"]
        del product
    for (rows, size, part), milliseconds in sums.items():
        print(json.dumps({"name": "27B", "rows": rows, "size": size, "part": part, "ms": round(milliseconds, 2)}))
    print(json.dumps({"seconds": round(perf_counter() - began, 1)}), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
