"""The gated delta rule: step, window, replay and the chunk form, each against float64 and against one another."""

from __future__ import annotations

import pytest
import torch

from pilotfish.kernels.delta_net import CHUNK, delta_prefill, delta_read, delta_replay, delta_step, delta_window

HEADS, DK, DV = 3, 16, 8
NAN = float("nan")


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operands(*shape, seed=0, dk=DK, dv=DV):
    """q, k, v, beta, decay of tokens [*shape, heads, ...] as a layer makes them: unit keys, decays below 1."""
    q, k = (torch.nn.functional.normalize(draw(*shape, HEADS, dk, seed=seed + i), dim=-1) for i in (0, 1))
    v = draw(*shape, HEADS, dv, seed=seed + 2)
    beta = draw(*shape, HEADS, seed=seed + 3).sigmoid()
    log_decay = -draw(*shape, HEADS, seed=seed + 4).exp() * 0.3
    return q * dk**-0.5, k, v, beta, log_decay.exp()


def reference(state, q, k, v, beta, decay):
    """Outputs and state of one sequence's tokens [T, Hv, ...] in float64, straight from the rule."""
    state, q, k, v, beta, decay = (t.double() for t in (state, q, k, v, beta, decay))
    outputs = torch.zeros(v.shape, dtype=torch.float64)
    for t in range(len(q)):
        for h in range(q.shape[1]):
            kept = decay[t, h] * state[h]
            delta = beta[t, h] * (v[t, h] - kept.T @ k[t, h])
            state[h] = kept + torch.outer(k[t, h], delta)
            outputs[t, h] = state[h].T @ q[t, h]
    return outputs, state


def step(state, k, v, beta, decay):
    """`delta_step` of one token whose operands have no axes for the state's."""
    return delta_step(state, k.unsqueeze(-1), v.unsqueeze(-2), beta[..., None, None], decay[..., None, None])


def test_a_step_matches_float64():
    state = draw(HEADS, DK, DV, seed=9)
    q, k, v, beta, decay = operands(1)
    outputs, after = reference(state, q, k, v, beta, decay)
    stepped = step(state, k[0], v[0], beta[0], decay[0])
    torch.testing.assert_close(stepped.double(), after, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(delta_read(stepped, q[0].unsqueeze(-1)).double(), outputs[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", (1, 4, 9))
def test_a_window_matches_float64(width):
    states = draw(2, HEADS, DK, DV, seed=9)
    rows = operands(2, width)
    outputs = delta_window(states, *rows)
    for b in range(2):
        wanted, _ = reference(states[b], *(t[b] for t in rows))
        torch.testing.assert_close(outputs[b].double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dk", "dv"), ((16, 8), (16, 16), (7, 5), (128, 128)))
def test_a_window_has_the_bits_of_single_steps_of_one_sequence(dk, dv):
    states = draw(4, HEADS, dk, dv, seed=9)
    q, k, v, beta, decay = operands(4, 9, dk=dk, dv=dv)
    for width in (1, 2, 9):
        outputs = delta_window(states, *(t[:, :width] for t in (q, k, v, beta, decay)))
        for b in range(4):
            state = states[b]
            for j in range(width):
                state = step(state, k[b, j], v[b, j], beta[b, j], decay[b, j])
                assert torch.equal(outputs[b, j], delta_read(state, q[b, j].unsqueeze(-1))), (width, b, j)


def test_a_window_leaves_its_state():
    states = draw(2, HEADS, DK, DV, seed=9)
    before = states.clone()
    delta_window(states, *operands(2, 3))
    assert torch.equal(states, before)


@pytest.mark.parametrize("counts", ([0], [1], [9], [0, 0], [3, 3], [0, 9], [5, 0, 1, 9], [2, 1, 3, 2]))
def test_replay_has_the_bits_of_single_steps_and_reads_nothing_past_a_count(counts):
    layers, batch, most = 2, len(counts), max(counts)
    states = draw(layers, batch, HEADS, DK, DV, seed=9)
    _, k, v, beta, decay = operands(layers, batch, max(most, 1))
    spoiled = [t.clone() for t in (k, v, beta, decay)]
    for b, count in enumerate(counts):
        for t in spoiled:
            t[:, b, count:] = NAN
    replayed = delta_replay(states, *(t[:, :, :most] for t in spoiled), counts)
    for layer in range(layers):
        for b, count in enumerate(counts):
            state = states[layer, b]
            for j in range(count):
                state = step(state, *(t[layer, b, j] for t in (k, v, beta, decay)))
            assert torch.equal(replayed[layer, b], state), (layer, b)


@pytest.mark.parametrize("tokens", (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 2))
def test_prefill_matches_the_recurrence(tokens):
    state = draw(HEADS, DK, DV, seed=9)
    q, k, v, beta, decay = operands(tokens)
    outputs, after = delta_prefill(state, q, k, v, beta, decay.log())
    wanted, wanted_state = reference(state, q, k, v, beta, decay)
    # fp32, sums of up to 64 terms through a triangular solve
    torch.testing.assert_close(outputs.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after.double(), wanted_state, rtol=1e-4, atol=1e-5)


def test_prefill_in_parts_goes_on_from_the_state():
    state = draw(HEADS, DK, DV, seed=9)
    rows = operands(100)
    rows = (*rows[:4], rows[4].log())
    whole, after = delta_prefill(state, *rows)
    # cut on the chunk grid, so the same products in the same order
    first, middle = delta_prefill(state, *(t[:CHUNK] for t in rows))
    second, end = delta_prefill(middle, *(t[CHUNK:] for t in rows))
    assert torch.equal(torch.cat((first, second)), whole)
    assert torch.equal(end, after)


def test_prefill_survives_decays_that_underflow():
    q, k, v, beta, _ = operands(130)
    outputs, after = delta_prefill(draw(HEADS, DK, DV, seed=9), q, k, v, beta, torch.full((130, HEADS), -50.0))
    assert outputs.isfinite().all()
    assert after.isfinite().all()
