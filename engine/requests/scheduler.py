"""Which sequences run, and what the next step is. Decides; never touches a tensor.

Admission reserves a sequence's worst case (prompt + max_tokens + k + 1), so nothing is ever preempted. Pages are taken
as they are needed: until then the prefix cache may have them, and gives way. Prompt chunks and rounds alternate, so
that a long prompt does not starve the running sequences; a chunk may pause for a round, and a short one have none after
it. The cut of a prompt depends on its length and the grid alone (cache/grid.py). Places and turns to read go to the API
key that was served least (waiting.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass

from pilotfish.engine.cache.grid import Grid
from pilotfish.engine.cache.pool import Pool
from pilotfish.engine.cache.prefix import PrefixCache, PrefixSizes
from pilotfish.engine.options import MAX_DEPTH
from pilotfish.engine.requests.sequence import Sequence
from pilotfish.engine.requests.waiting import FairLines

LOOK_AHEAD = 3 * (MAX_DEPTH + 1)
"""Tokens past those that the host knows of which a launch may touch: a round that has not been read commits k + 1, so
does this one, and its drafts stand k + 1 further in the head's cache."""


class QueueFull(Exception):
    """The waiting queue is at its bound; the client may try again later."""


@dataclass(frozen=True)
class PrefillStep:
    """Run prompt[start:end] of one sequence; nothing is left of one that was found whole. With a `middle` these are two
    chunks, to be read together."""

    sequence: Sequence
    start: int
    end: int
    middle: int | None = None

    @property
    def ends(self) -> list[int]:
        """Where its chunks end."""
        return [self.end] if self.middle is None else [self.middle, self.end]


@dataclass(frozen=True)
class RoundStep:
    """Run one round over these sequences, all past their prompt."""

    sequences: list[Sequence]


