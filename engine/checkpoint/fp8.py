"""FP8 matrices as released files store them, in plain torch: what tests and kernels call true.

A matrix [N, K] is kept as e4m3 bytes and scales that multiply, one for each block of R rows and C columns:
w = fp8 * scale[n // R, k // C]. Per tensor R, C = N, K; per output channel 1, K; block formats 128, 128, the last
blocks of an axis being cut off where it ends. A product of the two has at most 28 significant bits, so fp32 rounds it
once, and not at all where the scale is bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 128
E4M3_MAX = 448.0
SEARCHED = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)
"""Shares of a row's plain scale that calibration tries."""
DEQUANTIZE_BLOCK = 1 << 22  # weights expanded at a time: 16 MiB of fp32


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """A packed [N, K] matrix on one device.

    weight: float8_e4m3fn [N, K]; scale: bf16 or fp32 [ceil(N/R), ceil(K/C)], finite, none negative; block: (R, C).
    Raises ValueError if the parts do not fit each other.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]

    def __post_init__(self) -> None:
        if self.weight.dtype != torch.float8_e4m3fn or self.weight.dim() != 2:
            raise ValueError(f"weight: want float8_e4m3fn [N, K], got {self.weight.dtype} {list(self.weight.shape)}")
        wanted = tuple(-(-size // step) for size, step in zip(self.weight.shape, self.block, strict=True))
        if self.scale.dtype not in (torch.bfloat16, torch.float32) or tuple(self.scale.shape) != wanted:
            got = f"{self.scale.dtype} {list(self.scale.shape)}"
            raise ValueError(f"scale: want bf16 or fp32 {list(wanted)} for blocks of {self.block}, got {got}")

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return self.weight.shape

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + self.scale.nbytes

    def to(self, device: str | torch.device) -> Fp8Weight:
        return Fp8Weight(self.weight.to(device), self.scale.to(device), self.block)

    def take_rows(self, rows: torch.Tensor) -> Fp8Weight:
        """The matrix of these rows, int64 [n] on its device, in their order; the values stay what they were.

        Blocks stay blocks where the rows are whole ones, else each row gets scales of its own.
        """
        taken = self.weight.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
        height, width = self.block
        if len(self.scale) == 1:
            return Fp8Weight(taken, self.scale, (max(1, len(rows)), width))
        if len(rows) % height == 0:
            runs = rows.view(-1, height)
            whole = runs[:, :1] + torch.arange(height, device=rows.device)
            if bool((runs == whole).all() & (runs[:, 0] % height == 0).all()):
                return Fp8Weight(taken, self.scale[runs[:, 0] // height], self.block)
        return Fp8Weight(taken, self.scale[rows // height], (1, width))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[N, K] in `dtype`: the product in fp32, then rounded once more if `dtype` is narrower."""
        rows, columns = self.shape
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        step = max(1, DEQUANTIZE_BLOCK // max(1, columns))
        for begin in range(0, rows, step):
            part = slice(begin, min(begin + step, rows))
            blocks = torch.arange(part.start, part.stop, device=self.device) // self.block[0]
            factors = self.scale[blocks].float().repeat_interleave(self.block[1], dim=1)[:, :columns]
            out[part] = self.weight[part].float() * factors
        return out


def per_tensor(weight: torch.Tensor, scale: torch.Tensor) -> Fp8Weight:
    """scale: one number of any shape."""
    return Fp8Weight(weight, scale.reshape(1, 1), (max(1, weight.shape[0]), max(1, weight.shape[1])))


def per_channel(weight: torch.Tensor, scale: torch.Tensor) -> Fp8Weight:
    """scale: [N] or [N, 1]."""
    return Fp8Weight(weight, scale.reshape(-1, 1), (1, max(1, weight.shape[1])))


def per_block(weight: torch.Tensor, scale: torch.Tensor) -> Fp8Weight:
    """scale: [ceil(N/128), ceil(K/128)], or the same with axes of 1 after each."""
    return Fp8Weight(weight, scale.reshape(scale.shape[0], -1), (BLOCK, BLOCK))


def quantize_rows(values: torch.Tensor, importance: torch.Tensor | None = None) -> Fp8Weight:
    """A scale for each row of a finite fp32 [N, K]: amax / 448, or, with `importance` [K], mean squares of the inputs,
    that of SEARCHED times it under which the row's error, sum of importance * (w - q)^2, is least."""
    plain = row_scales(values.abs().amax(1, keepdim=True))
    best = _under(values, plain)
    if importance is None:
        return Fp8Weight(best, plain, (1, max(1, values.shape[1])))
    scale, least = plain, _row_errors(values, best, plain, importance)
    for factor in SEARCHED[1:]:
        other = plain * factor
        codes = _under(values, other)
        error = _row_errors(values, codes, other, importance)
        better = error < least
        scale, least = torch.where(better, other, scale), torch.where(better, error, least)
        best = torch.where(better, codes.view(torch.uint8), best.view(torch.uint8)).view(torch.float8_e4m3fn)
    return Fp8Weight(best, scale, (1, max(1, values.shape[1])))


def quantize_under(values: torch.Tensor, scale: torch.Tensor) -> Fp8Weight:
    """Rows of fp32 [N, K] under one scale, fp32 [1, 1]."""
    return per_tensor(_under(values, scale), scale)


def row_scales(amax: torch.Tensor) -> torch.Tensor:
    """fp32 scales of what has these largest magnitudes; 1 where all is zero."""
    return torch.where(amax > 0, amax / torch.tensor(E4M3_MAX, device=amax.device), 1.0)


def _under(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _row_errors(
    values: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, importance: torch.Tensor
) -> torch.Tensor:
    return ((values - codes.float() * scale).square_() * importance).sum(1, keepdim=True)
