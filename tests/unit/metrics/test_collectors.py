"""Every acceptance series, recomputed from a transcript with plain arithmetic."""

import random
import re
from collections import Counter
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry

from pilotfish.engine.link.messages import (
    CacheMiss,
    Execution,
    HeadCheck,
    MissReason,
    PrefixCacheStats,
    RequestOutput,
    StepReport,
    StepStats,
    TrunkCheck,
)
from pilotfish.metrics.collectors import Collector, RequestEnd
from pilotfish.metrics.definitions import DEFINITIONS, MISS_REASONS, SPEC
from tests.support.loaded import ready


@pytest.fixture
def registry():
    return CollectorRegistry()


def value(registry, name, **labels):
    return registry.get_sample_value(name, labels) or 0.0


def transcript(seed, num_steps=60):
    """Random reports: several sequences, k up to 8, rounds without drafts, prefill tokens."""
    rng = random.Random(seed)
    for _ in range(num_steps):
        outputs = []
        for index in range(rng.randrange(0, 4)):
            drafted = rng.randrange(0, 9)
            accepted = rng.randrange(0, drafted + 1)
            is_round = rng.random() < 0.9
            outputs.append(
                RequestOutput(
                    request_id=str(index),
                    token_ids=[1] * (accepted + 1 if is_round else 1),
                    num_drafted=drafted if is_round else 0,
                    num_accepted=accepted if is_round else 0,
                    round=is_round,
                )
            )
        yield StepReport(outputs=outputs, stats=StepStats())


@pytest.mark.parametrize("seed", range(5))
def test_acceptance_series_equal_the_transcript(registry, seed):
    collector = Collector(registry)
    reports = list(transcript(seed))
    for report in reports:
        collector.on_report(report)
    rounds = [o for r in reports for o in r.outputs if o.round]
    offered = [o for o in rounds if o.num_drafted]
    assert value(registry, SPEC + "num_drafts_total") == len(offered)
    assert value(registry, SPEC + "num_draft_tokens_total") == sum(o.num_drafted for o in rounds)
    assert value(registry, SPEC + "num_accepted_tokens_total") == sum(o.num_accepted for o in rounds)
    for position in range(8):
        labels = {"position": str(position)}
        drafted = sum(o.num_drafted > position for o in rounds)
        accepted = sum(o.num_accepted > position for o in rounds)
        assert value(registry, SPEC + "num_draft_tokens_per_pos_total", **labels) == drafted
        assert value(registry, SPEC + "num_accepted_tokens_per_pos_total", **labels) == accepted
    sizes = Counter(len(o.token_ids) for o in rounds)
    name = SPEC + "committed_tokens_per_round"
    assert value(registry, name + "_sum") == sum(len(o.token_ids) for o in rounds)
    for bound in range(1, 10):
        expected = sum(count for size, count in sizes.items() if size <= bound)
        assert value(registry, name + "_bucket", le=f"{bound}.0") == expected


def test_each_round_needs_what_timed_rounds_of_its_size_did(registry):
    timed = {1: 1.5, 2: 1.75, 4: 2.5}
    execution = Execution(num_layers=1, kv_dtype="bfloat16", state_dtype="float32", break_even=timed)
    collector = Collector(registry)
    collector.on_ready(ready(num_speculative_tokens=3, execution=execution))
    name = SPEC + "break_even_tokens_total"

    def after(num_sequences, num_drafted=3, token_ids=(1,), is_round=True):
        """What a round of so many sequences adds."""
        before = value(registry, name)
        outputs = [
            RequestOutput(request_id=str(n), token_ids=list(token_ids), num_drafted=num_drafted, round=is_round)
            for n in range(num_sequences)
        ]
        collector.on_report(StepReport(outputs=outputs, stats=StepStats()))
        return value(registry, name) - before

    assert after(1) == 1.5 and after(2) == 3.5 and after(4) == 10
    # between and beyond what was timed
    assert after(3) == pytest.approx(3 * 2.125) and after(6) == 15
    # plain rounds must commit one token; a prompt's end is no round, and who committed nothing is not counted
    assert after(2, num_drafted=0) == 2
    assert after(2, is_round=False) == after(2, token_ids=()) == 0


def test_no_round_needs_anything_where_none_was_timed(registry):
    collector = Collector(registry)
    collector.on_ready(ready(num_speculative_tokens=3))
    output = RequestOutput(request_id="r", token_ids=[1, 2], num_drafted=3, num_accepted=1, round=True)
    collector.on_report(StepReport(outputs=[output], stats=StepStats()))
    assert value(registry, SPEC + "break_even_tokens_total") == 0


