"""The engine loop: exact text under load, limits, bad input answered, and everything freed."""

from __future__ import annotations

import pytest
import torch

from pilotfish.engine.link.messages import SamplingParams
from pilotfish.spec.slots import MAX_STOP_IDS
from tests.support.loops import LoopDriver, assert_alone
from tests.support.rounds import MODELS, random_prompt, transcript
from tests.support.tiny_models import VOCAB_SIZE

two_models = pytest.mark.parametrize(("kind", "dtype"), (MODELS[1], MODELS[2]))


def assert_idle(driver):
    scheduler = driver.loop.scheduler
    scheduler.check()
    assert not driver.loop.has_work()
    assert scheduler.pages.num_used == scheduler.slots.num_used == 0
    assert driver.loop.step() is None


class TestExactness:
    @pytest.mark.parametrize("depth", range(1, 9))
    def test_five_requests_through_three_places_are_as_each_alone(self, depth):
        kind, dtype = MODELS[depth % 4]
        driver = LoopDriver(kind, dtype, depth=depth, max_num_seqs=3, seed=depth)
        requests = [
            driver.ask("greedy", 21),
            driver.ask("sampled", 40, seed=2, mode="sampled"),
            driver.ask("penalised", 63, seed=3, mode="every feature"),
            driver.ask("late", 5, seed=4, max_tokens=9),
            driver.ask("long prompt", 150, seed=5, mode="sampled", max_tokens=7),
        ]
        driver.run()
        for request in requests:
            assert_alone(request)
            assert request.finish == "length"
            assert len(request.tokens) == request.submit.sampling.max_tokens
        assert sum(output.num_accepted for request in requests for output in request.outputs) > 0
        assert_idle(driver)

    def test_each_request_tells_once_how_long_it_waited(self):
        driver = LoopDriver(depth=2, max_num_seqs=1)
        requests = [driver.ask(name, 21, seed=seed) for seed, name in enumerate("abc")]
        driver.run()
        waits = [[o.queue_seconds for o in request.outputs if o.queue_seconds is not None] for request in requests]
        assert [len(wait) for wait in waits] == [1, 1, 1]
        assert all(wait[0] > 0 for wait in waits)

    @two_models
    def test_the_head_s_own_drafts_change_nothing(self, kind, dtype):
        driver = LoopDriver(kind, dtype, depth=3, agreeing="own")
        requests = [
            driver.ask(mode, length, seed=length, mode=mode)
            for mode, length in (("greedy", 9), ("sampled", 64), ("every feature", 70))
        ]
        driver.run()
        for request in requests:
            assert_alone(request)

    def test_without_speculation_it_is_plain_decoding(self):
        driver = LoopDriver(depth=0, agreeing="own")
        requests = [driver.ask("a", 21), driver.ask("b", 40, seed=2, mode="sampled")]
        driver.run()
        for request in requests:
            assert_alone(request)
            assert all(output.num_drafted == 0 for output in request.outputs)

    def test_each_request_keeps_its_own_k(self):
        driver = LoopDriver(depth=8, agreeing=8)
        requests = {k: driver.ask(f"k = {k}", 21, k=k, max_tokens=19) for k in (0, 1, 5, None)}
        driver.run()
        for k, request in requests.items():
            assert_alone(request)
            most = 8 if k is None else k
            assert max(output.num_drafted for output in request.outputs) == most
            assert max(len(output.token_ids) for output in request.outputs) == most + 1

    @two_models
    def test_a_prompt_of_several_chunks_lets_others_go_on(self, kind, dtype):
        driver = LoopDriver(kind, dtype, depth=2, agreeing=1)
        short = driver.ask("short", 5, seed=3)
        driver.step()
        long = driver.ask("long", 300, seed=6)
        driver.run(10)
        # five chunks of the long prompt, a round of the short one after each
        assert len(long.tokens) == 1
        assert len(short.tokens) == 1 + 5 * 2
        driver.run()
        assert_alone(short)
        assert_alone(long)

    @two_models
    def test_neighbours_of_an_aborted_request_keep_their_bits(self, kind, dtype):
        driver = LoopDriver(kind, dtype, depth=4, seed=1)
        requests = [driver.ask("a", 21), driver.ask("b", 40, seed=2), driver.ask("c", 9, seed=9, mode="sampled")]
        driver.run(5)
        driver.loop.abort("b")
        later = driver.ask("d", 40, seed=7, mode="sampled")
        driver.run()
        for request in (requests[0], requests[2], later):
            assert_alone(request)
            assert request.finish == "length"
        assert requests[1].finish == "abort"

    def test_penalties_of_a_late_request_leave_running_ones_alone(self):
        driver = LoopDriver(depth=3, seed=2)
        early = driver.ask("early", 21, mode="sampled")
        driver.run(3)
        late = driver.ask("late", 40, seed=2, mode="every feature")
        driver.run()
        assert_alone(early)
        assert_alone(late)


