"""Products of up to 256 rows with packed weights, bitwise independent of what the other rows are and how many.

y = x W^T, W a fusion of parts [N_i, K] in NVFP4, FP8 or BF16, in the order of packing.py. One CTA takes 16 rows of W,
or a few times 16; its warps share K between them: warp w the units w, w + warps, ... one after the other, by
mma.m16n8k16 with 8 rows of x as columns; then the warps' sums are added in order of w. The number of warps follows
from the weight's shape alone. How many tiles a CTA has, how many units are in flight and how many columns share a weight's
unpacking follow from the number of rows, and change no bit.

Reads the packed weights once, x from L1 or L2. The floor is those bytes over the memory's rate. R = rows, N, K.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F

from pilotfish.kernels.cuda import packing
from pilotfish.kernels.cuda.packing import Packed

MAX_ROWS = 256


class PackedLinear:
    """Parts [N_i, K] fused to one product with N = the sum of N_i, on one device.

    parts: bf16 tensors, NvFp4Weight or Fp8Weight; they are not referred to afterwards. With `swiglu` the parts are gate
    and up, of one shape and format, and the product is silu(gate) * up, N = N_0. Raises ValueError for a part that
    cannot be packed, with the part's number.
    """

    def __init__(self, parts: Sequence[Any], swiglu: bool = False):
        columns = {int(part.shape[1]) for part in parts}
        if len(columns) != 1:
            raise ValueError(f"want parts of one width, got {sorted(columns)}")
        self.in_features = columns.pop()
        heights = [int(part.shape[0]) for part in parts]
        self.swiglu = swiglu
        self.out_features = heights[0] if swiglu else sum(heights)
        packed = [_pack_part(number, part, 0 if swiglu else sum(heights[:number])) for number, part in enumerate(parts)]
        if swiglu:
            if len(parts) != 2 or heights[0] != heights[1] or packed[0].kind != packed[1].kind:
                got = [(part.format.value, height) for part, height in zip(packed, heights, strict=True)]
                raise ValueError(f"want gate and up of one shape and format, got {got}")
            self.ranges = [packing.interleave(*packed)]
        else:
            self.ranges = [packing.join(list(run)) for _, run in groupby(packed, key=lambda part: part.kind)]
        self.num_bytes = sum(part.num_bytes for part in self.ranges)

    def rows(self, x: torch.Tensor, out: torch.Tensor, pdl: bool = False) -> None:
        """Writes out [R, N], bf16 or fp32, R of 1 .. MAX_ROWS. x: bf16 [>= R, K], contiguous.

        A row's bits depend on that row of x alone. With `pdl` the kernels start while what came before still runs.
        """
        raise NotImplementedError

    def bulk(self, x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """bf16 [T, N] for prefill: any T. scratch: bf16, at least `scratch_size` numbers; overwritten."""
        raise NotImplementedError

    @property
    def scratch_size(self) -> int:
        """Numbers of bf16 that `bulk` needs: the matrix expanded."""
        return self.in_features * self.out_features * (2 if self.swiglu else 1)

    def dequantize(self) -> torch.Tensor:
        """fp32 [N, K] ([2 N, K], gate then up, with `swiglu`): exactly what the parts' own `dequantize` give."""
        height = self.out_features * (2 if self.swiglu else 1)
        out = torch.empty((height, self.in_features), dtype=torch.float32, device=self.ranges[0].data.device)
        for part in self.ranges:
            values = packing.unpack(part, self.in_features).view(part.num_tiles, packing.TILE, -1)
            for tile, (first, count) in enumerate(part.place.tolist()):
                if self.swiglu:
                    first += (tile % 2) * self.out_features
                out[first : first + count] = values[tile, :count]
        return out

    def rows_reference(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """The same in plain torch, in fp32; rounded once."""
        product = F.linear(x[: len(out)].float(), self.dequantize())
        if self.swiglu:
            gate, up = product.chunk(2, -1)
            product = F.silu(gate) * up
        out.copy_(product)


def _pack_part(number: int, part: Any, first_column: int) -> Packed:
    try:
        return packing.pack(part, first_column)
    except ValueError as error:
        raise ValueError(f"part {number}: {error}") from error
