"""NVFP4 in plain torch: bytes, values and the quantiser, against worked numbers and compressed-tensors' own."""

from __future__ import annotations

import pytest
import torch

from pilotfish.engine.checkpoint import nvfp4
from pilotfish.engine.checkpoint.nvfp4 import NvFp4Weight, encode, pack, quantize, unpack

# Row 0 in units of its effective scale 0.4, the first two given as 0.12 and -0.62; see test_worked_example.
ROW_0_CODES = [0x1, 0xB, 0x0, 0x6, 0xF, 0x2, 0x4, 0x9, 0x7, 0xD, 0x3, 0x0, 0x9, 0x6, 0xC, 0x1]


def scale_bytes(weight: NvFp4Weight) -> list[list[int]]:
    return weight.scale.view(torch.uint8).tolist()


@pytest.fixture
def worked_example() -> torch.Tensor:
    """[2, 32], largest magnitude 2.4 at row 0, column 8; the largest of row 0's second group is 0.5."""
    table = torch.tensor(nvfp4.E2M1_SIGNED)
    matrix = torch.linspace(-0.5, 0.5, 64).view(2, 32).clone()
    matrix[0, :16] = table[ROW_0_CODES] * 0.4
    matrix[0, :2] = torch.tensor([0.12, -0.62])
    matrix[0, 16] = 0.5
    matrix[0, 8] = 2.4
    return matrix


def test_worked_example(worked_example):
    """Global 2688/2.4 = 1120; block scales 448 and 96; byte 0 is 0xB1, which stands for 0.2 and -0.6."""
    weight = quantize(worked_example)
    assert weight.global_scale == pytest.approx(1120.0, rel=1e-6)
    assert scale_bytes(weight)[0] == [0x7E, 0x6C]
    assert weight.packed[0, :8].tolist() == [0xB1, 0x60, 0x2F, 0x94, 0xD7, 0x03, 0x69, 0x1C]
    values = weight.dequantize()
    assert values[0, :2].tolist() == pytest.approx([0.2, -0.6], rel=1e-6)
    # The stored scale counts, not amax/6 of the group: 96/1120, whose rounding the largest value shows.
    assert values[0, 16].item() == pytest.approx(6 * 96 / 1120, rel=1e-6)


def test_low_nibble_is_the_even_column():
    packed = torch.tensor([[0xB1]], dtype=torch.uint8)
    assert unpack(packed).tolist() == [[0x1, 0xB]]


def test_pack_undoes_unpack_for_every_byte():
    packed = torch.arange(256, dtype=torch.uint8).view(2, 128)
    assert torch.equal(pack(unpack(packed)), packed)


def test_every_code_has_its_value():
    weight = NvFp4Weight(
        pack(torch.arange(16, dtype=torch.uint8).view(1, 16)), torch.ones(1, 1).to(torch.float8_e4m3fn), 1.0
    )
    wanted = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert weight.dequantize()[0].tolist() == wanted + [-value for value in wanted]
    assert torch.signbit(weight.dequantize()[0, 8])


def test_products_of_code_and_scale_are_exact_in_16_bits():
    """All 16 codes times all 127 scales: nothing is lost in bf16 or fp16."""
    scales = torch.arange(0x7F, dtype=torch.uint8).view(-1, 1).view(torch.float8_e4m3fn)
    codes = torch.arange(16, dtype=torch.uint8).repeat(0x7F, 1)
    weight = NvFp4Weight(pack(codes), scales, 1.0)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(weight.dequantize(dtype).float(), weight.dequantize())


def test_dequantize_is_product_then_division_then_one_rounding():
    generator = torch.Generator().manual_seed(4)
    weight = quantize(torch.randn(5, 48, generator=generator))
    table = torch.tensor(nvfp4.E2M1_SIGNED)
    product = table[unpack(weight.packed).long()] * weight.scale.float().repeat_interleave(16, 1)
    wanted = product / torch.tensor(weight.global_scale)
    assert torch.equal(weight.dequantize(), wanted)
    assert torch.equal(weight.dequantize(torch.bfloat16), wanted.bfloat16())


def test_taken_rows_keep_their_values():
    weight = quantize(torch.randn(9, 32, generator=torch.Generator().manual_seed(8)))
    rows = torch.tensor([8, 0, 3, 3])
    assert torch.equal(weight.take_rows(rows).dequantize(), weight.dequantize()[rows])


