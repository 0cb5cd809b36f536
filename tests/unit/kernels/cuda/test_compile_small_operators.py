"""The small operators' machine code for sm_90, made without a GPU: one kernel for every number of rows, wide loads, no
spills, and no read of what changes before the wait for the kernel before."""

from __future__ import annotations

import pytest
import torch

from pilotfish.engine.round.batch_state import BatchState
from pilotfish.kernels.cuda import commit, lookup, norm, router, sample
from pilotfish.kernels.cuda.packing import PackedRows, pack
from pilotfish.kernels.cuda.tiled_rows import TiledRows
from tests.support.compiled import Code, compiling
from tests.support.dependent_launch import Waits

EPS = 1e-6
CPU = torch.device("cpu")


def checked(kernels, most_registers):
    """The code of the one kernel that all launches were."""
    assert len({kernel.hash for kernel in kernels}) == 1
    code = Code(kernels[0])
    assert code.stack == 0 and code.count("LDL") == code.count("STL") == 0
    assert code.registers <= most_registers
    assert code.count("ACQBULK") == code.count("PREEXIT") == 1
    assert code.before("ST", "ACQBULK") == code.before("ATOM", "ACQBULK") == 0
    return code


def bf16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_norms(tied):
    hidden, embedding = 2048, bf16(100, 2048)
    if tied:
        embedding = PackedRows(pack(embedding), hidden)
    scale = torch.ones(hidden)
    state = BatchState(4, 8, 64, CPU).fields
    with compiling() as kernels:
        for batch, width, rows in ((1, 1, 16), (4, 4, 16), (3, 9, 32)):
            slots = torch.zeros(batch, dtype=torch.int32)
            tokens, positions = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int32)
            norm.embed_rows(
                embedding, scale, EPS, slots, state.last_token, state.drafts, state.length, width, tokens, positions,
                torch.zeros(rows, hidden), TiledRows.empty(rows, hidden, CPU), pdl=True,
            )  # fmt: skip
    # the embedding's and the scale's tile, in sixteens of bytes
    code = checked(kernels, 96)
    assert code.loads["LDG.E.128"] == 6 and code.count("STG.E.128") == code.count("STG") - 2 == 6
    with compiling() as kernels:
        for rows in (1, 5, 16, 64):
            h = TiledRows.empty(rows, hidden, CPU)
            norm.add_norm(torch.zeros(rows, hidden), bf16(rows, hidden), scale, EPS, h, pdl=True)
    code = checked(kernels, 96)
    assert code.loads["LDG.E.128"] == 10 and code.before("LDG.E.128", "ACQBULK") == 4
    # also h goes 16 bytes at a time
    assert code.count("STG.E.128") == code.count("STG") == 6
    with compiling() as kernels:
        for rows in (1, 16):
            out = bf16(rows, 2 * hidden)
            tokens = torch.zeros(rows, dtype=torch.int64)
            norm.pair_norm(tokens, embedding, bf16(rows, hidden), scale, scale, EPS, out, rows, pdl=True)
    checked(kernels, 96)


def test_router_and_commit():
    with compiling() as kernels:
        for rows in (1, 16, 256):
            ids = torch.zeros((rows, 8), dtype=torch.int32)
            router.route(torch.zeros(rows, 257), 256, torch.zeros(rows, 8), ids, torch.zeros(rows), pdl=True)
    # one warp: no barrier
    assert checked(kernels, 96).count("BAR") == 0
    state = BatchState(4, 8, 64, CPU).fields
    with compiling() as kernels:
        for batch, width in ((1, 1), (4, 4), (2, 9)):
            slots, chosen = torch.zeros(batch, dtype=torch.int32), torch.zeros(batch * width, dtype=torch.int64)
            verdicts = commit.Verdicts.empty(batch, CPU)
            commit.accept_commit(chosen, slots, state, verdicts, width, 3, pdl=True)
    checked(kernels, 96)


def test_look_up():
    state = BatchState(4, 8, 64, CPU, history_length=4105).fields
    scratch = lookup.LookupScratch.empty(16, CPU)
    with compiling() as kernels:
        for batch, depth in ((1, 1), (4, 3), (16, 8)):
            lookup.look_up(torch.zeros(batch, dtype=torch.int32), state, depth, 5, 2, scratch, pdl=True)
    code = checked(kernels, 64)
    assert code.count("ATOM") >= 1 and not Waits(kernels[0]).early


REGISTERS = {
    "_choose_kernel": 128, "threshold_kernel": 224, "count_kernel": 96, "mass_kernel": 128, "tie_kernel": 96,
    "_draw_kernel": 96,
}  # fmt: skip


def test_choose():
    vocab = 248320
    state = BatchState(2, 8, vocab, CPU).fields
    scratch = sample.ChoiceScratch.empty(16, vocab, CPU)
    with compiling() as kernels:
        for batch, width in ((1, 1), (4, 4)):
            rows = batch * width
            out, slots = torch.zeros(rows, dtype=torch.int64), torch.zeros(batch, dtype=torch.int32)
            sample.choose(torch.zeros(rows, vocab), slots, state, width, out, scratch, out, pdl=True)
    named = {name: [kernel for kernel in kernels if kernel.metadata.name == name] for name in REGISTERS}
    # a launch a digit, for every number of rows
    assert [len(found) for found in named.values()] == [2, 2, 8, 14, 2, 2] and len(kernels) == 30
    codes = {name: checked(found, REGISTERS[name]) for name, found in named.items()}
    for found in named.values():
        waits = Waits(found[0])
        assert waits.early <= {("ld", frozenset(["slots"]))} and not waits.leaves_early
    # the exponential of a score once, not once in each lane's layout of digits
    assert codes["mass_kernel"].count("MUFU.EX2") <= 4
    code = codes["_choose_kernel"]
    # logits, bias and counts; the accurate logarithm twice for each of a lane's 16 logits, no approximation of it
    assert code.loads["LDG.E.128"] >= 12 and code.count("MUFU.LG2") == 0
