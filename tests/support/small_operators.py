"""Tests of the small operators against their references; run in Triton's interpreter and on a GPU by those that import
them and say which `device`. R = rows, B = sequences, V = vocabulary."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest
import torch

from pilotfish.engine.link.messages import SamplingParams, ThinkingBudget
from pilotfish.engine.round.batch_state import BatchState
from pilotfish.kernels import moe
from pilotfish.kernels.cuda import commit, lookup, norm, router, sample
from pilotfish.kernels.cuda.tiled_rows import TiledRows
from pilotfish.spec import slots
from tests.support import kernel_references
from tests.support.device_reference import Reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""The interpreter is slow: fewer rows and cases."""
WIDTH = 2 if INTERPRETED else 9
SEEDS = range(1 if INTERPRETED else 3)
VOCAB = 650
CHUNK = 128
MAX_DEPTH = 8
EPS = 1e-6
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """6 chunks of the small vocabulary, the last one short."""
    monkeypatch.setattr(sample, "CHUNK", CHUNK)
    if INTERPRETED:
        # some take several chunks in turn, as at a full vocabulary
        monkeypatch.setattr(sample, "PROGRAMS", 8)


def draw(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def integers(high, *shape, seed=0):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def tiled_nan(rows, width, dtype, device):
    tiled = TiledRows.empty(rows, width, device, dtype)
    tiled.memory.fill_(NAN)
    return tiled


def twice(function, reference, values, device):
    """Runs both on copies of `values`; what each left there."""
    outcomes = []
    for run in (function, reference):
        copies = [value.clone().to(device) if isinstance(value, torch.Tensor) else value for value in values]
        run(*copies)
        outcomes.append([value.cpu() if isinstance(value, torch.Tensor) else value for value in copies])
    return outcomes


# -- norms -------------------------------------------------------------------------------------------------------------


def assert_close(got, wanted):
    tolerance = {"rtol": 2e-6, "atol": 2e-6} if got.dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-3}
    torch.testing.assert_close(got, wanted, **tolerance)


@pytest.mark.parametrize(("batch", "width"), (([3, 1, 0], 4), ([2], 1), ([1, 4], 9)))
@pytest.mark.parametrize("hidden", (96, 512))
def test_embed_rows(device, dtype, batch, width, hidden):
    rows = 24
    inputs = [
        draw(40, hidden, seed=1).to(dtype),
        1 + 0.1 * draw(hidden, seed=2),
        EPS,
        torch.tensor(batch, dtype=torch.int32),
        integers(40, 5, seed=3),
        integers(40, 5, MAX_DEPTH, seed=4),
        torch.tensor([0, 17, 5, 300, 2]),
        width,
        torch.full((rows,), -1),
        torch.full((rows,), -1, dtype=torch.int32),
        torch.full((rows, hidden), NAN),
        torch.full((rows, hidden), NAN, dtype=dtype),
    ]
    got, wanted = twice(norm.embed_rows, kernel_references.embed_rows_reference, inputs, device)
    for mine, theirs in zip(got[8:11], wanted[8:11], strict=True):
        assert torch.equal(mine, theirs)
    assert_close(got[11], wanted[11])
    assert not got[11][len(batch) * width :].any()


@pytest.mark.parametrize("delta", (None, torch.float32, "activations"))
@pytest.mark.parametrize("store", (True, False))
@pytest.mark.parametrize("rows", (None, [4, 0, 4, 7]))
def test_add_norm(device, dtype, delta, store, rows):
    hidden = 384
    inputs = [
        draw(9, hidden, seed=1, scale=100.0),
        None if delta is None else draw(9, hidden, seed=2).to(dtype if delta == "activations" else delta),
        1 + 0.1 * draw(hidden, seed=3),
        EPS,
        torch.full((9 if rows is None else len(rows), hidden), NAN, dtype=dtype),
        None if rows is None else torch.tensor(rows, dtype=torch.int32),
        store,
    ]
    got, wanted = twice(norm.add_norm, kernel_references.add_norm_reference, inputs, device)
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[0], inputs[0]) == (delta is None or not store or rows is not None)
    assert_close(got[4], wanted[4])


