"""Packed products and grouped experts on a GPU against the bytes they must read.

    python tests/bench/bench_kernels_linear.py [--formats NVFP4,FP8,BF16] [--rows 1,4,8,16,32,64,256] [--tune] ...

Regime: decoding, 1 .. 256 rows of x in the order in which lanes load it (--row-major: as prompts have it); weights
larger than the L2, or as many copies in turn as are. A time is that of one launch among many in a CUDA graph, each
reading the same x: the median of replays, with and without programmatic dependent launch. Experts are chosen from the
router's logits, beyond moe.CHOICE_ROWS rows by a launch more. The limit is the weights' bytes (codes, scales, numbers)
over the memory's rate, 4.37 TB/s of an H200. Values and bits are checked first; a product that fails prints no time.
--tune tries launch shapes instead, the best last: `warps` decides the bits where there are no segments, the rest does
not. One JSON line a row on stdout, a table on stderr.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product as combinations
from typing import Any

import torch
import triton
from tqdm import tqdm

from pilotfish.engine.checkpoint.fp8 import per_channel
from pilotfish.engine.checkpoint.nvfp4 import NvFp4Weight
from pilotfish.kernels.cuda import linear, moe
from pilotfish.kernels.cuda.expand import expand
from pilotfish.kernels.cuda.launch_shapes import LaunchShape, choose_shape, ring_fits
from pilotfish.kernels.cuda.linear import PackedLinear
from pilotfish.kernels.cuda.moe import ExpertScratch, ExpertWeights, GroupedExperts, combine
from pilotfish.kernels.cuda.packing import TILE, Format, Packed
from pilotfish.kernels.cuda.tiled_rows import AnyRows, TiledRows
from pilotfish.kernels.cuda.warm import compile_all
from tests.support.routed import outputs

RATE = 4.37e12  # bytes a second, read on one H200
PAST_L2 = 200e6
LAUNCHES = 40
SHAPES = (
    (12288, 2048),
    (2048, 4096),
    (8192, 2048),
    (28672, 2048),
    (248320, 2048),
    (34816, 5120),
    (5120, 17408),
    (5120, 6144),
)
ROW_PARALLEL = {(2048, 4096): 8, (5120, 6144): 8, (5120, 17408): 8}  # their segments of K
GATED = ((34816, 5120),)
SMALL = ((257, 2048), (64, 2048), (96, 5120))  # router; b and a
TOGETHER = ((12288, 64, 2048), (16384, 96, 5120))  # q|k|v|z with b|a in BF16
EXPERTS = {"35B-A3B": (256, 8, 2048, 512)}


def random_weight(format: Format, rows: int, columns: int) -> Any:
    def numbers(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")

    if format is Format.NVFP4:
        scale = numbers(rows, columns // 16, low=1, high=0x7F).view(torch.float8_e4m3fn)
        return NvFp4Weight(numbers(rows, columns // 2), scale, 2e4)
    if format is Format.FP8:
        codes = torch.randn(rows, columns, device="cuda").to(torch.float8_e4m3fn)
        return per_channel(codes, torch.full((rows,), 0.02, device="cuda"))
    return torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") * 0.02


def in_graph(launch: Callable[[int], None], count: int = LAUNCHES, replays: int = 15) -> float:
    """Seconds of one of `count` launches, each given its number: the median over replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for number in range(min(count, 3)):
            launch(number)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            launch(number)
    times = []
    for _ in range(replays + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / count)
    return statistics.median(times[3:])


def wanted_seconds(num_bytes: int, rows: int) -> float:
    """What the order to build this asks for, up to 16 rows."""
    floor = num_bytes / RATE
    return max(num_bytes / 3.3e12, floor + 2.5e-6) if rows <= 8 else max(num_bytes / 3.0e12, floor + 3e-6)


def report(name: str, rows: int, num_bytes: int, plain: float, pdl: float, **more: Any) -> None:
    floor = num_bytes / RATE
    best = min(plain, pdl)
    line = {
        "name": name,
        "rows": rows,
        "us": round(plain * 1e6, 2),
        "us_pdl": round(pdl * 1e6, 2),
        "floor_us": round(floor * 1e6, 2),
        "tb_s": round(num_bytes / best / 1e12, 2),
        "times_floor": round(best / floor, 2),
        "reached": bool(best <= wanted_seconds(num_bytes, rows)) if rows <= 16 else None,
        **more,
    }
    print(json.dumps(line), flush=True)
    tqdm.write(
        f"{name:28} {rows:4} rows {plain * 1e6:8.2f} us {pdl * 1e6:8.2f} with PDL, floor {floor * 1e6:7.2f},"
        f" {line['tb_s']:5.2f} TB/s, x {line['times_floor']:.2f} {'' if line['reached'] in (True, None) else 'missed'}",
        file=sys.stderr,
    )


