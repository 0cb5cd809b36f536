"""The prefix cache under a scheduler, beside a device that remembers which tokens each page and state was read from.

`Twin` shares nothing with the tree: a page holds all tokens up to its end, a slot and a snapshot all that were read, so
whatever is found in the wrong place, stale, or one token off is another tuple.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pilotfish.engine.cache.grid import Grid
from pilotfish.engine.cache.pool import Pool
from pilotfish.engine.cache.prefix import PrefixCache, PrefixSizes
from pilotfish.engine.link.messages import SamplingParams, Submit
from pilotfish.engine.requests import scheduler as scheduling
from pilotfish.engine.requests.scheduler import PrefillStep, Scheduler
from pilotfish.engine.requests.sequence import Sequence

PAGE = 2
GRID = Grid(4, PAGE)


def pages_for(length):
    return -(-length // PAGE)


@pytest.fixture(autouse=True)
def little_ahead(monkeypatch):
    """Pages of two tokens: what a round may touch is one more."""
    monkeypatch.setattr(scheduling, "LOOK_AHEAD", 1)


class Twin:
    """A scheduler with a cache, and the memory of what it says. Whoever reads one of `broken` leaves NaN."""

    def __init__(self, num_pages=64, num_snapshots=16, places=4, grid=GRID, page_bytes=1):
        pages, slots = Pool("pages", num_pages + 1), Pool("slots", places + 1)
        self.broken, self.has_nan = set(), {}
        sizes = PrefixSizes(num_snapshots, 4 * page_bytes, page_bytes)
        self.prefix = PrefixCache(grid, pages, sizes, lambda number: not self.has_nan[number])
        self.scheduler = Scheduler(pages, slots, places, 1000, grid, self.prefix)
        self.pages, self.slots, self.snapshots = {}, {}, {}
        self.finished, self.published, self.read, self.number = [], set(), {}, 0

    def submit(self, prompt, salt="", spare=1, system_tokens=None, uses_cache=True, key=""):
        self.number += 1
        request = Submit(
            request_id=str(self.number),
            prompt_token_ids=list(prompt),
            sampling=SamplingParams(),
            cache_salt=salt,
            key=key,
            system_tokens=system_tokens,
        )
        sequence = Sequence(request, len(prompt) + spare, 0, pages_for(len(prompt) + spare))
        sequence.uses_cache = uses_cache
        self.scheduler.add(sequence)
        return sequence

    def admit(self):
        free = self.scheduler.pages.capacity - sum(s.num_pages for s in self.scheduler.running)
        free -= sum(len(s.pages) for s in self.scheduler.retired)
        for sequence in self.scheduler.admit():
            free -= sequence.num_pages
            self.slots[sequence.slot] = ()
            self.read[sequence] = 0
        self.check()
        if self.scheduler.waiting and len(self.scheduler.running) < self.scheduler.max_num_seqs:
            # what is kept delays nobody: without any of it, there would be no room either
            following = self.scheduler.waiting.next(Counter())
            assert following.num_pages > free or not self.scheduler.slots.num_free

    @property
    def holders(self):
        return self.scheduler.running + self.scheduler.retired

    def step(self):
        """A chunk of a prompt, read by looking at everything before it."""
        step = self.scheduler.next_step()
        if not isinstance(step, PrefillStep):
            for sequence in step.sequences if step is not None else ():
                self.write(sequence)
            self.check()
            return False
        sequence, salt = step.sequence, step.sequence.request.cache_salt
        if (number := sequence.restore) is not None:
            assert not self.has_nan[number]
            self.slots[sequence.slot] = self.snapshots[number]
        told = (salt, *sequence.prompt)
        assert self.slots[sequence.slot] == (told[: step.start + 1] if step.start else ()), "another's state"
        for index, page in enumerate(sequence.pages):
            if (index + 1) * PAGE <= step.start:
                assert self.pages[page] == told[: (index + 1) * PAGE + 1], "another's page"
            elif index * PAGE < len(told) - 1:
                assert not any(page in other.pages for other in self.holders if other is not sequence)
                if index * PAGE < step.end:
                    self.pages[page] = told[: min((index + 1) * PAGE, step.end) + 1]
        self.slots[sequence.slot] = told[: step.end + 1]
        self.read[sequence] += step.end - step.start
        sequence.num_prefilled, sequence.restore = step.end, None
        number = self.prefix.publish(sequence)
        if number is not None:
            self.snapshots[number] = self.slots[sequence.slot]
            self.has_nan[number] = self.snapshots[number] in self.broken
            self.published.add(self.slots[sequence.slot])
        if sequence.is_prefilled:
            assert self.read[sequence] + sequence.num_cached == len(sequence.prompt)
        self.check()
        return True

    def write(self, sequence):
        """A round's token goes behind what is there: nobody else may have that page."""
        position = len(sequence.prompt) + sequence.num_written
        if position == sequence.limit:
            return
        page = sequence.pages[position // PAGE]
        assert not any(page in other.pages for other in self.holders if other is not sequence)
        assert not any(page in self.prefix.tree.pages_of(node) for node in self.nodes())
        self.pages[page] = "a round's"
        self.scheduler.wrote(sequence, 1)

    def nodes(self):
        todo, found = self.prefix.tree.roots, []
        while todo:
            found.append(todo.pop())
            todo += found[-1].children.values()
        return found

    def check(self):
        self.scheduler.check()
        for node in self.nodes():
            told = (node.salt, *memoryview(b"".join(step.chunk for step in node.path)).cast("i"))
            for index, page in enumerate(self.prefix.tree.pages_of(node)):
                assert self.pages[page] == told[: (index + 1) * PAGE + 1]
            if node.snapshot is not None and node.snapshot in self.snapshots:
                assert self.snapshots[node.snapshot] == told

    def read_whole(self, prompt, **fields):
        """One prompt alone, to its end; the tokens of it that were found."""
        sequence = self.submit(prompt, **fields)
        self.admit()
        while not sequence.is_prefilled:
            assert self.step()
        self.step()
        self.scheduler.finish(sequence)
        self.check()
        return sequence.num_cached

    def read_all(self):
        """All that wait, as far as there are places."""
        self.admit()
        while not all(sequence.is_prefilled for sequence in self.scheduler.running):
            self.step()

    def kept(self, prompt, salt=""):
        """Boundaries on a prompt's way that have a snapshot."""
        chunks = self.prefix._chunks(list(prompt))
        return [n.end for n in self.prefix.tree.walk(self.prefix.tree.root(salt), chunks) if n.snapshot is not None]

    def reasons(self):
        stats = self.prefix.take_stats()
        return [miss.reason for miss in stats.misses] if stats is not None else []


def tokens(length, seed=0):
    return random.Random(seed).choices(range(1000), k=length)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("num_pages", "num_snapshots", "grid"),
    [
        (64, 16, GRID),
        (20, 3, GRID),
        (20, 1, Grid(2, PAGE)),
        (14, 30, Grid(1, PAGE)),
        (40, 0, GRID),
        (40, 5, Grid(3, 2)),
        (60, 7, Grid(2, 2)),
    ],
    ids=str,
)
def test_a_random_walk_finds_nothing_wrong_and_delays_nobody(num_pages, num_snapshots, grid, seed):
    generator = random.Random(seed)
    twin = Twin(num_pages, num_snapshots, grid=grid)
    prompts = [[generator.randint(0, 1) for _ in range(48)] for _ in range(2)]
    for _ in range(700):
        action = generator.random()
        running = twin.scheduler.running
        if action < 0.25 and len(twin.scheduler.waiting) < 5:
            prompt = generator.choice(prompts)[: generator.randint(1, pages_for(num_pages))]
            if generator.random() < 0.3:
                prompt = [*prompt[:-1], 1 - prompt[-1]]
            twin.submit(
                prompt,
                generator.choice(("", "", "tenant")),
                generator.randint(1, 8),
                generator.choice((None, 3, 8, 100)),
                generator.random() < 0.9,
            )
        elif action < 0.35 and running:
            # aborted, or at its end; now, or once a launched round has been read
            sequence = generator.choice(running)
            in_flight = sequence.is_prefilled and generator.random() < 0.5
            twin.scheduler.finish(sequence, in_flight)
        elif action < 0.4 and twin.scheduler.retired:
            twin.scheduler.release(generator.choice(twin.scheduler.retired))
        elif action < 0.42 and twin.published:
            twin.broken.add(generator.choice(sorted(twin.published, key=str)))
        elif action < 0.43:
            twin.prefix.forget()
        elif action < 0.6:
            twin.admit()
        else:
            twin.step()
        twin.check()
        twin.prefix.take_stats()
    for sequence in list(twin.scheduler.running):
        twin.scheduler.finish(sequence)
    for sequence in list(twin.scheduler.retired):
        twin.scheduler.release(sequence)
    twin.prefix.forget()
    twin.check()
    assert twin.scheduler.pages.num_idle == 0 and not twin.nodes()


