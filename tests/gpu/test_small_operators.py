"""On a GPU: the small operators against their references in bf16 and at full vocabulary, and what only a device shows:
the same bits for every number of rows, beside any neighbours, with and without programmatic dependent launch."""

from __future__ import annotations

import pytest
import torch

from pilotfish.engine.link.messages import SamplingParams
from pilotfish.engine.round.batch_state import BatchState
from pilotfish.kernels.cuda import norm, router, sample
from pilotfish.kernels.cuda.packing import PackedRows, pack
from pilotfish.kernels.cuda.warm import compile_all
from pilotfish.spec.gumbel import gumbel_noise
from tests.support import small_operators as small
from tests.support.device_reference import Reference
from tests.support.small_operators import *  # noqa: F403
from tests.support.small_operators import EPS, draw, integers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB = 248320


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """The kernels that choose, in each variant that is tested, on all cores at once."""

    def launch(vocab, logits, pdl=False, **options):
        table = Reference(BatchState(2, small.MAX_DEPTH, vocab, torch.device("cuda"))).slots
        kept = options.get("kept")
        scratch = sample.ChoiceScratch.empty(1, vocab if kept is None else len(kept), "cuda")
        slots, out = (torch.zeros(1, dtype=kind, device="cuda") for kind in (torch.int32, torch.int64))
        sample.choose(logits, slots, table, 1, out, scratch, pdl=pdl, **options)

    def variants():
        logits = torch.zeros(1, small.VOCAB, device="cuda")
        words, ids = (torch.zeros((1, 21), dtype=torch.int32, device="cuda") for _ in range(2))
        has_nan = torch.zeros(1, dtype=torch.int64, device="cuda")
        for options in ({}, {"draft": True}, {"kept": ids[0]}, {"allowed": words}):
            launch(small.VOCAB, logits, has_nan=has_nan, **options)
        launch(small.VOCAB, logits.bfloat16(), has_nan=has_nan)
        for pdl in (False, True):
            launch(VOCAB, torch.zeros(1, VOCAB, device="cuda"), pdl)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "CHUNK", small.CHUNK)
        compile_all(variants, load=True)


@pytest.fixture
def device():
    return "cuda"


@pytest.fixture
def dtype():
    return torch.bfloat16


# -- bits --------------------------------------------------------------------------------------------------------------


def normed(x, delta, scale, pdl=False):
    x, h = x.clone(), torch.full_like(delta, float("nan"))
    norm.add_norm(x, delta, scale, EPS, h, pdl=pdl)
    return torch.cat((x, h.float()), dim=1)


def routed(logits, pdl=False):
    rows, experts = len(logits), logits.shape[1] - 1
    weights, gate = torch.zeros(rows, 8, device="cuda"), torch.zeros(rows, device="cuda")
    ids = torch.zeros(rows, 8, dtype=torch.int32, device="cuda")
    router.route(logits, experts, weights, ids, gate, pdl=pdl)
    return torch.cat((weights, ids.float(), gate[:, None]), dim=1)


@pytest.mark.parametrize("hidden", (384, 2048, 5120))
def test_a_row_keeps_its_bits_beside_any_others(hidden):
    x, delta = draw(16, hidden, seed=1, scale=10.0).cuda(), draw(16, hidden, seed=2).bfloat16().cuda()
    x[3] *= 1e5
    scale = 1 + 0.1 * draw(hidden, seed=3).cuda()
    logits = draw(16, 257, seed=4).cuda()
    alone = torch.cat([normed(x[r : r + 1], delta[r : r + 1], scale) for r in range(16)])
    routes = torch.cat([routed(logits[r : r + 1].contiguous()) for r in range(16)])
    for rows in range(1, 17):
        for pdl in (False, True):
            assert torch.equal(normed(x[:rows].clone(), delta[:rows].clone(), scale, pdl), alone[:rows])
            assert torch.equal(routed(logits[:rows].clone(), pdl), routes[:rows])
    x[5], logits[5] = float("nan"), float("nan")
    others = [r for r in range(16) if r != 5]
    assert torch.equal(normed(x, delta, scale)[others], alone[others])
    assert torch.equal(routed(logits)[others], routes[others])


@pytest.mark.parametrize("hidden", (384, 2048, 5120))
def test_the_norm_is_near_float64(hidden):
    x, delta = draw(4, hidden, seed=1).cuda(), draw(4, hidden, seed=2).bfloat16().cuda()
    x[1] *= 1e5
    h = torch.empty(4, hidden, device="cuda")
    exact = x.double() + delta.double()
    exact = exact * (exact.square().mean(-1, keepdim=True) + EPS).rsqrt()
    norm.add_norm(x, delta, torch.ones(hidden, device="cuda"), EPS, h)
    assert ((h - exact).abs() <= 4e-7 * exact.abs() + 1e-7).all()


# -- a full vocabulary -------------------------------------------------------------------------------------------------

CHAT = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, seed=3)
FULL = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=1.0, seed=1),
    "chat": CHAT,
    "top_p": SamplingParams(temperature=1.0, top_p=0.95, seed=5),
    "flat": SamplingParams(temperature=3.0, top_p=0.98, min_p=1e-4, seed=6),
    "many": SamplingParams(temperature=2.0, top_k=5000, seed=7),
    "penalised": SamplingParams(temperature=0.7, top_k=20, presence_penalty=1.5, repetition_penalty=1.1, seed=8),
}


