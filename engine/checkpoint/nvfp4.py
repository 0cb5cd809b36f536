"""NVFP4 as compressed-tensors, ModelOpt and lynn-engine store it, in plain torch: what tests and kernels call true.

A matrix [N, K], K a multiple of 16, is kept as 4-bit codes, one scale for each 16 columns of a row, and one number
for the whole: w = e2m1(code) * scale / global_scale (compressed-tensors) or * global_scale (ModelOpt, lynn-engine).
In `packed` byte j of a row holds column 2j in its low nibble and 2j+1 in its high one. A code is a sign (bit 3) and
an index into 0, 0.5, 1, 1.5, 2, 3, 4, 6. With e4m3 scales every product e2m1 * scale is exact in bf16, fp16 and fp32
(4.5 bits a weight); with lynn-engine's fp16 scales in fp32 alone (5 bits a weight).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

GROUP = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_EPS = 0.125  # torch.finfo(torch.float8_e4m3fn).eps: stands for a scale that rounds to 0
DEQUANTIZE_BLOCK = 1 << 22  # weights expanded at a time: 16 MiB of fp32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SEARCHED = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 1.05, 1.1, 1.2, 1.35, 1.5)
"""Shares of the plain scale that calibration tries for each group; the first of equal ones wins. 1.5 puts the largest
value on 4, beyond which steps are the coarsest."""
E2M1_SIGNED = E2M1 + tuple(-value for value in E2M1)

# A magnitude becomes the index of the number of boundaries below it. The boundaries lie half way between
# neighbours; one that is itself met goes to the even index (round to nearest, ties to even), hence the flags.
_BOUNDARIES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


@dataclass(frozen=True, eq=False)
class _PackedCodes:
    """Codes uint8 [N, K/2], their scales [N, K/16] and one number, on one device."""

    packed: torch.Tensor
    scale: torch.Tensor
    global_scale: float

    @property
    def shape(self) -> torch.Size:
        """(N, K) of the matrix it stands for."""
        return torch.Size((self.packed.shape[0], self.packed.shape[1] * 2))

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def num_bytes(self) -> int:
        return self.packed.nbytes + self.scale.nbytes + 4


@dataclass(frozen=True, eq=False)
class NvFp4Weight(_PackedCodes):
    """A packed [N, K] matrix on one device.

    packed: uint8 [N, K/2]; scale: float8_e4m3fn [N, K/16], none negative or NaN; global_scale: finite and above 0, a
    divisor, or a factor if `multiplies`. The two are not turned into one another: that would round.
    Raises ValueError if the parts do not fit each other.
    """

    multiplies: bool = False

    def __post_init__(self) -> None:
        _check_parts(self.packed, self.scale, torch.float8_e4m3fn, self.global_scale)

    def to(self, device: str | torch.device) -> NvFp4Weight:
        return NvFp4Weight(self.packed.to(device), self.scale.to(device), self.global_scale, self.multiplies)

    def take_rows(self, rows: torch.Tensor) -> NvFp4Weight:
        """The matrix of these rows, int64 [n] on its device, in their order; the values stay what they were."""
        scale = self.scale.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
        return NvFp4Weight(self.packed[rows], scale, self.global_scale, self.multiplies)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[N, K] in `dtype`: the exact product of code and scale, divided or multiplied in fp32, then rounded once."""
        # A tensor, not a number: some devices turn division by a number into a product with its reciprocal.
        number = torch.tensor(self.global_scale, dtype=torch.float32, device=self.device)
        return _expand(self.packed, self.scale, dtype, torch.mul if self.multiplies else torch.div, number)