class TestWhatIsFound:
    @pytest.mark.parametrize("length", range(1, 18))
    def test_a_prompt_again_is_found_up_to_its_last_boundary(self, length):
        twin, prompt = Twin(), tokens(length)
        assert twin.read_whole(prompt) == 0
        assert twin.read_whole(prompt) == GRID.last_boundary(length)

    @pytest.mark.parametrize("differs_at", range(9))
    def test_only_what_comes_before_a_difference_is_found(self, differs_at):
        twin, prompt = Twin(), tokens(9)
        twin.read_whole(prompt)
        other = [*prompt[:differs_at], 1000, *prompt[differs_at + 1 :]]
        assert twin.read_whole(other) == GRID.last_boundary(differs_at)

    def test_a_conversation_is_found_where_it_ended(self):
        twin, prompt = Twin(128, 8), tokens(200)
        before = 0
        for length in range(10, 200, 7):
            assert twin.read_whole(prompt[:length]) == GRID.last_boundary(before)
            before = length

    def test_another_salt_s_is_not_found(self):
        twin, prompt = Twin(), tokens(12)
        twin.read_whole(prompt, salt="one")
        assert twin.read_whole(prompt, salt="other") == 0
        assert twin.read_whole(prompt, salt="one") == 12

    def test_another_is_read_between(self):
        twin, one, other = Twin(), tokens(12, 1), tokens(12, 2)
        assert [twin.read_whole(prompt) for prompt in (one, other, one, other)] == [0, 0, 12, 12]

    def test_a_prompt_that_asks_for_its_own_logprobs_takes_no_part(self):
        twin, prompt = Twin(), tokens(12)
        assert twin.read_whole(prompt, uses_cache=False) == 0
        assert twin.read_whole(prompt) == 0
        assert twin.read_whole(prompt, uses_cache=False) == 0

    def test_what_another_reads_meanwhile_is_not_read_again(self):
        twin, prompt = Twin(), tokens(13)
        first, second = twin.submit(prompt), twin.submit(prompt)
        twin.read_all()
        assert (first.num_cached, second.num_cached) == (0, 12)
        assert first.pages[:6] == second.pages[:6] and first.pages[6] != second.pages[6]

    def test_an_aborted_prompt_leaves_whole_chunks(self):
        twin, prompt = Twin(), tokens(15)
        sequence = twin.submit(prompt)
        twin.admit()
        for _ in range(3):
            twin.step()
        twin.scheduler.finish(sequence)
        twin.check()
        assert twin.read_whole(prompt) == 8

    def test_a_state_with_nan_is_not_found_nor_what_was_read_on_from_it(self):
        twin, prompt = Twin(), tokens(13)
        twin.broken.add(("", *prompt[:8]))
        twin.broken.add(("", *prompt[:12]))
        twin.read_whole(prompt)
        assert twin.read_whole(prompt) == 2
        twin.broken.clear()
        assert twin.read_whole(prompt) == 2
        assert twin.read_whole(prompt) == 12

    def test_who_goes_on_from_a_sound_state_keeps_it_when_one_before_is_not(self):
        twin, prompt = Twin(num_snapshots=3), tokens(13)
        twin.broken.add(("", *prompt[:8]))
        twin.read_whole(prompt)
        goes_on, finds_it = twin.submit(prompt), twin.submit(prompt[:9])
        twin.admit()
        assert (goes_on.num_cached, finds_it.num_cached) == (12, 2)
        for seed in range(4):
            twin.submit(tokens(9, 1 + seed))
        twin.read_all()
        assert goes_on.is_prefilled


