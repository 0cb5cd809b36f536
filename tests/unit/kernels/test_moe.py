"""Experts: routing with ties, each row against a plain loop, and a row's bits whatever else is in its tile."""

from __future__ import annotations

import pytest
import torch

from pilotfish.kernels.linear import TILE_ROWS, Linear
from pilotfish.kernels.moe import GatedMlp, combine, expert_bulk, expert_parts, mlp_rows, route

HIDDEN, WIDTH, EXPERTS, TOP_K = 32, 24, 6, 2
DTYPES = (torch.float32, torch.bfloat16)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights_of(expert, dtype):
    gate_up = (draw(2 * WIDTH, HIDDEN, seed=100 + expert) * HIDDEN**-0.5).to(dtype)
    down = (draw(HIDDEN, WIDTH, seed=200 + expert) * WIDTH**-0.5).to(dtype)
    return gate_up, down


def make_experts(dtype):
    return [GatedMlp(*(Linear(weight) for weight in weights_of(expert, dtype))) for expert in range(EXPERTS)]


class Forbidden:
    """An expert that must not run."""

    def __getattr__(self, name):
        raise AssertionError("an expert that no row chose was used")


def mlp_reference(x, expert, dtype):
    """One row through one expert in float64."""
    gate_up, down = (weight.double() for weight in weights_of(expert, dtype))
    gate, up = (gate_up @ x.double()).chunk(2)
    return down @ (gate / (1 + (-gate).exp()) * up)


def expert_rows(x, num_rows, experts, weights, ids, gate=0.0, shared=None):
    """The routed experts, and the shared one by its gate."""
    shared = make_experts(x.dtype)[0] if shared is None else shared
    parts = expert_parts(x, num_rows, experts, shared, ids)
    return combine(parts, weights[:num_rows], torch.full((num_rows,), gate))


def routed(num_rows, seed=1):
    padded = -(-num_rows // TILE_ROWS) * TILE_ROWS
    return route(draw(padded, EXPERTS, seed=seed), TOP_K)


def test_route_weights_match_the_formula():
    logits = draw(5, EXPERTS)
    weights, ids = route(logits, 3)
    for row in range(5):
        probabilities = logits[row].double().softmax(0)
        wanted = sorted(range(EXPERTS), key=lambda e: (-probabilities[e], e))[:3]
        assert ids[row].tolist() == wanted
        chosen = probabilities[wanted]
        torch.testing.assert_close(weights[row].double(), chosen / chosen.sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_route_ties_go_to_the_lower_id(dtype):
    logits = torch.zeros(1, 300, dtype=dtype)
    logits[0, [7, 250]] = 1.0
    _, ids = route(logits, 4)
    assert ids[0].tolist() == [7, 250, 0, 1]


def test_route_of_a_row_keeps_its_bits_beside_any_others():
    logits = draw(36, 257)
    weights, ids = route(logits, 8)
    for row in range(36):
        alone = route(logits[row : row + 1], 8)
        assert torch.equal(alone[0][0], weights[row])
        assert torch.equal(alone[1][0], ids[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", (1, TILE_ROWS - 1, TILE_ROWS, 2 * TILE_ROWS + 3))
def test_expert_rows_match_a_loop_in_float64(num_rows, dtype):
    weights, ids = routed(num_rows)
    x = draw(len(ids), HIDDEN, seed=2).to(dtype)
    output = expert_rows(x, num_rows, make_experts(dtype), weights, ids)
    # bf16 rounds gate and up, their product, and each expert's output
    tolerance = 0.03 if dtype == torch.bfloat16 else 1e-5
    for row in range(num_rows):
        parts = [
            float(w) * mlp_reference(x[row], e, dtype) for w, e in zip(weights[row], ids[row].tolist(), strict=True)
        ]
        torch.testing.assert_close(output[row].double(), sum(parts), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_shared_expert_comes_last_and_by_its_gate(dtype):
    num_rows, experts = TILE_ROWS + 1, make_experts(dtype)
    weights, ids = routed(num_rows)
    x = draw(len(ids), HIDDEN, seed=2).to(dtype)
    plain = expert_rows(x, num_rows, experts, weights, ids)
    shared = mlp_rows(experts[5], x)[:num_rows].float()
    together = expert_rows(x, num_rows, experts, weights, ids, 0.25, experts[5])
    assert torch.equal(together, torch.addcmul(plain, shared, torch.full((num_rows, 1), 0.25)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_keeps_its_bits_beside_any_others(dtype):
    num_rows, experts = 2 * TILE_ROWS + 3, make_experts(dtype)
    weights, ids = routed(num_rows)
    x = draw(len(ids), HIDDEN, seed=2).to(dtype)
    together = expert_rows(x, num_rows, experts, weights, ids)
    for row in range(num_rows):
        alone = torch.zeros(TILE_ROWS, HIDDEN, dtype=dtype)
        alone[0] = x[row]
        own = [t[row : row + 1].expand(TILE_ROWS, -1) for t in (weights, ids)]
        assert torch.equal(expert_rows(alone, 1, experts, *own)[0], together[row]), row


def test_padding_rows_use_no_expert():
    num_rows = 3
    weights, ids = routed(num_rows)
    ids[:num_rows], ids[num_rows:] = torch.tensor([1, 4]), torch.tensor([0, 5])
    x = draw(TILE_ROWS, HIDDEN, seed=2)
    x[num_rows:] = float("nan")
    experts = [expert if i in (1, 4) else Forbidden() for i, expert in enumerate(make_experts(torch.float32))]
    assert expert_rows(x, num_rows, experts, weights, ids)[:num_rows].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", (1, 17, 70))
def test_bulk_agrees_with_rows(tokens, dtype):
    weights, ids = routed(tokens)
    x = draw(len(ids), HIDDEN, seed=2).to(dtype)
    experts = make_experts(dtype)
    rows = expert_rows(x, tokens, experts, weights, ids)[:tokens]
    bulk = expert_bulk(x[:tokens], experts, weights[:tokens], ids[:tokens])
    # products of other shapes: sums in another order, and one bf16 rounding may tip
    tolerance = 0.03 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(bulk, rows, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_mlp_keeps_a_row_s_bits_in_every_tile(dtype):
    mlp = make_experts(dtype)[0]
    row = draw(HIDDEN, seed=3).to(dtype)
    outputs = []
    for position in range(3 * TILE_ROWS):
        x = draw(3 * TILE_ROWS, HIDDEN, seed=4).to(dtype)
        x[position] = row
        outputs.append(mlp_rows(mlp, x)[position])
    assert all(torch.equal(output, outputs[0]) for output in outputs)