@pytest.mark.parametrize("rows", (1, 8, 9))
def test_embed_rows_writes_tiled_rows(device, dtype, rows):
    values = [draw(40, 384, seed=1).to(dtype), 1 + 0.1 * draw(384, seed=2), EPS, torch.ones(1, dtype=torch.int32)]
    values += [integers(40, 2, seed=3), integers(40, 2, MAX_DEPTH, seed=4), torch.tensor([3, 17]), min(rows, 3)]
    values = [value.to(device) if isinstance(value, torch.Tensor) else value for value in values]
    tokens, positions = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.int32)
    plain, tiled = torch.full((rows, 384), NAN, dtype=dtype, device=device), tiled_nan(rows, 384, dtype, device)
    for h in (plain, tiled):
        x = torch.full((rows, 384), NAN, device=device)
        norm.embed_rows(*values, tokens.to(device), positions.to(device), x, h)
    assert plain.isfinite().all() and torch.equal(tiled.plain(), plain)


def test_add_norm_writes_tiled_rows(device, dtype):
    for rows, hidden in ((1, 384), (8, 128), (11, 2560)):
        x, delta, scale = draw(rows, hidden, seed=1), draw(rows, hidden, seed=2).to(dtype), draw(hidden, seed=3)
        plain = torch.full((rows, hidden), NAN, dtype=dtype, device=device)
        tiled = tiled_nan(rows, hidden, dtype, device)
        for h in (plain, tiled):
            # x takes the sum
            norm.add_norm(x.clone().to(device), delta.to(device), scale.to(device), EPS, h)
        assert plain.isfinite().all() and torch.equal(tiled.plain(), plain)


def test_pair_norm(device, dtype):
    hidden = 160
    inputs = [
        integers(40, 5, seed=1),
        draw(40, hidden, seed=2).to(dtype),
        draw(7, hidden, seed=3).to(dtype),
        1 + 0.1 * draw(hidden, seed=4),
        1 + 0.1 * draw(hidden, seed=5),
        EPS,
        torch.full((7, 2 * hidden), 7.0, dtype=dtype),
        5,
    ]
    got, wanted = twice(norm.pair_norm, kernel_references.pair_norm_reference, inputs, device)
    assert_close(got[6], wanted[6])
    assert (got[6][5:] == 7).all()