class TestLimits:
    @pytest.mark.parametrize("max_tokens", (1, 2, 3, 10))
    def test_max_tokens_is_never_overshot_and_no_draft_beyond_it_offered(self, max_tokens):
        driver = LoopDriver(depth=8, agreeing=8)
        request = driver.ask("a", 21, max_tokens=max_tokens)
        driver.run()
        assert request.tokens == request.reference.tokens[:max_tokens]
        assert request.finish == "length"
        # the first token is prefill's and every round commits one without a draft
        assert sum(output.num_drafted for output in request.outputs) == max(0, max_tokens - 2)

    @pytest.mark.parametrize("accepted", (0, 4, 8))
    @pytest.mark.parametrize("max_model_len", (64, 256))
    def test_the_model_s_length_is_never_passed(self, max_model_len, accepted):
        length = max_model_len - 12
        driver = LoopDriver(depth=8, agreeing=accepted, max_model_len=max_model_len)
        request = driver.ask("a", length, max_tokens=500)
        driver.run()
        assert request.tokens == request.reference.tokens[:12]
        assert request.finish == "length"
        assert_idle(driver)

    def test_the_longest_prompt_leaves_room_for_one_token(self):
        driver = LoopDriver(depth=8, max_model_len=64)
        request = driver.submit("a", random_prompt(63), SamplingParams(temperature=0))
        driver.run()
        assert (len(request.tokens), request.finish) == (1, "length")

    @pytest.mark.parametrize("field", ("stop_token_ids", "eos_token_ids"))
    def test_a_stop_id_inside_a_run_ends_the_request_there(self, field):
        driver = LoopDriver(depth=8, agreeing=8)
        stop = transcript("moe", "float32", 21).tokens[5]
        request = driver.ask("a", 21, **{field: (stop,)})
        neighbour = driver.ask("b", 40, seed=2)
        driver.run()
        assert request.tokens == request.reference.tokens[:6]
        assert (request.finish, request.last.stop_token_id) == ("stop", stop)
        assert neighbour.finish == "length"
        assert neighbour.last.stop_token_id is None
        assert_alone(neighbour)

    @pytest.mark.parametrize("agreeing", (0, 2, 5))
    def test_only_offered_drafts_are_counted(self, agreeing):
        driver = LoopDriver(depth=5, agreeing=agreeing)
        requests = [driver.ask("a", 21, max_tokens=18), driver.ask("b", 40, seed=2, k=3, max_tokens=17)]
        driver.run()
        for request, own_k in zip(requests, (5, 3), strict=True):
            committed = 0
            for output in request.outputs:
                remaining = request.submit.sampling.max_tokens - committed
                offered = min(own_k, remaining - 1) if output.round else 0
                assert output.num_drafted == offered
                assert output.num_accepted == min(agreeing, offered)
                committed += len(output.token_ids)


class TestLogprobs:
    def test_every_token_of_every_run_has_those_of_its_logits(self):
        driver = LoopDriver(depth=8, agreeing=3)
        requests = [
            driver.ask("none", 40, seed=2),
            driver.ask("two", 21, mode="every feature", logprobs=2),
            driver.ask("five", 5, seed=3, logprobs=5),
        ]
        driver.run()
        assert all(output.logprobs is None for output in requests[0].outputs)
        for request, wanted in zip(requests[1:], (2, 5), strict=True):
            entries = [entry for output in request.outputs for entry in output.logprobs or ()]
            assert [entry.token_id for entry in entries] == request.tokens
            # the first token's logits are prefill's, which the transcript does not keep
            for position, entry in enumerate(entries[1:], len(request.reference.prompt)):
                table = request.reference.logits[position].double().log_softmax(0)
                assert entry.logprob == pytest.approx(float(table[entry.token_id]), abs=1e-5)
                assert [value for _, value in entry.top] == pytest.approx(table.topk(wanted).values.tolist(), abs=1e-5)

    def test_zero_asks_for_the_token_alone(self):
        driver = LoopDriver(depth=2, agreeing=1)
        request = driver.ask("a", 21, logprobs=0)
        driver.run()
        assert all(entry.top == [] for output in request.outputs for entry in output.logprobs)


