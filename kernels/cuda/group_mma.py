"""Packed NVFP4 weights on the warp group's instruction: from a lane's registers, as they were unpacked. Gluon.

wgmma m64nNk16 takes A, weights here, from registers: each of four warps has 16 rows, in the fragments of
mma.m16n8k16. Such a fragment is what packing.py gives a lane, in 8 steps of 16 columns a unit. B, rows of x, comes from
shared memory, its columns in the fragments' order: of a half unit, 32 words of two numbers, lane q has words 8 q ... of
x, and step by step each of the four lanes has two.

A program of four warps has 8 tiles of weights, four at a time: while some are multiplied others are unpacked.
"""

# Triton compiles no unpacking of tuples, and what grows in a loop has no type that mypy knows:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mma_v2, warpgroup_mma, warpgroup_mma_wait

from pilotfish.kernels.cuda.mma import nvfp4_word

TILES = 8
"""Of a program: gate and up of 64 output columns, or down of 128."""
TILES_AHEAD = gl.constexpr(3)
"""Units of tiles that are on their way while one is multiplied; of rows one or two."""
UNIT_WORDS = gl.constexpr(288)
UNPACK_ASM = gl.constexpr(
    "\n".join(["{", ".reg .b32 t, u, z;", "mov.b32 z, 0x80008000;", *nvfp4_word("$4", range(4), "$12"), "}"])
)
"""mma.py's unpacking for one word $4 of 8 codes and its scale times 2^118, twice in $12: four pairs of bf16. Each of
both is given 8 times, once for a weight."""
UNPACK_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 4 + ["r"] * 16))

# of a warp's tile: [warp, row half, lane, half, octet, weight]
WEIGHTS = gl.constexpr(
    gl.BlockedLayout([1, 1, 1, 2, 2, 8], [1, 1, 32, 1, 1, 1], [4, 1, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0])
)
CODES = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
SCALES = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
# all of a program's threads copy, 8 bytes each
SCALES_IN = gl.constexpr(gl.BlockedLayout([1, 2], [2, 16], [4, 1], [1, 0]))
OUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
PACKED_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
ROWS_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


def has_group_products(device: torch.device) -> bool:
    """Whether four warps multiply by one instruction there: wgmma, of compute capability 9 alone. On a CPU kernels are
    compiled, for 9.0, to be looked at."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


@gluon.constexpr_function
def sums(rows, group):
    """The accumulators' layout, [64, rows]: of the warp group's instruction, or of each warp's own."""
    if group:
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])
    return gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])


@gluon.constexpr_function
def operand(number, rows, group):
    return gl.DotOperandLayout(number, sums(rows, group), 2)


@gluon.constexpr_function
def axis(layout, dim):
    """Of `layout`'s axes that one alone."""
    for other in reversed(range(layout.rank)):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def fragments(codes, scales, LAYOUT: gl.constexpr):
    """bf16 [64, 128], times 2^-8, as the warp group's A operand: of int32 [4, 256] and [4, 32], a unit of four tiles.

    No number moves: each lane unpacks what it loaded.
    """
    words: gl.constexpr = gl.SliceLayout(5, WEIGHTS)
    halves: gl.constexpr = gl.SliceLayout(4, words)
    codes = gl.convert_layout(gl.reshape(codes, [4, 2, 32, 2, 2]), words, assert_trivial=True)
    lanes: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, halves))
    scales = gl.convert_layout(scales, lanes, assert_trivial=True)[:, None, :, None]
    row_half = gl.arange(0, 2, axis(halves, 1))[None, :, None, None]
    half = gl.arange(0, 2, axis(halves, 3))[None, None, None, :]
    # a lane's four bytes: of its two rows, of each the two halves
    scales = (scales >> (row_half * 16 + half * 8) & 0xFF) * 0x00100010 + 0x70007000
    scales, _ = gl.broadcast(scales[:, :, :, :, None], codes)
    each = (gl.arange(0, 8, axis(WEIGHTS, 5)) * 0)[None, None, None, None, None, :]
    # not pure: else it might be moved to before the wait for what still reads these registers
    weights = gl.inline_asm_elementwise(
        UNPACK_ASM,
        UNPACK_CONSTRAINTS,
        [codes[:, :, :, :, :, None] + each, scales[:, :, :, :, :, None] + each],
        dtype=gl.bfloat16,
        is_pure=False,
        pack=8,
    )
    # warp, row half, g, q, half, octet, pair 4, 2 of it -> a pair of each lane q together
    weights = gl.permute(gl.reshape(weights, [4, 2, 8, 4, 2, 2, 4, 2]), [0, 1, 2, 4, 5, 6, 3, 7])
    return gl.convert_layout(gl.reshape(weights, [64, 128]), LAYOUT, assert_trivial=True)


@gluon.jit
def copy_tiles(shared, sources, unit, slot, UNITS: gl.constexpr):
    """The same of the program's tiles."""
    for i in gl.static_range(2):
        mask = unit < UNITS
        async_copy.async_copy_global_to_shared(shared[i].index(slot), sources[i] + unit * UNIT_WORDS, mask)
    async_copy.commit_group()


@gluon.jit
def multiply(rows, weights, totals, GROUP: gl.constexpr):
    """Begins to add a unit's products to each of the sums, with rows [n, 128] in shared memory. Without GROUP they are
    done at once, in the same order."""
    out = ()
    for i in gl.static_range(len(totals)):
        # the same registers for any number of rows
        left = gl.convert_layout(weights, operand(0, rows[i].shape[0], GROUP), assert_trivial=True)
        right = rows[i].permute([1, 0])
        if GROUP:
            out = out + (warpgroup_mma(left, right, totals[i], is_async=True),)
        else:
            out = out + (mma_v2(left, right.load(operand(1, rows[i].shape[0], GROUP)), totals[i]),)
    return out


@gluon.jit
def waited(LEFT: gl.constexpr, totals, GROUP: gl.constexpr):
    """The sums, when of all products begun no more than LEFT are still to come."""
    gl.static_assert(len(totals) <= 2)
    if not GROUP:
        return totals
    elif len(totals) == 1:
        return (warpgroup_mma_wait(LEFT, deps=[totals[0]]),)
    else:
        return warpgroup_mma_wait(LEFT, deps=[totals[0], totals[1]])
