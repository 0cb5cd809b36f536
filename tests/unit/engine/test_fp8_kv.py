"""An FP8 key-value cache changes what the model says, and nothing of what that depends on: not k, not the batch, not
where a prompt was cut, not whether a row's predecessors came in its own window."""

from __future__ import annotations

import random

import pytest
import torch

from pilotfish.engine.cache.tensors import KvCache
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.round import torch_table
from pilotfish.engine.round.prompt import PromptPass
from pilotfish.kernels.attention import PAGE, from_cache, prefill_attention, write_kv
from tests.support.loops import LoopDriver
from tests.support.rounds import MAX_DEPTH, MODELS, MODES, Driver, make_engine, random_prompt, transcript
from tests.support.windows import Windows

FP8 = torch.float8_e4m3fn
two_models = pytest.mark.parametrize(("kind", "dtype"), (MODELS[1], MODELS[2]))


def driver_of(kind, dtype, **options):
    return Driver(make_engine(kind, dtype, kv_dtype=FP8, **options))


def caches_of(driver):
    return [*driver.trunk.kv, driver.executor.model.head.cache]


def assert_is(driver, slot, reference):
    """Tokens, logits, and bytes of both caches are those of the reference, as far as the driver came."""
    end = driver.length(slot)
    assert driver.tokens[slot] == reference.tokens[: len(driver.tokens[slot])]
    for position in range(len(reference.prompt), end):
        assert torch.equal(driver.logits[slot][position], reference.logits[position]), position
    wanted = (reference.kv, reference.head_kv)
    for cache, bytes_ in zip(caches_of(driver), wanted, strict=True):
        assert bytes_.dtype == torch.uint8
        assert torch.equal(driver.entries(cache, slot, end), bytes_[:, :, :end])


def test_every_cache_is_fp8_the_head_s_too():
    driver = driver_of("moe", "bfloat16")
    assert {t.dtype for cache in caches_of(driver) for t in (cache.k, cache.v)} == {FP8}


@two_models
@pytest.mark.parametrize("depth", range(1, MAX_DEPTH + 1))
def test_every_k_has_the_tokens_logits_and_bytes_of_k_0(kind, dtype, depth):
    """From one page into the next, every accepted count in turn, then with the head's own drafts."""
    reference = transcript(kind, dtype, 249, num_tokens=60, kv_dtype=FP8)
    driver = driver_of(kind, dtype)
    driver.start(3, reference.prompt, [6, 2], max_tokens=60)
    for accepted in range(depth + 1):
        driver.force(3, reference.drafts(len(driver.tokens[3]), depth, accepted))
        (report,) = driver.round([3], depth, next_depth=depth)
        assert report.num_accepted == accepted
    for _ in range(2):
        driver.round([3], depth, next_depth=depth)
    assert driver.length(3) > 256 or depth < 3
    assert_is(driver, 3, reference)


@two_models
def test_batches_of_mixed_depths_follow_each_sequence_alone(kind, dtype):
    generator = random.Random(3)
    modes, lengths = ("greedy", "sampled", "every feature"), (21, 40, 63)
    references = {
        slot: transcript(kind, dtype, length, seed=slot, mode=mode, kv_dtype=FP8)
        for slot, (mode, length) in enumerate(zip(modes, lengths, strict=True), 1)
    }
    driver = driver_of(kind, dtype)
    for slot, reference in references.items():
        driver.start(slot, reference.prompt, [slot, 8 - slot], MODES[modes[slot - 1]], max_tokens=40)
    for _ in range(5):
        depth = generator.randint(0, 8)
        for slot, reference in references.items():
            driver.force(slot, reference.drafts(len(driver.tokens[slot]), depth, generator.randint(0, depth)))
        driver.round([1, 2, 3], depth, next_depth=generator.randint(1, 3))
    for slot, reference in references.items():
        assert_is(driver, slot, reference)


@pytest.mark.parametrize("run_ahead", (False, True))
def test_the_engine_writes_the_text_of_k_0(run_ahead):
    driver = LoopDriver("moe", "bfloat16", depth=3, kv_dtype=FP8, run_ahead=run_ahead, seed=2)
    requests = [driver.ask(str(i), (21, 40, 63)[i % 3], seed=i % 3, mode=list(MODES)[i % 3]) for i in range(6)]
    driver.run()
    for request in requests:
        assert request.tokens == request.reference.tokens[:20]
    assert sum(output.num_accepted for request in requests for output in request.outputs) > 0


