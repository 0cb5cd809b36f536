"""`project_prompt` and `attend_prompt`: kernels in the interpreter (interpret_attention_prompt.py), code for a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pilotfish.kernels.attention import PAGE
from pilotfish.kernels.cuda.attention_prompt import attend_prompt, project_prompt
from tests.support.compiled import Code, compiling
from tests.support.interpreter import run_interpreted


def test_kernels_in_the_interpreter():
    run_interpreted(__file__, "interpret_attention_prompt.py")


@pytest.mark.parametrize("cache_dtype", (torch.bfloat16, torch.float8_e4m3fn))
def test_its_code_for_a_gpu(cache_dtype):
    """Three launches; the context comes by whole sectors, and nothing is spilled."""
    heads, kv, dim, rows = 16, 2, 256, 40
    caches = [torch.zeros(2, kv, PAGE, dim).to(cache_dtype) for _ in range(2)]
    projected, norm = torch.zeros(rows, 2 * (heads + kv) * dim).bfloat16(), torch.ones(heads + kv, dim)
    angles = torch.zeros(rows, 1, 32), torch.zeros(rows, 1, 32)
    with compiling() as kernels:
        q, out = torch.zeros(rows, heads, dim).bfloat16(), torch.zeros(rows, heads * dim).bfloat16()
        project_prompt(projected, torch.arange(rows), *angles, torch.tensor([1]), *caches, norm, 1e-6, q)
        attend_prompt(q, projected, 0, rows, torch.tensor([1]), *caches, out)
    assert [kernel.metadata.name for kernel in kernels] == ["project_kernel", "_gather_kernel", "_gate_kernel"]
    codes = [Code(kernel) for kernel in kernels]
    assert [code.stack for code in codes] == [0, 0, 0]
    wide = "LDG.E.128" if cache_dtype == torch.bfloat16 else "LDG.E.64"
    assert codes[1].loads[wide] > 0 and codes[1].loads["LDG.E.U16"] == codes[1].loads["LDG.E.U8"] == 0
