"""Packed weights, FP8 keys and values, draft heads and look-up have the same bits on the GPU as on the CPU."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from pilotfish.draft_heads.lookup.match import look_up
from pilotfish.engine.checkpoint.fp8 import per_block, per_channel, per_tensor
from pilotfish.engine.checkpoint.load import load_weights
from pilotfish.engine.checkpoint.nvfp4 import quantize
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.errors import LayoutError
from pilotfish.kernels.attention import from_cache, to_cache
from tests.support.packing import RECIPES, pack_checkpoint
from tests.support.tiny_models import build_tiny, fuse_experts, split_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def weights():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(300, 416, generator=generator)
    packed = quantize(matrix)
    codes = (matrix * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {
        "nvfp4": packed,
        "modelopt nvfp4": type(packed)(packed.packed, packed.scale, 1 / packed.global_scale, True),
        "fp8 tensor": per_tensor(codes, torch.tensor(0.0123)),
        "fp8 channel": per_channel(codes, torch.rand(300, generator=generator).bfloat16()),
        "fp8 block": per_block(codes, torch.rand(3, 4, generator=generator)),
    }


@pytest.mark.parametrize("name", weights())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantised_values_are_the_same(name, dtype):
    on_cpu = weights()[name]
    on_gpu = on_cpu.to("cuda")
    assert on_gpu.device.type == "cuda"
    assert torch.equal(on_gpu.dequantize(dtype).cpu(), on_cpu.dequantize(dtype))
    for rows in (torch.arange(128, 256), torch.tensor([299, 0, 5, 5])):
        taken = on_gpu.take_rows(rows.cuda())
        assert torch.equal(taken.dequantize(dtype).cpu(), on_cpu.take_rows(rows).dequantize(dtype))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_checkpoints_load_onto_the_gpu(tmp_path, recipe):
    source = build_tiny(tmp_path / "source", "moe")
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    tensors = fuse_experts(tensors) if recipe.fused_experts else split_experts(tensors)
    folder, plain = pack_checkpoint(tmp_path / "packed", config, tensors, recipe)
    checkpoint = open_checkpoint(folder)
    if "lynn" in recipe.name:
        with pytest.raises(LayoutError, match="CPU only"):
            load_weights(checkpoint, "cuda", progress=False)
        return
    for name, weight in load_weights(checkpoint, "cuda", progress=False).items():
        assert weight.device.type == "cuda"
        values = weight if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float32)
        assert torch.equal(values.cpu(), plain[name]), name


@pytest.mark.parametrize("scale", (1.0, 0.25))
def test_an_fp8_cache_holds_and_gives_the_same(scale):
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 200
    values[:5] = torch.tensor([1e30, -1e30, float("inf"), -float("inf"), float("nan")])
    stored = to_cache(values.cuda(), scale, torch.float8_e4m3fn)
    assert torch.equal(stored.cpu().view(torch.uint8), to_cache(values, scale, torch.float8_e4m3fn).view(torch.uint8))
    assert int(stored.float().isnan().sum()) == 1
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for dtype in (torch.float32, torch.bfloat16):
        got, wanted = from_cache(every.cuda(), dtype).cpu(), from_cache(every, dtype)
        assert torch.equal(got.nan_to_num(500.0), wanted.nan_to_num(500.0))


def test_look_up_is_the_same():
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(0, 4, (9, 200), generator=generator, dtype=torch.int32)
    last = torch.randint(0, 200, (9,), generator=generator)
    wanted = look_up(history, last, 5, 4, 2)
    got = look_up(history.cuda(), last.cuda(), 5, 4, 2)
    assert all(torch.equal(mine.cpu(), other) for mine, other in zip(got, wanted, strict=True))
