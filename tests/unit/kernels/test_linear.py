"""Matrix products: right to rounding, and a row's bits wherever it stands and whatever its neighbours hold."""

from __future__ import annotations

import pytest
import torch

from pilotfish.engine.checkpoint.nvfp4 import quantize
from pilotfish.kernels import linear as linear_module
from pilotfish.kernels.linear import TILE_ROWS, Linear, QuantizedLinear, in_tree, make_linear, padded_rows, segments

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((1, 7), (33, 65), (96, 64), (257, 130), (320, 64), (1000, 33))


def random(shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got, x, weight):
    """Against float64. A bf16 result is rounded once (2^-8 relative); sums of K terms are held in fp32."""
    wanted = x.double() @ weight.double().T
    rounding = 2**-8 if got.dtype == torch.bfloat16 else 0
    scale = x.double().abs() @ weight.double().abs().T
    assert ((got.double() - wanted).abs() <= rounding * wanted.abs() + 1e-6 * scale).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_rows_match_float64(out_features, in_features, dtype):
    weight, x = random((out_features, in_features), dtype), random((2 * TILE_ROWS, in_features), dtype, 1)
    assert_close(Linear(weight).rows(x), x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", (1, 5, 16, 65))
def test_bulk_matches_float64(num_rows, dtype):
    weight, x = random((33, 65), dtype), random((num_rows, 65), dtype, 1)
    assert_close(Linear(weight).bulk(x), x, weight)


def test_the_library_meets_few_numbers_of_rows(monkeypatch):
    """It keeps programs for each."""
    weight, met = random((33, 65), torch.bfloat16), set()
    linear = Linear(weight)
    linear.packed, linear._weights = True, [weight]
    monkeypatch.setattr(linear, "_segment", lambda x, weight: met.add(len(x)) or torch.nn.functional.linear(x, weight))
    for num_rows in range(1, 4 * TILE_ROWS):
        x = random((num_rows, 65), torch.bfloat16, num_rows)
        assert_close(linear.bulk(x), x, weight)
    assert met == {TILE_ROWS * number for number in (1, 2, 3, 4)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_a_row_keeps_its_bits_at_every_position_of_every_tile(out_features, in_features, dtype):
    linear = Linear(random((out_features, in_features), dtype))
    row = random((1, in_features), dtype, 1)
    alone = linear.rows(torch.cat((row, row.new_zeros(TILE_ROWS - 1, in_features))))[0]
    for tiles in (1, 2, 3):
        for position in range(tiles * TILE_ROWS):
            x = random((tiles * TILE_ROWS, in_features), dtype, 2)
            x[position] = row
            assert torch.equal(linear.rows(x)[position], alone), (tiles, position)


@pytest.mark.parametrize(
    ("width", "heads", "count"),
    [(17408, 8, 8), (6144, 24, 8), (4096, 16, 8), (3584, 8, 4), (512, 8, 4), (4096, 12, 4), (256, 4, 2), (384, 6, 1)],
)
def test_segments_fall_on_units_and_on_heads(width, heads, count):
    assert segments(width, heads) == count


def test_parts_are_added_by_one_tree():
    # of these numbers every other order gives another sum
    parts = [torch.tensor(x) for x in (1e8, 3.0, -1e8, 5.0, 7.0, 1e7, 0.3, -1e7)]
    a, b, c, d, e, f, g, h = parts
    assert torch.equal(in_tree(parts), ((a + b) + (c + d)) + ((e + f) + (g + h)))
    assert not torch.equal(in_tree(parts), sum(parts[1:], parts[0]))
    assert torch.equal(in_tree(parts[:2]), a + b) and in_tree(parts[:1]) is a


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [2, 8])
def test_a_row_parallel_product_is_what_devices_with_its_segments_would_add_up_to(count, dtype):
    """Each device has some columns of x and of the weight, and knows nothing of the others."""
    weight, x = random((96, 1024), dtype), random((2 * TILE_ROWS, 1024), dtype, 1)
    whole = Linear(weight, count)
    for devices in (1, 2, count):
        shares = zip(x.chunk(devices, 1), weight.chunk(devices, 1), strict=True)
        parts = [
            Linear(columns.clone()).rows(part.clone()).float()
            for own, matrix in shares
            for part, columns in zip(own.chunk(count // devices, 1), matrix.chunk(count // devices, 1), strict=True)
        ]
        assert torch.equal(whole.rows(x), in_tree(parts).to(dtype))
    quantized = QuantizedLinear([weight], dtype, count)
    torch.testing.assert_close(quantized.rows(x), whole.rows(x), rtol=1e-2, atol=1e-3 * 1024**0.5)
    wanted, rounding = x.double() @ weight.double().T, 2**-8 if dtype == torch.bfloat16 else 1e-6
    scale = x.double().abs() @ weight.double().abs().T
    # each segment is rounded, then their sum
    assert ((whole.bulk(x).double() - wanted).abs() <= rounding * scale).all()
    assert torch.equal(whole.rows(x)[3], whole.rows(x.roll(5, 0))[8])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_other_rows_is_not_seen(dtype):
    linear = Linear(random((33, 65), dtype))
    x = random((2 * TILE_ROWS, 65), dtype, 1)
    clean = linear.rows(x)
    spoiled = x.clone()
    spoiled[1::2] = float("nan")
    assert torch.equal(linear.rows(spoiled)[::2], clean[::2])


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_a_cpu_without_bf16_products_keeps_a_row_s_bits_too(out_features, in_features, monkeypatch):
    monkeypatch.setattr(linear_module, "cpu_multiplies_bf16", lambda: False)
    weight, rows = random((out_features, in_features), torch.bfloat16), 3 * TILE_ROWS
    linear, row = Linear(weight), random((1, in_features), torch.bfloat16, 1)
    assert not linear.packed
    alone = linear.rows(row.expand(TILE_ROWS, -1).contiguous())[0]
    for position in range(rows):
        x = random((rows, in_features), torch.bfloat16, 2)
        x[position] = row
        output = linear.rows(x)
        assert torch.equal(output[position], alone), position
    assert_close(output, x, weight)


def test_the_weight_may_be_a_view_of_another():
    wide = random((40, 130), torch.bfloat16)
    x = random((TILE_ROWS, 65), torch.bfloat16, 1)
    assert torch.equal(Linear(wide[::2, 1::2]).rows(x), Linear(wide[::2, 1::2].clone()).rows(x))


def test_rows_want_whole_tiles():
    with pytest.raises(AssertionError, match="whole tiles"):
        Linear(random((3, 4), torch.float32)).rows(torch.zeros(TILE_ROWS + 1, 4))


def test_a_weight_that_is_no_matrix_is_refused():
    with pytest.raises(ValueError, match="got shape"):
        Linear(torch.zeros(3))


@pytest.mark.parametrize(("rows", "tiles"), ((0, 1), (1, 1), (TILE_ROWS, 1), (TILE_ROWS + 1, 2), (4 * TILE_ROWS, 4)))
def test_padded_rows(rows, tiles):
    assert padded_rows(rows) == tiles * TILE_ROWS


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_parts_equal_their_expanded_weights(dtype):
    parts = [quantize(random((24, 32), torch.float32)), random((5, 32), torch.float32, 1)]
    weight = torch.cat((parts[0].dequantize(dtype), parts[1].to(dtype)))
    linear, x = QuantizedLinear(parts, dtype), random((2 * TILE_ROWS, 32), dtype, 2)
    assert (linear.out_features, linear.in_features) == tuple(weight.shape)
    # another library path than Linear's, so sums may be in another order: equal up to rounding
    assert_close(linear.rows(x), x, weight)
    assert_close(linear.bulk(x[:7]), x[:7], weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_packed_part_on_the_cpu_is_the_linear_of_its_expanded_weight(dtype):
    part = quantize(random((24, 32), torch.float32))
    made, x = make_linear([part], dtype, torch.device("cpu")), random((TILE_ROWS, 32), dtype, 2)
    assert torch.equal(made.rows(x), Linear(part.dequantize(dtype)).rows(x))


def test_packed_weights_stay_packed_off_the_cpu():
    part = quantize(random((24, 32), torch.float32))
    made = make_linear([part], torch.bfloat16, torch.device("meta"))
    assert isinstance(made, QuantizedLinear)
    assert made.num_bytes == part.num_bytes < 24 * 32


def test_parts_of_one_product_keep_their_order():
    parts = [random((n, 16), torch.float32, n) for n in (3, 1, 5)]
    x = random((TILE_ROWS, 16), torch.float32, 9)
    assert_close(make_linear(list(parts), torch.float32, torch.device("cpu")).rows(x), x, torch.cat(parts))
