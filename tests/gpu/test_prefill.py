"""A prompt's recurrence and attention on the device, against the CPU's, and from what their bits may depend."""

import pytest
import torch

from pilotfish.kernels.attention import PAGE, prefill_attention
from pilotfish.kernels.cuda.delta_prefill import gdn_prompt, is_installed
from tests.support.delta_prompts import *  # noqa: F403
from tests.support.delta_windows import EPS, DeltaLayer
from tests.support.prompt_attention import *  # noqa: F403

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def device():
    return "cuda"


@pytest.fixture
def dtype():
    return torch.bfloat16


@pytest.fixture(params=[None, torch.float8_e4m3fn], ids=str)
def cache_dtype(request):
    return request.param


@pytest.fixture(params=[(16, 32, 128, 128), (16, 48, 128, 128), (2, 4, 64, 64)], ids=str)
def sizes(request):
    return request.param


@pytest.fixture
def rule():
    if not is_installed():
        pytest.skip("needs fla-core")
    return None


def test_a_prompt_has_the_same_bits_twice(dtype, sizes, rule):
    layer = DeltaLayer(sizes, dtype, "cuda")
    rows = layer.rows(700, 61).cuda()

    def run():
        states, histories = (part.clone() for part in layer.memory[:2])
        numbers = torch.tensor((1, 690), dtype=torch.int32, device="cuda")
        return gdn_prompt(rows, states, histories, numbers, *layer.weights, EPS, rule), states[1], histories[1]

    assert all(torch.equal(mine, other) for mine, other in zip(run(), run(), strict=True))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float8_e4m3fn))
@pytest.mark.parametrize(("start", "rows"), ((0, 1), (0, 700), (PAGE, 300), (PAGE + 5, 40), (4 * PAGE, 1)))
@pytest.mark.parametrize(("heads", "kv", "dim"), ((16, 2, 256), (6, 2, 64)))
def test_attention_matches_the_cpu(heads, kv, dim, start, rows, dtype):
    pages = (start + rows - 1) // PAGE + 1
    # what lies past the end is never read
    caches = [draw(pages + 1, kv, PAGE, dim, seed=s) for s in (1, 2)]
    for cache in caches:
        cache[pages - 1, :, (start + rows - 1) % PAGE + 1 :] = float("nan")
    caches = [cache.to(dtype) for cache in caches]
    q, table = draw(rows, heads, dim, seed=3), [*range(pages)]
    wanted = prefill_attention(q, *(cache.float() for cache in caches), table, start, 0.5, 2.0)
    got = prefill_attention(q.cuda(), *(cache.cuda() for cache in caches), table, start, 0.5, 2.0)
    torch.testing.assert_close(got.cpu(), wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))


def test_attention_needs_no_mask_in_memory():
    heads, kv, dim, rows, start = 16, 2, 256, 8192, 56 * 1024
    pages = (start + rows) // PAGE
    caches = [torch.zeros(pages, kv, PAGE, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    q = torch.zeros(rows, heads, dim, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    prefill_attention(q, *caches, list(range(pages)), start)
    # half of it for copies in 16 bits and the output; a mask of rows x end would be 512 MiB more
    assert torch.cuda.max_memory_allocated() - before < 3 * q.nbytes + 3 * sum(cache.nbytes for cache in caches)
