"""Activations: against float64, and an element's bits wherever it lies."""

from __future__ import annotations

import pytest
import torch

from pilotfish.kernels.activation import sigmoid, silu, softplus

FORMULAS = {
    sigmoid: lambda x: 1 / (1 + (-x).exp()),
    silu: lambda x: x / (1 + (-x).exp()),
    softplus: lambda x: torch.logaddexp(x, torch.zeros_like(x)),
}
activations = pytest.mark.parametrize("activation", FORMULAS)


dtypes = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))


def draw(*shape, dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)


@activations
def test_matches_float64(activation):
    x = torch.cat((draw(4000), torch.tensor([0.0, -0.0, 1e-30, 20.5, -20.5, 80.0, -80.0, 1e30])))
    wanted = FORMULAS[activation](x.double())
    # softplus returns x above 20, where exp(-x) is below 2.1e-9
    torch.testing.assert_close(activation(x).double(), wanted, rtol=1e-6, atol=1e-37)


@activations
def test_extremes_stay_finite(activation):
    assert activation(torch.tensor([-1e38, -200.0, 200.0, 1e38])).isfinite().all()


@activations
@dtypes
@pytest.mark.parametrize("width", (1, 5, 16, 31, 48, 1000, 10240))
def test_an_element_keeps_its_bits_wherever_it_lies(activation, width, dtype):
    x = draw(9, width, dtype=dtype)
    together = activation(x)
    assert torch.equal(torch.cat([activation(row) for row in x]), together.flatten())
    for first in (1, 3, 7):
        assert torch.equal(activation(x.flatten()[first:].clone()), together.flatten()[first:])


@activations
@dtypes
@pytest.mark.parametrize("threads", (1, 3, 5))
def test_an_element_keeps_its_bits_for_any_number_of_threads(activation, threads, dtype):
    x = draw(7, 10240, dtype=dtype)
    wanted = activation(x)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(activation(x), wanted)
    finally:
        torch.set_num_threads(before)


@activations
def test_views_are_read_as_they_look(activation):
    wide = draw(9, 2, 100)
    assert torch.equal(activation(wide[:, 1]), activation(wide[:, 1].contiguous()))
    assert torch.equal(activation(wide.mT), activation(wide).mT)


@activations
def test_the_input_stays(activation):
    x = draw(40)
    before = x.clone()
    activation(x)
    assert torch.equal(x, before)
