"""A sequence that sits a round out does nothing in it: all that requests get is, bit for bit, what they get without."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from pilotfish.draft_heads.lookup.head import LookupHead
from pilotfish.engine.assemble import assemble
from pilotfish.engine.link.messages import SamplingParams, Submit
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.plan import Plan
from tests.support.fixed_shapes import fixed_engine
from tests.support.grammars import MadeGrammars
from tests.support.misses import SOME, Misses, Turns, counts, run_all
from tests.support.rounds import CPU, MODES, make_engine, random_prompt
from tests.support.tiny_models import VOCAB_SIZE

MOST = 3
WAYS = ("free", "free, ahead", "captured", "not captured")
FEW = dict.fromkeys((5, 6, 9), 60.0)


def loop_of(kind: str, depth: int, way: str, look_up: Any = None, **options: Any) -> EngineLoop:
    if way.startswith("free"):
        engine = make_engine(kind, depth=depth, max_num_seqs=MOST, **options)
        if look_up is not None:
            model = dataclasses.replace(engine.executor.model, head=look_up)
            engine = assemble(model, Plan(CPU, torch.float32, depth, None, 2048, MOST, "configured", 12, 64), 8, 0, 0.0)
        loop = EngineLoop(engine)
        loop.executor.run_ahead = way == "free, ahead"
    else:
        captured = way == "captured"
        loop = EngineLoop(fixed_engine(kind, depth, max_num_seqs=MOST, captured=captured, look_up=look_up, **options))
        assert loop.executor.asynchronous
    loop.grammars = MadeGrammars(lambda: Turns(VOCAB_SIZE))  # type: ignore[assignment]
    return loop


def request(name: str, prompt: list[int], mode: str, k: int | None = None, **fields: Any) -> Submit:
    values = {field: getattr(MODES[mode], field) for field in SamplingParams.__struct_fields__}
    if "grammar" in fields:
        # a grammar has its own
        values["min_tokens"] = 0
    sampling = SamplingParams(**values | fields)
    return Submit(request_id=name, prompt_token_ids=prompt, sampling=sampling, speculative_k=k)


def requests_of(depth: int, **fields: Any) -> list[Submit]:
    """More than there are places, in all modes, most with a grammar."""
    every = "every feature"
    return [
        request("greedy", random_prompt(21), "greedy", grammar=SOME, max_tokens=23, **fields),
        request("rows", random_prompt(40, 2), "sampled", grammar=SOME, logprobs=2, max_tokens=17, **fields),
        request("plain", random_prompt(9, 3), every, logprobs=1, max_tokens=31, **fields),
        request("penalties", random_prompt(63, 4), every, grammar=SOME, logprobs=0, max_tokens=26, **fields),
        request("banned", random_prompt(70, 5), every, grammar=SOME, bad_words_token_ids=((6, 9),), max_tokens=19),
        request("one draft", random_prompt(30, 6), "sampled", min(1, depth), grammar=SOME, max_tokens=15, **fields),
        request("no draft", random_prompt(12, 7), "sampled", 0, grammar=SOME, max_tokens=12, **fields),
        request("stops", random_prompt(12, 8), "greedy", grammar=SOME, stop_token_ids=(12, 15, 33), max_tokens=40),
    ]  # fmt: skip


def run_with(monkeypatch, misses: Misses, loop: EngineLoop, requests: list[Submit], **options: Any) -> Any:
    with monkeypatch.context() as patched:
        misses.patch(patched)
        return run_all(loop, requests, **options)


@pytest.fixture(scope="module")
def undisturbed() -> dict[Any, Any]:
    """What requests get where none sits a round out: the same in every way, so each kind runs once."""
    return {}


def wanted_of(
    monkeypatch, undisturbed: dict[Any, Any], make: partial, requests: list[Submit], seed: int
) -> dict[str, list[Any]]:
    key = (*make.args, seed)
    if key not in undisturbed:
        undisturbed[key], _ = run_with(monkeypatch, Misses(0), make(way="free"), requests)
    return undisturbed[key]


def assert_the_same(
    monkeypatch, undisturbed: dict[Any, Any], make: partial, way: str, requests: list[Submit], seed: int, every=False
) -> Any:
    wanted = wanted_of(monkeypatch, undisturbed, make, requests, seed)
    misses = Misses(1 / 2, seed, every)
    got, num_sat_out = run_with(monkeypatch, misses, make(way=way), requests)
    assert got == wanted
    assert not [output[6] for outputs in got.values() for output in outputs if output[6]]
    assert misses.num_missed > 20 and misses.num_first > 0 and num_sat_out == misses.num_missed
    return wanted, misses


@pytest.mark.parametrize(
    ("kind", "depth", "way"),
    (
        *(("moe", 3, way) for way in WAYS),
        *(("moe", depth, way) for depth in (0, 5) for way in ("free, ahead", "captured")),
        *(("moe", 1, way) for way in ("free", "not captured")),
        *(("hv_gt_hk", 3, way) for way in ("free, ahead", "not captured")),
    ),
)
def test_rounds_sat_out_change_nothing(monkeypatch, undisturbed, kind, depth, way):
    make, every = partial(loop_of, kind, depth), kind == "moe"
    wanted, misses = assert_the_same(monkeypatch, undisturbed, make, way, requests_of(depth), 20 + depth, every)
    offered, accepted, forced = counts(wanted)
    assert misses.num_whole > 0 and forced > 10
    assert (accepted > 10 and offered > accepted) if depth else offered == 0


@pytest.mark.parametrize("way", WAYS)
def test_nor_under_a_look_up_which_reads_all_tokens(monkeypatch, undisturbed, way):
    """Few ids may come, so that text repeats itself."""
    make = partial(loop_of, "hv_gt_hk", 4, look_up=LookupHead(4, 2))
    wanted, _ = assert_the_same(monkeypatch, undisturbed, make, way, requests_of(4, logit_bias=FEW), seed=1)
    assert counts(wanted)[1] > 20


@pytest.mark.parametrize("way", WAYS)
def test_nor_where_prompts_begin_with_snapshots_and_pages_of_others(monkeypatch, undisturbed, way):
    shared = random_prompt(130, 9)
    requests = [
        request(f"{i}", [*shared, *random_prompt(5 * i, i)], "sampled", grammar=SOME, max_tokens=24) for i in range(6)
    ]
    make = partial(loop_of, "hv_gt_hk", 3, num_snapshots=4)
    assert_the_same(monkeypatch, undisturbed, make, way, requests, seed=2)


@pytest.mark.parametrize("way", WAYS)
def test_nor_for_whoever_gets_the_place_of_one_that_left_meanwhile(monkeypatch, undisturbed, way):
    """Every third round that is sat out, the sequence that has run longest is hung up on."""
    requests = [
        request(f"{i}", random_prompt(20 + i, i), ("greedy", "sampled")[i % 2], grammar=SOME, max_tokens=24, logprobs=0)
        for i in range(8)
    ]
    make = partial(loop_of, "moe", 3)
    wanted = wanted_of(monkeypatch, undisturbed, make, requests, seed=5)
    loop, misses, left, calls = make(way=way), Misses(1 / 3, 5), set(), []
    misses.on_miss = lambda: calls.append(None)

    def leave() -> None:
        # how many rounds there are depends on where prompts pause, by the clock
        if len(calls) >= 3 and loop.scheduler.running and len(left) < 6:
            calls.clear()
            left.add(loop.scheduler.running[0].request_id)
            loop.abort(loop.scheduler.running[0].request_id)

    got, _ = run_with(monkeypatch, misses, loop, requests, after=leave)
    assert 2 < len(left) < 8
    for name, outputs in got.items():
        if name in left:
            assert outputs.pop()[5] == "abort"
        assert outputs == wanted[name][: len(outputs)]
        assert name in left or len(outputs) == len(wanted[name])
    assert loop.scheduler.pages.num_used == loop.scheduler.slots.num_used == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_text_decoded_again_while_idle_is_no_other_one(monkeypatch, way):
    loop, checked = loop_of("moe", 3, way), [0, 0]
    loop.self_audit.rate = 1.0
    take = loop.self_audit.take_counts

    def counted() -> tuple[int, int]:
        taken = take()
        checked[:] = (known + new for known, new in zip(checked, taken, strict=True))
        return taken

    loop.self_audit.take_counts = counted  # type: ignore[method-assign]
    run_with(monkeypatch, Misses(1 / 3, 6), loop, requests_of(3)[:2])
    assert checked[0] > 10 and checked[1] == 0


def test_a_round_with_a_miss_that_is_not_undone_would_be_found(monkeypatch):
    """What these tests look at: without it, the trunk would go over the rows that it has replayed once more."""
    wanted, _ = run_with(monkeypatch, Misses(0), loop_of("moe", 3, "captured"), requests_of(3))
    loop = loop_of("moe", 3, "captured")
    executor, sit_out = loop.executor, loop.executor._sit_out

    def broken(batch: Any, shape: Any, missed: list[int]) -> None:
        kept = executor.state.pending_count.clone()
        sit_out(batch, shape, missed)
        executor.state.pending_count.copy_(kept)

    monkeypatch.setattr(executor, "_sit_out", broken)
    got, _ = run_with(monkeypatch, Misses(1 / 3, 3), loop, requests_of(3))
    assert got != wanted


def test_what_masks_are_waited_for_is_no_part_of_what_a_round_takes(monkeypatch):
    """A round may wait for a share of it: each wait would make the next one longer."""
    loop, now = loop_of("moe", 1, "free"), [0.0]
    grammars, waits = loop.executor.grammars, []
    settle = grammars.settle

    def slowly(slots: list[int], patience: float) -> list[int]:
        now[0] += 100.0
        waits.append(patience)
        return settle(slots, 60.0)

    monkeypatch.setattr("pilotfish.engine.loop.perf_counter", lambda: now[0])
    monkeypatch.setattr(grammars, "settle", slowly)
    loop.submit(request("asks", random_prompt(21), "greedy", grammar=SOME, max_tokens=23))
    while loop.has_work():
        loop.step()
    assert len(waits) > 3 and (loop._round_times.round_seconds or 0.0) < 100.0 and max(waits) < 100.0 / 8
