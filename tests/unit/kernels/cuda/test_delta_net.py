"""The reference of `gdn_window` means what the torch table and the state mean. The kernels are compared with it by
their PTX: test_run_delta_net.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pilotfish.engine.cache.tensors import Pending, RecurrentState
from pilotfish.engine.round.torch_table import TorchOperators, TorchScratch
from pilotfish.kernels.cuda.delta_net import check_sizes
from tests.support.delta_prompts import cpu_layer
from tests.support.delta_windows import MOST, NAN, NUM_SLOTS, ROUNDS, DeltaLayer
from tests.support.kernel_references import gdn_window_reference


class TorchLayer:
    """The torch table's operators and state, from a DeltaLayer's."""

    def __init__(self, layer):
        _, heads, dk, dv = layer.sizes
        state, history, _ = layer.memory

        def rows(*shape):
            return torch.full((1, NUM_SLOTS, MOST, *shape), NAN)

        pending = Pending(rows(heads, dk), rows(heads, dv), rows(heads), rows(heads), rows(layer.channels))
        no_hidden = torch.empty(NUM_SLOTS, 0)
        self.state = RecurrentState(state[None].clone(), history[None].clone(), no_hidden, pending)
        self.layer, self.ops = cpu_layer(layer), TorchOperators()

    def step(self, projected, slots, counts, width):
        """A round: replay, window, pending rows."""
        slots, state, scratch = torch.tensor(slots), SimpleNamespace(pending_count=torch.tensor(counts)), TorchScratch()
        out = torch.empty(len(projected), self.layer.num_value_heads * self.layer.value_head_dim)
        self.ops.replay(slots, state, self.state, scratch)
        self.ops.gdn_window(self.layer, 0, projected, slots, width, state, self.state, scratch, out)
        self.ops.keep_rows(slots, self.state, scratch)
        return out


@pytest.mark.parametrize("sizes", ((2, 4, 16, 16), (1, 3, 8, 16), (2, 2, 16, 8)))
def test_the_reference_is_the_torch_table(sizes):
    layer = DeltaLayer(sizes)
    cpu = TorchLayer(layer)
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