def rows_of(x: torch.Tensor, row_major: bool) -> AnyRows:
    return x if row_major else TiledRows.of(x)


def copies_of(part: Packed) -> list[Packed]:
    count = max(1, -(-int(PAST_L2) // part.num_bytes))
    return [part] + [replace(part, data=part.data.clone()) for _ in range(count - 1)]


def check(product: PackedLinear, x: torch.Tensor) -> None:
    """Raises AssertionError on wrong values (of the first tiles) or bits that depend on the number of rows."""
    out = torch.empty((16, product.out_features), dtype=torch.float32, device="cuda")
    one = torch.empty_like(out[:1])
    product.rows(x[:16], out)
    product.rows(x[5:6].contiguous(), one)
    assert torch.equal(one[0], out[5]), "bits of a row depend on the others"
    part = product.ranges[0]
    tiles = min(64, part.num_tiles)
    scratch = torch.empty((tiles * TILE, x.shape[1]), dtype=torch.bfloat16, device="cuda")
    expand(part, slice(0, tiles), scratch)
    columns = min(tiles * TILE, product.out_features)
    want = x[:16].double() @ scratch[:columns].double().T
    assert torch.allclose(out[:, :columns].double(), want, rtol=0.02, atol=0.02 * float(want.abs().max())), "values"


def bench_products(
    formats: list[Format], rows: list[int], shapes: tuple[tuple[int, int], ...], row_major: bool
) -> None:
    for format, (height, width) in combinations(formats, shapes):
        segments = ROW_PARALLEL.get((height, width), 0)
        product = PackedLinear([random_weight(format, height, width)], segments=segments)
        first = torch.randn(max(*rows, 16), width, dtype=torch.bfloat16, device="cuda")
        x = rows_of(first, row_major)
        outs = {count: torch.empty((count, height), dtype=torch.bfloat16, device="cuda") for count in rows}

        def warm(product: PackedLinear = product, x: AnyRows = x, outs: dict[int, torch.Tensor] = outs) -> None:
            for out, pdl in combinations(outs.values(), (False, True)):
                product.rows(x, out, pdl)

        compile_all(warm)
        check(product, first)
        part = product.ranges[0]
        copies = copies_of(part)
        for count, out in outs.items():
            shape = choose_shape(part, count, segments=segments, tiled=not row_major)

            def launch(
                number: int,
                pdl: bool,
                out: torch.Tensor = out,
                shape: LaunchShape = shape,
                copies: list[Packed] = copies,
            ) -> None:
                linear.launch(copies[number % len(copies)], x, out, shape, False, pdl)  # noqa: B023

            launches = LAUNCHES if count <= 16 else 10
            plain, pdl = (in_graph(lambda number, pdl=pdl: launch(number, pdl), launches) for pdl in (False, True))
            report(f"{format.value} {height}x{width}", count, part.num_bytes, plain, pdl, shape=vars(shape))
        del product, copies, part


def bench_together(formats: list[Format], rows: list[int], row_major: bool) -> None:
    """BF16 tiles in the launch of others against a launch of their own after it. The bytes are those of both."""
    for format, (height, plain_height, width) in combinations(formats, TOGETHER):
        if format is Format.BF16:
            continue
        product = PackedLinear(
            [random_weight(kind, size, width) for kind, size in ((format, height), (Format.BF16, plain_height))]
        )
        ((part, plain),) = product.launches(1)
        assert plain is not None
        copies = [(copy, replace(plain, data=plain.data.clone())) for copy in copies_of(part)]
        x = rows_of(torch.randn(max(*rows, 16), width, dtype=torch.bfloat16, device="cuda"), row_major)
        for count in rows:
            outs = [torch.empty((count, height + plain_height), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
            shapes = [choose_shape(each, count, tiled=not row_major) for each in (part, plain)]
            shape = choose_shape(part, count, plain=plain, tiled=not row_major)

            def together(number: int, pdl: bool, copies: Any = copies, x: Any = x, out: Any = outs[0]) -> None:
                one, other = copies[number % len(copies)]
                linear.launch(one, x, out, shape, False, pdl, other)  # noqa: B023

            def apart(number: int, pdl: bool, copies: Any = copies, x: Any = x, out: Any = outs[1]) -> None:
                for each, shape in zip(copies[number % len(copies)], shapes, strict=True):  # noqa: B023
                    linear.launch(each, x, out, shape, False, pdl)

            compile_all(lambda: [run(0, pdl) for run in (together, apart) for pdl in (False, True)])
            together(0, False)
            apart(0, False)
            assert torch.equal(*outs), "bits depend on the launch"
            for what, run in (("one launch", together), ("two", apart)):
                plain_time, pdl_time = (
                    in_graph(lambda number, run=run, pdl=pdl: run(number, pdl)) for pdl in (False, True)
                )
                title = f"{format.value} {height}+{plain_height}x{width} {what}"
                report(title, count, part.num_bytes + plain.num_bytes, plain_time, pdl_time)


def in_ring(part: Packed, shapes: Iterable[LaunchShape]) -> Iterator[LaunchShape]:
    """What of a shape can differ with its units in shared memory: how many, steps of x, and registers if it has no
    bound. What does not fit 48 KB with the sums over warps, or does not come out even, is left out."""
    for shape in shapes:
        steps, turns = part.num_units // shape.split // shape.warps, shape.segments // shape.split // shape.warps or 1
        bounds = (shape.registers,) if shape.registers else {1: (0, 96), 2: (0, 128), 4: (168,)}[shape.row_tiles]
        for stages, ahead, registers in combinations((1, 2, 3, 4, 5), (0,) if shape.quarters else (0, 1), bounds):
            size = max(stages, turns)
            ringed = replace(shape, stages=stages, x_ahead=ahead, registers=registers, ring=True)
            even = size % stages == 0 and size % turns == 0
            if ring_fits(ringed, part.format) and even and stages <= steps and ahead <= min(stages, steps - 1):
                yield ringed


def tuned_shapes(part: Packed, chosen: LaunchShape, keep_bits: bool) -> Iterator[LaunchShape]:
    most = {Format.NVFP4: 8, Format.FP8: 4, Format.BF16: 2}[part.format]
    row_tiles, segments = chosen.row_tiles, chosen.segments
    if segments:
        for (warps, parts), tiles, stages, ahead in combinations(
            ((8, 1), (4, 1), (4, 2), (2, 4)), (1, 2), (1, 2, 4), (0, 1)
        ):
            steps, turns = part.num_units // parts // warps, segments // parts // warps
            if stages <= steps and ahead <= min(stages, steps - 1) and tiles * row_tiles * stages <= 16 and turns:
                registers = 168 if tiles * row_tiles > 4 else 0
                for pinned in (False, True):
                    yield LaunchShape(warps, tiles, row_tiles, stages, ahead, segments, parts, registers, pinned)
        ways = combinations(((8, 1), (4, 2), (2, 4)), (1, 2))
        yield from in_ring(
            part, (LaunchShape(warps, tiles, row_tiles, 0, 0, segments, parts) for (warps, parts), tiles in ways)
        )
        return
    all_warps = (chosen.warps,) if keep_bits else (4, 8, 16)
    for warps, tiles, stages, ahead in combinations(all_warps, (1, 2, 4), (1, 2, 3, 4, 6, 8), (0, 1, 3)):
        # more would not fit the registers
        room = most // 2 if row_tiles == 4 else most
        if part.num_units % warps or tiles * stages > room or tiles * row_tiles > 16 or ahead * row_tiles > 3:
            continue
        steps = part.num_units // warps
        if stages <= steps and ahead <= min(stages, steps - 1):
            yield from (LaunchShape(warps, tiles, row_tiles, stages, ahead, pinned=pinned) for pinned in (False, True))
    if part.block_scale is None and part.format is not Format.BF16:
        yield from in_ring(part, (LaunchShape(chosen.warps, tiles, row_tiles, 0, 0) for tiles in (1, 2)))


def tuned_parts(format: Format, shapes: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, PackedLinear]]:
    """Each shape as it is in a model: GATED with SwiGLU, TOGETHER with BF16 beside it, in segments if ROW_PARALLEL."""
    beside = {(height, width): plain for height, plain, width in TOGETHER}
    for height, width in shapes:
        name = f"{format.value} {height}x{width}"
        if (height, width) in GATED:
            halves = [random_weight(format, height // 2, width) for _ in range(2)]
            yield f"{name} swiglu", PackedLinear(halves, swiglu=True)
            continue
        parts = [random_weight(format, height, width)]
        if format is not Format.BF16 and (height, width) in beside:
            plain = beside[height, width]
            yield f"{name}+{plain}", PackedLinear([*parts, random_weight(Format.BF16, plain, width)])
        else:
            yield name, PackedLinear(parts, segments=ROW_PARALLEL.get((height, width), 0))


def tune_products(
    formats: list[Format], rows: list[int], shapes: tuple[tuple[int, int], ...], keep_bits: bool, row_major: bool
) -> None:
    for name, product in (case for format in formats for case in tuned_parts(format, shapes)):
        part, plain = product.launches(1)[0]
        x = rows_of(torch.randn(max(rows), product.in_features, dtype=torch.bfloat16, device="cuda"), row_major)
        copies = copies_of(part)
        for count in rows:
            empty = torch.empty((count, product.out_features), dtype=torch.bfloat16, device="cuda")
            out = rows_of(empty, row_major or not product.swiglu)
            chosen = choose_shape(part, count, product.swiglu, plain, product.segments, not row_major)
            tried = list(tuned_shapes(part, chosen, keep_bits))
            if product.swiglu:
                tried = [shape for shape in tried if shape.tiles > 1]
            tried += [] if chosen in tried else [chosen]

            def run(shape: LaunchShape, part: Packed) -> None:
                linear.launch(part, x, out, shape, product.swiglu, True, plain)  # noqa: B023

            compile_all(lambda: [run(shape, part) for shape in tried])  # noqa: B023
            times = []
            for shape in tried:
                seconds = in_graph(lambda number: run(shape, copies[number % len(copies)]), 20, 5)  # noqa: B023
                times.append((seconds, shape))
            for seconds, shape in sorted(times, key=lambda entry: -entry[0])[-6:]:
                report(name, count, part.num_bytes, seconds, seconds, shape=vars(shape))
                tqdm.write(f"    {shape}", file=sys.stderr)
            for pinned in (False, True):
                same = replace(chosen, pinned=pinned)
                ours = next((seconds for seconds, shape in times if shape == same), float("nan"))
                tqdm.write(
                    f"    {'chosen now' if same == chosen else 'not'}: {same}, {ours * 1e6:.2f} us", file=sys.stderr
                )


def random_experts(format: Format, name: str) -> GroupedExperts:
    experts, top_k, hidden, width = EXPERTS[name]
    sizes = ((width, hidden), (width, hidden), (hidden, width))
    made = [ExpertWeights(*(random_weight(format, *size) for size in sizes)) for _ in range(experts + 1)]
    return GroupedExperts(made[:-1], made[-1], top_k)


class Routed:
    """Rows over a layer of experts, by as many uniform routings in turn as pass the L2."""

    def __init__(self, layer: GroupedExperts, count: int, row_major: bool):
        generator = torch.Generator(device="cuda").manual_seed(count)
        x = torch.randn(count, layer.hidden, dtype=torch.bfloat16, device="cuda")
        self.layer, self.x, self.out = layer, rows_of(x, row_major), rows_of(torch.empty_like(x), row_major)
        self.scratch = ExpertScratch.make(count, layer.top_k, layer.num_experts, layer.width, layer.hidden, x.device)
        sizes = (count, layer.num_experts + 1)
        self.logits = [torch.rand(sizes, device="cuda", generator=generator) for _ in range(LAUNCHES)]
        self.outputs = outputs(count, layer.top_k, "cuda")
        chosen = (logits[:, :-1].topk(layer.top_k, -1).indices for logits in self.logits)
        self.distinct = statistics.mean(len(ids.unique()) for ids in chosen) + 1
        self.num_bytes = int(self.distinct * layer.num_bytes / (layer.num_experts + 1))

    def launch(self, number: int, pdl: bool) -> None:
        self.layer.rows(self.x, self.logits[number], *self.outputs, self.scratch, pdl)


def bench_experts(formats: list[Format], rows: list[int], row_major: bool) -> None:
    for format, name in combinations(formats, EXPERTS):
        layer = random_experts(format, name)
        for count in rows:
            routed = Routed(layer, count, row_major)
            stream = torch.zeros(count, layer.hidden, device="cuda")
            weights, gate = torch.full((count, layer.top_k), 0.1, device="cuda"), torch.ones(count, device="cuda")
            scale = torch.ones(layer.hidden, device="cuda")

            def whole(number: int, pdl: bool) -> None:
                routed.launch(number, pdl)  # noqa: B023
                combine(routed.scratch.out, weights, gate, stream, scale, 1e-6, routed.out, pdl)  # noqa: B023

            compile_all(lambda: [whole(0, pdl) for pdl in (False, True)])
            for what, run in (("experts", routed.launch), ("experts and combine", whole)):
                plain, pdl = (in_graph(lambda number, pdl=pdl: run(number, pdl)) for pdl in (False, True))  # noqa: B023
                title = f"{format.value} {name} {what}"
                report(title, count, routed.num_bytes, plain, pdl, distinct=round(routed.distinct, 1))


def tune_experts(formats: list[Format], rows: list[int], keep_bits: bool, row_major: bool) -> None:
    """Launch shapes of gate_up and of down, each with the other's chosen now."""
    for format, name in combinations(formats, EXPERTS):
        layer = random_experts(format, name)
        chosen_by = moe.choose_shape
        for count, down in combinations(rows, (False, True)):
            routed, group = Routed(layer, count, row_major), layer.groups[0]
            part = group.down if down else group.gate_up
            tiles = part.num_tiles // group.num_experts
            chosen = chosen_by(part.format, tiles, part.num_units, count)
            # gate's and up's tiles take turns
            all_warps, all_tiles = (chosen.warps,) if keep_bits else (1, 2, 4, 8), (1, 2, 4, 8) if down else (2, 4, 8)
            tried = [
                LaunchShape(warps, most, chosen.row_tiles, stages, ahead, registers=chosen.registers, pinned=pinned)
                for warps, most, stages, ahead, pinned in combinations(
                    all_warps, all_tiles, (1, 2, 4), (0, 1, 2, 3), (False, True)
                )
                if part.num_units % warps == 0 and most * stages <= 8 and most * chosen.row_tiles <= 8
                if stages <= part.num_units // warps and ahead <= min(stages, part.num_units // warps - 1)
            ]

            def launch(shape: LaunchShape, number: int) -> None:
                moe.choose_shape = lambda form, tiles, units, rows: (
                    shape if units == part.num_units else chosen_by(form, tiles, units, rows)  # noqa: B023
                )
                routed.launch(number, True)  # noqa: B023

            compile_all(lambda: [launch(shape, 0) for shape in tried])  # noqa: B023
            times = [(in_graph(lambda number, shape=shape: launch(shape, number), 40, 5), shape) for shape in tried]
            moe.choose_shape = chosen_by
            title = f"{format.value} {name} {'down' if down else 'gate_up'}"
            for seconds, shape in sorted(times, key=lambda entry: -entry[0])[-8:]:
                report(title, count, routed.num_bytes, seconds, seconds, shape=vars(shape))
                tqdm.write(f"    {shape}", file=sys.stderr)
            ours = next((seconds for seconds, shape in times if shape == chosen), float("nan"))
            tqdm.write(f"    chosen now: {chosen}, {ours * 1e6:.2f} us", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="NVFP4,FP8,BF16")
    parser.add_argument("--rows", default="1,4,8,16,32,64,256")
    parser.add_argument("--shapes", help="as 12288x2048,...; all of the list if not given")
    parser.add_argument("--tune", action="store_true", help="try launch shapes, at --rows")
    parser.add_argument("--keep-bits", action="store_true", help="with --tune: only shapes of the same bits")
    parser.add_argument("--row-major", action="store_true", help="x as prompts have it")
    parser.add_argument("--no-products", action="store_true")
    parser.add_argument("--no-experts", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    formats = [Format(name) for name in args.formats.split(",")]
    rows = [int(count) for count in args.rows.split(",")]
    shapes = SHAPES + SMALL
    if args.shapes:
        shapes = tuple((int(n), int(k)) for n, k in (shape.split("x") for shape in args.shapes.split(",")))
    device = torch.cuda.get_device_name()
    print(json.dumps({"device": device, "torch": torch.__version__, "triton": triton.__version__}), flush=True)
    if args.tune:
        if not args.no_products:
            tune_products(formats, rows, shapes, args.keep_bits, args.row_major)
        if not args.no_experts:
            tune_experts(formats, rows, args.keep_bits, args.row_major)
        return
    if not args.no_products:
        bench_products(formats, rows, shapes, args.row_major)
        bench_together(formats, [count for count in rows if count <= 32], args.row_major)
    if not args.no_experts:
        bench_experts(formats, rows, args.row_major)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