def test_prefill_tokens_are_in_no_round(registry):
    output = RequestOutput(request_id="r", token_ids=[1], round=False)
    Collector(registry).on_report(StepReport(outputs=[output], stats=StepStats()))
    assert value(registry, SPEC + "committed_tokens_per_round_count") == 0
    assert value(registry, "pilotfish_generation_tokens_total") == 1


def test_gauges_and_phases(registry):
    stats = StepStats(
        phases={"verify": 0.003, "draft": 0.001, "made_up": 1.0},
        step_seconds=0.004,
        num_prefill_tokens=5,
        num_running=2,
        num_waiting=3,
        kv_pages_used=7,
        kv_pages_total=9,
        state_slots_used=2,
        state_slots_total=4,
    )
    collector = Collector(registry)
    collector.on_report(StepReport(outputs=[], stats=stats))
    names = (
        "num_requests_running",
        "num_requests_waiting",
        "kv_pages_used",
        "kv_pages",
        "state_slots_used",
        "state_slots",
    )
    assert [value(registry, "pilotfish_" + name) for name in names] == [2, 3, 7, 9, 2, 4]
    assert value(registry, "pilotfish_kv_cache_usage") == 7 / 9
    assert value(registry, "pilotfish_round_seconds_sum", phase="verify") == 0.003
    assert value(registry, "pilotfish_prefill_tokens_total") == 5
    # phases are a closed set: a label value from elsewhere makes no series
    assert b"made_up" not in collector.exposition()
    collector.on_engine(False)
    assert value(registry, "pilotfish_num_requests_running") == 0
    assert value(registry, "pilotfish_engine_up") == 0


def test_rounds_that_a_sequence_sat_out_are_counted_and_are_no_rounds_of_its(registry):
    collector = Collector(registry)
    assert registry.get_sample_value("pilotfish_grammar_rounds_missed_total") == 0
    for count in (2, 0, 3):
        collector.on_report(StepReport(outputs=[], stats=StepStats(phases={"wait": 0.001}, num_sat_out=count)))
    assert value(registry, "pilotfish_grammar_rounds_missed_total") == 5
    assert value(registry, SPEC + "num_drafts_total") == 0


def test_request_ends(registry):
    collector = Collector(registry)
    base = {"seconds": 2.0, "num_prompt_tokens": 5}
    collector.on_end(RequestEnd(finish_reason="stop", num_tokens=9, num_rounds=4, num_round_tokens=8, **base))
    collector.on_end(RequestEnd(finish_reason="abort", num_tokens=1, num_rounds=0, num_round_tokens=0, **base))
    assert value(registry, "pilotfish_request_finished_total", finish_reason="stop") == 1
    assert value(registry, "pilotfish_request_finished_total", finish_reason="abort") == 1
    name = SPEC + "request_acceptance_length"
    assert value(registry, name + "_sum") == 2.0
    assert value(registry, name + "_count") == 1
    assert value(registry, "pilotfish_prompt_tokens_total") == 10


def test_tokens_of_one_round_share_its_time(registry):
    collector = Collector(registry)
    collector.on_tokens(0.008, 4)
    name = "pilotfish_inter_token_latency_seconds"
    assert value(registry, name + "_count") == 4
    assert value(registry, name + "_sum") == pytest.approx(0.008)
    assert value(registry, name + "_bucket", le="0.002") == 4
    assert value(registry, name + "_bucket", le="0.0015") == 0


def test_missing_head_is_a_series(registry):
    without = ready(
        binding_limit="fast_path",
        num_speculative_tokens=0,
        speculation_disabled_reason="the checkpoint has no mtp.* tensor",
        execution=Execution(num_layers=1, kv_dtype="float8_e4m3fn", state_dtype="float32"),
    )
    Collector(registry, "1.2").on_ready(without)
    assert value(registry, SPEC + "disabled", reason="the checkpoint has no mtp.* tensor") == 1
    assert value(registry, SPEC + "k") == 0
    assert value(registry, "pilotfish_max_num_seqs", limit="fast_path") == 4
    labels = {"version": "1.2", "model_type": "scripted", "device": "none", "dtype": "none"}
    assert value(registry, "pilotfish_build_info", **labels, kv_dtype="float8_e4m3fn") == 1


def test_the_self_test_is_a_series_where_there_was_one(registry):
    trunk, head = TrunkCheck(verdict="failed", top1=0.01), HeadCheck(verdict="untested")
    Collector(registry).on_ready(ready(trunk_check=trunk, head_check=head))
    assert value(registry, "pilotfish_self_test_failed", part="trunk") == 1
    assert registry.get_sample_value("pilotfish_self_test_failed", {"part": "head"}) is None
    sound = ready(trunk_check=TrunkCheck(verdict="ok", top1=0.4), head_check=HeadCheck(verdict="weak"))
    other = CollectorRegistry()
    Collector(other).on_ready(sound)
    assert value(other, "pilotfish_self_test_failed", part="trunk") == 0
    assert value(other, "pilotfish_self_test_failed", part="head") == 1


