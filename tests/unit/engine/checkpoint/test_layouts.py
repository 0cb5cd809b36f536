"""One row of tensors for each layout that released checkpoints use: told apart, read or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from pilotfish.engine.checkpoint.headers import DTYPE_BITS, TensorInfo
from pilotfish.engine.checkpoint.layouts import PACKED, READ, Layout, classify, describe
from pilotfish.engine.errors import CheckpointError, LayoutError

N, K = 256, 384
MODULE = "model.layers.0.mlp.down_proj"


def parts(**tensors):
    """Tensor records by suffix, from suffix (without its dot) -> (dtype, shape)."""
    found = {}
    for suffix, (dtype, shape) in tensors.items():
        dotted = "" if suffix == "bare" else "." + suffix.replace("__", ".")
        size = DTYPE_BITS[dtype] // 8
        for dim in shape:
            size *= dim
        found[dotted] = TensorInfo(MODULE + dotted, dtype, tuple(shape), Path("model.safetensors"), 0, size)
    return found


CT_NVFP4 = {
    "weight_packed": ("U8", (N, K // 2)),
    "weight_scale": ("F8_E4M3", (N, K // 16)),
    "weight_global_scale": ("F32", (1,)),
}
MODELOPT = {
    "weight": ("U8", (N, K // 2)),
    "weight_scale": ("F8_E4M3", (N, K // 16)),
    "weight_scale_2": ("F32", ()),
}
FP8 = {"weight": ("F8_E4M3", (N, K))}
LYNN = {"packed": ("U8", (N, K // 2)), "scale": ("F16", (N, K // 16)), "global_scale": ("F32", ())}

ROWS = [
    ({"weight": ("BF16", (N, K))}, Layout.PLAIN),
    ({"weight": ("F16", (N, K))}, Layout.PLAIN),
    ({"bare": ("F32", (N,))}, Layout.PLAIN),
    (CT_NVFP4, Layout.CT_NVFP4),
    (CT_NVFP4 | {"weight_global_scale": ("F32", ())}, Layout.CT_NVFP4),
    (CT_NVFP4 | {"input_global_scale": ("F32", (1,))}, Layout.CT_NVFP4_W4A4),
    (MODELOPT, Layout.MODELOPT_NVFP4),
    (MODELOPT | {"input_scale": ("F32", ())}, Layout.MODELOPT_NVFP4_W4A4),
    (FP8 | {"weight_scale_inv": ("BF16", (2, 3))}, Layout.FP8_BLOCK_INV),
    (FP8 | {"weight_scale_inv": ("F32", (2, 3))}, Layout.FP8_BLOCK_INV),
    ({"weight": ("F8_E4M3", (64, 64)), "weight_scale_inv": ("F32", (1, 1))}, Layout.FP8_BLOCK_INV),
    (FP8 | {"weight_scale": ("F32", (2, 3))}, Layout.CT_FP8_BLOCK),
    (FP8 | {"weight_scale": ("F32", (2, 1, 3, 1))}, Layout.MODELOPT_FP8_BLOCK),
    (FP8 | {"weight_scale": ("F32", ())}, Layout.FP8_TENSOR),
    (FP8 | {"weight_scale": ("BF16", (1,)), "input_scale": ("BF16", (1,))}, Layout.FP8_TENSOR),
    (FP8 | {"weight_scale": ("BF16", (N, 1))}, Layout.FP8_CHANNEL),
    (FP8 | {"weight_scale": ("F32", (N,))}, Layout.FP8_CHANNEL),
    (FP8, Layout.FP8_BARE),
    (LYNN, Layout.LYNN),
    ({f"weight__{suffix}": row for suffix, row in LYNN.items()}, Layout.LYNN),
    (
        {"weight_packed": ("I32", (N, K // 8)), "weight_scale": ("BF16", (N, K // 128)), "weight_shape": ("I64", (2,))},
        Layout.CT_INT_PACKED,
    ),
    ({"weight_packed": ("I32", (N, K // 8)), "weight_scale": ("BF16", (N, K // 128))}, Layout.CT_INT_PACKED),
    (
        {"qweight": ("I32", (K // 8, N)), "qzeros": ("I32", (3, N // 8)), "scales": ("F16", (3, N))},
        Layout.GPTQ_AWQ,
    ),
    ({"weight_packed": ("U8", (N, K // 2)), "weight_scale": ("U8", (N, K // 32))}, Layout.MX),
    (FP8 | {"weight_scale": ("U8", (N, K // 32))}, Layout.MX),
    ({"weight": ("U8", (N, K // 2)), "weight_sf": ("F8_E4M3", (N, K // 16))}, Layout.TRANSFORMERS_NVFP4),
    ({"weight": ("I8", (N, K))}, Layout.OTHER_DTYPE),
    ({"weight": ("F64", (N, K))}, Layout.OTHER_DTYPE),
    ({"weight_packed": ("U8", (N, K // 2)), "weight_scale": ("F8_E4M3", (N, K // 16))}, Layout.UNKNOWN),
    (
        {"weight": ("U32", (N, K // 8)), "scales": ("BF16", (N, K // 64)), "biases": ("BF16", (N, K // 64))},
        Layout.MLX_PACKED,
    ),
    (LYNN | {"scale": ("F8_E4M3", (N, K // 16))}, Layout.UNKNOWN),
    ({"weight": ("F8_E5M2", (N, K)), "weight_scale": ("F32", ())}, Layout.UNKNOWN),
    (MODELOPT | {"weight_scale": ("F16", (N, K // 16))}, Layout.UNKNOWN),
    (MODELOPT | {"pre_quant_scale": ("BF16", (K,))}, Layout.UNKNOWN),
    (FP8 | {"weight_scale": ("F32", ()), "weight_zero_point": ("I8", ())}, Layout.UNKNOWN),
    (CT_NVFP4 | {"weight_scale": ("F16", (N, K // 16))}, Layout.UNKNOWN),
    (CT_NVFP4 | {"weight": ("BF16", (N, K))}, Layout.UNKNOWN),
    (MODELOPT | {"weight": ("BF16", (N, K))}, Layout.UNKNOWN),
    (FP8 | {"weight_scale": ("F32", (5, 7))}, Layout.UNKNOWN),
    ({"weight_scale": ("F32", (1,))}, Layout.UNKNOWN),
]


@pytest.mark.parametrize(("row", "wanted"), ROWS, ids=lambda value: value.name if isinstance(value, Layout) else "")
def test_each_layout_is_told_apart(row, wanted):
    assert classify(parts(**row)) is wanted


def test_every_layout_has_a_row():
    assert {wanted for _, wanted in ROWS} == set(Layout) - {Layout.GGUF}  # told by the container


@pytest.mark.parametrize("row", [row for row, wanted in ROWS if wanted not in READ])
def test_refusal_names_layout_module_and_what_is_read(row):
    with pytest.raises(LayoutError) as caught:
        describe(MODULE, "model.language_model.layers.0.mlp.down_proj", parts(**row))
    message = str(caught.value)
    assert message.startswith("model.language_model.layers.0.mlp.down_proj: stored as " + classify(parts(**row)).value)
    assert "model.safetensors" in message and "want plain BF16/F16/F32, NVFP4" in message


@pytest.mark.parametrize("row", [row for row, wanted in ROWS if wanted in PACKED])
def test_packed_module_has_the_shape_it_stands_for(row):
    module = describe(MODULE, MODULE, parts(**row))
    weight = next(shape for name, (_, shape) in row.items() if name in ("weight", "weight_packed") or "packed" in name)
    assert module.shape == ((N, K) if weight[0] == N else weight) and module.dtype in ("U8", "F8_E4M3")


def test_packed_module_counts_all_its_bytes():
    module = describe(MODULE, MODULE, parts(**CT_NVFP4))
    assert module.num_bytes == N * K // 2 + N * K // 16 + 4
    assert module.files == (Path("model.safetensors"),)


BLOCK = FP8 | {"weight_scale_inv": ("F32", (2, 3))}
UNFIT = [
    (CT_NVFP4, {"weight_packed": ("U8", (N, 4))}, r"weight_packed: want \[N, K/2\] with K .* 16, got U8 \[256, 4\]"),
    (CT_NVFP4, {"weight_packed": ("U8", (2, N, 8))}, r"weight_packed: want \[N, K/2\]"),
    (
        CT_NVFP4,
        {"weight_scale": ("F8_E4M3", (N, 12))},
        r"weight_scale: want shape \[256, 24\], got F8_E4M3 \[256, 12\]",
    ),
    (CT_NVFP4, {"weight_global_scale": ("F32", (2,))}, r"weight_global_scale: want one number"),
    (CT_NVFP4, {"input_global_scale": ("F32", (N,))}, r"input_global_scale: want one number"),
    (MODELOPT, {"weight": ("U8", (N, 4))}, r"weight: want \[N, K/2\] with K a multiple of 16"),
    (MODELOPT, {"weight_scale": ("F8_E4M3", (N, 12))}, r"weight_scale: want shape \[256, 24\]"),
    (MODELOPT, {"weight_scale_2": ("F32", (N,))}, r"weight_scale_2: want one number"),
    (LYNN, {"scale": ("F16", (N, 12))}, r"scale: want shape \[256, 24\]"),
    (BLOCK, {"weight_scale_inv": ("F32", (2, 2))}, r"weight_scale_inv: want shape \[2, 3\], got F32 \[2, 2\]"),
    (BLOCK, {"weight_scale_inv": ("F16", (2, 3))}, r"weight_scale_inv: want BF16 or F32 scales, got F16 \[2, 3\]"),
    (BLOCK, {"weight": ("F8_E4M3", (2, N, K))}, r"weight: want \[N, K\], got F8_E4M3 \[2, 256, 384\]"),
    (FP8, {"weight_scale": ("F32", (2, 1, 2, 1))}, r"weight_scale: want shape \[2, 1, 3, 1\]"),
    (FP8 | {"weight_scale": ("F32", ())}, {"input_scale": ("F32", (K,))}, r"input_scale: want one number"),
]


@pytest.mark.parametrize(("row", "change", "message"), UNFIT)
def test_refuses_parts_that_do_not_fit(row, change, message):
    with pytest.raises(CheckpointError, match=f"{MODULE}.{message}"):
        describe(MODULE, MODULE, parts(**(row | change)))
