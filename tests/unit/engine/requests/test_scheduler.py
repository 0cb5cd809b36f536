"""The scheduler: limits, order, the cut of prompts, turns of prefill and rounds, and its books after any operation."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from msgspec import structs

from pilotfish.engine.cache.grid import Grid
from pilotfish.engine.cache.pool import Pool
from pilotfish.engine.link.messages import SamplingParams, Submit
from pilotfish.engine.requests.scheduler import LOOK_AHEAD, PrefillStep, QueueFull, RoundStep, Scheduler
from pilotfish.engine.requests.sequence import Sequence

CHUNK = 64


def make_sequence(name, prompt_length=10, num_pages=1):
    request = Submit(request_id=name, prompt_token_ids=list(range(prompt_length)), sampling=SamplingParams())
    return Sequence(request, prompt_length + 16, 3, num_pages)


def make_scheduler(num_pages=100, num_slots=8, max_num_seqs=4, max_waiting=3, chunk=CHUNK):
    pools = Pool("KV pages", num_pages + 1), Pool("state slots", num_slots + 1)
    return Scheduler(*pools, max_num_seqs, max_waiting, Grid(chunk, 256))


def add(scheduler, *sequences):
    for sequence in sequences:
        scheduler.add(sequence)
        scheduler.check()


def admit(scheduler):
    admitted = [sequence.request_id for sequence in scheduler.admit()]
    scheduler.check()
    return admitted


def advance(scheduler):
    """Runs the next step as the engine does; its description."""
    step = scheduler.next_step()
    scheduler.check()
    if isinstance(step, PrefillStep):
        step.sequence.num_prefilled = step.end
        return (step.sequence.request_id, step.start, step.end)
    return [sequence.request_id for sequence in step.sequences] if isinstance(step, RoundStep) else None


def test_no_more_run_than_may():
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, *(make_sequence(name) for name in "abcd"))
    assert admit(scheduler) == ["a", "b"]
    assert admit(scheduler) == []
    scheduler.finish(scheduler.running[0])
    assert admit(scheduler) == ["c"]


def test_two_chunks_of_one_length_are_one_step_where_they_may_be():
    scheduler, steps = make_scheduler(chunk=2048), []
    scheduler.pairs = True
    asks = make_sequence("asks", 4096)
    asks.request = structs.replace(asks.request, sampling=SamplingParams(prompt_logprobs=0))
    for sequence in (make_sequence("a", 9000), make_sequence("b", 2047), make_sequence("c", 2048), asks):
        add(scheduler, sequence)
        admit(scheduler)
        while not sequence.is_prefilled:
            step = scheduler.next_step()
            scheduler.check()
            if isinstance(step, PrefillStep):
                steps.append((sequence.request_id, step.start, *step.ends))
                sequence.num_prefilled = step.end
        scheduler.finish(sequence)
    assert steps == [
        ("a", 0, 1024, 2048), ("a", 2048, 4096, 6144), ("a", 6144, 8192), ("a", 8192, 9000),
        ("b", 0, 1024), ("b", 1024, 2047), ("c", 0, 1024, 2048),
        ("asks", 0, 1024), ("asks", 1024, 2048), ("asks", 2048, 4096),
    ]  # fmt: skip
    assert scheduler.num_steps(9000) == 4 and scheduler.num_steps(2048) == 1


def test_beside_a_sequence_that_decodes_chunks_are_steps_of_their_own():
    scheduler = make_scheduler()
    scheduler.pairs = True
    add(scheduler, make_sequence("a", 10), make_sequence("b", 3 * CHUNK))
    admit(scheduler)
    steps = [advance(scheduler) for _ in range(4)]
    assert steps == [("a", 0, 10), ["a"], ("b", 0, CHUNK), ["a"]]
    scheduler.finish(scheduler.running[0])
    assert advance(scheduler) == ("b", CHUNK, 3 * CHUNK)


@pytest.mark.parametrize("max_num_seqs", (0, 9))
def test_more_sequences_than_slots_are_refused(max_num_seqs):
    with pytest.raises(ValueError, match=r"want 1\.\.8"):
        make_scheduler(max_num_seqs=max_num_seqs)


def test_admission_is_first_come_first_served_even_if_a_later_one_would_fit():
    scheduler = make_scheduler(num_pages=4)
    add(scheduler, make_sequence("a", num_pages=2), make_sequence("b", num_pages=3), make_sequence("c", num_pages=1))
    assert admit(scheduler) == ["a"]
    scheduler.finish(scheduler.running[0])
    assert admit(scheduler) == ["b", "c"]


def test_a_running_sequence_holds_its_worst_case_from_the_start():
    scheduler = make_scheduler(num_pages=5)
    sequence = make_sequence("a", prompt_length=1, num_pages=5)
    add(scheduler, sequence)
    admit(scheduler)
    assert scheduler.num_reserved == 5 and sequence.slot > 0
    add(scheduler, make_sequence("b"))
    assert admit(scheduler) == []


def test_pages_are_taken_as_they_are_needed():
    scheduler = make_scheduler(num_pages=5)
    sequence = make_sequence("a", prompt_length=200, num_pages=5)
    add(scheduler, sequence)
    admit(scheduler)
    taken = []
    while not sequence.is_prefilled:
        advance(scheduler)
        taken.append(len(sequence.pages))
    # up to each cut, and as far as a round may reach
    assert taken == [1, 1, 1, 1]
    for _ in range(4):
        advance(scheduler)
        known = 200 + sequence.num_written
        assert len(sequence.pages) == min(5, -(-(known + LOOK_AHEAD) // 256))
        scheduler.wrote(sequence, 200)
    assert len(sequence.pages) == 4 and scheduler.num_reserved == 5


@pytest.mark.parametrize("running", (0, 1, 4))
def test_the_queue_s_bound_counts_those_beyond_the_free_places(running):
    scheduler = make_scheduler(max_num_seqs=4, max_waiting=2)
    add(scheduler, *(make_sequence(f"r{i}") for i in range(running)))
    assert len(admit(scheduler)) == running
    add(scheduler, *(make_sequence(f"w{i}") for i in range(4 - running + 2)))
    with pytest.raises(QueueFull, match="at most 2 may"):
        scheduler.add(make_sequence("one too many"))
    scheduler.check()
    assert len(scheduler.waiting) == 4 - running + 2


def test_a_bound_of_zero_still_lets_the_free_places_fill():
    scheduler = make_scheduler(max_num_seqs=1, max_waiting=0)
    add(scheduler, make_sequence("a"))
    with pytest.raises(QueueFull):
        scheduler.add(make_sequence("b"))


def test_prefill_and_rounds_alternate():
    scheduler = make_scheduler()
    add(scheduler, make_sequence("a", 10))
    admit(scheduler)
    assert advance(scheduler) == ("a", 0, 10)
    add(scheduler, make_sequence("b", 3 * CHUNK))
    admit(scheduler)
    steps = [advance(scheduler) for _ in range(7)]
    assert steps == [["a"], ("b", 0, 64), ["a"], ("b", 64, 128), ["a"], ("b", 128, 192), ["a", "b"]]


def test_prompts_go_on_without_a_pause_when_nobody_decodes():
    scheduler = make_scheduler()
    add(scheduler, make_sequence("a", 2 * CHUNK + 1), make_sequence("b", 5))
    admit(scheduler)
    assert [advance(scheduler) for _ in range(3)] == [("a", 0, 64), ("a", 64, 128), ("a", 128, 129)]
    assert advance(scheduler) == ["a"]
    assert advance(scheduler) == ("b", 0, 5)


def test_nothing_to_do_is_no_step():
    assert make_scheduler().next_step() is None


def test_finishing_a_waiting_sequence_frees_nothing():
    scheduler = make_scheduler(max_num_seqs=1)
    first, second = make_sequence("a"), make_sequence("b")
    add(scheduler, first, second)
    admit(scheduler)
    scheduler.finish(second)
    scheduler.check()
    assert not scheduler.waiting
    assert scheduler.running == [first]


@pytest.mark.parametrize("steps", (0, 1, 3))
def test_finishing_a_running_sequence_frees_all_it_held(steps):
    scheduler = make_scheduler()
    sequence = make_sequence("a", 2 * CHUNK, num_pages=3)
    add(scheduler, sequence)
    admit(scheduler)
    for _ in range(steps):
        advance(scheduler)
    scheduler.finish(sequence)
    scheduler.check()
    assert scheduler.pages.num_used == scheduler.slots.num_used == 0
    assert scheduler.next_step() is None


class Walk:
    """Random arrivals, steps and endings; `cuts` collects every prompt's chunks."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.scheduler = make_scheduler(num_pages=12, num_slots=4, max_num_seqs=3, max_waiting=5)
        self.number = 0
        self.arrived, self.admitted, self.refused = [], [], 0
        self.cuts: dict[str, list[tuple[int, int]]] = {}
        self.lengths: dict[str, int] = {}
        self.aborted: set[str] = set()

    def arrive(self):
        sequence = make_sequence(f"s{self.number}", self.random.randint(1, 4 * CHUNK), self.random.randint(1, 6))
        self.number += 1
        try:
            self.scheduler.add(sequence)
        except QueueFull:
            self.refused += 1
        else:
            self.arrived.append(sequence.request_id)
            self.lengths[sequence.request_id] = len(sequence.prompt)

    def step(self):
        self.admitted += [sequence.request_id for sequence in self.scheduler.admit()]
        self.scheduler.check()
        step = self.scheduler.next_step()
        if isinstance(step, PrefillStep):
            self.cuts.setdefault(step.sequence.request_id, []).append((step.start, step.end))
            step.sequence.num_prefilled = step.end
        elif isinstance(step, RoundStep):
            assert all(sequence.is_prefilled for sequence in step.sequences)
            for sequence in step.sequences:
                if self.random.random() < 0.2:
                    self.scheduler.finish(sequence)

    def abort(self):
        alive = [*self.scheduler.waiting, *self.scheduler.running]
        if alive:
            sequence = self.random.choice(alive)
            self.aborted.add(sequence.request_id)
            self.scheduler.finish(sequence)

    def run(self, count):
        for _ in range(count):
            draw = self.random.random()
            operation = self.arrive if draw < 0.25 else self.abort if draw < 0.3 else self.step
            operation()
            self.scheduler.check()
            assert len(self.scheduler.running) <= self.scheduler.max_num_seqs