def test_capacity_becomes_series(registry):
    capacity = ready(
        ledger={"weights_bytes": 7, "free_bytes": 5, "total_bytes": 12, "checkpoint_bytes": 6},
        limits={"fast-path rows": 4, "state slots": 4},
        kv_bytes_per_token=512,
        bytes_per_sequence=99,
    )
    Collector(registry).on_ready(capacity)
    assert value(registry, "pilotfish_concurrency_limit", limit="fast-path rows") == 4
    assert value(registry, "pilotfish_memory_bytes", part="weights") == 7
    assert registry.get_sample_value("pilotfish_memory_bytes", {"part": "total"}) is None
    assert value(registry, "pilotfish_kv_bytes_per_token") == 512
    assert value(registry, "pilotfish_state_slots") == 4
    assert value(registry, "pilotfish_engine_ready_timestamp_seconds") > 1e9


def test_rounds_by_path_and_load_by_key(registry):
    collector = Collector(registry)
    for graph, phases in ((True, {"verify": 0.1}), (False, {"verify": 0.1}), (False, {"prefill": 0.1})):
        collector.on_report(StepReport(outputs=[], stats=StepStats(graph=graph, phases=phases)))
    assert [value(registry, "pilotfish_rounds_total", path=path) for path in ("graph", "eager")] == [1, 1]
    collector.on_key("2", 17)
    assert value(registry, "pilotfish_key_requests_total", key="2") == 1
    assert value(registry, "pilotfish_key_generation_tokens_total", key="2") == 17


def test_the_prefix_cache_is_counted_in_tokens_and_ends_with_its_engine(registry):
    collector = Collector(registry)
    misses = (CacheMiss(request_id="a", reason="differs", num_prompt_tokens=9),) * 2
    now = {"num_snapshots": 3, "num_bytes": 300, "capacity_bytes": 500, "num_evictions": 1, "misses": misses}
    for hits in (0, 512, None, 256):
        cache = None if hits is None else PrefixCacheStats(num_queried_tokens=1000, num_hit_tokens=hits, **now)
        collector.on_report(StepReport(outputs=[], stats=StepStats(prefix_cache=cache)))

    def known(name, **labels):
        return value(registry, f"pilotfish_prefix_cache_{name}", **labels)

    names = ("queries_total", "hits_total", "evictions_total", "snapshots", "bytes", "capacity_bytes")
    assert [known(name) for name in names] == [3000, 768, 3, 3, 300, 500]
    assert [known("misses_total", reason=reason) for reason in ("differs", "salt")] == [6, 0]
    collector.on_restart()
    assert [known(name) for name in names] == [3000, 768, 3, 0, 0, 500]


def test_reasons_are_those_that_the_engine_gives():
    assert get_args(MissReason) == MISS_REASONS


def test_names_follow_the_rules():
    names = [entry.name for entry in DEFINITIONS]
    assert len(names) == len(set(names))
    for entry in DEFINITIONS:
        assert re.fullmatch(r"pilotfish_[a-z0-9_]+", entry.name)
        assert entry.name.endswith("_total") == (entry.kind == "counter"), entry.name
        assert bool(entry.buckets) == (entry.kind == "histogram"), entry.name
        assert list(entry.buckets) == sorted(set(entry.buckets)), entry.name
        assert not re.search(r"_(ms|milliseconds|ratio|percent|kb|mb|gib)\b", entry.name)
        assert entry.help.endswith(".")


def test_the_names_dashboards_rely_on_exist():
    names = {entry.name for entry in DEFINITIONS}
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert f"pilotfish_spec_decode_{name}_total" in names
    for name in ("num_draft_tokens", "num_accepted_tokens"):
        assert f"pilotfish_spec_decode_{name}_per_pos_total" in names


def test_token_latency_is_fine_between_1_and_10_ms():
    (entry,) = [entry for entry in DEFINITIONS if entry.name == "pilotfish_inter_token_latency_seconds"]
    fine = [bound for bound in entry.buckets if 0.001 <= bound <= 0.01]
    assert len(fine) >= 10


def test_two_collectors_do_not_share_series():
    first, second = CollectorRegistry(), CollectorRegistry()
    Collector(first).on_rejection("queue_full")
    Collector(second)
    assert value(first, "pilotfish_request_rejected_total", reason="queue_full") == 1
    assert value(second, "pilotfish_request_rejected_total", reason="queue_full") == 0


def test_exposition_is_the_text_format(registry):
    text = Collector(registry).exposition().decode()
    assert "# TYPE pilotfish_spec_decode_num_drafts_total counter" in text
    assert "_created" not in text