class Scheduler:
    """`waiting` in lines by key; `running` in order of admission, at most `max_num_seqs`; `retired` have ended, but
    a launched round still reads what they hold. `pairs`: two chunks of one length that follow each other are one step
    while no sequence decodes, which changes no cut and no bit."""

    def __init__(
        self,
        pages: Pool,
        slots: Pool,
        max_num_seqs: int,
        max_waiting: int,
        grid: Grid,
        prefix: PrefixCache | None = None,
        pairs: bool = False,
    ):
        if not 1 <= max_num_seqs <= slots.capacity:
            raise ValueError(f"max_num_seqs: want 1..{slots.capacity} (state slots), got {max_num_seqs}")
        self.pages, self.slots = pages, slots
        self.max_num_seqs, self.max_waiting, self.grid, self.pairs = max_num_seqs, max_waiting, grid, pairs
        self.prefix = prefix or PrefixCache(grid, pages, PrefixSizes())
        self.waiting = FairLines()
        self.running: list[Sequence] = []
        self.retired: list[Sequence] = []
        self._last_was_prefill = False
        self._paused: PrefillStep | None = None

    def check_room(self, num_coming: int) -> None:
        """Raises QueueFull when max_waiting already wait beyond those that could run at once.

        num_coming: those that will be added later for sure (their grammars are being read) wait too.
        """
        free_places = max(0, self.max_num_seqs - len(self.running))
        if len(self.waiting) + num_coming >= self.max_waiting + free_places:
            raise QueueFull(f"{len(self.waiting) + num_coming} requests wait, at most {self.max_waiting} may")

    def add(self, sequence: Sequence, num_coming: int = 0) -> None:
        """Queues a sequence. Raises QueueFull, see check_room."""
        self.check_room(num_coming)
        self.waiting.add(sequence)

    def admit(self) -> list[Sequence]:
        """Moves waiting sequences to running, in turn, while their worst case fits: none overtakes the next one."""
        admitted = []
        while self.waiting and len(self.running) < self.max_num_seqs and self.slots.num_free:
            sequence = self.waiting.next(self._unread())
            node = self.prefix.find(sequence)
            shared = self.prefix.pages_of(node)
            num_new = sequence.num_pages - len(shared) + sum(map(self.pages.is_idle, shared))
            if num_new > self.pages.capacity - self.num_reserved:
                break
            self.waiting.take(sequence)
            (sequence.slot,) = self.slots.take(sequence, 1)
            sequence.pages = self.pages.take(sequence, 0, shared)
            self.prefix.enter(sequence, node)
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def _unread(self) -> Counter[str]:
        """Prompt tokens of each key that were admitted and are yet to be read."""
        unread = Counter[str]()
        for sequence in self.running:
            unread[sequence.request.key] += len(sequence.prompt) - sequence.num_prefilled
        return unread

    @property
    def num_reserved(self) -> int:
        """Pages that running and retired sequences have, and those that they may take yet."""
        promised = sum(sequence.num_pages - len(sequence.pages) for sequence in self.running)
        return self.pages.num_used + promised

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Takes the pages that a launch may write to, of those that were reserved: `num_tokens` are known."""
        wanted = min(-(-(num_tokens + LOOK_AHEAD) // self.grid.page), sequence.num_pages)
        if (missing := wanted - len(sequence.pages)) > 0:
            self.prefix.make_room(missing)
            sequence.pages = self.pages.add(sequence, missing)

    def next_step(self, held: Container[Sequence] = ()) -> PrefillStep | RoundStep | None:
        """A chunk of an unfinished prompt, of the key that was served least the oldest, and a round of all others, in
        turn, unless told to `go_on`. A chunk that has paused goes on before another one. Prompts of sequences that are
        `held` wait."""
        prompts = [sequence for sequence in self.running if not sequence.is_prefilled and sequence not in held]
        decoding = [sequence for sequence in self.running if sequence.is_prefilled]
        if prompts and not (decoding and self._last_was_prefill):
            self._last_was_prefill = True
            if (paused := self._paused) is not None:
                self._paused = None
                return paused
            sequence = self.waiting.least_served(prompts)
            self.prefix.advance(sequence)
            # a step that may have to pause is no longer than it must be
            step = self._chunk(sequence, pairs=self.pairs and not decoding)
            self.waiting.serve(sequence, step.end - step.start)
            self._grow(sequence, step.end)
            return step
        self._last_was_prefill = False
        for sequence in decoding:
            self._grow(sequence, len(sequence.prompt) + sequence.num_written)
        return RoundStep(decoding) if decoding else None

    def _chunk(self, sequence: Sequence, pairs: bool) -> PrefillStep:
        """The next chunk of a prompt, or two."""
        start, length = sequence.num_prefilled, len(sequence.prompt)
        # log-probabilities of a prompt's tokens are made of one chunk's rows
        pairs = pairs and sequence.request.sampling.prompt_logprobs is None
        ends = self._ends(start, length, pairs) if start < length else [length]
        return PrefillStep(sequence, start, ends[-1], middle=ends[0] if len(ends) > 1 else None)

    def _ends(self, start: int, length: int, pairs: bool) -> list[int]:
        end = self.grid.next_cut(start, length)
        if pairs and end < length and (further := self.grid.next_cut(end, length)) - end == end - start:
            return [end, further]
        return [end]

    def num_steps(self, length: int) -> int:
        """Steps that a prompt of so many tokens is read in alone."""
        start, count = 0, 0
        while start < length:
            start, count = self._ends(start, length, self.pairs)[-1], count + 1
        return count

    def pause(self, step: PrefillStep) -> None:
        """The chunk is read up to somewhere: the next step of prompts is this one again."""
        self._paused = step

    def go_on(self) -> None:
        """No round has to follow the step of a prompt that runs."""
        self._last_was_prefill = False

    @property
    def has_others(self) -> bool:
        """Whether a sequence is past its prompt, for which a chunk would pause."""
        return any(sequence.is_prefilled for sequence in self.running)

    def wrote(self, sequence: Sequence, num_tokens: int) -> None:
        """Tokens were committed to a running sequence: they count for its key."""
        sequence.num_written += num_tokens
        self.waiting.serve(sequence, num_tokens)

    def finish(self, sequence: Sequence, in_flight: bool = False) -> None:
        """Takes a sequence out and frees what it holds; not yet, if a launched round may still read it (`in_flight`):
        then `release` does."""
        if sequence not in self.running:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        if self._paused is not None and self._paused.sequence is sequence:
            self._paused = None
        self.waiting.leave(sequence)
        self.retired.append(sequence)
        if not in_flight:
            self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Frees what a retired sequence holds."""
        self.retired.remove(sequence)
        self.prefix.leave(sequence)
        self.slots.give_back(sequence)
        self.pages.give_back(sequence)

    def check(self) -> None:
        """Every invariant of the pools and the prefix cache, and that exactly the running and retired sequences hold
        something."""
        self.pages.check()
        self.slots.check()
        self.prefix.check()
        holders = self.running + self.retired
        assert self.slots.num_used == len(holders)
        assert self.pages.num_used == len({page for sequence in holders for page in sequence.pages})
        assert all(len(sequence.pages) <= sequence.num_pages for sequence in holders)
        assert self.num_reserved <= self.pages.capacity