# -- router ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "top_k"), ((8, 2), (13, 13), (256, 8), (203, 8), (512, 10), (1, 1)))
@pytest.mark.parametrize("step", (None, 0.5))
def test_route(device, experts, top_k, step):
    logits = draw(6, experts + 1, seed=experts, scale=2.0)
    logits[1] *= 1e4
    logits[2] = 0
    if step is not None:
        # many equal logits, zeros of both signs among them
        logits = (logits / step).round() * step
    outputs = [torch.full((5, top_k), NAN), torch.full((5, top_k), -1, dtype=torch.int32), torch.full((5,), NAN)]
    got, wanted = twice(router.route, router.route_reference, [logits, experts, *outputs], device)
    assert torch.equal(got[3], wanted[3])
    torch.testing.assert_close(got[2], wanted[2], rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(got[4], wanted[4], rtol=2e-6, atol=1e-7)
    # the CPU path's router, on rows whose softmax does not underflow
    weights, ids = moe.route(logits[[0, 2, 3, 4], :experts], top_k)
    assert torch.equal(got[3][[0, 2, 3, 4]].long(), ids)
    torch.testing.assert_close(got[2][[0, 2, 3, 4]], weights, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("bad", (NAN, INF, -INF))
def test_route_names_different_experts_whatever_the_logits(device, bad):
    logits = draw(3, 17)
    logits[0, 5] = bad
    logits[1] = bad
    weights, ids, gate = torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3)
    logits, weights, ids, gate = (value.to(device) for value in (logits, weights, ids, gate))
    router.route(logits, 16, weights, ids, gate)
    assert all(len(set(row)) == 4 and set(row) <= set(range(16)) for row in ids.tolist())
    assert weights[2].isfinite().all()


# -- choose ------------------------------------------------------------------------------------------------------------

BAD_WORDS = ((5,), (7, 8), (11, 12, 13), (9, 8), (3, 600))
PLAIN = SamplingParams(temperature=0)
REQUESTS = {
    "greedy": PLAIN,
    "sampled": SamplingParams(temperature=0.9, seed=-7, choice=3),
    "hot": SamplingParams(temperature=4.0, seed=1 << 40),
    "penalised": SamplingParams(temperature=0, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.2),
    "biased": SamplingParams(temperature=1.0, seed=1, logit_bias={3: 2.0, 17: -5.0, 600: 4.0}),
    "allowed": SamplingParams(temperature=1.0, seed=1, allowed_token_ids=(3, 9, 64, 640, 649)),
    "min tokens": SamplingParams(temperature=0, min_tokens=4, stop_token_ids=(1, 2, 64, 649)),
    "bad words": SamplingParams(temperature=0, bad_words_token_ids=BAD_WORDS),
    "thinking": SamplingParams(
        temperature=0, thinking=ThinkingBudget(num_tokens=2, start_token_id=20, end_token_id=21, closing=(30, 31, 21))
    ),
    "min_p": SamplingParams(temperature=1.0, min_p=0.2, seed=4),
    "top_k": SamplingParams(temperature=1.0, top_k=5, seed=5),
    "top_k 1": SamplingParams(temperature=1.0, top_k=1, seed=5),
    "larger top_k": SamplingParams(temperature=2.0, top_k=40, seed=6),
    "top_p": SamplingParams(temperature=0.5, top_p=0.6, seed=7),
    "flat top_p": SamplingParams(temperature=5.0, top_p=0.97, seed=8),
    "top_p 0": SamplingParams(temperature=5.0, top_p=1e-9, seed=8),
    "top_k, top_p": SamplingParams(temperature=1.3, top_k=20, top_p=0.8, seed=9),
    "min_p, top_k, top_p": SamplingParams(temperature=2.0, top_k=100, top_p=0.9, min_p=0.05, seed=10),
    "everything": SamplingParams(
        temperature=1.1,
        top_k=50,
        top_p=0.95,
        min_p=0.01,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias={3: 2.0, 17: -5.0},
        min_tokens=50,
        stop_token_ids=(319,),
        bad_words_token_ids=BAD_WORDS,
        seed=-11,
        choice=2,
    ),
}


def make_state(requests: list[SamplingParams], device: Any = "cpu", seed: int = 0) -> BatchState:
    """Slot 0 is the null slot, slot i + 1 holds requests[i] in the middle of its text, with drafts of few ids."""
    state = BatchState(len(requests) + 1, MAX_DEPTH, VOCAB, torch.device(device), history_length=400)
    for index, params in enumerate(requests):
        slot = index + 1
        prompt = integers(VOCAB, 20, seed=seed + index).tolist()
        state.admit(slot, prompt, params, limit=60, own_k=5)
        state.length[slot] = 20 + index % 7
        state.last_token[slot] = 8
        state.counts[slot, :30] = integers(3, 30, seed=seed + index).int().to(device)
        state.seen[slot] |= (state.counts[slot] > 0).to(torch.uint8)
        state.recent[slot, -3:] = torch.tensor([11, 12, 7], device=device)
    state.drafts[1:] = integers(30, len(requests), MAX_DEPTH, seed=seed + 100).to(device)
    # what word bans and the thinking budget look for
    state.drafts[1:, 1:5] = torch.tensor([20, 11, 12, 9], device=device)
    return state


def choose(state, logits, batch, width, device, **options):
    """The kernel's tokens and NaN flags, and the reference's."""
    reference = Reference(state)
    rows = len(batch) * width
    given = torch.tensor(batch, dtype=torch.int32, device=device)
    kept = options.get("kept")
    scratch = sample.ChoiceScratch.empty(rows + 1, VOCAB if kept is None else len(kept), device)
    outcomes = []
    for run in (sample.choose, reference.choose):
        drafts = state.drafts.clone()
        out = torch.full((rows,), -5, device=device)
        has_nan = torch.full((rows,), -5, device=device)
        run(logits.to(device), given, reference.slots, width, out, scratch, has_nan, **options)
        outcomes.append((out.tolist(), has_nan.tolist(), state.drafts.tolist()))
        state.drafts.copy_(drafts)
    assert not scratch.counters.any()
    return outcomes


def some_logits(rows, seed=0):
    return draw(rows, VOCAB, seed=seed, scale=3.0)


@pytest.mark.parametrize("name", REQUESTS)
def test_choose(device, name):
    state = make_state([REQUESTS[name], PLAIN], device)
    for seed in SEEDS:
        batch = [1] if INTERPRETED else [2, 1]
        got, wanted = choose(state, some_logits(len(batch) * WIDTH, seed), batch, WIDTH, device)
        assert got == wanted


def test_requests_of_all_kinds_in_one_batch_are_chosen_as_alone(device):
    requests = [REQUESTS[name] for name in (REQUESTS if not INTERPRETED else ("greedy", "hot", "thinking", "top_k"))]
    state = make_state(requests, device)
    logits = some_logits(WIDTH * (len(requests) + 1), 5)
    together = choose(state, logits, [*range(1, len(requests) + 1), 0], WIDTH, device)[0][0]
    alone = [
        choose(state, rows, [slot], WIDTH, device)[0][0]
        for slot, rows in enumerate(logits.split(WIDTH)[: len(requests)], start=1)
    ]
    assert together[:-WIDTH] == [token for tokens in alone for token in tokens]


@pytest.mark.parametrize(
    "name",
    ("greedy", "top_k, top_p", "flat top_p")
    if INTERPRETED
    else ("greedy", "sampled", "min_p", "top_k", "larger top_k", "flat top_p", "top_k, top_p"),
)
@pytest.mark.parametrize("kind", ("ties", "equal", "few", "none", "nan", "infinite"))
def test_choose_from_unusual_logits(device, name, kind):
    state = make_state([REQUESTS[name]], device)
    logits = some_logits(WIDTH, 1)
    if kind == "ties":
        logits = logits.round()
    elif kind == "equal":
        logits[:] = 1.5
    elif kind == "few":
        logits[:, 3:640] = -INF
    elif kind == "none":
        logits[:] = -INF
    elif kind == "nan":
        logits[:, 70] = logits[1:, 7] = NAN
    else:
        logits[:, 100] = logits[:, 650 - 1] = INF
    got, wanted = choose(state, logits, [1], WIDTH, device)
    if kind == "none":
        # nothing may be chosen: only that it is some token
        assert all(0 <= token < VOCAB for token in got[0])
    else:
        assert got == wanted
    assert (got[1] == [1] * WIDTH) == (kind == "nan")


@pytest.mark.parametrize("name", ("penalised", "bad words", "thinking") if INTERPRETED else REQUESTS)
def test_drafts_are_chosen_one_after_another(device, name):
    state = make_state([REQUESTS[name], REQUESTS["sampled"]], device)
    for step in range(4 if INTERPRETED else MAX_DEPTH):
        logits = some_logits(2, step)
        got, wanted = choose(state, logits, [1, 2], 1, device, first=step, draft=True)
        assert got == wanted
        state.drafts.copy_(torch.tensor(got[2]))


@pytest.mark.parametrize("name", ("sampled", "biased", "thinking", "top_k") if INTERPRETED else REQUESTS)
def test_a_trimmed_vocabulary_draws_the_same_numbers(device, name):
    state = make_state([REQUESTS[name]], device)
    kept = torch.arange(VOCAB)[integers(2, VOCAB, seed=9).bool()].int().to(device)
    got, wanted = choose(state, some_logits(WIDTH)[:, : len(kept)].contiguous(), [1], WIDTH, device, kept=kept)
    assert got == wanted
    if name != "thinking":
        assert set(got[0]) <= set(kept.tolist())


@pytest.mark.parametrize("name", ("sampled", "flat top_p"))
def test_grammars_mask_their_own_rows(device, name):
    masked = msgspec.structs.replace(REQUESTS[name], grammar=object())
    state = make_state([masked, REQUESTS[name]], device)
    words = integers(1 << 32, 2 * WIDTH, -(-VOCAB // 32), seed=2)
    logits = some_logits(2 * WIDTH)
    free = choose(state, logits, [1, 2], WIDTH, device)[0][0]
    for row, token in enumerate(free):
        words[row, token // 32] &= ~(1 << (token % 32))
    words = words.sub((words >> 31) << 32).int().to(device)
    got, wanted = choose(state, logits, [1, 2], WIDTH, device, allowed=words)
    assert got == wanted
    assert got[0][WIDTH:] == free[WIDTH:]
    assert all(mine != theirs for mine, theirs in zip(got[0][:WIDTH], free, strict=False))


def rows_of_all_kinds():
    """Where a radix search may go wrong: what differs in the last bits alone, or not at all."""
    normal = some_logits(1, 4)[0]
    two = integers(2, VOCAB, seed=5).float() * 0.25
    tiny = draw(VOCAB, seed=6, scale=1e-40)
    tiny[::9], tiny[1::9] = 0.0, -0.0
    few = torch.full((VOCAB,), -INF)
    few[[2, 130, 131, 500, 649]] = torch.tensor([1.0, 1.25, 1.25, -3.0, 1.0])
    return {
        "normal": normal,
        "far below zero": normal - 1e4,
        "one bucket": 17 + 1e-6 * draw(VOCAB, seed=7),
        "denormal": tiny,
        "two values": two,
        "equal": torch.full((VOCAB,), -0.5),
        "rounded": (0.4 * normal).round(),
        "few": few,
    }


CUTS = {
    "top_p": SamplingParams(temperature=1.0, top_p=0.6),
    "wide top_p": SamplingParams(temperature=2.0, top_p=0.97),
    "tiny top_p": SamplingParams(temperature=1.0, top_p=1e-7),
    "top_k": SamplingParams(temperature=1.0, top_k=60),
    "top_k, top_p": SamplingParams(temperature=3.0, top_k=65, top_p=0.8),
    "top_k, top_p, min_p": SamplingParams(temperature=3.0, top_k=50, top_p=0.9, min_p=0.3),
    "top_k of all": SamplingParams(temperature=1.0, top_k=VOCAB),
    "top_k past all, top_p": SamplingParams(temperature=2.0, top_k=VOCAB + 50, top_p=0.7),
}


def num_kept(scores: torch.Tensor, params: SamplingParams) -> tuple[int, int]:
    """Of a row's scores in falling order, what the rules keep: a number, and a larger one where the sum that ends top_p
    is within a rounding error of it. What is never drawn is not counted."""
    ordered = scores.double().sort(descending=True).values
    kept = min(params.top_k or len(scores), int((ordered >= ordered[0] - 21).sum()))
    if params.min_p:
        kept = min(kept, int((ordered.float() >= ordered[0].float() + torch.tensor(params.min_p).log()).sum()))
    masses = (ordered - ordered[0]).exp()[: max(params.top_k, 0) or None]
    if params.min_p:
        masses = masses[:kept]
    before = (masses.cumsum(0) - masses) / masses.sum()
    sure, possible = (int((before < params.top_p + error).sum()) for error in (-1e-6, 1e-6))
    return (min(kept, max(sure, 1)), min(kept, possible)) if params.top_p < 1 else (kept, kept)


@pytest.mark.parametrize(("kept_ids", "times"), ((VOCAB, 1 if INTERPRETED else 3), (70, 2)))
def test_what_is_cut_is_the_rules_prefix(device, monkeypatch, kept_ids, times):
    """Of every kind of row under every rule, three programs a row; also where all of it is less than a chunk."""
    rows = rows_of_all_kinds()
    if INTERPRETED and kept_ids == VOCAB:
        # it takes minutes there: every third kind; the shorter rows are of all kinds
        rows = dict(list(rows.items())[::3])
    state = make_state(list(CUTS.values()), device)
    logits = torch.stack(list(rows.values())).repeat(len(CUTS), 1)[:, :kept_ids].contiguous().to(device)
    batch = torch.arange(1, len(CUTS) + 1, dtype=torch.int32, device=device)
    kept = None if kept_ids == VOCAB else torch.arange(0, 7 * kept_ids, 7, dtype=torch.int32, device=device)
    scratch = sample.ChoiceScratch.empty(len(logits), kept_ids, device)
    monkeypatch.setattr(sample, "PROGRAMS", 3 * len(logits))
    out = torch.full((len(logits),), -1, device=device)
    # rules other than filters have been tested
    state.flags[1:] &= slots.FILTERED
    for _ in range(times):
        sample.choose(logits, batch, Reference(state).slots, len(rows), out, scratch, kept=kept)
    assert not scratch.counters.any()
    columns, bits = torch.arange(kept_ids), (kept_ids - 1).bit_length()
    went_on = scratch.counts.any(-1).any(-1) | scratch.sums.any(-1).any(-1)
    for row, (name, kind) in enumerate((name, kind) for name in CUTS for kind in rows):
        scores, threshold = scratch.scores[row, :kept_ids].cpu(), int(scratch.threshold[row])
        assert torch.equal(scores, logits[row].cpu() / CUTS[name].temperature)
        raw = torch.where(scores == 0, 0.0, scores).view(torch.int32)
        keys = (raw ^ ((raw >> 31) & 0x7FFFFFFF)).long() + (1 << 31)
        survives = ((keys << bits) | ((1 << bits) - 1 - columns)) >= threshold
        num = int((survives & (scores >= scores.max() - 21)).sum())
        least, most = num_kept(scores, CUTS[name])
        assert least <= num <= most, (name, kind, num, least, most)
        assert survives[int(out[row]) if kept is None else int(out[row]) // 7]
    if kept is None:
        assert went_on.view(len(CUTS), -1)[:2].any(1).all() and went_on.view(len(CUTS), -1)[3:5].any(1).all()


def test_logits_may_be_narrow_and_padded(device):
    state = make_state([REQUESTS["sampled"], REQUESTS["top_k"]], device)
    wide = some_logits(4).to(torch.float16 if INTERPRETED else torch.bfloat16)
    padded = torch.full((16, VOCAB + 70), NAN, dtype=wide.dtype)
    padded[:4, :VOCAB] = wide
    assert choose(state, padded, [1, 2], 2, device)[0] == choose(state, wide.float(), [1, 2], 2, device)[0]


# -- commit ------------------------------------------------------------------------------------------------------------


RULES = {"counts": slots.PENALISED, "seen": slots.PENALISED, "recent": slots.BAD_SEQUENCES}


def tables(state):
    """Every tensor that a commit may write, without the rows of slots that never read them."""
    values = {name: value.cpu() for name, value in state.fields._asdict().items()}
    # several sequences may be the null slot: the last to write its history wins, and nothing reads it
    values["history"] = values["history"][1:]
    return {
        name: value[(values["flags"] & RULES[name]) != 0] if name in RULES else value for name, value in values.items()
    }


def commit_both(make, numbers, chosen, width, next_depth, device, **options):
    outcomes = []
    for is_reference in (False, True):
        state = make()
        reference = Reference(state)
        run = reference.accept_commit if is_reference else commit.accept_commit
        verdicts = commit.Verdicts.empty(len(numbers), device)
        given = torch.tensor(numbers, dtype=torch.int32, device=device)
        run(chosen.to(device), given, reference.slots, verdicts, width, next_depth, **options)
        outcomes.append((tables(state), {name: getattr(verdicts, name).tolist() for name in verdicts._fields}))
    (mine, verdict), (theirs, wanted) = outcomes
    assert verdict == wanted
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name
    return verdict, mine


@pytest.mark.parametrize("width", (1, 4, 9))
@pytest.mark.parametrize("seed", range(2 if INTERPRETED else 8))
@pytest.mark.parametrize("most_pending", (0, 4, 9))
def test_accept_commit(device, width, seed, most_pending):
    names = ("penalised", "bad words", "thinking", "everything", "min tokens", "greedy")

    def make():
        state = make_state([REQUESTS[name] for name in names], device, seed)
        numbers = torch.Generator().manual_seed(seed)
        for slot in range(1, len(names) + 1):
            state.num_offered[slot] = int(torch.randint(0, 9, (), generator=numbers))
            state.stop_ids[slot, 0] = int(torch.randint(0, 30, (), generator=numbers))
            # some are nearly at their limit
            state.limit[slot] = state.length[slot] + 2 + int(torch.randint(0, 12, (), generator=numbers))
            state.own_k[slot] = int(torch.randint(0, 9, (), generator=numbers))
            state.pending_count[slot] = slot % 5
        state.done[3] = seed == 2
        return state

    batch = [4, 1, 3, 6, 2, 5, 0, 0]
    chosen = torch.full((len(batch), width), 8)
    chosen[:, : width - 1] = make().drafts[batch, : width - 1].cpu()
    # agree for a number of tokens that differs from sequence to sequence
    for row, length in enumerate(integers(width + 1, len(batch), seed=seed).tolist()):
        chosen[row, length:] = 25 + integers(5, width - length, seed=row) if length < width else 8
    depth = min(width, MAX_DEPTH)
    verdict, after = commit_both(make, batch, chosen.flatten(), width, depth, device, most_pending=most_pending)
    assert verdict["num_committed"][-2:] == [0, 0] and max(verdict["num_committed"]) >= 1
    for slot, committed in zip(batch[:-2], verdict["num_committed"], strict=False):
        left = slot % 5 if slot % 5 + width <= most_pending else 0
        assert after["pending_count"][slot] == left + committed


def test_every_count_of_accepted_drafts_is_committed(device):
    for accepted in range(MAX_DEPTH + 1):

        def make():
            state = make_state([PLAIN], device)
            state.num_offered[1], state.own_k[1] = MAX_DEPTH, MAX_DEPTH
            return state

        chosen = torch.cat((make().drafts[1].cpu(), torch.tensor([8])))
        if accepted < MAX_DEPTH:
            chosen[accepted] = 99
        verdict, after = commit_both(make, [1], chosen, MAX_DEPTH + 1, MAX_DEPTH, device)
        assert verdict["num_committed"] == [accepted + 1] and verdict["head_row"] == [accepted]
        assert after["length"][1] == 20 + accepted + 1 and after["num_offered"][1] == MAX_DEPTH


def test_the_prompt_s_first_token_leaves_nothing_pending(device):
    names = ("penalised", "thinking", "bad words")

    def make():
        return make_state([REQUESTS[name] for name in names], device)

    _, after = commit_both(make, [1, 2, 3], torch.tensor([20, 20, 7]), 1, 3, device, pending=False)
    assert after["length"].tolist()[1:] == [20, 21, 22] and not after["pending_count"].any()


# -- look-up -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("longest", "shortest", "depth"), ((1, 1, 1), (3, 2, 8), (5, 5, 3), (64, 2, 5)))
def test_look_up(device, longest, shortest, depth, monkeypatch):
    """Texts that repeat themselves and some that do not, shorter and longer than what all programs take at once."""
    monkeypatch.setattr(lookup, "CHUNK", 16)
    monkeypatch.setattr(lookup, "PROGRAMS", 4)
    lengths = (1, 2, 16, 40, 63, 64, 65, 130, 200, 380)
    batch = torch.tensor([0, *range(len(lengths), 0, -1), 0], dtype=torch.int32, device=device)
    outcomes = []
    scratch = lookup.LookupScratch.empty(len(batch) + 1, device)
    for is_reference in (False, True):
        state = BatchState(len(lengths) + 1, MAX_DEPTH, VOCAB, torch.device(device), history_length=400)
        for slot, length in enumerate(lengths, 1):
            # few ids, or a period; what stands behind the newest token must not be looked at
            ids = integers(3 if slot % 2 else VOCAB, 400, seed=slot) if slot != 6 else torch.arange(400) % 23
            text = ids.tolist()[: length + 1]
            state.admit(slot, text, PLAIN, limit=length + 4 + 3 * slot, own_k=slot % (MAX_DEPTH + 1))
            state.history[slot, length + 1 :] = state.history[slot, length]
            state.length[slot] = length
        # as a commit leaves it
        state.set_drafts(batch.long(), torch.full((len(batch), depth), 7, device=device))
        reference = Reference(state)
        run = reference.look_up if is_reference else lookup.look_up
        for _ in range(1 if is_reference else 2):
            run(batch, reference.slots, depth, longest, shortest, scratch)
        outcomes.append((state.drafts[:, :depth].tolist(), state.num_offered.tolist()))
    assert outcomes[0] == outcomes[1]
    assert any(outcomes[0][1]) and not all(outcomes[0][1][1:])
    assert not scratch.counters.any()