class TestWhatIsKept:
    def test_the_last_two_and_fewer_farther_back(self):
        twin, prompt = Twin(256, 64), tokens(4 * 40 + 1)
        twin.read_whole(prompt)
        assert twin.kept(prompt) == [2, *(4 * number for number in (16, 32, 36, 38, 39, 40))]

    @pytest.mark.parametrize("newest", (1, 2, 5, 31, 100))
    def test_as_many_as_the_logarithm_of_what_was_read(self, newest):
        twin, prompt = Twin(1024, 600), tokens(4 * newest)
        twin.read_whole(prompt)
        assert len(twin.kept(prompt)) <= 3 + newest.bit_length()

    def test_the_end_of_the_system_prompt(self):
        twin, prompt = Twin(256, 64), tokens(4 * 40)
        twin.read_whole(prompt, system_tokens=23)
        assert 20 in twin.kept(prompt)
        assert twin.read_whole([*prompt[:23], *tokens(30, 1)]) == 20

    def test_a_place_where_prompts_part_from_the_second_time_on(self):
        twin, prompt = Twin(256, 64), tokens(4 * 40)
        twin.read_whole(prompt)
        forks = [[*prompt[:53], *tokens(100, seed)] for seed in (1, 2)]
        assert twin.read_whole(forks[0]) == 2
        assert twin.read_whole(forks[1]) == 52
        assert 52 in twin.kept(prompt)

    def test_that_place_stays_when_one_of_the_prompts_goes_on(self):
        twin, prompt = Twin(256, 64), tokens(4 * 60)
        twin.read_whole(prompt[: 4 * 40])
        twin.read_whole([*prompt[:53], 1000])
        twin.read_whole(prompt)
        assert 52 in twin.kept(prompt)

    def test_what_is_in_use_is_not_thinned_out(self):
        twin, prompt = Twin(256, 64), tokens(4 * 9)
        twin.read_whole(prompt[: 4 * 5 + 1])
        goes_on, waits = twin.submit(prompt), twin.submit(prompt[: 4 * 5 + 1])
        twin.admit()
        number = waits.restore
        while not goes_on.is_prefilled:
            twin.step()
        assert waits.restore == number and twin.snapshots[number] == ("", *prompt[:20])

    def test_what_is_in_use_does_not_give_way(self):
        twin, short, long = Twin(16, 16), tokens(3), tokens(8, 1)
        for prompt in (short, long):
            twin.read_whole(prompt)
        waits, other = twin.submit(short), twin.submit(tokens(25, 2))
        twin.admit()
        assert waits.restore is not None
        twin.scheduler.running.remove(waits)
        twin.scheduler.running.append(waits)
        while not other.is_prefilled:
            twin.step()
        assert twin.kept(short) == [2] and 8 not in twin.kept(long)

    def test_pages_past_the_last_snapshot_are_free_at_once(self):
        twin, prompt = Twin(), tokens(4 * 5 + 3)
        twin.read_whole(prompt)
        assert twin.scheduler.pages.num_idle == pages_for(4 * 5)
        twin.prefix.forget()
        assert twin.scheduler.pages.num_idle == 0

    def test_the_least_lately_used_gives_way_first(self):
        twin, prompts = Twin(256, 2), [tokens(3, seed) for seed in range(3)]
        for number in (0, 1, 0, 2):
            twin.read_whole(prompts[number])
        assert [twin.kept(prompt) for prompt in prompts] == [[2], [], [2]]

    def test_a_longer_way_to_read_again_is_kept_rather_than_a_short_one(self):
        twin = Twin(256, 2)
        long, short = tokens(8, 1), tokens(3, 2)
        for prompt in (long, short, tokens(3, 3)):
            twin.read_whole(prompt)
        assert twin.kept(long) == [8] and not twin.kept(short)

    def test_age_tells_in_the_end(self):
        twin, long = Twin(256, 2), tokens(8, 1)
        twin.read_whole(long)
        for seed in range(20):
            twin.read_whole(tokens(3, 2 + seed))
            assert twin.read_whole(long) == 8
        for seed in range(20):
            twin.read_whole(tokens(3, 30 + seed))
        assert twin.kept(long) == []

    def test_within_a_conversation_the_last_boundary_stays(self):
        twin, prompt = Twin(256, 4), tokens(8)
        twin.read_whole(prompt)
        assert twin.kept(prompt) == [2, 4, 8]
        for seed in range(3):
            twin.read_whole(tokens(3, 1 + seed))
        assert twin.kept(prompt) == [8]

    def test_no_place_for_a_snapshot_while_all_are_in_use(self):
        twin = Twin(256, 2, places=3)
        sequences = [twin.submit(tokens(9, seed)) for seed in range(3)]
        twin.read_all()
        assert twin.prefix.tree.num_kept == 2
        for sequence in sequences:
            twin.scheduler.finish(sequence)
            twin.check()
        assert [twin.read_whole(tokens(9, seed)) for seed in range(2)] == [8, 8]

    def test_memory_for_nothing_keeps_nothing(self):
        twin, prompt = Twin(num_snapshots=0), tokens(12)
        assert [twin.read_whole(prompt) for _ in range(2)] == [0, 0]
        assert not twin.nodes() and twin.prefix.take_stats() is None

    def test_what_is_kept_gives_way_to_an_admission(self):
        twin = Twin(16, 16)
        for seed in range(3):
            twin.read_whole(tokens(8, seed))
        assert twin.scheduler.pages.num_free < 15
        assert twin.read_whole(tokens(29, 9)) == 0
        assert twin.prefix.take_stats().num_evictions