@dataclass(frozen=True, eq=False)
class LynnWeight(_PackedCodes):
    """A packed [N, K] matrix of a lynn-engine pack: like NvFp4Weight, but scale is float16 and global_scale a factor.

    Codes times such scales do not fit 16 bits, so kernels made for e4m3 scales must not be given one.
    """

    def __post_init__(self) -> None:
        _check_parts(self.packed, self.scale, torch.float16, self.global_scale)

    def to(self, device: str | torch.device) -> LynnWeight:
        return LynnWeight(self.packed.to(device), self.scale.to(device), self.global_scale)

    def take_rows(self, rows: torch.Tensor) -> LynnWeight:
        """The matrix of these rows, int64 [n] on its device, in their order; the values stay what they were."""
        return LynnWeight(self.packed[rows], self.scale[rows], self.global_scale)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[N, K] in `dtype`: the exact fp32 product of code and scale, times global_scale, rounded once."""
        number = torch.tensor(self.global_scale, dtype=torch.float32, device=self.device)
        return _expand(self.packed, self.scale, dtype, torch.mul, number)


def _check_parts(packed: torch.Tensor, scale: torch.Tensor, scale_dtype: torch.dtype, global_scale: float) -> None:
    if packed.dtype != torch.uint8 or packed.dim() != 2:
        raise ValueError(f"packed: want uint8 [N, K/2], got {packed.dtype} {list(packed.shape)}")
    wanted = (packed.shape[0], packed.shape[1] * 2 // GROUP)
    if packed.shape[1] * 2 % GROUP or scale.dtype != scale_dtype or scale.shape != wanted:
        got = f"{scale.dtype} {list(scale.shape)}"
        raise ValueError(f"scale: want {scale_dtype} {list(wanted)} (K a multiple of {GROUP}), got {got}")
    if not 0 < global_scale < float("inf"):
        raise ValueError(f"global_scale: want a finite number above 0, got {global_scale}")


def _expand(
    packed: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    number: torch.Tensor,
) -> torch.Tensor:
    """finish(code * scale, number) in fp32, some rows at a time."""
    rows, columns = packed.shape[0], packed.shape[1] * 2
    table = _byte_values(packed.device)
    out = torch.empty((rows, columns), dtype=dtype, device=packed.device)
    step = max(1, DEQUANTIZE_BLOCK // max(1, columns))
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        values = table[packed[part].int()].view(-1, columns // GROUP, GROUP)
        product = values * scale[part].float()[:, :, None]
        out[part] = finish(product, number).view(-1, columns)
    return out


def _byte_values(device: torch.device) -> torch.Tensor:
    """fp32 [256, 2]: the two values a packed byte stands for, low nibble first."""
    codes = unpack(torch.arange(256, dtype=torch.uint8).view(256, 1))
    return torch.tensor(E2M1_SIGNED, dtype=torch.float32)[codes.int()].to(device)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [..., K] in 0..15, of packed uint8 [..., K/2]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Packed uint8 [..., K/2], of codes uint8 [..., K] in 0..15; K even."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def encode(values: torch.Tensor) -> torch.Tensor:
    """The nearest e2m1 codes, uint8, of fp32 values: ties to the even code, beyond +-6 clamped, -0 as 0."""
    magnitude = values.abs()
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for boundary, tie_goes_up in _BOUNDARIES:
        codes += magnitude >= boundary if tie_goes_up else magnitude > boundary
    return codes | ((values < 0).to(torch.uint8) << 3)


def global_scale_for(amax: torch.Tensor) -> torch.Tensor:
    """The fp32 divisor under which the largest scale is 448: 448 * 6 / amax, or 1 for a matrix of zeros."""
    amax = amax.float().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.nan_to_num(E4M3_MAX * E2M1_MAX / amax, posinf=1.0)


def quantize(
    weight: torch.Tensor, global_scale: torch.Tensor | None = None, importance: torch.Tensor | None = None
) -> NvFp4Weight:
    """NVFP4 of a finite [N, K] matrix, K a multiple of 16, computed in fp32, to the nearest codes.

    A group's scale = e4m3(amax(group) / 6 * global_scale), as llm-compressor does without calibration; global_scale
    is global_scale_for(amax(W)), or the one given, for a part of a matrix or for several that share it. With
    `importance` fp32 [K], mean squares of the inputs, it is that of SEARCHED times it under which the group's error,
    sum of importance * (w - q)^2, is least. Raises ValueError on another shape, or values that are not finite.
    """
    if weight.dim() != 2 or weight.shape[1] % GROUP:
        raise ValueError(f"want [N, K] with K a multiple of {GROUP}, got {list(weight.shape)}")
    values = weight.float()
    if not values.isfinite().all():
        raise ValueError("want finite values")
    if global_scale is None:
        global_scale = global_scale_for(values.abs().max())
    groups = values.view(values.shape[0], -1, GROUP)
    e2m1_max = torch.tensor(E2M1_MAX, device=values.device)
    wanted = global_scale * (groups.abs().amax(-1) / e2m1_max)
    scale, codes = _codes_under(wanted, groups, global_scale)
    if importance is not None:
        weights = importance.view(-1, GROUP)
        least = _group_errors(scale, codes, groups, global_scale, weights)
        for factor in SEARCHED[1:]:
            other, others = _codes_under(wanted * factor, groups, global_scale)
            error = _group_errors(other, others, groups, global_scale, weights)
            better = error < least
            scale, least = torch.where(better, other, scale), torch.where(better, error, least)
            codes = torch.where(better[:, :, None], others, codes)
    return NvFp4Weight(pack(codes.view(values.shape)), scale.to(torch.float8_e4m3fn), float(global_scale))


def _codes_under(
    wanted: torch.Tensor, groups: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The e4m3 scale [N, K/16] next to the wanted one, as fp32, and the codes [N, K/16, 16] under it."""
    scale = wanted.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
    scale = torch.where(scale == 0, E4M3_EPS, scale)
    return scale, encode(groups / (scale / global_scale)[:, :, None])


def _group_errors(
    scale: torch.Tensor, codes: torch.Tensor, groups: torch.Tensor, global_scale: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    table = torch.tensor(E2M1_SIGNED, device=codes.device)
    stored = table[codes.int()] * (scale / global_scale)[:, :, None]
    return ((groups - stored).square_() * weights).sum(-1)
