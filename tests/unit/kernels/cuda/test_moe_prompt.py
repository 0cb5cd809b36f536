"""`moe_prompt.experts`: in Triton's interpreter (interpret_moe_prompt.py), its PTX alone, and its code for a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from pilotfish.engine.round.cuda_table import CudaOperators
from pilotfish.kernels.cuda import moe_prompt, packing
from pilotfish.kernels.cuda.moe import ExpertWeights, GroupedExperts
from pilotfish.kernels.cuda.scratch import BulkScratch
from pilotfish.kernels.moe import route
from tests.support.compiled import Code, compiling
from tests.support.interpreter import run_interpreted
from tests.unit.kernels.cuda.test_experts import TOP_K, E, by_hand, experts, inputs
from tests.unit.kernels.cuda.test_mma import halves, run_ptx
from tests.unit.kernels.cuda.test_packing import nvfp4


def test_kernels_in_the_interpreter():
    run_interpreted(__file__, "interpret_moe_prompt.py")


def test_a_word_and_its_scale_are_four_pairs_of_weights():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (32, 8), generator=generator, dtype=torch.uint8)
    exponents, eighths = (torch.randint(0, most, (32,), generator=generator) for most in (30, 8))
    words = packing._to_words(codes, packing.NVFP4_BITS).numpy().view(np.uint32)
    pair = ((exponents * 8 + eighths) * 0x00100010 + 0x70007000).numpy().astype(np.uint32)
    got = np.concatenate([halves(half) for half in run_ptx(moe_prompt._ASM.value, 4, [words, pair])], 1)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    values = magnitudes[(codes & 7).long()] * (1 - 2 * (codes >> 3).double())
    scales = (1 + eighths.double() / 8) * 2.0 ** (exponents.double() - packing.SCALE_EXPONENT)
    assert np.array_equal(got, (values * scales[:, None] / 256).numpy())


@pytest.mark.parametrize("kind", ("nvfp4", "bf16"))
def test_a_layer_routes_by_its_logits(kind):
    """Off a GPU, where experts of any format are expanded."""
    packed, plain = experts(kind)
    scratch = BulkScratch(torch.device("cpu"))
    scratch.reserve(packed.scratch_size)
    ops = CudaOperators(SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16, scratch=scratch))
    x, _, _, _ = inputs(20)
    logits = torch.randn(20, E + 1, generator=torch.Generator().manual_seed(3)).bfloat16()
    weights, ids = route(logits[:, :E], TOP_K)
    want = logits[:, E:].double().sigmoid() * by_hand(x, plain[E])
    for row in range(20):
        for rank in range(TOP_K):
            want[row] += weights[row, rank] * by_hand(x[row : row + 1], plain[int(ids[row, rank])])[0]
    got = packed.bulk(x, *ops._route(logits, packed), scratch.memory)
    # products, SwiGLU and weights are rounded to bf16
    torch.testing.assert_close(got.double(), want, rtol=0.05, atol=0.02 * want.abs().max())


@pytest.mark.parametrize(("rows", "registers", "programs"), ((300, 255, 2), (40, 168, 3)), ids=["many", "few"])
def test_its_code_for_a_gpu(rows, registers, programs):
    """Weights and rows come by asynchronous copies of 16 bytes (scales of 8); nothing is stored by halves, next to
    nothing spilled (24 registers where rows are many, none of them in the loop), and a warp waits for no other to
    multiply what it unpacked (else 33 barriers a unit, and not 3): what else compiles costs a factor, and no value
    shows it."""
    parts = ExpertWeights(nvfp4(512, 2048), nvfp4(512, 2048), nvfp4(2048, 512))
    packed = GroupedExperts([parts] * 8, parts, 4)
    x, ids = torch.zeros(rows, 2048).bfloat16(), torch.zeros(rows, 4, dtype=torch.int32)
    with compiling() as kernels:
        moe_prompt.experts(packed, x, torch.zeros(rows, 4), ids, torch.zeros(rows))
    names = [kernel.metadata.name for kernel in kernels]
    assert names == ["list_kernel", "_experts_kernel", "_experts_kernel", "combine_kernel"]
    for kernel in kernels[1:3]:
        code = Code(kernel)
        assert code.stack <= 104 and code.registers <= registers and code.count("BAR") <= 24
        # a unit of 128 columns is 8 steps of 16, of gate and of up, or of twice as many rows of down
        assert code.count("HGMMA") == 16
        assert code.count("LDGSTS.E.BYPASS.128") > 0 and code.count("STS.U") == code.count("STS.64") == 0
        # so many programs on a multiprocessor
        assert kernel.metadata.shared <= (226 << 10) // programs
