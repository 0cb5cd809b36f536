"""Timed rounds are whole rounds of all sequences at the depth they stand for. What they took is nobody's business."""

import dataclasses

import pytest
import torch

from pilotfish.engine.check import cost_table
from pilotfish.engine.check.cost_table import BLOCKS, ROUNDS, Cost
from pilotfish.engine.link.messages import SamplingParams, Submit
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.options import EngineOptions
from pilotfish.engine.round.executor import RoundExecutor
from pilotfish.engine.round.shapes import Shape
from pilotfish.engine.start import make_core, start_engine
from tests.support.fixed_shapes import fixed_engine
from tests.support.tiny_models import build_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    return build_tiny(tmp_path_factory.mktemp("tiny"), "dense")


def options(folder, **fields):
    fields = {"num_speculative_tokens": 2, "max_num_seqs": 3, "max_model_len": 200, "num_threads": 1} | fields
    return EngineOptions(model=str(folder), dtype="float32", **fields)


def test_break_even():
    assert Cost(3, 1, 256, seconds=0.030, plain_seconds=0.020).break_even == pytest.approx(1.5)


def test_each_timed_step_is_a_round_of_all(folder, steps):
    engine, told = start_engine(options(folder)), []
    costs = cost_table.measure(
        engine.executor.model, engine.plan, list(range(50)), [1, 2], [(1, 20), (3, 40)], told.append
    )
    assert [(c.k, c.batch, c.context) for c in costs] == [(1, 1, 20), (2, 1, 20), (1, 3, 40), (2, 3, 40)]
    assert all(c.seconds == c.plain_seconds == 1.0 and c.break_even == 1.0 for c in costs)
    assert len(told) == 2 * 3 * BLOCKS
    for depth in (0, 1, 2):
        reports = [report for loop, report in steps if loop.depth == depth and report]
        rounds = [r for r in reports if sum(o.round and bool(o.token_ids) for o in r.outputs) == 3]
        assert len(rounds) >= BLOCKS * ROUNDS, "all three sequences in every timed round"
        # a random head is wrong, so drafts are offered to the end
        assert {output.num_drafted for r in rounds for output in r.outputs} == {depth}


def test_of_rounds_timed_for_the_cap_only_those_at_k_0_are_timed_again(steps):
    loop, seconds = EngineLoop(fixed_engine("dense", 2, num_pages=24)), {1: 1.5, 2: 3.0, 4: 2.0}
    costs = cost_table.of_served(loop, seconds, [])
    assert [(c.k, c.batch, c.seconds, c.plain_seconds) for c in costs] == [
        (2, 1, 1.5, 1.0), (2, 2, 3.0, 1.0), (2, 4, 2.0, 1.0),
    ]  # fmt: skip
    assert {timed for timed, _ in steps} == {loop} and loop.executor.num_missed == 0
    outputs = [output for _, report in steps if report for output in report.outputs]
    assert outputs and not any(output.num_drafted for output in outputs)
    assert not loop.has_work()


def test_a_slow_machine_times_one_block_of_the_first_place(folder):
    engine, told = start_engine(options(folder)), []
    places = [(1, 20), (2, 20)]
    costs = cost_table.measure(
        engine.executor.model, engine.plan, list(range(50)), [2], places, told.append, seconds=0.0
    )
    assert [(c.k, c.batch) for c in costs] == [(2, 1)] and len(told) == 2


def test_no_memory_for_timed_rounds_is_no_reason_not_to_serve(folder, monkeypatch, caplog):
    def no_room(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(cost_table, "at_boot", no_room)
    assert make_core(options(folder, cost_table=True)).ready.execution.break_even == {}
    assert "break-even is modelled: CUDA out of memory" in caplog.text


def test_only_the_timed_shape_is_captured(folder, monkeypatch):
    """On a device that captures; here what would be is written down."""
    captured = []
    monkeypatch.setattr(RoundExecutor, "capture", lambda self, shapes=None, **flags: captured.append((shapes, flags)))
    engine = start_engine(options(folder))
    plan = dataclasses.replace(engine.plan, captured=True)
    cost_table.measure(engine.executor.model, plan, list(range(50)), [2], [(3, 20)])
    alone = {"progress": False, "prompts": False}
    assert captured == [([Shape(3, 0)], alone), ([Shape(3, 2)], alone)]


@pytest.mark.parametrize(("batch", "context", "fit"), [(3, 80, True), (4, 20, False), (1, 180, False)])
def test_what_does_not_fit_is_known_before(folder, batch, context, fit):
    assert cost_table.fits(start_engine(options(folder)).plan, batch, context) == fit


def test_a_server_that_was_asked_times_itself(folder):
    found = make_core(options(folder, cost_table=True)).ready.execution.break_even
    assert list(found) == [1, 2, 3] and all(tokens > 0 for tokens in found.values())
    assert make_core(options(folder)).ready.execution.break_even == {}
    assert make_core(options(folder, cost_table=True, num_speculative_tokens=0)).ready.execution.break_even == {}


def test_what_timed_rounds_compiled_kept_no_request_waiting(folder, monkeypatch):
    compiled = [7]

    def take(self):
        count, compiled[0] = compiled[0], 0
        return count

    def timed(*_):
        compiled[0] = 3
        return []

    monkeypatch.setattr(RoundExecutor, "take_compiled", take)
    monkeypatch.setattr(cost_table, "at_boot", timed)
    core = make_core(options(folder, cost_table=True))
    core.submit(Submit(request_id="a", prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=1)))
    assert core.step().stats.num_compiled == 0


def test_a_start_s_seconds_are_told_by_part(folder):
    ready = make_core(options(folder)).ready
    seconds = ready.execution.start_seconds
    assert list(seconds) == ["weights", "rest"] and all(took > 0 for took in seconds.values())
    assert seconds["weights"] == ready.load_seconds
