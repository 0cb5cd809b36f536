"""Tests of `gdn_prompt`; run in Triton's interpreter (with a stand-in for fla-core) and on a GPU by those that import
them and give `device`, `dtype`, `sizes` and `rule`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pilotfish.engine.model.delta_net import GatedDeltaNet
from pilotfish.engine.round.torch_table import TorchOperators
from pilotfish.kernels.cuda.delta_prefill import gdn_prompt
from pilotfish.kernels.delta_net import delta_prefill
from tests.support.delta_windows import EPS, DeltaLayer


def stand_in(q, k, v, g, beta, scale, initial_state, output_final_state):
    """fla-core's chunk_gated_delta_rule as its documentation has it, by the CPU path's operator."""
    assert output_final_state and [t.dim() for t in (q, k, v, g, beta, initial_state)] == [4, 4, 4, 3, 3, 4]
    assert len(q) == 1 and all(t.is_contiguous() for t in (q, k, v, g, beta))
    group = v.shape[2] // q.shape[2]
    q, k = (t[0].float().repeat_interleave(group, dim=1) for t in (q * scale, k))
    output, after = delta_prefill(initial_state[0], q, k, v[0].float(), beta[0], g[0])
    return output[None].to(v.dtype), after[None]


def cpu_layer(layer):
    """A DeltaLayer's weights without its products, as the torch table takes them."""
    key_heads, heads, dk, dv = layer.sizes
    conv, rate, bias, norm = (t.cpu() for t in layer.weights)
    factor = torch.tensor([dk**-0.5, 1.0])[:, None, None]
    return GatedDeltaNet(None, None, conv, rate, bias, norm, factor, key_heads, heads, dk, dv, EPS, layer.dtype)


def assert_near(got, wanted):
    """Differs as bf16 operands must: by 1 % of the norm in all, and nowhere by more than 3 % of the largest value.

    fla-core rounds keys, values, gated keys, the solved triangle, deltas, read states and outputs to bf16. The same
    roundings in torch leave, over all cases here, 0.5 % of the norm and 1.5 % of the largest value. An element may be
    far off for its size: where what a head read nearly cancels, the gated norm magnifies what is left. The slightest
    fault tried, queries and keys 10 % too long, leaves 1.8 % of the norm and more; a gate, a state, a carry or a norm
    that is missing, or decays one token late, 14 %; the first rows without their history 12 %.
    """
    assert got.shape == wanted.shape
    error = got.cpu().float() - wanted.float()
    off = float(error.norm() / wanted.float().norm())
    most = float(error.abs().max() / wanted.abs().max())
    assert off <= 1e-2 and most <= 3e-2, f"{off:.2%} of the norm, {most:.2%} of the largest value"


@pytest.mark.parametrize(("num_rows", "padding"), ((1, 0), (2, 0), (70, 0), (200, 0), (1, 63), (130, 62)))
def test_a_prompt_matches_the_torch_table(device, dtype, sizes, rule, num_rows, padding):
    layer = DeltaLayer(sizes, dtype, device)
    states, histories, _ = layer.memory
    rows = layer.rows(num_rows + padding, 60)
    own = SimpleNamespace(s=states.cpu()[None].clone(), conv=histories.cpu()[None].clone())
    span = SimpleNamespace(slot=1, length=num_rows, num_rows=num_rows + padding)
    wanted = TorchOperators().gdn_prompt(cpu_layer(layer), 0, rows, span, own)
    before = states.clone(), histories.clone()
    numbers = torch.tensor((1, num_rows), dtype=torch.int32, device=device)
    # what stands in padding is not read, not even where it is no number
    rows[num_rows:] = float("nan")
    got = gdn_prompt(rows.to(device), states, histories, numbers, *layer.weights, EPS, rule)
    assert len(got) == num_rows + padding and not got[num_rows:].any() and not wanted[num_rows:].any()
    others = [slot for slot in range(len(states)) if slot != 1]
    for mine, theirs in zip((states, histories), before, strict=True):
        assert torch.equal(mine[others].nan_to_num(), theirs[others].nan_to_num())
    got, wanted, after, newest = got[:num_rows], wanted[:num_rows], states[1], histories[1]
    wanted_state, wanted_history = own.s[0, 1], own.conv[0, 1]
    assert torch.equal(newest.cpu(), wanted_history)
    if dtype == torch.float32:
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(after.cpu(), wanted_state, rtol=1e-4, atol=1e-5)
    else:
        assert_near(got, wanted)
        assert_near(after, wanted_state)