BAD = {
    "prompt: want token ids": {"prompt": [1, VOCAB_SIZE]},
    "prompt: want token ids in 0": {"prompt": [-1]},
    "prompt: want 1..127 tokens, got 0": {"prompt": []},
    "prompt: want 1..127 tokens, got 128": {"prompt": [1] * 128},
    "stop_token_ids: want token ids": {"stop_token_ids": (VOCAB_SIZE,)},
    "stop_token_ids: want at most": {"stop_token_ids": tuple(range(MAX_STOP_IDS + 1))},
    "logit_bias: want token ids": {"logit_bias": {-1: 1.0}},
    "max_tokens: want at least 0": {"max_tokens": -1},
    "seed: want a 64-bit integer": {"seed": 1 << 63},
    "top_k: want a number": {"top_k": 1 << 64},
    "min_tokens: want a number": {"min_tokens": 1 << 64},
    "choice: want a number": {"choice": -(1 << 64)},
    "speculative_k: want 0..3": {"k": 4},
    "speculative_k: want 0..3, got -1": {"k": -1},
}


class TestBadInput:
    @pytest.mark.parametrize("message", BAD)
    def test_a_bad_request_is_answered_and_the_engine_lives_on(self, message):
        driver = LoopDriver(depth=3, max_model_len=128, agreeing=2)
        fields = {"prompt": [1, 2], "k": None} | BAD[message]
        prompt, k = fields.pop("prompt"), fields.pop("k")
        bad = driver.submit("bad", prompt, SamplingParams(temperature=0, **fields), speculative_k=k)
        good = driver.ask("good", 21)
        driver.run()
        assert (bad.finish, bad.last.error_code, len(bad.outputs)) == ("error", "invalid", 1)
        assert bad.last.error.startswith(message)
        assert_alone(good)
        assert_idle(driver)

    def test_a_request_that_could_never_get_its_pages_is_refused(self):
        driver = LoopDriver(depth=3, num_pages=2)
        request = driver.submit("a", [1] * 9, SamplingParams(temperature=0, max_tokens=600))
        driver.run()
        assert request.last.error_code == "invalid"
        assert "need 3 KV pages, the pool has 2" in request.last.error

    def test_an_id_in_use_is_refused_and_its_owner_goes_on(self):
        driver = LoopDriver(depth=3, agreeing=2)
        request = driver.ask("a", 21)
        driver.run(2)
        driver.submit("a", [1, 2], SamplingParams(temperature=0))
        report = driver.step()
        refusal = next(output for output in report.outputs if output.error is not None)
        assert (refusal.request_id, refusal.error_code) == ("a", "invalid")
        driver.run()
        assert_alone(request)
        assert len(request.tokens) == 20

    @pytest.mark.parametrize("seed", (-(1 << 63), (1 << 63) - 1))
    def test_the_whole_range_of_seeds_is_taken(self, seed):
        driver = LoopDriver(depth=3, agreeing="own")
        request = driver.submit("a", [1, 2], SamplingParams(seed=seed, max_tokens=3))
        driver.run()
        assert (len(request.tokens), request.finish) == (3, "length")

    def test_beyond_the_queue_s_bound_the_answer_is_try_again(self):
        driver = LoopDriver(depth=3, max_num_seqs=1, max_waiting=1, agreeing=3)
        requests = [driver.ask(name, 21, max_tokens=5) for name in "abc"]
        driver.run()
        assert [request.finish for request in requests] == ["length", "length", "error"]
        assert requests[2].last.error_code == "queue_full"
        again = driver.ask("d", 21, max_tokens=5)
        driver.run()
        assert again.finish == "length"

    @pytest.mark.parametrize(
        "params",
        (
            {"temperature": 1e-6},
            {"temperature": 1e6},
            {"top_p": 1e-9},
            {"min_p": 1.0},
            {"top_k": 10**9},
            {"repetition_penalty": 1e-6, "frequency_penalty": -2.0},
            {"logit_bias": dict.fromkeys(range(VOCAB_SIZE), -100.0)},
            {"min_tokens": 500, "stop_token_ids": tuple(range(MAX_STOP_IDS))},
        ),
        ids=str,
    )
    def test_extreme_parameters_end_in_tokens(self, params):
        driver = LoopDriver(depth=3, agreeing="own")
        request = driver.submit("a", [1, 2], SamplingParams(**{"temperature": 0.8, "max_tokens": 6} | params))
        driver.run()
        assert (len(request.tokens), request.finish) == (6, "length")
        assert all(0 <= token < VOCAB_SIZE for token in request.tokens)


