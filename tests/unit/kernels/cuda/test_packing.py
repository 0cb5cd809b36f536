"""Packing loses nothing: what comes out equals the checkpoint format's own `dequantize`."""

from __future__ import annotations

import pytest
import torch

from pilotfish.engine.checkpoint.fp8 import per_block, per_channel, per_tensor
from pilotfish.engine.checkpoint.nvfp4 import LynnWeight, NvFp4Weight, quantize
from pilotfish.kernels.cuda import packing
from pilotfish.kernels.cuda.linear import PackedLinear
from tests.support.kernel_references import dequantized


def nvfp4(rows: int, columns: int, multiplies: bool = False, seed: int = 0) -> NvFp4Weight:
    """Random codes under every scale a file may hold, 0 and the denormal ones too."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 0x7F, (rows, columns // 16), dtype=torch.uint8, generator=generator)
    return NvFp4Weight(packed, scale.view(torch.float8_e4m3fn), 0.0371 if multiplies else 1234.5, multiplies)


def fp8_codes(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 0x7F, (rows, columns), dtype=torch.uint8, generator=generator)
    signs = torch.randint(0, 2, (rows, columns), dtype=torch.uint8, generator=generator) << 7
    return (codes | signs).view(torch.float8_e4m3fn)


def weights(rows: int, columns: int) -> dict:
    generator = torch.Generator().manual_seed(2)
    codes = fp8_codes(rows, columns)
    blocks = (-(-rows // 128), -(-columns // 128))
    return {
        "nvfp4": nvfp4(rows, columns),
        "modelopt": nvfp4(rows, columns, multiplies=True),
        "fp8 tensor": per_tensor(codes, torch.tensor(0.0123)),
        "fp8 channel": per_channel(codes, torch.rand(rows, generator=generator).bfloat16()),
        "fp8 block": per_block(codes, torch.rand(blocks, generator=generator)),
        "bf16": torch.randn(rows, columns, generator=generator).bfloat16(),
    }


def values(weight) -> torch.Tensor:
    return weight.float() if isinstance(weight, torch.Tensor) else weight.dequantize()


@pytest.mark.parametrize("shape", [(48, 256), (300, 416), (1, 16), (17, 144)])
@pytest.mark.parametrize("kind", list(weights(16, 128)))
def test_gives_back_the_formats_own_values(kind, shape):
    weight = weights(*shape)[kind]
    assert torch.equal(dequantized(PackedLinear([weight])), values(weight))


def test_parts_keep_their_own_numbers_whatever_their_heights():
    parts = [nvfp4(n, 256, seed=n) for n in (40, 16, 3)] + [weights(20, 256)["bf16"], nvfp4(33, 256, True)]
    product = PackedLinear(parts)
    assert torch.equal(dequantized(product), torch.cat([values(part) for part in parts]))
    assert [part.format.value for part in product.ranges] == ["NVFP4", "BF16", "NVFP4"]


@pytest.mark.parametrize("kind", list(weights(16, 128)))
def test_gate_and_up_come_apart_again(kind):
    gate, up = weights(72, 256)[kind], weights(72, 256)[kind]
    product = PackedLinear([gate, up], swiglu=True)
    assert product.out_features == 72
    assert torch.equal(dequantized(product), torch.cat([values(gate), values(up)]))


@pytest.mark.parametrize("rows", [5, 300])
def test_packs_some_rows_at_a_time(monkeypatch, rows):
    weight = nvfp4(rows, 256)
    whole = packing.pack(weight)
    monkeypatch.setattr(packing, "WORK", 16 * 256 * 2)
    parts = packing.pack(weight)
    assert torch.equal(whole.data, parts.data) and torch.equal(packing.unpack(parts, 256)[:rows], values(weight))


@pytest.mark.parametrize("rows", [48, 40])
def test_many_packed_together_are_each_as_alone(rows):
    parts = [nvfp4(rows, 256, multiplies, seed) for seed, multiplies in enumerate((False, True, False))]
    for one, weight in zip(packing.pack_all(parts), parts, strict=True):
        alone = packing.pack(weight)
        assert one.kind == alone.kind and torch.equal(one.data, alone.data)
        assert torch.equal(one.number, alone.number) and torch.equal(one.place, alone.place)


@pytest.mark.parametrize("shape", [(48, 256), (300, 416), (17, 144)])
def test_rows_of_bf16_can_be_taken_again(shape):
    matrix = weights(*shape)["bf16"]
    rows = packing.PackedRows(packing.pack(matrix), shape[1])
    ids = torch.randint(0, shape[0], (3, 5), generator=torch.Generator().manual_seed(1))
    for chosen in (torch.arange(shape[0]), ids, ids.int(), ids[0, 0]):
        assert torch.equal(rows[chosen], matrix[chosen.long()])


def test_needs_no_more_bytes_than_the_checkpoint():
    weight = quantize(torch.randn(512, 512))
    # 4 bits and a sixteenth of 8, and 12 bytes for each 16 rows
    assert PackedLinear([weight]).num_bytes == 512 * 512 * 4.5 / 8 + 512 / 16 * 12
    assert PackedLinear([weight]).num_bytes < 1.003 * weight.num_bytes


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([torch.zeros(4, 16)], "part 0: want a bf16 matrix"),
        ([nvfp4(4, 32), nvfp4(4, 16)], "parts of one width"),
        ([nvfp4(4, 16), LynnWeight(nvfp4(4, 16).packed, torch.ones(4, 1).half(), 1.0)], "part 1: want e4m3 scales"),
        ([per_tensor(torch.full((4, 16), float("nan")).to(torch.float8_e4m3fn), torch.ones(1))], "got a NaN"),
    ],
)
def test_names_what_it_cannot_pack(parts, error):
    with pytest.raises(ValueError, match=error):
        PackedLinear(parts)


def test_gate_and_up_must_be_alike():
    with pytest.raises(ValueError, match="gate and up of one shape and format"):
        PackedLinear([nvfp4(16, 128), weights(16, 128)["bf16"]], swiglu=True)
