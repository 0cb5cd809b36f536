"""A dense layer's products one behind the other, as a round has them, on a GPU: which launch shapes are fast there.

    python tests/bench/bench_kernels_layer.py [--rows 1,8,16,32] [--products mix,out,gate_up,down] [--row-major]

Regime: decoding, layers of the 27B in NVFP4 with more weights than the L2 holds, in a CUDA graph with programmatic
dependent launch. A product alone, launched again and again, finds its x where it was; here each x has just been written
by the kernel before, as in a round, in the order in which lanes load it (--row-major: row by row). Of one product at a
time other launch shapes are tried, of 17 to 64 rows those of wide.py too; times are those of a whole layer without
attention or GatedDeltaNet, the median of replays. Bits are compared first. One JSON line a shape on stdout, a table,
the best last, on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product as combinations

import torch
from tqdm import tqdm

from pilotfish.kernels.cuda import linear, norm, wide
from pilotfish.kernels.cuda.launch_shapes import LaunchShape, choose_shape
from pilotfish.kernels.cuda.linear import PackedLinear
from pilotfish.kernels.cuda.packing import Format
from pilotfish.kernels.cuda.swiglu import silu_product
from pilotfish.kernels.cuda.tiled_rows import AnyRows, TiledRows, stored
from pilotfish.kernels.cuda.warm import compile_all
from pilotfish.kernels.cuda.wide import WideShape
from tests.bench.bench_kernels_linear import in_graph, in_ring, random_weight, rows_of

HIDDEN, WIDTH, MIX, GATES, HEADS = 5120, 17408, 16384, 96, 6144
AnyShape = LaunchShape | WideShape
LAYERS = 6
EPS = 1e-6


class Layer:
    def __init__(self) -> None:
        kind = Format.NVFP4
        self.products = {
            "mix": PackedLinear([random_weight(kind, MIX, HIDDEN), random_weight(Format.BF16, GATES, HIDDEN)]),
            "out": PackedLinear([random_weight(kind, HIDDEN, HEADS)], segments=8),
            "gate_up": PackedLinear([random_weight(kind, WIDTH, HIDDEN) for _ in range(2)], swiglu=True),
            "down": PackedLinear([random_weight(kind, HIDDEN, WIDTH)], segments=8),
        }


class Chain:
    """The products of all layers for so many rows, each by its own launch shape."""

    def __init__(self, layers: list[Layer], rows: int, row_major: bool):
        self.layers, self.rows = layers, rows
        self.chosen = {}
        for name, product in layers[0].products.items():
            part, plain = product.launches(rows)[0]
            shape = wide.choose_wide_shape(part, rows, product.segments, product.in_features)
            by_warps = choose_shape(part, rows, product.swiglu, plain, product.segments, not row_major)
            self.chosen[name] = by_warps if shape is None else shape

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device="cuda")

        self.stream, self.scale = empty(rows, HIDDEN, dtype=torch.float32), torch.ones(HIDDEN, device="cuda")
        self.start = torch.randn(rows, HIDDEN, device="cuda", generator=torch.Generator("cuda").manual_seed(rows))
        self.delta, self.mixed = empty(rows, HIDDEN), empty(rows, MIX + GATES)
        self.normed, self.heads, self.inner = (
            rows_of(empty(rows, width), row_major) for width in (HIDDEN, HEADS, WIDTH)
        )
        # what stands for a mixer knows of no order, and numbers of others do as well
        self.gated = stored(self.heads)[0].view(-1)[: rows * HEADS].view(rows, HEADS)

    def launch(self, shapes: dict[str, AnyShape]) -> None:
        def rows(layer: Layer, name: str, x: AnyRows, out: AnyRows) -> None:
            product, shape = layer.products[name], shapes[name]
            # of mix a part of BF16, which is a launch of its own beside the warp group's
            part, plain = product.ranges[0], product.ranges[1] if len(product.ranges) > 1 else None
            if isinstance(shape, LaunchShape):
                linear.launch(part, x, out, shape, product.swiglu, True, plain)
                return
            wide.launch(part, x, out, shape, product.swiglu, product.segments, True)
            if plain is not None:
                own = choose_shape(plain, self.rows, False, None, 0, isinstance(x, TiledRows))
                linear.launch(plain, x, out, own, False, True, None)

        self.stream.copy_(self.start)
        norm.add_norm(self.stream, None, self.scale, EPS, self.normed, pdl=True)
        for layer in self.layers:
            rows(layer, "mix", self.normed, self.mixed)
            silu_product(self.mixed[:, :HEADS], self.mixed[:, HEADS : 2 * HEADS], self.gated)
            rows(layer, "out", self.heads, self.delta)
            norm.add_norm(self.stream, self.delta, self.scale, EPS, self.normed, pdl=True)
            rows(layer, "gate_up", self.normed, self.inner)
            rows(layer, "down", self.inner, self.delta)
            norm.add_norm(self.stream, self.delta, self.scale, EPS, self.normed, pdl=True)

    def seconds(self, shapes: dict[str, AnyShape]) -> float:
        """Of a layer."""
        return in_graph(lambda _: self.launch(shapes), 1, 9) / len(self.layers)


def candidates(product: PackedLinear, rows: int, chosen: AnyShape, row_major: bool) -> Iterator[AnyShape]:
    """What is chosen, first, shapes with units on their way in shared memory and in registers, x in quarters, and the
    warp group's kernel."""
    yield chosen
    part, plain = product.ranges[0], product.ranges[1] if len(product.ranges) > 1 else None
    if wide.can_take(part, rows, product.segments, product.in_features):
        for height, tiles, first in combinations((32,) if rows <= 32 else (32, 64), (4, 8), (False, True)):
            yield WideShape(height, tiles, tiles_first=first)
    if not isinstance(chosen, LaunchShape):
        chosen = choose_shape(part, rows, product.swiglu, plain, product.segments, not row_major)
        yield chosen
    row_tiles, segments = chosen.row_tiles, chosen.segments
    ways = ((8, 1), (4, 2)) if segments else ((chosen.warps, 1),)
    all_tiles = (1, 2) if segments and row_tiles < 4 else (2,)
    yield from in_ring(
        part,
        (
            LaunchShape(warps, tiles, row_tiles, 0, 0, segments, parts)
            for (warps, parts), tiles in combinations(ways, all_tiles)
        ),
    )
    if row_tiles < 4:
        for ahead in (0, 1):
            yield replace(chosen, stages=2, x_ahead=ahead, registers=0, ring=False)
    if row_tiles > 1 and not row_major:
        for (warps, parts), tiles, registers in combinations(ways, (1, 2, 4) if segments else (2, 4), (96, 128, 168)):
            quartered = LaunchShape(warps, tiles, row_tiles, 1, 0, segments, parts, registers, quarters=True)
            yield quartered
            yield from in_ring(part, [quartered])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,16,32")
    parser.add_argument("--row-major", action="store_true", help="x as prompts have it")
    parser.add_argument("--products", default="mix,out,gate_up,down")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    layers = [Layer() for _ in range(LAYERS)]
    for rows, name in combinations(map(int, args.rows.split(",")), args.products.split(",")):
        chain = Chain(layers, rows, args.row_major)
        shapes_of = candidates(layers[0].products[name], rows, chain.chosen[name], args.row_major)
        tried = [chain.chosen | {name: shape} for shape in shapes_of]
        compile_all(lambda: [chain.launch(shapes) for shapes in tried])  # noqa: B023
        chain.launch(chain.chosen)
        want = chain.stream.clone()
        assert want.isfinite().all()
        times = []
        for shapes in tried:
            chain.launch(shapes)
            assert torch.equal(chain.stream, want), f"bits depend on the launch shape: {shapes[name]}"
            times.append((chain.seconds(shapes), shapes[name]))
        before = times[0][0]
        for seconds, shape in sorted(times, key=lambda entry: -entry[0]):
            line = {"name": name, "rows": rows, "layer_us": round(seconds * 1e6, 2), "shape": vars(shape)}
            line["less_us"] = round((before - seconds) * 1e6, 2)
            print(json.dumps(line), flush=True)
            chosen = " as chosen" if shape == times[0][1] else ""
            tqdm.write(
                f"{name:8} {rows:3} rows {seconds * 1e6:8.2f} us a layer, {line['less_us']:6.2f} less{chosen} {shape}",
                file=sys.stderr,
            )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