class TestWhatIsTold:
    def test_tokens_asked_for_and_found(self):
        twin, prompt = Twin(page_bytes=10), tokens(13)
        twin.read_whole(prompt)
        twin.read_whole(prompt)
        stats = twin.prefix.take_stats()
        assert (stats.num_queried_tokens, stats.num_hit_tokens) == (26, 12)
        assert stats.num_snapshots == len(twin.kept(prompt)) == 3
        assert stats.num_bytes == 3 * 40 + 6 * 10 and stats.capacity_bytes == 16 * 40 + 64 * 10
        assert twin.prefix.take_stats() is None

    def test_requests_alike_count_each_time(self):
        """A report is left out where nothing has changed, not where it says the same again."""
        twin, prompt = Twin(), tokens(13)
        twin.read_whole(prompt)
        twin.prefix.take_stats()
        told = []
        for _ in range(3):
            twin.read_whole(prompt)
            told.append(twin.prefix.take_stats())
        assert [(stats.num_queried_tokens, stats.num_hit_tokens) for stats in told] == [(13, 12)] * 3

    @pytest.mark.parametrize(
        ("before", "now", "reasons"),
        [
            ([], tokens(1), ["short"]),
            ([], tokens(9), ["new"]),
            ([tokens(8, 1)], tokens(9), ["new"]),
            ([tokens(12)], [*tokens(7), 1000, 1000], ["differs"]),
            ([tokens(8)], tokens(30), []),
            ([tokens(8)], tokens(9), []),
        ],
    )
    def test_why_a_prompt_was_read(self, before, now, reasons):
        twin = Twin()
        for prompt in before:
            twin.read_whole(prompt)
        twin.reasons()
        twin.read_whole(now)
        assert twin.reasons() == reasons

    def test_the_first_token_that_differs_and_what_stands_there(self):
        twin, prompt = Twin(), list(range(20))
        twin.read_whole(prompt)
        twin.reasons()
        twin.read_whole([*range(9), 77, *range(10, 20)], key="team")
        (miss,) = twin.prefix.take_stats().misses
        assert (miss.reason, miss.key, miss.first_difference, miss.num_cached_tokens, miss.num_allowed_tokens) == (
            "differs", "team", 9, 8, 20,
        )  # fmt: skip
        assert miss.here == (77, *range(10, 17)) and miss.there == (9, 10, 11)

    def test_a_key_learns_nothing_of_salts_that_it_never_had(self):
        """Or a miss would tell one tenant what another one's prompts begin with."""
        twin, prompt = Twin(256, 8), tokens(8)
        twin.read_whole(prompt, salt="alice:", key="alice")
        twin.reasons()
        twin.read_whole([*prompt[:4], *tokens(4, 1)], salt="bob:", key="bob")
        twin.read_whole(prompt, salt="bob:other", key="bob")
        assert twin.reasons() == ["new", "salt"]
        twin.read_whole(prompt, salt="alice:other", key="alice")
        assert twin.reasons() == ["salt"]

    def test_salt_eviction_and_what_is_being_read(self):
        twin, prompt = Twin(256, 3), tokens(8)
        twin.read_whole(prompt, salt="one")
        twin.reasons()
        twin.read_whole(prompt, salt="other")
        assert twin.reasons() == ["salt"]
        for seed in range(5):
            twin.read_whole(tokens(8, 5 + seed))
        twin.reasons()
        twin.read_whole(prompt, salt="one")
        assert twin.reasons() == ["evicted"]
        for _ in range(2):
            twin.submit(tokens(8, 99))
        twin.admit()
        assert twin.reasons() == ["new", "unread"]

    def test_no_more_misses_than_a_report_holds(self):
        twin = Twin(places=40)
        for seed in range(40):
            twin.submit(tokens(1, seed))
        twin.admit()
        assert len(twin.reasons()) == 16
