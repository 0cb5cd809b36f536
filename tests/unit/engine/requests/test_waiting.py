"""Turns among API keys: a swarm starves nobody, one key alone is first come first served, books always balance."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pilotfish.engine.cache.grid import Grid
from pilotfish.engine.cache.pool import Pool
from pilotfish.engine.link.messages import SamplingParams, Submit
from pilotfish.engine.requests.scheduler import PrefillStep, RoundStep, Scheduler
from pilotfish.engine.requests.sequence import Sequence

CHUNK, PLACES = 64, 4


class Simulation:
    """Steps of one unit of time each: a prompt's chunk, or a round that gives every sequence in it 1 to 4 tokens."""

    def __init__(self, seed=0, places=PLACES, pages=1000):
        self.random = random.Random(seed)
        pools = Pool("KV pages", pages + 1), Pool("state slots", places + 1)
        self.scheduler = Scheduler(*pools, places, 10_000, Grid(CHUNK, 256))
        self.now = 0
        self.left: dict[str, int] = {}
        self.arrived: dict[str, int] = {}
        self.admitted: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        self.served: Counter[str] = Counter()

    def ask(self, name, key, tokens=100, prompt=50, priority=0, pages=1):
        request = Submit(
            request_id=name,
            prompt_token_ids=[0] * prompt,
            sampling=SamplingParams(max_tokens=tokens),
            key=key,
            priority=priority,
        )
        self.scheduler.add(Sequence(request, prompt + tokens, 3, pages))
        self.left[name], self.arrived[name] = tokens, self.now

    def step(self):
        self.now += 1
        for sequence in self.scheduler.admit():
            self.admitted[sequence.request_id] = self.now
        step = self.scheduler.next_step()
        if isinstance(step, PrefillStep):
            step.sequence.num_prefilled = step.end
            self._serve(step.sequence.request.key, step.end - step.start)
        elif isinstance(step, RoundStep):
            for sequence in step.sequences:
                name = sequence.request_id
                count = min(self.left[name], self.random.randint(1, 4))
                self.scheduler.wrote(sequence, count)
                self._serve(sequence.request.key, count)
                self.left[name] -= count
                if not self.left[name]:
                    self.scheduler.finish(sequence)
                    self.ended[name] = self.now
        self.scheduler.check()

    def run(self, most=100_000):
        while len(self.ended) < len(self.left):
            self.step()
            assert self.now < most

    def alone(self, **request):
        """Time that one such request takes with nobody else."""
        other = Simulation()
        other.ask("alone", "alone", **request)
        other.run()
        return other.ended["alone"]

    def _serve(self, key, count):
        self.served[key] += count


@pytest.mark.parametrize("seed", range(5))
def test_a_swarm_delays_others_by_no_more_than_twice_their_equal_share(seed):
    """Five keys and four places: an equal share is 4/5 of a place, among others' prompts."""
    simulation = Simulation(seed)
    for number in range(50):
        simulation.ask(f"swarm-{number}", "swarm")
    draw = random.Random(seed)
    arrivals = sorted(draw.randint(0, 400) for _ in range(4))
    for number, when in enumerate(arrivals):
        while simulation.now < when:
            simulation.step()
        simulation.ask(f"one-{number}", f"key-{number}")
    simulation.run()
    # of each other place a request that runs at the same time has its prompt read meanwhile
    share = simulation.alone() * 5 / PLACES + 4 * (PLACES + 1)
    for number in range(4):
        name = f"one-{number}"
        assert simulation.ended[name] - simulation.arrived[name] <= 2 * share
        # it waits for the first place that becomes free, and not for the swarm
        assert simulation.admitted[name] - simulation.arrived[name] <= simulation.alone()


def test_a_request_does_not_wait_behind_another_key_s_long_prompt():
    simulation = Simulation()
    simulation.ask("long", "a", prompt=500 * CHUNK)
    for _ in range(10):
        simulation.step()
    simulation.ask("short", "b", prompt=5, tokens=1)
    simulation.run()
    assert simulation.ended["short"] - simulation.arrived["short"] <= 4


@pytest.mark.parametrize("seed", range(3))
def test_keys_that_always_wait_are_served_alike(seed):
    simulation = Simulation(seed)
    sizes = {"small": (20, 10), "large": (400, 200), "long prompts": (20, 900)}
    for key, (tokens, prompt) in sizes.items():
        for number in range(60_000 // (tokens + prompt)):
            simulation.ask(f"{key}-{number}", key, tokens=tokens, prompt=prompt)
    for _ in range(4000):
        simulation.step()
    assert {sequence.request.key for sequence in simulation.scheduler.waiting} == sizes.keys()
    # one key may be ahead by what its places hold
    assert max(simulation.served.values()) - min(simulation.served.values()) <= (PLACES + 1) * 920


def test_a_pause_saves_nothing_up():
    """A key that was away gets its turn, not all turns until it has caught up."""
    simulation = Simulation()
    for number in range(300):
        simulation.ask(f"busy-{number}", "busy")
    for _ in range(1500):
        simulation.step()
    for number in range(100):
        simulation.ask(f"back-{number}", "back")
    before = simulation.served.copy()
    for _ in range(1500):
        simulation.step()
    gained = {key: simulation.served[key] - before[key] for key in ("busy", "back")}
    assert gained["busy"] >= 0.8 * gained["back"]


def test_one_key_is_first_come_first_served():
    simulation = Simulation(places=2)
    names = [f"r{number}" for number in range(30)]
    for number, name in enumerate(names):
        simulation.ask(name, "only", tokens=1 + 37 * number % 50, prompt=1 + 91 * number % 300)
    simulation.run()
    assert sorted(names, key=lambda name: (simulation.admitted[name], names.index(name))) == names


def test_priority_orders_one_key_s_requests_and_no_other_s():
    simulation = Simulation(places=1)
    simulation.ask("running", "a")
    simulation.step()
    simulation.ask("late", "a", priority=5)
    simulation.ask("usual", "a")
    simulation.ask("urgent", "a", priority=-1)
    simulation.ask("other", "b", priority=100)
    simulation.run()
    order = sorted(simulation.admitted, key=simulation.admitted.__getitem__)
    assert order.index("urgent") < order.index("usual") < order.index("late")
    assert order[1] == "other"


def test_none_overtakes_the_next_one_that_does_not_fit_yet():
    simulation = Simulation(pages=4)
    simulation.ask("running", "a", pages=3)
    simulation.step()
    simulation.ask("large", "b", pages=4)
    simulation.ask("small", "c", pages=1)
    simulation.run()
    assert simulation.admitted["large"] < simulation.admitted["small"]


@pytest.mark.parametrize("seed", range(3))
def test_the_books_balance_after_any_arrivals_and_ends(seed):
    draw, simulation = random.Random(seed), Simulation(seed, pages=8)
    for number in range(600):
        if draw.random() < 0.3:
            simulation.ask(
                f"r{number}", f"key-{draw.randint(0, 3)}", tokens=draw.randint(1, 30), pages=draw.randint(1, 4)
            )
        if draw.random() < 0.1 and (alive := [*simulation.scheduler.waiting, *simulation.scheduler.running]):
            gone = draw.choice(alive)
            simulation.scheduler.finish(gone)
            simulation.ended[gone.request_id] = simulation.now
        simulation.step()
    simulation.run()
    lines = simulation.scheduler.waiting
    assert not lines and not list(lines)
    # nothing is remembered of keys that have gone
    assert not lines._served and not lines._present and not lines._lines
