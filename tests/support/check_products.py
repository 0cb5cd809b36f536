"""Compiles each product's and expert's kernel that serving the family's models launches, without a GPU.

    python -m tests.support.check_products [--arch 90] [--rows 1,16,32] [--formats NVFP4,FP8,BF16] [--models 27B,...]

x is in the order in which lanes load it, as of all products but lm_head's and the draft head's first one. A line a
kernel: shape, registers, programs an SM has room for, bytes in flight an SM, instructions a weight. Exits with 1 if one
spills. Takes seconds a kernel the first time; Triton keeps them on disk.
"""

from __future__ import annotations

import argparse
import sys

import torch

from pilotfish.kernels.cuda import linear, moe
from pilotfish.kernels.cuda.launch_shapes import choose_shape
from pilotfish.kernels.cuda.packing import TILE, UNIT, UNIT_BYTES, Format, Packed
from pilotfish.kernels.cuda.tiled_rows import AnyRows, TiledRows
from tests.support.compiled import Code, compiling
from tests.support.routed import outputs

# hidden, feed-forward width
DENSE = {"0.8B": (1024, 3584), "2B": (2048, 6144), "4B": (2560, 9216), "9B": (4096, 12288), "27B": (5120, 17408)}
EXPERTS = {"35B-A3B": (2048, 512), "122B-A10B": (3072, 1024), "397B-A17B": (4096, 1024)}
MIXERS = {  # rows of q|gate|k|v, of qkv|z and of b|a, width of o_proj and of out_proj
    "0.8B": (5120, 8192, 32, 2048, 2048),
    "2B": (5120, 8192, 32, 2048, 2048),
    "4B": (10240, 12288, 64, 4096, 4096),
    "9B": (10240, 12288, 64, 4096, 4096),
    "27B": (14336, 16384, 96, 6144, 6144),
    "35B-A3B": (9216, 12288, 64, 4096, 4096),
    "122B-A10B": (17408, 20480, 128, 8192, 8192),
    "397B-A17B": (17408, 20480, 128, 8192, 8192),
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


def rows_of(num_rows: int, width: int, tiled: bool) -> AnyRows:
    if tiled:
        return TiledRows.empty(num_rows, width, torch.device("meta"))
    return torch.empty((num_rows, width), dtype=torch.bfloat16, device="meta")


def experts_of(format: Format, hidden: int, width: int, num_experts: int = 256, top_k: int = 8) -> moe.GroupedExperts:
    """So many experts and a shared one, in one group."""
    count = num_experts + 1
    gate_up, down = empty(format, 2 * width * count, hidden), empty(format, hidden * count, width)
    return moe.GroupedExperts.of([moe.ExpertGroup(gate_up, down, count, width)], top_k, num_experts, hidden)


def products(model: str) -> list[tuple[int, int, int, bool]]:
    """Rows, rows of BF16 in the same launch, width, and whether it is gate and up."""
    hidden, width = DENSE.get(model) or EXPERTS[model]
    attention, delta_net, gates, o_width, out_width = MIXERS[model]
    plain = [(attention, hidden), (hidden, o_width), (hidden, out_width), (VOCABULARY, hidden), (hidden, 2 * hidden)]
    plain += [(hidden, width)] if model in DENSE else [(257, hidden)]
    shapes = [(delta_net, gates, hidden, False), *((rows, 0, columns, False) for rows, columns in plain)]
    return shapes + ([(2 * width, 0, hidden, True)] if model in DENSE else [])


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
                for height, gates, width, swiglu in products(model):
                    part = empty(format, height, width, row_numbers=format is Format.FP8)
                    plain = empty(Format.BF16, gates, width) if gates and format is not Format.BF16 else None
                    tiled = height != VOCABULARY
                    shape = choose_shape(part, rows, swiglu, plain, tiled=tiled)
                    if (key := (format, width, swiglu, shape, plain is None)) in seen:
                        continue
                    seen.add(key)
                    x = rows_of(rows, width, tiled)
                    out = rows_of(rows, height // (2 if swiglu else 1) + gates, swiglu)
                    with compiling(args.arch) as kernels:
                        linear.launch(part, x, out, shape, swiglu, pdl, plain)
                    weights = shape.tiles * TILE * part.num_units * UNIT // shape.warps // 32
                    beside = "" if plain is None else f"+{gates}"
                    name = f"{model} {format.value} {height}{beside}x{width} {vars(shape)}".replace("'", "")
                    units = shape.tiles * shape.stages
                    spilled += describe(name, kernels[0], Code(kernels[0]), UNIT_BYTES[format], weights, units)
                if model not in EXPERTS:
                    continue
                hidden, width = EXPERTS[model]
                packed = experts_of(format, hidden, width)
                group = packed.groups[0]
                scratch = moe.ExpertScratch.make(
                    rows, packed.top_k, packed.num_experts, width, hidden, torch.device("meta")
                )
                x = rows_of(rows, hidden, True)
                with compiling(args.arch) as kernels:
                    logits = torch.empty((rows, packed.num_experts + 1), device="meta")
                    packed.rows(x, logits, *outputs(rows, packed.top_k, "meta"), scratch, pdl)
                for what, part, kernel in zip(
                    ("gate_up", "down"), (group.gate_up, group.down), kernels[-2:], strict=True
                ):
                    shape = moe.choose_shape(part.format, part.num_tiles // group.num_experts, part.num_units, rows)
                    weights = shape.tiles * TILE * part.num_units * UNIT // shape.warps // 32
                    name = f"{model} {format.value} experts {what} {rows} rows {vars(shape)}".replace("'", "")
                    units = shape.tiles * shape.stages
                    spilled += describe(name, kernel, Code(kernel), UNIT_BYTES[format], weights, units)
    sys.exit(1 if spilled else 0)


if __name__ == "__main__":
    main()