def test_dequantize_in_blocks_changes_nothing(monkeypatch):
    weight = quantize(torch.randn(37, 32, generator=torch.Generator().manual_seed(5)))
    whole = weight.dequantize()
    monkeypatch.setattr(nvfp4, "DEQUANTIZE_BLOCK", 100)  # three rows at a time, the last block shorter
    assert torch.equal(weight.dequantize(), whole)


def test_ties_go_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert encode(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert encode(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]
    above, below = (torch.nextafter(ties, torch.tensor(limit)) for limit in (9.0, 0.0))
    assert encode(above).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert encode(below).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert encode(torch.tensor([100.0, -100.0, 0.0, -0.0, -0.1])).tolist() == [7, 15, 0, 0, 8]


def test_representable_values_survive():
    generator = torch.Generator().manual_seed(6)
    first = quantize(torch.randn(16, 64, generator=generator))
    again = quantize(first.dequantize())
    # Equal values rather than bytes: a group whose codes all fell short of 6 gets a smaller scale.
    assert torch.allclose(again.dequantize(), first.dequantize(), rtol=0.07, atol=0)


def test_quantizer_equals_compressed_tensors_constants():
    """Made with compressed-tensors 0.20.1 (generate_gparam, calculate_qparams, NVFP4PackedCompressor)."""
    weight = quantize(torch.randn(2, 32, generator=torch.Generator().manual_seed(9)))
    assert weight.global_scale == 1090.2164306640625
    assert scale_bytes(weight) == [[126, 121], [123, 121]]
    # fmt: off
    assert weight.packed.flatten().tolist() == [
        189, 229, 54, 252, 36, 202, 118, 24, 94, 38, 247, 223, 51, 252, 234, 255,
        87, 194, 146, 67, 108, 206, 228, 215, 159, 199, 235, 77, 38, 228, 231, 213,
    ]
    # fmt: on


@pytest.mark.parametrize("case", ["normal", "tiny", "large", "zero groups", "ties", "bf16", "all zero"])
def test_quantizer_equals_compressed_tensors(case):
    ct = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not a dependency; constants are above")
    values = torch.randn(32, 64, generator=torch.Generator().manual_seed(7))
    if case == "zero groups":
        values[:, :16] = 0
        values[3, 16:32] *= 1e-7  # a scale that rounds to 0
    elif case == "ties":
        values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(4, 8) * 0.5
    else:
        values = values * {"tiny": 1e-3, "large": 1e3, "all zero": 0.0}.get(case, 1.0)
    values = values.bfloat16().float() if case == "bf16" else values
    packed, scale, global_scale = _by_compressed_tensors(ct, values)
    weight = quantize(values)
    assert weight.global_scale == global_scale.item()
    assert torch.equal(weight.scale.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(weight.packed, packed)


def _by_compressed_tensors(ct, values):
    args = ct.quantization.QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
    )
    scheme = ct.quantization.QuantizationScheme(targets=["Linear"], weights=args)
    helpers = ct.quantization.utils.helpers
    global_scale = helpers.generate_gparam(values.min(), values.max())
    groups = values.view(values.shape[0], -1, 16)
    scale, _ = helpers.calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=global_scale)
    stored = ct.compressors.nvfp4.NVFP4PackedCompressor.compress(
        {"weight": values, "weight_scale": scale, "weight_global_scale": global_scale}, scheme
    )
    return stored["weight_packed"], stored["weight_scale"], stored["weight_global_scale"]


def parts(rows=2, columns=32):
    return torch.zeros(rows, columns // 2, dtype=torch.uint8), torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)


def test_shape_and_size():
    weight = NvFp4Weight(*parts(), 3.0)
    assert weight.shape == (2, 32) and weight.num_bytes == 32 + 4 + 4
    assert weight.to("cpu").global_scale == 3.0


def test_refuses_parts_that_do_not_fit():
    packed, scale = parts()
    for bad in (
        (packed.int(), scale, 1.0),
        (packed[0], scale, 1.0),
        (packed[:, :7], scale, 1.0),
        (packed, scale[:, :1], 1.0),
        (packed, scale.float(), 1.0),
        (packed, scale, 0.0),
        (packed, scale, -1.0),
        (packed, scale, float("inf")),
        (packed, scale, float("nan")),
    ):
        with pytest.raises(ValueError, match="want"):
            NvFp4Weight(*bad)


def test_quantizer_refuses_shapes_and_values():
    for bad in (torch.zeros(2, 24), torch.zeros(32), torch.full((1, 16), float("nan"))):
        with pytest.raises(ValueError, match="want"):
            quantize(bad)
