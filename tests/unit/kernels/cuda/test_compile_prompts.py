"""No prompt's length chooses a kernel, but one of two for experts: those that prompts of the padded lengths have had
compiled, before an engine is ready, serve all later ones. fla-core's own are no part of this: they leave the length out
of what they are compiled by, too."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pilotfish.kernels.attention import PAGE
from pilotfish.kernels.cuda import delta_prefill, moe_prompt, norm, router
from pilotfish.kernels.cuda.attention_prompt import attend_prompt, project_prompt
from pilotfish.kernels.cuda.moe import ExpertWeights, GroupedExperts
from tests.support.launches import launches_of
from tests.unit.kernels.cuda.test_packing import nvfp4

LENGTHS = (1, 2, 16, 24, 100, 2048)
"""For Triton one, multiples of 16 and others."""
HIDDEN, HEADS, KEY_HEADS, WIDTH, TOP_K, EXPERTS = 256, 4, 2, 64, 4, 8


def mixer(rows):
    channels = 2 * KEY_HEADS * WIDTH + HEADS * WIDTH
    projected = torch.zeros(rows, channels + HEADS * WIDTH + 2 * HEADS).bfloat16()
    memory = torch.zeros(2, HEADS, WIDTH, WIDTH), torch.zeros(2, 3, channels).bfloat16(), torch.zeros(3).int()
    weights = torch.zeros(4, channels), torch.zeros(HEADS), torch.zeros(HEADS), torch.zeros(WIDTH)

    def rule(q, k, v, *_, initial_state, **options):
        return torch.zeros_like(v), initial_state

    delta_prefill.gdn_prompt(projected, *memory, *weights, 1e-6, rule)


def experts(packed, rows):
    x, ids = torch.zeros(rows, HIDDEN).bfloat16(), torch.zeros(rows, TOP_K, dtype=torch.int32)
    weights, gate = torch.zeros(rows, TOP_K), torch.zeros(rows)
    router.route(torch.zeros(rows, EXPERTS + 1).bfloat16(), EXPERTS, weights, ids, gate)
    moe_prompt.experts(packed, x, weights, ids, gate)


def sums(rows):
    x, delta = torch.zeros(rows, HIDDEN), torch.zeros(rows, HIDDEN).bfloat16()
    norm.add_norm(x, delta, torch.zeros(HIDDEN), 1e-6, torch.empty_like(delta))


def attention(rows, start=0):
    heads, kv, dim = 4, 2, 32
    angles = torch.zeros(2, rows, 1, 8)
    table = torch.arange(1, 20)
    caches = torch.zeros(2, 20, kv, PAGE, dim).bfloat16()
    projected = torch.zeros(rows, (2 * heads + 2 * kv) * dim).bfloat16()
    q, out = torch.zeros(rows, heads, dim).bfloat16(), torch.zeros(rows, heads * dim).bfloat16()
    place = (torch.arange(start, start + rows), *angles, table, *caches, torch.zeros(heads + kv, dim), 1e-6)
    project_prompt(projected, *place, q)
    attend_prompt(q, projected, start, rows, table, *caches, out)


def test_no_length_of_a_prompt_chooses_a_kernel():
    parts = ExpertWeights(nvfp4(64, HIDDEN), nvfp4(64, HIDDEN), nvfp4(HIDDEN, 64))
    packed = GroupedExperts([parts] * EXPERTS, parts, TOP_K)
    found = [
        launches_of(
            lambda rows=rows: (mixer(rows), experts(packed, rows), sums(rows), attention(rows), attention(rows, 2048))
        )  # type: ignore[misc]
        for rows in LENGTHS
    ]
    # each compiles
    names = {launch.compiled.metadata.name for launch in found[0]}
    kinds = {
        "_mix_kernel",
        "_state_kernel",
        "_gate_kernel",
        "_route_kernel",
        "_prepare_kernel",
        "_experts_kernel",
        "combine_kernel",
    }
    assert names == kinds | {"_add_norm_kernel", "project_kernel", "_gather_kernel"}
    for rows, launches in zip(LENGTHS, found, strict=True):
        # an expert of these has half the rows
        like = found[-1] if rows > 48 else found[0]
        assert [launch.hash for launch in launches] == [launch.hash for launch in like], rows
    changed = [few.kernel for few, many in zip(found[0], found[-1], strict=True) if few.hash != many.hash]
    assert [kernel.partition(".")[2] for kernel in changed] == ["_experts_kernel"] * 2


def test_a_length_that_is_looked_at_is_found(monkeypatch):
    kernel = delta_prefill._mix_kernel
    (param,) = (param for param in kernel.params if param.name == "T")
    monkeypatch.setattr(param, "do_not_specialize", False)
    kernel.device_caches.clear()
    try:
        first, second = (launches_of(lambda rows=rows: mixer(rows)) for rows in (16, 24))  # type: ignore[misc]
    finally:
        kernel.device_caches.clear()
    assert first != second
