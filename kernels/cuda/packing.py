"""Weights re-ordered once, at load, into the order in which a warp's lanes multiply them.

A matrix [N, K] is cut into tiles of 16 rows and units of 128 columns; missing rows and columns are 0. A unit is what
one warp takes at a step, as loads of 16 bytes a lane, lane = 4 g + q: rows g and g + 8, and of each half h of the
unit the 16 columns 64 h + 16 q ... That is the A fragment of mma.m16n8k16 under a fixed permutation of the columns,
chosen so that a lane's columns of a row-major x are 16 bytes each (tiled_rows.py: x in the order of lanes), and that
the 16 columns of a lane share one NVFP4 scale. Bytes of a unit:

    NVFP4  codes [row half 2][lane 32][half and octet 4] as words of 8 codes, then scales [lane 32][row half 2][half 2]
    FP8    [row half 2][half 2][lane 32][4] words of 4 codes
    BF16   [row half 2][half 2][octet 2][lane 32][8] numbers

The bits of a word stand so that few instructions make each pair of codes two bf16 numbers: see NVFP4_BITS. A scale is
stored as 5 bits of exponent and 3 of mantissa, normalised, so that its bf16 form takes two instructions; where it is 0
the codes are set to 0. All of it can be undone: `unpack` gives the values of the format's own `dequantize`.

4.5 bits a weight as NVFP4 has them, plus 12 bytes for a tile's 16 rows: no more than the checkpoint's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

TILE = 16
UNIT = 128
GROUP = 16
WORK = 1 << 24  # weights re-ordered at a time

# Where the sign, the two exponent bits and the mantissa bit of a code lie in the 16 bits of each half of a word, for
# the pairs (k, k+1) = (0, 1), (2, 3), (4, 5), (6, 7); even columns in the low half. 16 + b: bit b of the other half.
# The first pair stands as bf16 wants it (15, 8, 7, 6: the value times 2^-126); the second is that rotated by 4, the
# third shifted by 6; the fourth takes the bits left over, which two shifts bring home.
NVFP4_BITS = ((15, 8, 7, 6), (19, 12, 11, 10), (9, 2, 1, 0), (13, 14, 5, 4))
# The same for the 8 bits of an e4m3 code, from the sign down: the value times 2^-120.
FP8_BITS = ((15, 10, 9, 8, 7, 6, 5, 4), (11, 14, 13, 12, 3, 2, 1, 0))
SCALE_EXPONENT = 21  # a scale's byte: (its exponent + 21) * 8 + mantissa


class Format(Enum):
    NVFP4 = "NVFP4"
    FP8 = "FP8"
    BF16 = "BF16"


UNIT_BYTES = {Format.NVFP4: 1024 + 128, Format.FP8: 2048, Format.BF16: 4096}


@dataclass(frozen=True, eq=False)
class Packed:
    """Tiles of one format, multiplied by one launch.

    data: uint8 [tiles, units, bytes]; place: int32 [tiles, 2], the first output column of a tile and how many of its
    rows count; number: fp32 [tiles, 1] or [tiles, 16], what a product is multiplied by, or divided by if `divides`;
    block_scale: fp32 [tiles, units], a factor for each unit, or None.
    """

    format: Format
    data: torch.Tensor
    place: torch.Tensor
    number: torch.Tensor
    divides: bool
    block_scale: torch.Tensor | None

    @property
    def num_tiles(self) -> int:
        return self.data.shape[0]

    @property
    def num_units(self) -> int:
        return self.data.shape[1]

    @property
    def num_bytes(self) -> int:
        tensors = (self.data, self.place, self.number, self.block_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def kind(self) -> tuple[object, ...]:
        """What parts must share to be multiplied by one launch."""
        return (self.format, self.divides, self.number.shape[1], self.block_scale is not None, self.num_units)


def pack(weight: Any, first_column: int = 0) -> Packed:
    """A matrix [N, K] whose products go to output columns first_column ... of a fused result.

    weight: a bf16 tensor, an NvFp4Weight or an Fp8Weight. Raises ValueError for anything else, an FP8 code that is NaN,
    and FP8 blocks that are not 128 columns wide or end inside a tile.
    """
    if isinstance(weight, torch.Tensor):
        if weight.dtype != torch.bfloat16 or weight.dim() != 2:
            raise ValueError(f"want a bf16 matrix [N, K], got {weight.dtype} {list(weight.shape)}")
        return _packed(Format.BF16, _by_rows(_pack_bf16, weight), len(weight), first_column)
    if hasattr(weight, "packed"):
        if weight.scale.dtype != torch.float8_e4m3fn:
            raise ValueError(f"want e4m3 scales, got {weight.scale.dtype}: codes times them do not fit bf16")
        data = _by_rows(_pack_nvfp4, weight.packed, weight.scale.view(torch.uint8))
        packed = _packed(Format.NVFP4, data, len(weight.packed), first_column, divides=not weight.multiplies)
        packed.number.fill_(weight.global_scale)
        return packed
    if hasattr(weight, "block"):
        return _pack_fp8_weight(weight, first_column)
    raise ValueError(f"want a bf16 tensor, NVFP4 or FP8, got {type(weight).__name__}")


def pack_all(weights: Sequence[Any]) -> list[Packed]:
    """`pack` of each. NVFP4 matrices of one shape are re-ordered together: experts are many and small."""
    first = weights[0]
    together = all(hasattr(w, "packed") and w.scale.dtype == torch.float8_e4m3fn for w in weights)
    if not together or len({tuple(w.shape) for w in weights}) > 1 or len(first.packed) % TILE:
        return [pack(weight) for weight in weights]
    codes, scales = (torch.cat([getattr(w, part).view(torch.uint8) for w in weights]) for part in ("packed", "scale"))
    data = _by_rows(_pack_nvfp4, codes, scales).chunk(len(weights))
    packed = []
    for weight, part in zip(weights, data, strict=True):
        packed.append(_packed(Format.NVFP4, part, len(weight.packed), 0, divides=not weight.multiplies))
        packed[-1].number.fill_(weight.global_scale)
    return packed


def _packed(
    format: Format,
    data: torch.Tensor,
    num_rows: int,
    first_column: int,
    number: torch.Tensor | None = None,
    divides: bool = False,
    block_scale: torch.Tensor | None = None,
) -> Packed:
    starts = torch.arange(len(data), dtype=torch.int32) * TILE
    place = torch.stack((starts + first_column, (num_rows - starts).clamp(max=TILE)), dim=1).to(data.device)
    if number is None:
        number = torch.ones((len(data), 1), dtype=torch.float32, device=data.device)
    return Packed(format, data, place, number, divides, block_scale)


def _pack_fp8_weight(weight: Any, first_column: int) -> Packed:
    num_rows = weight.shape[0]
    height, width = weight.block
    codes = weight.weight.view(torch.uint8)
    if bool(((codes & 0x7F) == 0x7F).any()):
        raise ValueError("weight: want FP8 codes that are numbers, got a NaN")
    data = _by_rows(_pack_fp8, codes)
    scale = weight.scale.float()
    if scale.shape[1] == 1:
        if len(scale) == 1:
            number = scale.repeat(len(data), 1)
        else:
            number = _pad(scale.repeat_interleave(height, 0)[:num_rows], TILE, 1).view(-1, TILE)
        return _packed(Format.FP8, data, num_rows, first_column, number)
    if width != UNIT or (height % TILE and len(scale) > 1):
        raise ValueError(f"block: want FP8 blocks of {UNIT} columns and a multiple of {TILE} rows, got {weight.block}")
    rows = torch.arange(len(data), device=scale.device) * TILE // height
    return _packed(Format.FP8, data, num_rows, first_column, block_scale=scale[rows].contiguous())


def join(parts: Sequence[Packed]) -> Packed:
    """Tiles of parts of one kind, one after the other."""
    assert len({part.kind for part in parts}) == 1, [part.kind for part in parts]
    if len(parts) == 1:
        return parts[0]
    scales = [part.block_scale for part in parts if part.block_scale is not None]
    return Packed(
        parts[0].format,
        torch.cat([part.data for part in parts]),
        torch.cat([part.place for part in parts]),
        torch.cat([part.number for part in parts]),
        parts[0].divides,
        torch.cat(scales) if scales else None,
    )


def interleave(gate: Packed, up: Packed) -> Packed:
    """Tiles of two parts of one kind and shape in turn: gate 0, up 0, gate 1, ...: so one program has both."""
    joined = join((gate, up))
    order = torch.arange(joined.num_tiles, device=joined.data.device).view(2, -1).T.reshape(-1)
    scale = joined.block_scale
    return Packed(
        joined.format,
        joined.data[order],
        joined.place[order],
        joined.number[order],
        joined.divides,
        None if scale is None else scale[order],
    )


def unpack(packed: Packed, num_columns: int) -> torch.Tensor:
    """fp32 [tiles * 16, num_columns]: what the format's `dequantize` gives, rows of padding included (0)."""
    out = torch.empty((packed.num_tiles * TILE, num_columns), dtype=torch.float32, device=packed.data.device)
    step = max(1, WORK // (TILE * UNIT * packed.num_units))
    undo = {Format.NVFP4: _unpack_nvfp4, Format.FP8: _unpack_fp8, Format.BF16: _unpack_bf16}[packed.format]
    for begin in range(0, packed.num_tiles, step):
        part = slice(begin, begin + step)
        values = undo(packed.data[part])  # [tiles, units, 16, 128]
        if packed.block_scale is not None:
            values = values * packed.block_scale[part, :, None, None]
        number = packed.number[part, None, :, None]
        values = values / number if packed.divides else values * number
        rows = values.transpose(1, 2).reshape(-1, packed.num_units * UNIT)
        out[begin * TILE : begin * TILE + len(rows)] = rows[:, :num_columns]
    return out


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of a BF16 matrix [N, K] whose one copy is that of a product: of an embedding tied to lm_head.

    `rows[ids]`, ids of any integers [...], are bf16 [..., K]: the numbers that were packed.
    """

    packed: Packed
    num_columns: int

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor:
        packed, row = self.packed, ids.long()
        lanes = packed.data.view(torch.bfloat16).view(packed.num_tiles, packed.num_units, 2, 2, 2, 8, 4, 8)
        # [..., unit, half, octet, q, 8]
        values = lanes[row // TILE, :, row % TILE // 8, :, :, row % 8]
        return values.transpose(-3, -2).reshape(*ids.shape, -1)[..., : self.num_columns]


def _by_rows(pack_rows: Any, *tensors: torch.Tensor) -> torch.Tensor:
    """pack_rows over some tiles at a time, of tensors with a row each for a row of the matrix."""
    num_tiles = -(-len(tensors[0]) // TILE)
    step = max(1, WORK // (TILE * max(1, tensors[0].shape[1]))) * TILE
    out: torch.Tensor | None = None
    for begin in range(0, num_tiles * TILE, step):
        part = pack_rows(*(_pad(tensor[begin : begin + step], TILE, 1) for tensor in tensors))
        if out is None:
            out = torch.empty((num_tiles, *part.shape[1:]), dtype=torch.uint8, device=part.device)
        out[begin // TILE : begin // TILE + len(part)] = part
    assert out is not None
    return out


def _pad(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The tensor with zeros up to multiples of rows and columns."""
    missing = (-tensor.shape[0] % rows, -tensor.shape[1] % columns)
    return torch.nn.functional.pad(tensor, (0, missing[1], 0, missing[0])) if any(missing) else tensor


def _to_lanes(values: torch.Tensor) -> torch.Tensor:
    """[rows, columns] -> [tile, unit, row half, g, half, q, octet, 8]."""
    values = _pad(values, TILE, UNIT)
    tiles, units = values.shape[0] // TILE, values.shape[1] // UNIT
    return values.view(tiles, 2, 8, units, 2, 4, 2, 8).permute(0, 3, 1, 2, 4, 5, 6, 7)


def _from_lanes(values: torch.Tensor) -> torch.Tensor:
    """[tile, unit, row half, g, half, q, octet, 8] -> [tile, unit, 16, 128]."""
    return values.reshape(values.shape[0], values.shape[1], TILE, UNIT)


def _tables(layout: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """int32 [columns of a word, codes]: the bits a code sets in its word, for each column of the word."""
    width = len(layout[0])
    codes = torch.arange(1 << width)
    tables = []
    for bits in layout:
        for half in range(2):
            word = torch.zeros_like(codes)
            for place, bit in enumerate(bits):
                word |= ((codes >> (width - 1 - place)) & 1) << ((bit + 16 * half) % 32)
            tables.append(word)
    return torch.stack(tables).to(torch.uint32).view(torch.int32).to(device)


def _to_words(codes: torch.Tensor, layout: Sequence[Sequence[int]]) -> torch.Tensor:
    """int32 [...] of codes [..., columns of a word]."""
    tables = _tables(layout, codes.device)
    words = tables[0][codes[..., 0].int()]
    for column in range(1, len(tables)):
        words |= tables[column][codes[..., column].int()]
    return words


def _from_words(words: torch.Tensor, layout: Sequence[Sequence[int]]) -> torch.Tensor:
    """Codes uint8 [..., columns of a word] of words int32 [...]."""
    columns = []
    for bits in layout:
        for half in range(2):
            code = torch.zeros_like(words)
            for bit in bits:
                code = code << 1 | ((words >> ((bit + 16 * half) % 32)) & 1)
            columns.append(code.to(torch.uint8))
    return torch.stack(columns, dim=-1)


def _bytes(tensor: torch.Tensor, tiles: int, units: int) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).view(tiles, units, -1)


def _pack_nvfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    table = _scale_bytes(scale.device)
    scale = _pad(scale, TILE, UNIT // GROUP)
    codes = _pad(torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2), TILE, UNIT)
    codes = codes * (scale != 0).repeat_interleave(GROUP, dim=1)
    lanes = _to_lanes(codes).permute(0, 1, 2, 3, 5, 4, 6, 7)  # tile, unit, row half, g, q, half, octet, 8
    tiles, units = lanes.shape[:2]
    words = _to_words(lanes, NVFP4_BITS)
    groups = table[scale.int()].view(tiles, 2, 8, units, 2, 4).permute(0, 3, 2, 5, 1, 4)  # g, q, row half, half
    return torch.cat((_bytes(words, tiles, units), _bytes(groups, tiles, units)), dim=-1)


def _unpack_nvfp4(data: torch.Tensor) -> torch.Tensor:
    tiles, units = data.shape[:2]
    words = data[..., :1024].contiguous().view(torch.int32).view(tiles, units, 2, 8, 4, 2, 2)
    codes = _from_words(words, NVFP4_BITS).permute(0, 1, 2, 3, 5, 4, 6, 7)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=data.device)
    values = magnitudes[(codes & 7).int()] * (1 - 2 * (codes >> 3).float())
    groups = data[..., 1024:].reshape(tiles, units, 8, 4, 2, 2).permute(0, 1, 4, 2, 5, 3)  # row half, g, half, q
    # from a table: not every device's power of two is exact
    table = torch.tensor([(1 + byte % 8 / 8) * 2.0 ** (byte // 8 - SCALE_EXPONENT) for byte in range(256)])
    scales = table.to(data.device)[groups.int()]
    return _from_lanes(values * scales[..., None, None])


def _scale_bytes(device: torch.device) -> torch.Tensor:
    """uint8 [256]: the stored byte of an e4m3 scale; any will do for 0, whose codes are 0."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = torch.where(values > 0, values, 1.0)
    mantissa, exponent = torch.frexp(values)
    return ((exponent - 1 + SCALE_EXPONENT) * 8 + (mantissa * 16 - 8).int()).to(torch.uint8).to(device)


def _pack_fp8(codes: torch.Tensor) -> torch.Tensor:
    lanes = _to_lanes(codes).permute(0, 1, 2, 4, 3, 5, 6, 7)  # tile, unit, row half, half, g, q, octet, 8
    words = _to_words(lanes.reshape(*lanes.shape[:-2], 4, 4), FP8_BITS)
    return _bytes(words, *lanes.shape[:2])


def _unpack_fp8(data: torch.Tensor) -> torch.Tensor:
    tiles, units = data.shape[:2]
    words = data.contiguous().view(torch.int32).view(tiles, units, 2, 2, 8, 4, 4)
    codes = _from_words(words, FP8_BITS).view(tiles, units, 2, 2, 8, 4, 2, 8).permute(0, 1, 2, 4, 3, 5, 6, 7)
    return _from_lanes(codes.contiguous().view(torch.float8_e4m3fn).float())


def _pack_bf16(values: torch.Tensor) -> torch.Tensor:
    lanes = _to_lanes(values).permute(0, 1, 2, 4, 6, 3, 5, 7)  # tile, unit, row half, half, octet, g, q, 8
    return _bytes(lanes, *lanes.shape[:2])


def _unpack_bf16(data: torch.Tensor) -> torch.Tensor:
    tiles, units = data.shape[:2]
    values = data.contiguous().view(torch.bfloat16).view(tiles, units, 2, 2, 2, 8, 4, 8)
    return _from_lanes(values.permute(0, 1, 2, 5, 3, 6, 4, 7).float())
