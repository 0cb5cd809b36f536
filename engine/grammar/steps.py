"""The way from a round's tokens to the masks of the next round's rows, on threads beside the loop; no torch.

A step takes what was committed, finds what must come, and the masks after the drafts that will then be verified. A
round is launched with the sequences whose steps know what must come, and their masks are computed while the trunk runs.
A step may hold a round up for a small share of its time, once; then the round goes without its sequence, which stays
where it is and joins the first round after the step has ended. Such a step gives way to the others, and so do the next
ones of a sequence whose steps are slow. A step that takes more than LIMIT_SECONDS of CPU time ends its request with an
error.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pilotfish.engine.grammar.threads import Threads
from pilotfish.engine.guard import Guarded

SLOW_SECONDS = 0.02
"""CPU time of a step after which a round no longer waits for its sequence."""
SLOW_STEPS = 32
"""Quick steps until it is trusted again."""
LIMIT_SECONDS = 0.5
"""CPU time that one step may take."""
LOOK_SECONDS = 0.001
"""How often it is looked whether the trunk has ended."""
NUM_QUICK, NUM_SLOW, SLOW_NICE = 4, 2, 10
TOO_SLOW = "the grammar takes too long to say what may come next"


@dataclass(eq=False)
class Step:
    """One constraint's: `forced` is there once `knows_forced` is set, `rows` int32 [drafts + 1, words] once `ended` is.

    `clock` and `thread` are those of the thread it runs on, whose clock stood at `began`; None until it runs.
    `is_settled`: a round has been launched with it. `is_missed`: one has gone without it, so that none waits again;
    `is_apart`: so its thread gives way.
    """

    constraint: Guarded
    tokens: list[int]
    drafts: list[int]
    num_words: int
    threads: Threads
    forced: list[int] = field(default_factory=list)
    rows: np.ndarray | None = None
    clock: int | None = None
    thread: int = 0
    began: float = 0.0
    took: float = 0.0
    is_settled: bool = False
    is_missed: bool = False
    is_apart: bool = False
    knows_forced: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        constraint = self.constraint
        began = self.began = time.thread_time()
        self.thread = threading.get_native_id()
        self.clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            constraint.advance(self.tokens)
            # a lone token is not told apart, and the first of several comes after a prompt, with no drafts
            most = max(2, len(self.drafts) + 1)
            self.forced = constraint.forced(most, self.num_words) if constraint.error is None else []
            self.knows_forced.set()
            drafts = self.forced[: len(self.drafts)] + self.drafts[len(self.forced) :]
            rows = np.full((len(drafts) + 1, self.num_words), -1, dtype=np.int32)
            if constraint.error is None:
                constraint.mask_rows(drafts, rows)
            self.rows = rows
        finally:
            self.took = time.thread_time() - began
            self.knows_forced.set()
            self.ended.set()

    def miss(self) -> None:
        """A round goes without it. Others' steps do not wait behind it, and its thread gives way."""
        self.is_missed, self.is_settled = True, False
        if self.clock is not None and not self.is_apart:
            self.is_apart = True
            self.threads.set_apart(self.thread)

    def is_late(self) -> bool:
        """Whether it has used more than its time; then its constraint ends, though its thread may go on for a while."""
        if self.ended.is_set() or self.clock is None:
            return False
        if time.clock_gettime(self.clock) - self.began > LIMIT_SECONDS:
            self.constraint.overrun = TOO_SLOW
            return True
        return False


