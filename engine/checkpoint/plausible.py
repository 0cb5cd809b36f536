"""What a packed matrix may be worth by its scales: found out while they are read, at no cost.

Scales of the wrong convention (a divisor where a factor belongs, or the other way round) make weights a million times
too large, and text of one token: nothing in a header shows it. Trained weights stay below some tens, and a matrix that
is packed from its largest value A has A = 6 * 448 / divisor in NVFP4, so that the inverse of its number says 7e6 / A.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

from pilotfish.engine.checkpoint.layouts import FP8, NVFP4_CT, Module
from pilotfish.engine.errors import CheckpointError

LARGEST = 1000.0
"""The largest magnitude of a weight. In the shipped pack they end at 2, in released ones at some tens."""
LARGEST_CODE = {True: 448.0, False: 6.0}
"""The largest code of FP8 (True), and of NVFP4."""
SCALE_BITS = {
    "F8_E4M3": (np.uint8, 0x7E, None),
    "BF16": (np.uint16, 0x7F7F, 0x8000),
    "F16": (np.uint16, 0x7BFF, 0x8000),
    "F32": (np.uint32, 0x7F7FFFFF, 0x80000000),
}
"""How scales of a dtype are read: the integer that has their bits, the bits of the largest finite number (above them
are infinity, NaN and the negatives), and those of minus zero where it may stand."""


class SeenScales:
    """The largest scale of each matrix, of bytes that come in pieces and from several threads."""

    def __init__(self) -> None:
        self._largest: dict[str, float] = {}
        self._lock = threading.Lock()

    def see(self, module: Module, suffix: str, raw: np.ndarray) -> None:
        """Takes in some of a matrix's scales, uint8 [n]. Raises CheckpointError unless they are finite numbers, none
        negative."""
        largest = _largest(module, suffix, raw)
        with self._lock:
            self._largest[module.name] = max(largest, self._largest.get(module.name, 0.0))

    def check(self, module: Module, codes: torch.Tensor, number: tuple[str, float] | None) -> bool:
        """Whether the matrix is more than zeros. `number`: the suffix and value of its global scale, if there is one.

        Raises CheckpointError for scales that are all 0 where codes are not, and for weights that no model has.
        """
        largest = self._largest.pop(module.name, 0.0)
        is_fp8 = module.layout in FP8
        if not largest:
            if _any_code(codes, is_fp8):
                what = f"{module.raw_name}: all of its {_scales_of(module)} are 0 and its codes are not"
                raise CheckpointError(f"{what}, so that it would be 0 throughout; want the scales it was packed with")
            return False
        plain = LARGEST_CODE[is_fp8] * largest
        suffix, value = number or ("", 1.0)
        worth = plain / value if module.layout in NVFP4_CT else plain * value
        if worth > LARGEST:
            raise CheckpointError(_too_large(module, worth, plain, suffix, value))
        return True


def _too_large(module: Module, worth: float, plain: float, suffix: str, value: float) -> str:
    divides = module.layout in NVFP4_CT
    text = f"{module.raw_name}: weights up to {worth:.3g} by its scales, want at most {LARGEST:g}"
    if (plain * value if divides else plain / value) <= LARGEST and suffix:
        wanted, got = ("divisor", "factor") if divides else ("factor", "divisor")
        return (
            f"{text}: {suffix[1:]} {value:.6g} is a {got}, where {module.layout.value} has a {wanted}; want its inverse"
        )
    if module.layout in FP8:
        return f"{text}: its {_scales_of(module)} seem to be divisors, where {module.layout.value} has factors"
    return text


def _scales_of(module: Module) -> str:
    names = [suffix for suffix in module.parts if "scale" in suffix and "global" not in suffix and "_2" not in suffix]
    return next((name[1:] for name in names if "input" not in name), "scales")


def _any_code(codes: torch.Tensor, is_fp8: bool) -> bool:
    """Whether one is not +-0."""
    mask = 0x7F if is_fp8 else 0x77
    return bool((codes.view(torch.uint8) & mask).any())


def _largest(module: Module, suffix: str, raw: np.ndarray) -> float:
    dtype = module.parts[suffix].dtype
    bits_type, largest, minus_zero = SCALE_BITS[dtype]
    bits = raw.view(bits_type)
    most = int(bits.max()) if bits.size else 0
    if most <= largest:
        return _value(most, dtype)
    if minus_zero is None:
        raise CheckpointError(f"{module.raw_name}{suffix}: want scales in [0, 448], got a NaN or a negative one")
    positive = bits[bits != minus_zero]
    most = int(positive.max()) if positive.size else 0
    if most > largest:
        raise CheckpointError(f"{module.raw_name}{suffix}: want finite scales, none negative")
    return _value(most, dtype)


def _value(bits: int, dtype: str) -> float:
    """The value of a finite number that is not negative."""
    if dtype == "F8_E4M3":
        exponent, mantissa = bits >> 3, bits & 7
        return (mantissa / 8) * 2.0**-6 if not exponent else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    if dtype == "F16":
        return float(np.uint16(bits).view(np.float16))
    return float(np.uint32(bits << 16 if dtype == "BF16" else bits).view(np.float32))