def prefilled(chunk, length=200):
    """Last logits, and what the trunk's and the head's caches hold of a prompt cut so."""
    driver, seen = driver_of("moe", "float32", prefill_chunk=chunk), []
    driver.executor.observers.append(lambda name, rows, *_: seen.append(rows[0]) if name == "prefill.logits" else None)
    driver.start(1, random_prompt(length, 5), [1])
    held = [driver.entries(cache, 1, length).view(FP8) for cache in caches_of(driver)]
    return seen[-1], torch.stack([from_cache(values) for values in held])


ROUNDING = 5e-4
"""Of logits, if a few of a cache's values fell on the other side of a step. What FP8 changes is ten times as much."""


def assert_same_prompt(one, other):
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=ROUNDING)
    differs = one[1] != other[1]
    # fp32 sums in another order: few values lie so near to a boundary
    assert float(differs.float().mean()) < 1e-3
    # by one step of e4m3, whose subnormals are 2^-9 apart
    torch.testing.assert_close(one[1], other[1], rtol=2**-3, atol=2**-9)


@pytest.mark.parametrize("chunk", (7, 33, 100, 256))
def test_a_prompt_s_cut_changes_no_more_than_rounding(chunk):
    assert_same_prompt(prefilled(chunk), prefilled(64))


def test_a_chunk_that_attends_to_what_it_has_not_stored_would_be_seen(monkeypatch):
    """The rule that the test above relies on: a row sees what the cache holds of its own chunk too."""
    cut = prefilled(33)

    def unrounded(q, k_cache, v_cache, table, start, *scales):
        own = [given[table[0] : table[0] + 1] for given in exact]
        return prefill_attention(q, *own, [0], start, *scales)

    exact = [torch.zeros(2, 2, PAGE, 32) for _ in range(2)]
    monkeypatch.setattr(torch_table, "write_kv", lambda k, v, *rest: (write_kv(k, v, *rest), write_kv(*exact, *rest)))
    monkeypatch.setattr(torch_table, "prefill_attention", unrounded)
    with pytest.raises(AssertionError):
        assert_same_prompt(prefilled(256), cut)


@torch.inference_mode()
def test_verify_rows_say_what_a_prompt_of_the_same_tokens_says():
    """Predecessors in the cache, in the same window, or in the same chunk: the same logits but for rounding."""
    model = make_engine("moe", "float32", kv_dtype=FP8).executor.model
    ids, start, table, prompt = torch.tensor(random_prompt(80, 6)), 71, [2], PromptPass(model)

    def fresh(upto):
        model.trunk.state.reset(1)
        return prompt.trunk(ids[:upto], prompt.span(1, 0, upto, table))

    whole, windows = fresh(80)[start:], Windows(model)
    for widths in ([9], [1] * 9, [4, 5]):
        fresh(start)
        at, count, rows = start, 0, []
        for width in widths:
            rows.append(windows.trunk(ids[None, at : at + width], [1], [at], [table], [count]))
            at, count = at + width, width
        torch.testing.assert_close(torch.cat(rows), whole, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("scale", (1.0, 0.01))
def test_what_lies_beyond_the_range_saturates_and_the_text_goes_on(scale):
    """Keys a hundred times too large for the cache: no NaN, and still the bits of k = 0."""
    drivers = [driver_of("moe", "float32"), driver_of("moe", "float32")]
    for driver in drivers:
        head = driver.executor.model.head
        layers = [layer for layer in driver.trunk.layers if isinstance(layer.mixer, GatedAttention)]
        for layer in (*layers, head.layer):
            layer.mixer.qk_norm[layer.mixer.num_heads :] *= 1e4
        for caches, owner in ((driver.trunk.kv, None), ([head.cache], head)):
            scaled = [KvCache(cache.k, cache.v, scale, scale) for cache in caches]
            if owner is None:
                driver.trunk.kv[:] = scaled
            else:
                object.__setattr__(owner, "cache", scaled[0])
    alone, together = drivers
    prompt = random_prompt(60, 8)
    for driver in drivers:
        driver.start(1, prompt, [4], max_tokens=30, depth=4)
    for _ in range(12):
        alone.round([1], 0, next_depth=1)
    for _ in range(4):
        together.force(1, alone.tokens[1][len(together.tokens[1]) :][:4])
        together.round([1], 2, next_depth=4)
    stored = alone.entries(alone.trunk.kv[0], 1, 60).view(FP8).float()
    assert bool(stored.isfinite().all()) and float((stored[0].abs() == 448).float().mean()) > 0.5
    assert together.tokens[1] == alone.tokens[1][: len(together.tokens[1])]
    assert all(bool(row.isfinite().all()) for row in alone.logits[1].values())
    for position in set(alone.logits[1]) & set(together.logits[1]):
        assert torch.equal(alone.logits[1][position], together.logits[1][position])
