"""Prefill and rounds of an executor: a sequence's tokens and bits whatever runs beside it, and limits that hold."""

from __future__ import annotations

import random

import pytest
import torch

from pilotfish.engine.link.messages import SamplingParams
from tests.support.rounds import GREEDY, MODELS, MODES, Driver, make_engine, random_prompt, transcript
from tests.support.slots import drawn

two_models = pytest.mark.parametrize(("kind", "dtype"), (MODELS[1], MODELS[2]))


def assert_follows(driver, slot, reference):
    """Tokens and logits of the driver's sequence are those of the reference, as far as it came."""
    tokens = driver.tokens[slot]
    assert tokens == reference.tokens[: len(tokens)]
    for position in range(len(reference.prompt), driver.length(slot)):
        assert torch.equal(driver.logits[slot][position], reference.logits[position]), (slot, position)


class TestPrefill:
    @two_models
    @pytest.mark.parametrize("chunk", (64, 256))
    @pytest.mark.parametrize("length", (1, 63, 64, 65, 150))
    def test_the_place_of_a_prompt_does_not_matter(self, kind, dtype, length, chunk):
        seen = []
        for slot, table in ((1, [1, 2]), (4, [7, 3])):
            driver = Driver(make_engine(kind, dtype, prefill_chunk=chunk))
            report = driver.start(slot, random_prompt(length, 5), table)
            state = driver.trunk.state
            entries = driver.entries(driver.trunk.kv[0], slot, length)
            head = driver.entries(driver.executor.model.head.cache, slot, length)
            drafts = driver.state.drafts[slot, :1]
            seen.append((report.token_ids, state.s[:, slot], state.conv[:, slot], entries, head, drafts))
        assert seen[0][0] == seen[1][0]
        assert all(torch.equal(one, other) for one, other in zip(seen[0][1:], seen[1][1:], strict=True))

    @two_models
    def test_a_slot_s_former_sequence_leaves_nothing(self, kind, dtype):
        driver = Driver(make_engine(kind, dtype))
        driver.start(2, random_prompt(90, 1), [4, 5], MODES["every feature"])
        driver.round([2], depth=5, next_depth=5)
        reference = transcript(kind, dtype, 21)
        driver.start(2, reference.prompt, [5, 4])
        for _ in range(3):
            driver.round([2], depth=2, next_depth=2)
        assert_follows(driver, 2, reference)

    def test_logits_do_not_depend_on_the_head(self):
        reference = transcript("moe", "float32", 21)
        driver = Driver(make_engine(depth=0))
        driver.start(1, reference.prompt, [1], depth=0)
        for _ in range(5):
            driver.round([1])
        assert_follows(driver, 1, reference)

    def test_the_head_s_cache_is_filled_at_depth_0_too(self):
        reference = transcript("moe", "float32", 150, seed=5)
        driver = Driver(make_engine())
        driver.start(1, reference.prompt, [1], depth=0)
        driver.round([1], depth=0, next_depth=3)
        end, head = driver.length(1), driver.executor.model.head.cache
        assert torch.equal(driver.entries(head, 1, end), reference.head_kv[:, :, :end])
        assert int(driver.state.drafts[1, 0]) == reference.first_drafts[end]

    def test_a_prompt_s_cut_changes_no_more_than_rounding(self):
        states, entries = [], []
        for chunk in (64, 256):
            driver = Driver(make_engine(prefill_chunk=chunk))
            driver.start(1, random_prompt(200, 5), [1])
            states.append(driver.trunk.state.s[:, 1])
            caches = (driver.trunk.kv[0], driver.executor.model.head.cache)
            entries.append(torch.stack([driver.entries(cache, 1, 200) for cache in caches]))
        torch.testing.assert_close(*states, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(*entries, rtol=1e-3, atol=1e-4)

    def test_first_drafts_are_offered_within_the_limits(self):
        driver = Driver(make_engine())
        driver.start(1, random_prompt(9), [1], max_tokens=4, depth=8)
        assert int(driver.state.num_offered[1]) == 2
        driver.start(2, random_prompt(9), [2], own_k=5, depth=8)
        assert int(driver.state.num_offered[2]) == 5

    def test_the_first_token_is_drawn_for_the_position_after_the_prompt(self):
        driver, seen = Driver(make_engine()), []
        driver.executor.observers.append(
            lambda name, rows, *_: seen.append(rows.clone()) if "prefill" in name else None
        )
        params = MODES["sampled"]
        report = driver.start(1, random_prompt(70), [1], params)
        assert report.token_ids == [drawn(seen[0], params.temperature, params.seed, params.choice, 70)]

    def test_a_first_token_that_stops_ends_the_sequence(self):
        token = transcript("moe", "float32", 21).tokens[0]
        driver = Driver(make_engine())
        params = SamplingParams(temperature=0, stop_token_ids=(token,))
        report = driver.start(1, random_prompt(21), [1], params, depth=8)
        assert (report.token_ids, report.stopped, report.done) == ([token], True, True)
        assert int(driver.state.num_offered[1]) == 0

    def test_one_token_may_be_the_limit(self):
        driver = Driver(make_engine())
        report = driver.start(1, random_prompt(21), [1], max_tokens=1, depth=8)
        assert (len(report.token_ids), report.stopped, report.done) == (1, False, True)


class TestRounds:
    @two_models
    @pytest.mark.parametrize("batch", (1, 2, 3, 4))
    def test_batches_of_any_depth_follow_each_sequence_alone(self, kind, dtype, batch):
        generator = random.Random(batch)
        modes = ("greedy", "sampled", "every feature", "greedy")
        lengths = (21, 40, 63, 5)
        references = {
            slot: transcript(kind, dtype, lengths[slot - 1], seed=slot, mode=modes[slot - 1])
            for slot in range(1, batch + 1)
        }
        driver = Driver(make_engine(kind, dtype))
        for slot, reference in references.items():
            driver.start(slot, reference.prompt, [slot, 8 - slot], MODES[modes[slot - 1]], max_tokens=40)
        for _ in range(5):
            depth, slots = generator.randint(0, 8), generator.sample(sorted(references), batch)
            counts = {slot: generator.randint(0, depth) for slot in slots}
            for slot in slots:
                driver.force(slot, references[slot].drafts(len(driver.tokens[slot]), depth, counts[slot]))
            reports = driver.round(slots, depth, next_depth=generator.randint(0, 3))
            assert {report.slot: report.num_accepted for report in reports} == counts
        for slot, reference in references.items():
            assert_follows(driver, slot, reference)

    @two_models
    @pytest.mark.parametrize("chunk", (64, 256))
    def test_windows_cross_page_borders(self, kind, dtype, chunk):
        reference = transcript(kind, dtype, 249, num_tokens=30, chunk=chunk)
        driver = Driver(make_engine(kind, dtype, prefill_chunk=chunk))
        driver.start(3, reference.prompt, [6, 2])
        for depth, accepted in ((3, 1), (8, 2), (8, 8), (4, 0)):
            driver.force(3, reference.drafts(len(driver.tokens[3]), depth, accepted))
            driver.round([3], depth, next_depth=8)
        assert driver.length(3) > 256
        assert_follows(driver, 3, reference)
        end = driver.length(3)
        head = driver.entries(driver.executor.model.head.cache, 3, end)
        assert torch.equal(head, reference.head_kv[:, :, :end])

    @pytest.mark.parametrize("mode", MODES)
    def test_the_head_s_own_drafts_change_no_token(self, mode):
        reference = transcript("hv_gt_hk", "bfloat16", 40, seed=2, mode=mode)
        driver = Driver(make_engine("hv_gt_hk", "bfloat16"))
        driver.start(1, reference.prompt, [1], MODES[mode], depth=5)
        for _ in range(5):
            driver.round([1], depth=5, next_depth=5)
        assert_follows(driver, 1, reference)

    def test_a_token_is_drawn_for_its_absolute_position(self):
        reference = transcript("moe", "float32", 21, mode="sampled")
        params = MODES["sampled"]
        for position, logits in reference.logits.items():
            chosen = drawn(logits[None], params.temperature, params.seed, params.choice, position + 1)
            assert chosen == reference.tokens[position + 1 - 21]

    @pytest.mark.parametrize(("max_tokens", "accepted"), ((2, 8), (5, 8), (5, 2), (9, 8)))
    def test_max_tokens_is_never_overshot(self, max_tokens, accepted):
        reference = transcript("moe", "float32", 21)
        driver = Driver(make_engine())
        driver.start(1, reference.prompt, [1], max_tokens=max_tokens)
        while not bool(driver.state.done[1]):
            driver.force(1, reference.drafts(len(driver.tokens[1]), 8, accepted))
            (report,) = driver.round([1], depth=8)
        assert driver.tokens[1] == reference.tokens[:max_tokens]
        assert (report.stopped, report.done) == (False, True)
        assert report.num_accepted <= len(report.token_ids)

    @pytest.mark.parametrize("field", ("stop_token_ids", "eos_token_ids"))
    @pytest.mark.parametrize("index", (1, 4, 8))
    def test_a_stop_id_ends_a_run_and_is_its_last_token(self, field, index):
        reference = transcript("moe", "float32", 21)
        assert reference.tokens[index] not in reference.tokens[:index]
        driver = Driver(make_engine())
        params = SamplingParams(temperature=0, **{field: (reference.tokens[index],)})
        driver.start(1, reference.prompt, [1], params)
        driver.force(1, reference.drafts(1, 8, 8))
        (report,) = driver.round([1], depth=8)
        assert driver.tokens[1] == reference.tokens[: index + 1]
        assert (report.stopped, report.done, report.num_accepted) == (True, True, index)

    def test_the_model_s_end_ids_can_be_ignored(self):
        reference = transcript("moe", "float32", 21)
        driver = Driver(make_engine())
        params = SamplingParams(temperature=0, eos_token_ids=(reference.tokens[4],), ignore_eos=True)
        driver.start(1, reference.prompt, [1], params)
        driver.force(1, reference.drafts(1, 8, 8))
        driver.round([1], depth=8)
        assert driver.tokens[1] == reference.tokens[:10]

    def test_min_tokens_holds_inside_a_run(self):
        reference = transcript("moe", "float32", 21)
        params = SamplingParams(temperature=0, stop_token_ids=(reference.tokens[2],), min_tokens=6)
        plain = Driver(make_engine())
        plain.start(1, reference.prompt, [1], params)
        for _ in range(9):
            plain.round([1])
        assert reference.tokens[2] not in plain.tokens[1][:6]
        driver = Driver(make_engine())
        driver.start(1, reference.prompt, [1], params)
        driver.force(1, plain.tokens[1][1:9])
        (report,) = driver.round([1], depth=8)
        assert report.num_accepted == 8
        assert driver.tokens[1] == plain.tokens[1]

    @two_models
    def test_a_done_sequence_commits_nothing_and_its_neighbour_keeps_its_bits(self, kind, dtype):
        references = {1: transcript(kind, dtype, 21), 2: transcript(kind, dtype, 40, seed=2)}
        driver = Driver(make_engine(kind, dtype))
        for slot, reference in references.items():
            driver.start(slot, reference.prompt, [slot], max_tokens=3 if slot == 1 else 40)
        for depth in (4, 4, 2):
            for slot, reference in references.items():
                driver.force(slot, reference.drafts(len(driver.tokens[slot]), depth, 2))
            reports = driver.round([1, 2], depth, next_depth=2)
        assert driver.tokens[1] == references[1].tokens[:3]
        assert (reports[0].token_ids, reports[0].done, reports[0].num_accepted) == ([], True, 0)
        assert int(driver.state.pending_count[1]) == 0
        assert_follows(driver, 2, references[2])

    def test_drafts_past_a_sequence_s_own_k_are_neither_counted_nor_accepted(self):
        reference = transcript("moe", "float32", 21)
        driver = Driver(make_engine())
        driver.start(1, reference.prompt, [1], own_k=2)
        driver.force(1, reference.drafts(1, 5, 5))
        driver.state.set_drafts(torch.tensor([1]), driver.state.drafts[[1], :5].clone())
        (report,) = driver.round([1], depth=5)
        assert (report.num_drafted, report.num_accepted) == (2, 2)
        assert driver.tokens[1] == reference.tokens[:4]

    def test_only_drafts_that_fit_the_round_are_counted(self):
        reference = transcript("moe", "float32", 21)
        driver = Driver(make_engine())
        driver.start(1, reference.prompt, [1])
        driver.force(1, reference.drafts(1, 5, 5))
        (report,) = driver.round([1], depth=2)
        assert (report.num_drafted, report.num_accepted) == (2, 2)
        (report,) = driver.round([1], depth=0)
        assert (report.num_drafted, report.num_accepted) == (0, 0)

    def test_log_probabilities_are_those_of_the_raw_logits(self):
        reference = transcript("moe", "float32", 21, mode="every feature")
        driver = Driver(make_engine())
        driver.start(1, reference.prompt, [1], MODES["every feature"], max_tokens=40)
        driver.force(1, reference.drafts(1, 4, 2))
        (report,) = driver.round([1], depth=4, logprobs=3)
        assert len(report.logprobs) == len(report.token_ids) == 3
        for offset, entry in enumerate(report.logprobs):
            table = reference.logits[21 + offset].double().log_softmax(0)
            top = sorted(range(len(table)), key=lambda i, t=table: (-float(t[i]), i))[:3]
            assert entry.token_id == report.token_ids[offset]
            assert entry.logprob == pytest.approx(float(table[entry.token_id]), abs=1e-5)
            assert [token for token, _ in entry.top] == top
            assert [value for _, value in entry.top] == pytest.approx(table[top].tolist(), abs=1e-5)


def test_an_executor_without_its_head_never_touches_the_head_s_memory():
    engine = make_engine()
    engine.executor.head_on = False
    driver = Driver(engine)
    driver.start(1, random_prompt(80), [1, 2], GREEDY, depth=3)
    for _ in range(3):
        driver.round([1], depth=2, next_depth=2)
    cache = engine.executor.model.head.cache
    assert cache.k.isnan().all()
    assert cache.v.isnan().all()
    assert int(driver.state.num_offered[1]) == 0
