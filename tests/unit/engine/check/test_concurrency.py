"""The cap by rounds timed at the start: which number it is, that all sequences took part, that nothing is left."""

from __future__ import annotations

import pytest
import torch

from pilotfish.engine import plan as plan_module
from pilotfish.engine.check import concurrency
from pilotfish.engine.check.concurrency import capped, round_seconds, worth_running
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.options import EngineOptions
from pilotfish.engine.plan import MEASURED, make_plan, most_to_measure
from pilotfish.engine.start import start_engine
from tests.support.tiny_models import build_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    return build_tiny(tmp_path_factory.mktemp("tiny"), "dense")


def options(folder, **fields):
    fields = {"num_speculative_tokens": 2, "max_num_seqs": 6, "max_model_len": 400, "num_threads": 1} | fields
    return EngineOptions(model=str(folder), dtype="float32", **fields)


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        ({1: 1.0}, 1),
        ({1: 1.0, 2: 1.61}, 1),  # 24 % more
        ({1: 1.0, 2: 1.6}, 2),  # 25 %
        ({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.5, 16: 2.6}, 8),
        ({1: 1.0, 2: 1.9, 4: 2.0}, 1),  # what comes after a doubling that gave nothing is not waited for
        ({4: 1.0, 6: 1.3}, 6),  # 15 % for 1.5 times as many is 27 % a doubling
        ({4: 1.0, 6: 1.35}, 4),
    ],
)
def test_doublings_go_on_while_each_adds_a_quarter(seconds, wanted):
    assert worth_running(seconds) == wanted


def test_all_sequences_take_part_in_what_is_timed_and_nothing_stays(folder, monkeypatch, steps):
    engine = start_engine(options(folder))
    loop = EngineLoop(engine)

    def timed(loop):
        before = len(steps)
        assert concurrency_timed(loop) == 1.0
        reports = [report for _, report in steps[before:]]
        assert len(reports) == concurrency.WARM_UPS + concurrency.ROUNDS
        for report in reports:
            assert sum(bool(output.token_ids) for output in report.outputs) == len(loop.scheduler.running)
        return {1: 1.0, 2: 1.2, 4: 1.5, 6: 2.4}[len(loop.scheduler.running)]

    concurrency_timed = concurrency._timed
    monkeypatch.setattr(concurrency, "_timed", timed)
    held = capped(engine, loop, [])
    assert held.ready.execution.round_seconds == {1: 1.0, 2: 1.2, 4: 1.5, 6: 2.4}
    assert (held.ready.max_num_seqs, held.ready.binding_limit, held.ready.limits[MEASURED]) == (4, MEASURED, 4)
    assert held.scheduler.max_num_seqs == held.plan.max_num_seqs == 4 and held.ready.limits["state slots"] == 6
    assert not loop.has_work() and held.scheduler.pages.num_free == held.ready.kv_pages_total


def test_no_more_are_timed_than_the_pages_hold(folder):
    engine = start_engine(options(folder, kv_cache_tokens=3 * 256, enable_prefix_caching=False, max_model_len=300))
    assert sorted(round_seconds(EngineLoop(engine), [5, 6, 7])) == [1, 2]


def test_a_context_too_short_to_time_in_leaves_the_cap_to_memory(folder):
    engine = start_engine(options(folder, max_model_len=64))
    held = capped(engine, EngineLoop(engine), [])
    assert held.ready.max_num_seqs == held.scheduler.max_num_seqs == 6
    assert held.ready.binding_limit == "captured graphs" and MEASURED not in held.ready.limits
    assert held.ready.execution.round_seconds == {}


def test_room_is_made_for_as_many_as_memory_and_rows_allow(folder, monkeypatch):
    checkpoint = open_checkpoint(str(folder))
    config = checkpoint.config
    assert [most_to_measure(config, depth, 1 << 40, 2) for depth in (0, 3, 8)] == [64, 64, 16]
    few = plan_module.buffer_bytes(config, 3, 16) * plan_module.MEASURED_SHARE
    assert most_to_measure(config, 3, few, 4) == 16 and most_to_measure(config, 3, 0, 4) == 4

    monkeypatch.setattr(plan_module, "choose_fused", lambda *_: True)
    monkeypatch.setattr(plan_module, "_room_beside_weights", lambda *_: (1 << 40, 1 << 40))
    wanted = {"max_num_seqs": None, "num_speculative_tokens": 3}
    found = [
        (made.max_num_seqs, made.binding_limit)
        for more in ({"cost_table": True}, {}, {"cost_table": True, "enforce_eager": True})
        for made in [make_plan(options(folder, **wanted, **more), checkpoint)]
    ]
    assert found == [(64, MEASURED), (4, "fast-path rows"), (4, "fast-path rows")]
