"""The kernels' arithmetic, walked lane by lane on the CPU: the PTX that unpacks, mma's fragments, and where each is.

No CPU runs the kernels themselves. What is checked instead: the loads as mma.py makes them, the very PTX it holds, run
by a small interpreter over all lanes, mma.m16n8k16 as the PTX manual lays out its fragments, and the order in which a
sum over warps is stored; against a product with the checkpoint format's own values.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from pilotfish.kernels.cuda import mma, packing
from pilotfish.kernels.cuda.packing import Format
from tests.unit.kernels.cuda.test_packing import values, weights

LANE = np.arange(32)
G, Q = LANE // 4, LANE % 4


def number(text: str) -> np.ndarray:
    return np.full(32, int(text, 0), np.uint32)


def halves(words: np.ndarray) -> np.ndarray:
    """fp64 [32, 2] of packed bf16 pairs, low half first."""
    pairs = np.stack((words & 0xFFFF, words >> 16), -1).astype(np.uint32) << 16
    return pairs.view(np.float32).astype(np.float64)


def fma_bf16x2(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    exact = torch.from_numpy(halves(a) * halves(b) + halves(c))
    # products of codes and scales are exact in bf16; the interpreter rounds nothing, so that a wrong one is seen
    rounded = exact.to(torch.bfloat16)
    assert torch.equal(rounded.double(), exact)
    bits = rounded.view(torch.int16).numpy().astype(np.uint32) & 0xFFFF
    return bits[:, 0] | bits[:, 1] << 16


def prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    source = np.concatenate((a.astype("<u4")[:, None].view(np.uint8), b.astype("<u4")[:, None].view(np.uint8)), 1)
    picks = [int(selector[0] >> (4 * i)) & 0xF for i in range(4)]
    assert max(picks) < 8
    return np.ascontiguousarray(source[:, picks]).view(np.uint32)[:, 0]


def shift_right_wrap(a: np.ndarray, b: np.ndarray, n: np.ndarray) -> np.ndarray:
    both = (b.astype(np.uint64) << np.uint64(32)) | a
    return (both >> n.astype(np.uint64)).astype(np.uint32)


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    out = np.zeros(32, np.uint32)
    for index in range(8):
        if int(table[0]) >> index & 1:
            match = [value if index >> (2 - place) & 1 else ~value for place, value in enumerate((a, b, c))]
            out |= match[0] & match[1] & match[2]
    return out


OPS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "shf.r.wrap.b32": shift_right_wrap,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "fma.rn.bf16x2": fma_bf16x2,
}


def run_ptx(asm: str, outs: int, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The registers $0 .. of a block of PTX over 32 lanes, given its inputs, the registers after them."""
    registers = {f"${outs + index}": value.astype(np.uint32) for index, value in enumerate(inputs)}
    for line in re.sub(r"[{}\n]", " ", asm).split(";"):
        op, _, rest = line.strip().partition(" ")
        if not op or op == ".reg":
            continue
        target, *sources = (part.strip() for part in rest.split(","))
        arguments = [registers[s] if s in registers else number(s) for s in sources]
        registers[target] = OPS[op](*arguments)
    return [registers[f"${index}"] for index in range(outs)]


def unpack_half(format: Format, loads: list[np.ndarray], scales: np.ndarray | None, row_half: int) -> list[np.ndarray]:
    """Four tensors [4, 32] of bf16 pairs, as mma.unpack_half gives them."""
    if format is Format.NVFP4:
        asm = (mma.NVFP4_LOW, mma.NVFP4_HIGH)[row_half].value
        flat = run_ptx(asm, 16, [*loads[row_half], *[scales] * 4])
    elif format is Format.FP8:
        asm = mma.FP8_ASM.value
        flat = [word for load in loads[2 * row_half : 2 * row_half + 2] for word in run_ptx(asm, 8, list(load))]
    else:
        flat = [word for load in loads[4 * row_half : 4 * row_half + 4] for word in load]
    return [np.stack(flat[4 * t : 4 * t + 4]) for t in range(4)]


def mma_fragments() -> list[list[str]]:
    """The registers of A, B for the two steps of MMA_ASM, by name."""
    return [re.findall(r"\{([^}]*)\}", line)[1:3] for line in mma.MMA_ASM.value.strip().split("\n")]


