"""`moe_prompt.experts`: its unpacking's PTX alone, and its code for a GPU. Its values and bits: test_run_prompts.py."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from pilotfish.engine.model.mlp import PackedMoeMlp
from pilotfish.engine.model.trunk import Norm
from pilotfish.engine.round.cuda_table import CudaOperators
from pilotfish.kernels.cuda import group_mma, moe_prompt, packing
from pilotfish.kernels.cuda.linear import PackedLinear
from pilotfish.kernels.cuda.moe import ExpertWeights, GroupedExperts
from pilotfish.kernels.cuda.scratch import BulkScratch
from pilotfish.kernels.moe import route
from pilotfish.kernels.norm import rms_norm
from tests.support.compiled import Code, compiling
from tests.unit.kernels.cuda.test_experts import TOP_K, E, H, by_hand, experts, inputs
from tests.unit.kernels.cuda.test_mma import halves, run_ptx
from tests.unit.kernels.cuda.test_packing import nvfp4


def test_a_word_and_its_scale_are_four_pairs_of_weights():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (32, 8), generator=generator, dtype=torch.uint8)
    exponents, eighths = (torch.randint(0, most, (32,), generator=generator) for most in (30, 8))
    words = packing._to_words(codes, packing.NVFP4_BITS).numpy().view(np.uint32)
    pair = ((exponents * 8 + eighths) * 0x00100010 + 0x70007000).numpy().astype(np.uint32)
    got = np.concatenate([halves(half) for half in run_ptx(group_mma.UNPACK_ASM.value, 4, [words] * 8 + [pair] * 8)], 1)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    values = magnitudes[(codes & 7).long()] * (1 - 2 * (codes >> 3).double())
    scales = (1 + eighths.double() / 8) * 2.0 ** (exponents.double() - packing.SCALE_EXPONENT)
    assert np.array_equal(got, (values * scales[:, None] / 256).numpy())


@pytest.mark.parametrize("kind", ("nvfp4", "bf16"))
def test_a_layer_routes_by_its_logits(kind):
    """A prompt's experts off a GPU, where those of any format are expanded; normed, as the next layer reads them."""
    packed, plain = experts(kind)
    router = torch.randn(E + 1, H, generator=torch.Generator().manual_seed(3)).bfloat16() / H**0.5
    mlp = PackedMoeMlp(PackedLinear([router]), packed, TOP_K)
    scratch = BulkScratch(torch.device("cpu"))
    scratch.reserve(max(packed.scratch_size, mlp.router.scratch_size))
    ops = CudaOperators(SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16, scratch=scratch))
    x, _, _, _ = inputs(20)
    logits = ops.product(mlp.router, x)
    weights, ids = route(logits[:, :E], TOP_K)
    want = logits[:, E:].double().sigmoid() * by_hand(x, plain[E])
    for row in range(20):
        for rank in range(TOP_K):
            want[row] += weights[row, rank] * by_hand(x[row : row + 1], plain[int(ids[row, rank])])[0]
    stream, after = torch.zeros(20, H), Norm(torch.ones(H), 1e-6, torch.float32)
    (normed,) = ops.feed_forward_prompt(mlp, [stream], [x], after)
    # products, SwiGLU and weights are rounded to bf16
    torch.testing.assert_close(stream.double(), want, rtol=0.05, atol=0.02 * want.abs().max())
    torch.testing.assert_close(normed, rms_norm(stream, after.scale, after.eps, torch.float32))


def loops_with(code: Code, op: str) -> list[list[str]]:
    """The instructions of each loop that has such a one."""
    lines = re.findall(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)([^;]*);", code.text, re.M)
    found = []
    for address, name, operands in lines:
        target = re.search(r"0x([0-9a-f]+)", operands)
        if name == "BRA" and target and int(target[1], 16) < int(address, 16):
            loop = [other for at, other, _ in lines if int(target[1], 16) <= int(at, 16) <= int(address, 16)]
            found += [loop] if any(other.startswith(op) for other in loop) else []
    return found


@pytest.mark.parametrize(
    ("rows", "registers", "programs", "loops"), ((300, 232, 2, 3), (40, 168, 3, 1)), ids=["many", "few"]
)
def test_its_code_for_a_gpu(rows, registers, programs, loops):
    """Weights and rows come by asynchronous copies of 16 bytes (scales of 8), nothing is spilled, and no weight is
    stored: what a lane unpacks is multiplied from its registers. A unit has two barriers: behind the wait for its
    copies, and before the next ones."""
    parts = ExpertWeights(nvfp4(512, 2048), nvfp4(512, 2048), nvfp4(2048, 512))
    packed = GroupedExperts([parts] * 8, parts, 4)
    x, ids = torch.zeros(rows, 2048).bfloat16(), torch.zeros(rows, 4, dtype=torch.int32)
    with compiling() as kernels:
        moe_prompt.experts(packed, x, torch.zeros(rows, 4), ids, torch.zeros(rows))
    names = [kernel.metadata.name for kernel in kernels]
    assert names == ["_prepare_kernel", "_experts_kernel", "_experts_kernel", "combine_kernel"]
    for kernel in kernels[1:3]:
        code = Code(kernel)
        assert code.stack == 0 and code.registers <= registers
        # a unit of 128 columns is 8 steps of 16, of two times four tiles; 96 rows at a time are 64 and 32
        assert code.count("HGMMA") == 16 * (4 if loops == 3 else 1)
        assert code.count("LDGSTS.E.BYPASS.128") > 0 and code.count("STS.U16") == 0
        # so many programs on a multiprocessor
        assert kernel.metadata.shared <= (226 << 10) // programs
        bodies = loops_with(code, "HGMMA")
        assert len(bodies) == loops
        for loop in bodies:
            assert sum(op.startswith("BAR") for op in loop) == 2, loop
            assert not any(op.startswith(("ST", "SHFL")) for op in loop)
            # descriptors are a warp's, not brought there from its lanes before each product
            assert sum(op.startswith("R2UR") for op in loop) <= 4
            # a pair of weights each: of 8 tiles, for any number of rows
            assert sum(op.startswith("HMUL2") for op in loop) == 64


@pytest.mark.parametrize("arch", (80, 120))
def test_it_assembles_for_devices_that_it_has_not_run_on(arch, monkeypatch):
    monkeypatch.setattr(moe_prompt, "has_group_products", lambda device: False)
    parts = ExpertWeights(nvfp4(64, 256), nvfp4(64, 256), nvfp4(256, 64))
    packed = GroupedExperts([parts] * 8, parts, 4)
    x, ids = torch.zeros(300, 256).bfloat16(), torch.zeros(300, 4, dtype=torch.int32)
    with compiling(arch) as kernels:
        moe_prompt.experts(packed, x, torch.zeros(300, 4), ids, torch.zeros(300))
    for kernel in kernels[1:3]:
        code = Code(kernel)
        # what a program may have of shared memory where a multiprocessor has least
        assert code.stack == 0 and code.count("HMMA") > 0 and kernel.metadata.shared <= 99 << 10