@pytest.fixture(scope="module")
def state():
    state = BatchState(len(FULL) + 1, 8, VOCAB, torch.device("cuda"))
    for slot, params in enumerate(FULL.values(), start=1):
        state.admit(slot, integers(VOCAB, 100, seed=slot).tolist(), params, limit=200, own_k=8)
        state.length[slot] = 100 + slot
    state.drafts[:] = integers(VOCAB, *state.drafts.shape).cuda()
    return state


def chosen(state, logits, slots, width, pdl=False, run=None, **options):
    out = torch.full((len(slots) * width,), -1, device="cuda")
    scratch = sample.ChoiceScratch.empty(len(out), VOCAB, "cuda")
    reference = Reference(state)
    given = (logits, torch.tensor(slots, dtype=torch.int32, device="cuda"), reference.slots, width, out, scratch)
    if run is None:
        sample.choose(*given, pdl=pdl, **options)
        assert not scratch.counters.any()
    else:
        reference.choose(*given, **options)
    return out.tolist()


def peaked(rows, seed):
    """Logits with a head of some thousand likely tokens and a long tail, as language models give."""
    logits = draw(rows, VOCAB, seed=seed, scale=2.0)
    logits += 6 * draw(rows, VOCAB, seed=seed + 1).clamp(min=2.0) - 12
    return logits.cuda()


@pytest.mark.parametrize("name", FULL)
def test_full_vocabulary_tokens_are_the_reference_s(state, name):
    slot = list(FULL).index(name) + 1
    pairs = []
    for seed in range(8):
        logits = peaked(4, 10 * seed)
        pairs += zip(chosen(state, logits, [slot], 4), chosen(state, logits, [slot], 4, run="reference"), strict=True)
    wrong = sum(mine != theirs for mine, theirs in pairs)
    # sums of floats and of integers may end top_p at another token, once in thousands of rows
    assert wrong <= (1 if FULL[name].top_p < 1 else 0)


def test_full_vocabulary_rows_are_chosen_alike_in_every_batch(state):
    slots = list(range(1, len(FULL) + 1))
    logits = peaked(2 * len(slots), 3)
    together = chosen(state, logits, slots, 2)
    for index, slot in enumerate(slots):
        rows = logits[2 * index : 2 * index + 2].clone()
        assert chosen(state, rows, [slot], 2, pdl=True) == together[2 * index : 2 * index + 2]


def test_noise_has_the_bits_of_the_torch_generator(state):
    # without logits the token is the noise's own maximum
    logits = torch.zeros(9, VOCAB, device="cuda")
    positions = state.length[2] + 1 + torch.arange(9, device="cuda")
    key = state.seed[2].expand(9), state.choice[2].expand(9), positions
    assert chosen(state, logits, [2], 9) == gumbel_noise(*key, VOCAB).argmax(-1).tolist()


def test_sampled_tokens_have_the_softmax_s_distribution(state):
    logits = torch.full((9, VOCAB), -30.0, device="cuda")
    weights = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    logits[:, 1000:1005] = weights.log().cuda()
    counts = torch.zeros(5)
    before = state.length.clone()
    for _ in range(400):
        state.length += 9
        counts += torch.tensor(chosen(state, logits, [2], 9, filters=False)).sub(1000).bincount(minlength=5)
    state.length.copy_(before)
    total = counts.sum()
    assert total == 3600
    # five standard deviations
    assert ((counts / total - weights).abs() < 5 * (weights * (1 - weights) / total).sqrt()).all()


def test_a_captured_choice_is_replayed(state):
    logits = peaked(4, 9)
    out = torch.zeros(4, dtype=torch.int64, device="cuda")
    scratch, slots = sample.ChoiceScratch.empty(4, VOCAB, "cuda"), torch.tensor([3], dtype=torch.int32, device="cuda")
    given = (logits, slots, Reference(state).slots, 4, out, scratch)
    sample.choose(*given, pdl=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample.choose(*given, pdl=True)
    for slot in (3, 1, 5, 3):
        slots.fill_(slot)
        logits.copy_(peaked(4, slot))
        graph.replay()
        assert out.tolist() == chosen(state, logits, [slot], 4)


@pytest.mark.parametrize("hidden", [1024, 2048, 2560, 400])
def test_an_embedding_in_the_order_of_lm_head_has_the_bits_of_the_matrix(hidden):
    matrix, scale = draw(3000, hidden, seed=1).bfloat16().cuda(), (1 + 0.1 * draw(2, hidden, seed=2)).cuda()
    packed = PackedRows(pack(matrix), hidden)
    last, drafts = integers(3000, 4, seed=3).cuda(), integers(3000, 4, 8, seed=4).cuda()
    slots, length = torch.tensor([3, 0, 2], dtype=torch.int32, device="cuda"), torch.arange(4, device="cuda")
    outs = []
    for embedding in (matrix, packed):
        tokens, positions = torch.zeros(16, dtype=torch.int64, device="cuda"), torch.zeros(16, device="cuda").int()
        x, h = torch.full((16, hidden), float("nan"), device="cuda"), torch.zeros(16, hidden, device="cuda").bfloat16()
        pair = torch.zeros(16, 2 * hidden, device="cuda").bfloat16()
        norm.embed_rows(embedding, scale[0], EPS, slots, last, drafts, length, 5, tokens, positions, x, h)
        norm.pair_norm(tokens, embedding, h, scale[0], scale[1], EPS, pair, 16)
        outs.append((x, h, pair))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*outs, strict=True))
    assert torch.equal(packed[tokens], matrix[tokens])