def multiply(low: np.ndarray, high: np.ndarray, x: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Both steps of MMA_ASM on fragments laid out as the PTX manual does; total fp64 [32, 4]."""
    names = {f"${4 + i}": low[i] for i in range(4)} | {f"${8 + i}": high[i] for i in range(4)}
    names |= {f"${12 + i}": x[i] for i in range(4)}
    for a_names, b_names in mma_fragments():
        a, b = np.zeros((16, 16)), np.zeros((16, 8))
        for place, name in enumerate(a_names.split(",")):
            rows, columns = G + 8 * (place % 2), 2 * Q + 8 * (place // 2)
            a[rows, columns], a[rows, columns + 1] = halves(names[name]).T
        for place, name in enumerate(b_names.split(",")):
            b[2 * Q + 8 * place, G], b[2 * Q + 8 * place + 1, G] = halves(names[name]).T
        product = a @ b
        total = total + np.stack([product[G + 8 * (i // 2), 2 * Q + i % 2] for i in range(4)], 1)
    return total


def walk(packed: packing.Packed, x: torch.Tensor, warps: int) -> np.ndarray:
    """fp64 [tiles, 8 rows of x, 16]: what the kernels add up, before a weight's own number."""
    tiles, units = packed.num_tiles, packed.num_units
    data = packed.data.view(torch.int32).numpy().view(np.uint32)
    width = x.shape[1]
    words = x.view(torch.int32).numpy().view(np.uint32).reshape(-1)
    loads = {Format.NVFP4: 2, Format.FP8: 4, Format.BF16: 8}[packed.format]
    out = np.zeros((tiles, 8, 16))
    for tile in range(tiles):
        total = np.zeros((32, 4))
        for warp in range(warps):
            for step in range(units // warps):
                unit = data[tile, step * warps + warp]
                registers = [unit[load * 128 + LANE * 4 + np.arange(4)[:, None]] for load in range(loads)]
                scales = unit[256 + LANE] if packed.format is Format.NVFP4 else None
                low, high = (unpack_half(packed.format, registers, scales, half) for half in range(2))
                part = np.zeros((32, 4))
                for t in range(4):
                    column = warp * 64 + Q * 8 + step * warps * 64 + t // 2 * 32 + t % 2 * 4 + np.arange(4)[:, None]
                    there = column < width // 2
                    x_words = np.where(there, words[np.where(there, G * (width // 2) + column, 0)], 0)
                    part = multiply(low[t], high[t], x_words, part)
                if packed.block_scale is not None:
                    part = part * float(packed.block_scale[tile, step * warps + warp])
                total += part
        # over_warps: element 64 c + 32 r + lane
        flat = total.reshape(32, 2, 2).transpose(2, 1, 0).reshape(128)
        index = np.arange(128)
        out[tile, index % 4 * 2 + index // 64, index % 32 // 4 + index // 32 % 2 * 8] = flat
    return out


@pytest.mark.parametrize("columns", [256, 400])
@pytest.mark.parametrize("kind", list(weights(16, 128)))
def test_lanes_multiply_what_the_checkpoint_holds(kind, columns):
    weight = weights(40, columns)[kind]
    packed = packing.pack(weight)
    x = torch.randn(8, columns, generator=torch.Generator().manual_seed(3)).bfloat16()
    out = torch.from_numpy(walk(packed, x, 2))
    if packed.format is Format.NVFP4:
        out = out * mma.NVFP4_RESCALE.value
    number = packed.number.double()[:, None, :]
    out = out / number if packed.divides else out * number
    wanted = x.double() @ values(weight).double().T
    # all of it is in fp64, but the values' own product with their number was rounded to fp32
    torch.testing.assert_close(
        out.transpose(0, 1).reshape(8, -1)[:, :40], wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max()
    )


def test_every_code_and_scale_unpacks_exactly():
    """All 16 codes under all 127 scales, at each place of a word."""
    scales = torch.arange(0x7F, dtype=torch.uint8).repeat_interleave(16 * 4)[: 0x7F * 64]
    scales = scales[: len(scales) // 64 * 64].view(-1, 4)
    codes = torch.arange(16, dtype=torch.uint8).repeat(len(scales) * 4).view(len(scales), 64)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    data = packing._pack_nvfp4(packing._pad(packed, 16, 64), packing._pad(scales, 16, 8))
    want = packing._unpack_nvfp4(data)
    words = data.contiguous().view(torch.int32).numpy().view(np.uint32)[:, 0]
    for tile in range(0, len(words), 16):
        registers = [words[tile][load * 128 + LANE * 4 + np.arange(4)[:, None]] for load in range(2)]
        for half in range(2):
            pairs = unpack_half(Format.NVFP4, registers, words[tile][256 + LANE], half)
            for t in range(4):
                for pair in range(4):
                    column = 64 * (t // 2) + 16 * Q + 8 * (t % 2) + 2 * pair
                    got = halves(pairs[t][pair]) * mma.NVFP4_RESCALE.value
                    for i in range(2):
                        assert np.array_equal(got[:, i], want[tile, 0, G + 8 * half, column + i].double().numpy())
