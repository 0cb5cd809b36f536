"""Compiles each product's and expert's kernel that serving the family's models launches, without a GPU.

    python -m tests.support.check_products [--arch 90] [--rows 1,16,32] [--formats NVFP4,FP8,BF16] [--models 27B,...]

A line a kernel: shape, registers, programs an SM has room for, bytes in flight an SM, instructions a weight. Exits with
1 if one spills. Takes seconds a kernel the first time; Triton keeps them on disk.
"""

from __future__ import annotations

import argparse
import sys

import torch

from pilotfish.kernels.cuda import linear, moe
from pilotfish.kernels.cuda.linear import choose_shape
from pilotfish.kernels.cuda.packing import TILE, UNIT, UNIT_BYTES, Format, Packed
from tests.support.compiled import Code, compiling

# hidden, feed-forward width
DENSE = {"0.8B": (1024, 3584), "2B": (2048, 6144), "4B": (2560, 9216), "9B": (4096, 12288), "27B": (5120, 17408)}
EXPERTS = {"35B-A3B": (2048, 512), "122B-A10B": (3072, 1024), "397B-A17B": (4096, 1024)}
MIXERS = {  # rows of q|gate|k|v and of qkv|z|b|a, width of o_proj and of out_proj
    "0.8B": (5120, 8224, 2048, 2048),
    "2B": (5120, 8224, 2048, 2048),
    "4B": (10240, 12352, 4096, 4096),
    "9B": (10240, 12352, 4096, 4096),
    "27B": (14336, 16480, 6144, 6144),
    "35B-A3B": (9216, 12352, 4096, 4096),
    "122B-A10B": (17408, 20608, 8192, 8192),
    "397B-A17B": (17408, 20608, 8192, 8192),
}
VOCABULARY = 248320


def empty(format: Format, rows: int, columns: int, row_numbers: bool = False, blocks: bool = False) -> Packed:
    tiles, units = -(-rows // TILE), -(-columns // UNIT)
    return Packed(
        format,
        torch.empty((tiles, units, UNIT_BYTES[format]), dtype=torch.uint8, device="meta"),
        torch.empty((tiles, 2), dtype=torch.int32, device="meta"),
        torch.empty((tiles, TILE if row_numbers else 1), device="meta"),
        format is Format.NVFP4,
        torch.empty((tiles, units), device="meta") if blocks else None,
    )


def products(model: str) -> list[tuple[int, int, bool]]:
    hidden, width = DENSE.get(model) or EXPERTS[model]
    attention, delta_net, o_width, out_width = MIXERS[model]
    shapes = [(attention, hidden, False), (delta_net, hidden, False), (hidden, o_width, False)]
    shapes += [(hidden, out_width, False), (VOCABULARY, hidden, False), (hidden, 2 * hidden, False)]
    return shapes + ([(2 * width, hidden, True), (hidden, width, False)] if model in DENSE else [(257, hidden, False)])


def describe(name: str, kernel: object, code: Code, unit_bytes: int, lane_weights: int, in_flight_units: int) -> bool:
    warps = kernel.metadata.num_warps  # type: ignore[attr-defined]
    programs = min(65536 // (-(-code.registers // 8) * 8 * 32 * warps), 64 // warps, 32)
    in_flight = programs * warps * in_flight_units * unit_bytes / 1024
    spills = code.stack or code.count("LDL") or code.count("STL")
    print(
        f"{name:58} {code.registers:4} registers {programs:2} programs {in_flight:4.0f} KB in flight"
        f" {len(code.instructions):5} instructions {len(code.instructions) / lane_weights:5.2f} a weight"
        f"{'  SPILLS' if spills else ''}",
        flush=True,
    )
    return bool(spills)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--rows", default="1,16,32")
    parser.add_argument("--formats", default="NVFP4,FP8,BF16")
    parser.add_argument("--models", default=",".join(MIXERS))
    args = parser.parse_args()
    pdl, spilled, seen = args.arch >= 90, 0, set()
    models, formats = args.models.split(","), [Format(name) for name in args.formats.split(",")]
    for model in models:
        for rows in map(int, args.rows.split(",")):
            for format in formats:
                for height, width, swiglu in products(model):
                    part = empty(format, height, width, row_numbers=format is Format.FP8)
                    shape = choose_shape(part, rows, swiglu)
                    if (key := (format, width, swiglu, shape)) in seen:
                        continue
                    seen.add(key)
                    x = torch.empty((rows, width), dtype=torch.bfloat16, device="meta")
                    out = torch.empty((rows, height // (2 if swiglu else 1)), dtype=torch.bfloat16, device="meta")
                    with compiling(args.arch) as kernels:
                        linear.launch(part, x, out, shape, swiglu, pdl)
                    weights = shape.tiles * TILE * part.num_units * UNIT // shape.warps // 32
                    name = f"{model} {format.value} {height}x{width} {vars(shape)}".replace("'", "")
                    units = shape.tiles * shape.stages
                    spilled += describe(name, kernels[0], Code(kernels[0]), UNIT_BYTES[format], weights, units)
                if model not in EXPERTS:
                    continue
                hidden, width = EXPERTS[model]
                group = moe.Group(empty(format, 2 * width * 2, hidden), empty(format, hidden * 2, width), 2, width)
                packed = moe.GroupedExperts.of([group], 8, 1, hidden)
                scratch = moe.Scratch.make(rows, 8, 1, width, hidden, torch.device("meta"))
                x = torch.empty((rows, hidden), dtype=torch.bfloat16, device="meta")
                with compiling(args.arch) as kernels:
                    packed.rows(x, torch.empty((rows, 8), dtype=torch.int32, device="meta"), scratch, pdl)
                for what, part, kernel in zip(
                    ("gate_up", "down"), (group.gate_up, group.down), kernels[-2:], strict=True
                ):
                    shape = moe.choose_shape(part.format, part.num_tiles // 2, part.num_units, rows)
                    weights = shape.tiles * TILE * part.num_units * UNIT // shape.warps // 32
                    name = f"{model} {format.value} experts {what} {rows} rows {vars(shape)}".replace("'", "")
                    units = shape.tiles * shape.stages
                    spilled += describe(name, kernel, Code(kernel), UNIT_BYTES[format], weights, units)
    sys.exit(1 if spilled else 0)


if __name__ == "__main__":
    main()
