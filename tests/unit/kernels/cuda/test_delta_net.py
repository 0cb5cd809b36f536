"""The GatedDeltaNet window: its reference has the meaning of the CPU path's layer and state, and the kernels (in
Triton's interpreter, in a process of their own) agree with the reference."""

from __future__ import annotations

import pytest
import torch

from pilotfish.engine.cache.tensors import Pending, RecurrentState
from pilotfish.engine.model.delta_net import GatedDeltaNet
from pilotfish.engine.model.window import Window
from pilotfish.kernels.cuda.delta_net import DeltaScratch, gdn_window_reference, pending_width
from pilotfish.kernels.rope import inverse_frequencies

NAN = float("nan")
EPS = 1e-6


class Given:
    """A projection that hands out what it was given, and an output product that changes nothing."""

    def __init__(self, rows):
        self.value = rows

    def rows(self, x):
        return self.value if self.value is not None else x


def draw(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


class Layer:
    """One linear layer's weights and, twice, its memory: as the CPU path keeps it and as the window kernel does."""

    def __init__(self, key_heads, heads, dk, dv, num_slots=5, most=9, dtype=torch.float32):
        self.channels = 2 * key_heads * dk + heads * dv
        self.weights = (
            draw(4, self.channels, seed=1, scale=0.5),
            -draw(heads, seed=2).exp(),
            draw(heads, seed=3),
            1 + 0.1 * draw(dv, seed=4),
        )
        self.sizes = (key_heads, heads, dk, dv)
        self.most, self.dtype = most, dtype
        state, history = draw(num_slots, heads, dk, dv, seed=5), draw(num_slots, 3, self.channels, seed=6).to(dtype)
        self.memory = (
            state,
            history,
            torch.full((num_slots, most, pending_width(self.channels, heads)), NAN, dtype=dtype),
        )

        def rows(*shape, kind=torch.float32):
            return torch.full((1, num_slots, most, *shape), NAN, dtype=kind)

        pending = Pending(rows(heads, dk), rows(heads, dv), rows(heads), rows(heads), rows(self.channels, kind=dtype))
        self.cpu = RecurrentState(state[None].clone(), history[None].clone(), pending)

    @property
    def num_columns(self):
        _, heads, _, dv = self.sizes
        return self.channels + heads * dv + 2 * heads

    def module(self, projected):
        key_heads, heads, dk, dv = self.sizes
        conv, rate, bias, norm = self.weights
        factor = torch.tensor([dk**-0.5, 1.0])[:, None, None]
        return GatedDeltaNet(
            Given(projected), Given(None), conv, rate, bias, norm, factor, key_heads, heads, dk, dv, EPS, self.dtype
        )

    def step_cpu(self, projected, slots, counts, width):
        """The CPU path's round: replay, window, pending rows."""
        slots = torch.tensor(slots)
        window = Window.build(width, slots, [0] * len(slots), [[0]] * len(slots), inverse_frequencies(8, 1e4))
        states, histories = self.cpu.replay(slots, [counts[s] for s in slots.tolist()])
        out, rows = self.module(projected).rows(projected, window, states[0], histories[0])
        self.cpu.pending.store(slots, [rows])
        return out

    def step(self, projected, slots, counts, width, function=None):
        """The window kernel's round, or its reference's."""
        heads, dv = self.sizes[1], self.sizes[3]
        out = torch.full((len(projected), heads * dv), NAN, dtype=self.dtype)
        slots, counts = torch.tensor(slots, dtype=torch.int32), torch.tensor(counts)
        operands = (projected, slots, counts, *self.memory, *self.weights, EPS, width)
        if function is None:
            gdn_window_reference(*operands, None, out)
            return out
        shape = (len(projected), len(slots), self.most, self.channels, heads, dv)
        scratch = DeltaScratch.empty(*shape, torch.device("cpu"))
        for buffer in (scratch.mixed, scratch.gates, scratch.read):
            buffer.fill_(NAN)
        function(*operands, scratch, out)
        return out


ROUNDS = (
    # slots, width, pending rows accepted of each slot
    ([1, 2], 9, [0, 0, 0, 0, 0]),
    ([2, 1, 3], 2, [0, 9, 4, 0, 0]),
    ([1, 3], 1, [0, 1, 0, 2, 0]),
    ([3], 6, [0, 0, 0, 1, 0]),
    ([4, 3, 1], 4, [0, 1, 0, 3, 0]),
    ([3, 1], 1, [0, 2, 0, 4, 0]),
)


@pytest.mark.parametrize(("key_heads", "heads", "dk", "dv"), ((2, 4, 16, 16), (1, 3, 8, 16), (2, 2, 16, 8)))
def test_the_reference_is_the_layer_of_the_cpu_path(key_heads, heads, dk, dv):
    layer = Layer(key_heads, heads, dk, dv)
    for number, (slots, width, counts) in enumerate(ROUNDS):
        num_rows = len(slots) * width
        projected = draw(num_rows + -num_rows % 8, layer.num_columns, seed=20 + number)
        wanted = layer.step_cpu(projected, slots, counts, width)
        got = layer.step(projected, slots, counts, width)
        torch.testing.assert_close(got[:num_rows], wanted[:num_rows], rtol=1e-5, atol=1e-6)
        state, history, _ = layer.memory
        torch.testing.assert_close(state, layer.cpu.s[0], rtol=1e-5, atol=1e-6)
        assert torch.equal(history, layer.cpu.conv[0])