class TestAbort:
    @pytest.mark.parametrize("steps", (0, 1, 2, 3, 5))
    def test_aborting_at_any_time_frees_everything(self, steps):
        """Before admission, in prefill (the prompt has three chunks), and in decode."""
        driver = LoopDriver(depth=3, agreeing=1)
        request = driver.ask("a", 150, seed=5)
        driver.run(steps)
        driver.loop.abort("a")
        assert driver.loop.has_work()
        driver.run()
        assert request.finish == "abort"
        assert_idle(driver)

    def test_aborting_one_that_waits_lets_the_next_one_in(self):
        driver = LoopDriver(depth=3, max_num_seqs=1, agreeing=3)
        requests = [driver.ask(name, 21, max_tokens=6) for name in "abc"]
        driver.run(2)
        driver.loop.abort("b")
        driver.run()
        assert [request.finish for request in requests] == ["length", "abort", "length"]
        assert not requests[1].tokens
        assert_alone(requests[2])

    def test_unknown_and_ended_ids_are_no_error(self):
        driver = LoopDriver(depth=3, agreeing=3)
        request = driver.ask("a", 21, max_tokens=4)
        driver.loop.abort("nobody")
        driver.run()
        driver.loop.abort("a")
        driver.loop.abort("a")
        assert_idle(driver)
        assert [output.finish_reason for output in request.outputs].count(None) == len(request.outputs) - 1

    def test_an_id_may_come_again_after_its_end(self):
        driver = LoopDriver(depth=3, agreeing=3)
        driver.ask("a", 21)
        driver.run(2)
        driver.loop.abort("a")
        driver.run()
        del driver.requests["a"]
        request = driver.ask("a", 40, seed=2)
        driver.run()
        assert_alone(request)
        assert len(request.tokens) == 20


class TestReports:
    def test_gauges_follow_the_work(self):
        driver = LoopDriver(depth=3, max_num_seqs=2, agreeing=1)
        for name in "abc":
            driver.ask(name, 21, max_tokens=6)
        stats = driver.step().stats
        assert (stats.num_running, stats.num_waiting, stats.num_prefill_tokens) == (2, 1, 21)
        assert (stats.state_slots_used, stats.state_slots_total) == (2, 2)
        assert (stats.kv_pages_used, stats.kv_pages_total) == (2, 12)
        assert set(stats.phases) == {"prefill"}
        driver.run()
        last = driver.reports[-1].stats
        assert last.num_running == last.num_waiting == last.kv_pages_used == last.state_slots_used == 0
        assert set(last.phases) == {"verify", "choose", "accept", "repair", "draft", "report"}

    def test_every_request_ends_once(self):
        driver = LoopDriver(depth=4, max_num_seqs=2)
        requests = [driver.ask(str(number), 21 + number, seed=number, max_tokens=3 + number) for number in range(4)]
        driver.run()
        for request in requests:
            assert [output.finish_reason is not None for output in request.outputs].count(True) == 1
            assert request.finish == "length"
            assert [output.round for output in request.outputs] == [False] + [True] * (len(request.outputs) - 1)

    def test_an_idle_engine_has_nothing_to_report(self):
        assert_idle(LoopDriver(depth=3))

    def test_ready_says_what_is_served(self):
        ready = LoopDriver(depth=3, max_num_seqs=2, max_model_len=128).loop.ready
        assert (ready.num_speculative_tokens, ready.max_num_seqs, ready.max_model_len) == (3, 2, 128)
        assert (ready.vocab_size, ready.kv_pages_total, ready.page_size) == (VOCAB_SIZE, 12, 256)

    def test_the_ledger_counts_the_caches_bytes(self):
        loop = LoopDriver(depth=3, max_num_seqs=2).loop
        trunk, head = loop.executor.model.trunk, loop.executor.model.head
        caches = [tensor for cache in (*trunk.kv, head.cache) for tensor in (cache.k, cache.v)]
        assert loop.ready.ledger["kv_cache_bytes"] == sum(t.numel() * t.element_size() for t in caches)
        pending = torch.tensor([t.nbytes for t in vars(trunk.state.pending).values()])
        assert loop.ready.ledger["pending_bytes"] == int(pending.sum())

    def test_nan_in_the_logits_ends_that_request_alone(self):
        driver = LoopDriver(depth=3, agreeing=2)
        embedding = driver.loop.executor.model.trunk.embedding
        good = [driver.ask("a", 21), driver.ask("b", 40, seed=2, mode="sampled")]
        used = {token for r in good for token in (*r.submit.prompt_token_ids, *r.reference.tokens)}
        # neither read nor written nor (as a wrong draft, one above a right one) verified by the others
        poison = next(token for token in range(VOCAB_SIZE) if not {token, token - 1} & used)
        before = embedding[poison].clone()
        bad = driver.submit("bad", [1, 2, poison], SamplingParams(temperature=0, max_tokens=9))
        try:
            embedding[poison] = float("nan")
            driver.run()
        finally:
            embedding[poison] = before
        assert (bad.finish, bad.last.error_code) == ("error", "nan")
        assert "NaN" in bad.last.error
        for request in good:
            assert_alone(request)
        assert_idle(driver)