class Masks:
    """Masks of one round: waits for the steps where it must."""

    def __init__(self, steps: list[Step | None], depth: int, num_words: int):
        self._steps, self._depth, self._num_words = steps, depth, num_words

    def result(
        self, is_verified: Callable[[], bool] = lambda: True, patience: float = math.inf
    ) -> tuple[np.ndarray, list[int]]:
        """What grammars allow each row, int32 words [B * W, words], and the places of the sequences whose steps have
        not ended: they sit the round out. Rows of sequences without a grammar allow everything.

        Waits until the trunk has ended (`is_verified`), and for `patience` seconds after that.
        """
        self._wait(is_verified, patience)
        width, missed = self._depth + 1, []
        words = np.full((len(self._steps) * width, self._num_words), -1, dtype=np.int32)
        for b, step in enumerate(self._steps):
            if step is None:
                continue
            if not step.ended.is_set():
                step.miss()
                missed.append(b)
            elif step.rows is not None:
                rows = step.rows[:width]
                words[b * width : b * width + len(rows)] = rows
        return words, missed

    def _wait(self, is_verified: Callable[[], bool], patience: float) -> None:
        until = math.inf
        for step in self._steps:
            while step is not None and not step.ended.is_set():
                if until == math.inf and is_verified():
                    until = time.monotonic() + patience
                if (left := until - time.monotonic()) <= 0:
                    return
                step.ended.wait(min(left, LOOK_SECONDS))


class Steps:
    """The newest step of every slot that has a grammar."""

    def __init__(self, vocab_size: int):
        self.num_words = -(-vocab_size // 32)
        self._newest: dict[int, Step] = {}
        self._slow: dict[int, int] = {}
        self._quick_threads = Threads(NUM_QUICK, "grammar-masks", nice_apart=SLOW_NICE)
        self._slow_threads = Threads(NUM_SLOW, "grammar-slow", SLOW_NICE, SLOW_NICE)

    def begin(self, slot: int, constraint: Guarded, tokens: list[int], drafts: list[int]) -> None:
        """Starts on the rows after committed tokens and these drafts, or what is forced in their place."""
        self._judge(slot)
        threads = self._slow_threads if self._slow.get(slot) else self._quick_threads
        step = self._newest[slot] = Step(constraint, tokens, drafts, self.num_words, threads)
        threads.submit(step.run)

    def release(self, slot: int) -> None:
        """The slot's grammar is gone, or another one comes."""
        step = self._newest.pop(slot, None)
        self._slow.pop(slot, None)
        if step is not None and not step.ended.is_set():
            step.miss()

    def ready(self, slot: int, until: float, whole: bool = False) -> bool:
        """Whether a round may take the slot: it has no grammar, or its step knows what must come; or, with `whole`, the
        masks too. Waits for that until then by time.monotonic(), once for a step, and not at all for one of a sequence
        whose steps are slow. Also if the step is given up: then its constraint has an error."""
        step = self._newest.get(slot)
        if step is None or step.is_settled or step.ended.is_set():
            return True
        if not step.is_missed and not self._slow.get(slot):
            event = step.ended if whole else step.knows_forced
            if event.wait(max(0.0, until - time.monotonic())):
                return True
        step.miss()
        return step.is_late()

    def settle(self, slot: int) -> list[int]:
        """What a ready step forces, once: the drafts that it counted on."""
        step = self._newest.get(slot)
        if step is None or step.is_settled:
            return []
        step.is_settled = True
        return step.forced

    def forced(self, slot: int) -> list[int]:
        """What must come next by the grammar, as far as the newest step knows."""
        step = self._newest.get(slot)
        return step.forced if step is not None and step.knows_forced.is_set() else []

    def waits(self, slot: int) -> bool:
        """Whether the slot's step has yet to be taken into a round."""
        step = self._newest.get(slot)
        return step is not None and not step.is_settled

    def wait(self, slot: int, seconds: float) -> None:
        """Waits until the slot's step has ended, or so long."""
        if (step := self._newest.get(slot)) is not None:
            step.ended.wait(seconds)

    def masks(self, slots: list[int], depth: int) -> Masks | None:
        """Masks of a round over these slots; None where no grammar is among them."""
        steps = [self._newest.get(slot) for slot in slots]
        return Masks(steps, depth, self.num_words) if any(step is not None for step in steps) else None

    def _judge(self, slot: int) -> None:
        """Slow is who was slow within the last SLOW_STEPS steps."""
        step = self._newest.get(slot)
        if step is not None and step.took > SLOW_SECONDS:
            self._slow[slot] = SLOW_STEPS
        elif self._slow.get(slot):
            self._slow[slot] -= 1
