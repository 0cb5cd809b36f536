"""The window kernels' machine code for sm_90, made without a GPU: what their bits and their speed rest on.

Bits: one kernel for every number of sequences and of window rows, and mma.sync products only. Speed: wide loads, no
spills, no barrier inside a step of the recurrence.
"""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch

from pilotfish.kernels.attention import PAGE
from tests.support.attention_windows import AttentionLayer
from tests.support.compiled import Code, compiling
from tests.support.delta_windows import DeltaLayer, counts_of

HOPPER_SHARED = 227 * 1024
SHAPES = ((1, 1), (1, 4), (3, 9), (16, 1), (2, 8))
"""Sequences, window rows."""


def names(kernels):
    return [kernel.metadata.name for kernel in kernels]


def checked(kernel, most_registers, early_stores=0):
    """The code of a kernel that spills nothing, and waits for the one before it before it writes; `early_stores`: of
    what it alone reads and writes."""
    code = Code(kernel)
    assert code.stack == 0 and code.count("LDL") == code.count("STL") == 0
    assert code.registers <= most_registers
    assert code.count("ACQBULK") == code.count("PREEXIT") == 1
    assert code.before("STG", "ACQBULK") == early_stores
    return code


def fusible(ptx):
    """Sums and differences of a product, which the assembler may round once or twice."""
    products = set(re.findall(r"mul\.f32\s+(%r\d+)", ptx))
    sums = re.findall(r"(?:add|sub)\.f32\s+%r\d+, (%r\d+), (%r\d+);", ptx)
    return [registers for registers in sums if products & set(registers)]


def test_delta_net():
    layer = DeltaLayer((16, 32, 128, 128), torch.bfloat16)
    with compiling() as kernels:
        for batch, width in SHAPES:
            slots = [1, 2, 3, 4] * 4
            layer.step(layer.rows(batch * width, 1), slots[:batch], counts_of(1, 2), width, pdl=True)
    assert names(kernels) == ["_steps_kernel", "_finish_kernel"] * len(SHAPES)
    assert len({kernel.hash for kernel in kernels}) == 2
    rows, finish = kernels[:2]
    # 4 programs of 4 warps on a multiprocessor
    code = checked(rows, 128, early_stores=16)
    # two ways through, accepted rows and the window: in each a barrier before rows are in shared memory, and one after
    assert code.count("BAR") == 4 and rows.metadata.shared <= 8192
    # all of the state, and a chunk of accepted rows with its taps, is asked for before the wait
    assert code.before("LDG.E.64.STRONG.GPU", "ACQBULK") == 16 + 4 and code.before("LDG.E.128", "ACQBULK") == 8
    # a step: sums over 8 lanes of 2 columns, one of an accepted row and two of the window's; and sums of 32 lanes, k's
    # norm of an accepted row, and of the window's q's norm and their product too
    assert code.count("SHFL") == (1 + 2) * 2 * 3 + (1 + 3) * 5 and code.count("MUFU.RSQ") == 3
    assert code.count("STG.E.64") == 16 + 1
    # 32 numbers a thread: into two sums and a new state, an accepted row's into one. No multiplication and addition
    # become one in one way and not in the other: but for logarithms all that are one stand in the source
    steps = (1 + 2) * 2 * 3 * 4 + 2 * 32 + 2 + 2 * 2
    assert code.instructions.count("FFMA") == steps + 3 * (4 + 1) + 3 * (4 + 4 + 1)
    for instance in ("mul.f32", "add.f32", "sub.f32"):
        assert instance not in rows.asm["ptx"]
    # of the window's rows only what the first launch left is read after the wait
    code = checked(finish, 64)
    assert code.before("LDG", "ACQBULK") == 9 and code.count("BAR") == 1 and finish.metadata.shared == 0


def test_delta_net_of_the_demo_model():
    layer = DeltaLayer((2, 4, 64, 64), torch.bfloat16)
    with compiling() as kernels:
        layer.step(layer.rows(4, 1), [1], counts_of(1, 2), 4, pdl=True)
    assert checked(kernels[0], 128, early_stores=8).count("BAR") == 4


def test_rounds_may_have_fewer_slots_than_the_model():
    layer = DeltaLayer((2, 4, 64, 64), torch.bfloat16)
    layer.memory[2] = layer.memory[2][:2]
    with compiling() as kernels:
        layer.step(layer.rows(4, 1), [1], counts_of(1, 2), 4)
    assert names(kernels) == ["_steps_kernel", "_finish_kernel"]


@pytest.mark.parametrize(
    ("cache_dtype", "tiled"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float8_e4m3fn, True)]
)
def test_attention(cache_dtype, tiled):
    layer = AttentionLayer((16, 2, 256, 64), [PAGE, 5, 7], torch.bfloat16, cache_dtype)
    with compiling() as kernels:
        for batch, width in SHAPES:
            slots = [1, 2, 3] * 6
            layer.step(layer.rows(batch * width, 1), slots[:batch], width, tiled=tiled, num_programs=132, pdl=True)
    assert names(kernels[:3]) == ["plan_kernel", "items_kernel", "merge_kernel"]
    assert len({kernel.hash for kernel in kernels}) == 3
    plan, items, merge = kernels[:3]
    # large angles are reduced in local memory, by the library's sine
    assert Code(plan).registers <= 96
    code = checked(merge, 128)
    # of up to eight chunks all parts are asked for before any is looked at: the best, the mass and 4 columns of 8 units
    assert code.before("LDG", "MUFU.EX2") >= 4 + 8 * (2 + 1)
    code = checked(items, 255)
    # rows are normed in ten places, each of them the same: no product is left that could become one with a sum or not
    for kernel in (items, merge):
        assert fusible(kernel.asm["ptx"]) == []
    assert items.metadata.shared <= HOPPER_SHARED
    # 16 rows x 16 columns x 256, then x 64 columns of the 256: one instruction for every row of every window, of which
    # there are 16 on one way and 32 on the other
    assert code.count("HMMA.16816.F32") == 32 + 64 and code.count("HGMMA") == 0
    # keys and values straight to shared memory: two units ahead of the loop, one in it; the queries come after them
    copies = 2 * 8 if cache_dtype == torch.bfloat16 else 2 * 4
    assert code.count("LDGSTS.E.BYPASS.128") == 2 * 3 * copies
    # and with each unit's keys the page of one to come, so that no turn of the loop waits for a page: what comes to
    # registers are places of 32 sequences, and the pages of the first two units and of the window's own rows
    assert code.count("LDGSTS") == 2 * 3 * (copies + 1)
    assert code.loads["LDG.E.STRONG.GPU"] == 3 + 5 + 2 * (5 + 2 + 2)
    assert code.before("LDG.E.128", "LDGSTS") == 0
    with compiling() as kernels:
        layer.step(layer.rows(1, 1), [1], 1, num_programs=132, pdl=True, settled=True)
    early = Code(kernels[1])
    # so is what 16 rows and two blocks of own keys are turned by, and two norms
    assert early.before("LDG.E.128", "ACQBULK") == 4 * (16 // 8 + 2) + 2 * 4
    # two units are on their way before the wait
    assert early.before("LDGSTS", "ACQBULK") == 2 * (copies + 1)
    assert early.stack == early.before("STG", "ACQBULK") == 0
    # who has waited for its own copies waits for those of the others before it looks at any
    order = [op for op in code.instructions if op.startswith(("DEPBAR.LE", "BAR.SYNC", "LDS"))]
    after = [next_op for op, next_op in pairwise(order) if op.startswith("DEPBAR.LE")]
    assert len(after) == 2 * 3 and all(op.startswith("BAR.SYNC") for op in after)
