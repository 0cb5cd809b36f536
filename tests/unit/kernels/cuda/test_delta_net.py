"""The reference of `gdn_window` means what the CPU path's layer and state mean. The kernels are compared with it by
their PTX: test_run_delta_net.py."""

from __future__ import annotations

import pytest
import torch

from pilotfish.engine.cache.tensors import Pending, RecurrentState
from pilotfish.engine.model.window import Window
from pilotfish.kernels.cuda.delta_net import check_sizes, gdn_window_reference
from pilotfish.kernels.rope import inverse_frequencies
from tests.support.delta_prompts import Given, cpu_layer
from tests.support.delta_windows import MOST, NAN, NUM_SLOTS, ROUNDS, DeltaLayer


class CpuLayer:
    """The CPU path's layer and state, from a DeltaLayer's."""

    def __init__(self, layer):
        _, heads, dk, dv = layer.sizes
        state, history, _ = layer.memory

        def rows(*shape):
            return torch.full((1, NUM_SLOTS, MOST, *shape), NAN)

        pending = Pending(rows(heads, dk), rows(heads, dv), rows(heads), rows(heads), rows(layer.channels))
        self.state = RecurrentState(state[None].clone(), history[None].clone(), pending)
        self.projected = Given()
        self.layer = cpu_layer(layer, self.projected)

    def step(self, projected, slots, counts, width):
        """A round: replay, window, pending rows."""
        slots = torch.tensor(slots)
        window = Window.build(width, slots, [0] * len(slots), [[0]] * len(slots), inverse_frequencies(8, 1e4))
        states, histories = self.state.replay(slots, [counts[s] for s in slots.tolist()])
        self.projected.value = projected
        out, rows = self.layer.rows(projected, window, states[0], histories[0])
        self.state.pending.store(slots, [rows])
        return out


@pytest.mark.parametrize("sizes", ((2, 4, 16, 16), (1, 3, 8, 16), (2, 2, 16, 8)))
def test_the_reference_is_the_layer_of_the_cpu_path(sizes):
    layer = DeltaLayer(sizes)
    cpu = CpuLayer(layer)
    for number, (slots, width, counts) in enumerate(ROUNDS):
        num_rows = len(slots) * width
        projected = layer.rows(num_rows + -num_rows % 8, 20 + number)
        wanted = cpu.step(projected, slots, counts, width)[:num_rows]
        got = layer.step(projected, slots, counts, width, gdn_window_reference)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
        state, history, _ = layer.memory
        torch.testing.assert_close(state, cpu.state.s[0], rtol=1e-5, atol=1e-6)
        assert torch.equal(history, cpu.state.conv[0])


@pytest.mark.parametrize(
    ("sizes", "field"),
    (
        ((2, 4, 48, 64, 4), "linear_key_head_dim"),
        ((2, 4, 64, 8, 4), "linear_value_head_dim"),
        ((2, 4, 64, 64, 3), "linear_conv_kernel_dim"),
    ),
)
def test_sizes_that_the_kernels_do_not_hold_are_refused_by_name(sizes, field):
    check_sizes(16, 48, 128, 128, 4)
    with pytest.raises(ValueError, match=f"^{field}: "):
        check_sizes(*sizes)
