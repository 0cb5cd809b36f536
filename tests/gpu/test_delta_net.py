"""GatedDeltaNet windows on the device, at the sizes of served models and of the demo."""

import pytest
import torch

from tests.support.delta_windows import *  # noqa: F403
from tests.support.delta_windows import ROUNDS, WINDOWS, DeltaLayer, counts_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def device():
    return "cuda"


@pytest.fixture
def dtype():
    return torch.bfloat16


@pytest.fixture(params=[(16, 32, 128, 128), (16, 48, 128, 128), (16, 16, 128, 128), (2, 4, 64, 64)], ids=str)
def sizes(request):
    return request.param


@pytest.fixture
def rounds():
    return ROUNDS


@pytest.fixture
def windows():
    return WINDOWS


def test_dependent_launches_change_no_bit(device, dtype, sizes):
    plain, dependent = DeltaLayer(sizes, dtype, device), DeltaLayer(sizes, dtype, device)
    for number in range(20):
        width = number % 9 + 1
        rows, counts = plain.rows(4 * width, number), counts_of(1, min(number, 1))
        got = dependent.step(rows, [1, 2, 3, 0], counts, width, pdl=True)
        assert torch.equal(got[: 3 * width], plain.step(rows, [1, 2, 3, 0], counts, width)[: 3 * width])
    for slot in (1, 2, 3):
        for mine, other in zip(dependent.slot(slot), plain.slot(slot), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("scale", (1.0, 1e5))
def test_rows_of_any_size_match_the_reference(device, dtype, scale):
    """Rows scaled to 1e5: sigmoid, softplus and the norms at their ends."""
    sizes = (16, 32, 128, 128)
    ours, theirs = DeltaLayer(sizes, dtype, device), DeltaLayer(sizes, dtype)
    rows = (ours.rows(16, 7).float() * scale).to(dtype)
    got = ours.step(rows, [1, 2, 3, 4], [0] * 5, 4)
    wanted = theirs.step(rows, [1, 2, 3, 4], [0] * 5, 4, gdn_window_reference)  # noqa: F405
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got.float(), wanted.float(), rtol=2e-2, atol=1e-3 * scale)
