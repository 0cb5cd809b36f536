"""Gated attention of a window: its reference has the meaning of the CPU path's layer, and the kernels (in Triton's
interpreter, in a process of their own) agree with the reference."""

from __future__ import annotations

import pytest
import torch

from pilotfish.engine.cache.tensors import KvCache
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.model.window import Window
from pilotfish.kernels.attention import PAGE
from pilotfish.kernels.cuda.attention import (
    AttentionScratch,
    RowPlan,
    attention_window_reference,
    plan_rows_reference,
)
from pilotfish.kernels.rope import inverse_frequencies

EPS = 1e-6
TABLES = torch.tensor([[0, 0, 0], [5, 1, 6], [3, 2, 7], [4, 9, 8]], dtype=torch.int32)
LENGTHS = torch.tensor([0, PAGE - 2, 2 * PAGE + 60, 5])


def draw(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


class Given:
    """A projection that hands out what it was given, and an output product that changes nothing."""

    def __init__(self, rows):
        self.value = rows

    def rows(self, x):
        return self.value if self.value is not None else x


class Layer:
    """A full-attention layer's weights and its pages: random where LENGTHS say that something was written, else NaN."""

    def __init__(self, heads, kv, dim, rotary, dtype=torch.float32):
        self.heads, self.kv, self.dim, self.dtype = heads, kv, dim, dtype
        self.inv_freq = inverse_frequencies(rotary, 1e7)
        self.qk_norm = 1 + 0.1 * draw(heads + kv, dim, seed=1)
        self.caches = [torch.full((10, kv, PAGE, dim), float("nan")) for _ in range(2)]
        for slot, length in enumerate(LENGTHS.tolist()):
            for seed, cache in enumerate(self.caches):
                for page, part in zip(
                    TABLES[slot].tolist(), draw(length, kv, dim, seed=10 * slot + seed).split(PAGE), strict=False
                ):
                    cache[page, :, : len(part)] = part.transpose(0, 1)
        self.caches = [cache.to(dtype) for cache in self.caches]

    @property
    def num_columns(self):
        return 2 * (self.heads + self.kv) * self.dim

    def plan(self, function, slots, width, step=0):
        plan = RowPlan.empty(len(slots) * width, len(slots), 2 * len(self.inv_freq), torch.device("cpu"))
        for buffer in (plan.cos, plan.sin):
            buffer.fill_(float("nan"))
        slots = torch.tensor(slots, dtype=torch.int32)
        function(slots, LENGTHS, self.inv_freq, width, step, self.heads, self.kv, plan)
        return plan

    def step(self, function, projected, slots, width, **options):
        plan = self.plan(plan_rows_reference, slots, width)
        scratch = AttentionScratch.empty(
            len(slots) * width, len(slots), width, 3 * PAGE, 10, self.heads, self.kv, self.dim, self.dtype,
            torch.device("cpu"),
        )  # fmt: skip
        for buffer in (scratch.q, scratch.partial, scratch.stats):
            buffer.fill_(float("nan"))
        out = torch.full((len(projected), self.heads * self.dim), float("nan"), dtype=self.dtype)
        slots = torch.tensor(slots, dtype=torch.int32)
        function(projected, slots, plan, TABLES, *self.caches, self.qk_norm, EPS, width, scratch, out, **options)
        return out[: len(slots) * width]

    def step_cpu(self, projected, slots, width):
        starts = [int(LENGTHS[slot]) for slot in slots]
        tables = [TABLES[slot].tolist() for slot in slots]
        window = Window.build(width, torch.tensor(slots), starts, tables, self.inv_freq)
        module = GatedAttention(
            Given(projected), Given(None), self.qk_norm, self.heads, self.kv, self.dim, EPS, self.dtype
        )
        return module.rows(projected, window, KvCache(*self.caches))[: window.num_rows]


def padded(num_rows):
    return num_rows + -num_rows % 8


@pytest.mark.parametrize(("slots", "width"), (([1, 2, 3], 4), ([2], 9), ([3, 1], 1)))
def test_the_reference_is_the_layer_of_the_cpu_path(slots, width):
    projected = draw(padded(len(slots) * width), Layer(4, 2, 32, 8).num_columns, seed=3)
    ours, theirs = Layer(4, 2, 32, 8), Layer(4, 2, 32, 8)
    got = ours.step(attention_window_reference, projected, slots, width)
    torch.testing.assert_close(got, theirs.step_cpu(projected, slots, width), rtol=1e-5, atol=1e-6)
    for mine, other in zip(ours.caches, theirs.caches, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6, equal_nan=True)