@pytest.mark.parametrize("seed", range(4))
def test_a_random_walk_keeps_the_books(seed):
    walk = Walk(seed)
    walk.run(1500)
    assert walk.refused > 0
    assert len(walk.admitted) > 50


@pytest.mark.parametrize("seed", range(4))
def test_the_cut_of_a_prompt_depends_on_its_length_alone(seed):
    walk = Walk(seed)
    walk.run(1500)
    for name, cut in walk.cuts.items():
        length = walk.lengths[name]
        whole = [(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]
        # a sequence that ended before its prompt did has the first of these chunks
        assert cut == whole[: len(cut)], name
        assert cut == whole or name in walk.aborted or name in {s.request_id for s in walk.scheduler.running}


@pytest.mark.parametrize("seed", range(4))
def test_all_that_arrive_are_admitted_in_order_and_end(seed):
    walk = Walk(seed)
    walk.run(600)
    for _ in range(2000):
        walk.step()
        walk.scheduler.check()
    assert not walk.scheduler.waiting
    assert not walk.scheduler.running
    assert walk.admitted == [name for name in walk.arrived if name in walk.admitted]
    assert set(walk.arrived) - set(walk.admitted) <= walk.aborted


def test_a_decoding_sequence_runs_every_second_step_whatever_prompts_come():
    scheduler = make_scheduler(max_num_seqs=4, max_waiting=50)
    add(scheduler, make_sequence("decoding"))
    admit(scheduler)
    advance(scheduler)
    steps = []
    for number in range(40):
        if number % 5 == 0:
            add(scheduler, make_sequence(f"p{number}", 20 * CHUNK))
            admit(scheduler)
        steps.append(advance(scheduler))
    rounds = [isinstance(step, list) and "decoding" in step for step in steps]
    assert all(one or other for one, other in pairwise(rounds))
