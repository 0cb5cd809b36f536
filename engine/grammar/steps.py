"""The way from a round's tokens to the masks of the next round's rows, on threads beside the loop; no torch.

A step takes what was committed, finds what must come, and the masks after the drafts that will then be verified. A
round is launched with the sequences whose steps know what must come, and waits for their masks while the trunk runs. A
sequence whose last steps were slow is left out of rounds until its step has ended, on threads that give way. A step
that takes more than LIMIT_SECONDS of CPU time, or ROUND_SECONDS once a round waits for it, ends its request with an
error. The others go on.
"""

from __future__ import annotations

import threading
import time
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
ROUND_SECONDS = 0.15
"""CPU time that it may take while a round waits for its masks; no step of the trial took as long."""
HELD_SECONDS = 0.25
"""CPU time that the part of a step may take during which the library keeps the interpreter's lock."""
LOOK_SECONDS = 0.02
NUM_QUICK, NUM_SLOW, SLOW_NICE = 4, 2, 10
TOO_SLOW = "the grammar takes too long to say what may come next"


@dataclass(eq=False)
class Step:
    """One constraint's: `forced` is there once `knows_forced` is set, `rows` int32 [drafts + 1, words] once `ended` is.

    `clock` is that of the thread it runs on, which stood at `began`; None until it runs.
    """

    constraint: Guarded
    tokens: list[int]
    drafts: list[int]
    num_words: int
    forced: list[int] = field(default_factory=list)
    rows: np.ndarray | None = None
    clock: int | None = None
    began: float = 0.0
    took: float = 0.0
    is_settled: bool = False
    knows_forced: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        constraint = self.constraint
        began = self.began = time.thread_time()
        self.clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            constraint.advance(self.tokens)
            self.forced = constraint.forced() if constraint.error is None else []
            if time.thread_time() - began > HELD_SECONDS:
                constraint.overrun = TOO_SLOW
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

    def wait(self) -> bool:
        """Waits for the step's end; False if it has used up a round's time first: then it is given up."""
        while not self.ended.wait(LOOK_SECONDS):
            if self.is_late(ROUND_SECONDS):
                return False
        return True

    def is_late(self, limit: float) -> bool:
        """Whether it has used more than its time; then its constraint ends, though its thread may go on for a while."""
        if self.ended.is_set() or self.clock is None:
            return False
        if time.clock_gettime(self.clock) - self.began > limit:
            self.constraint.overrun = TOO_SLOW
            return True
        return False


class Masks:
    """Masks of one round: waits for the steps where it must."""

    def __init__(self, steps: list[Step | None], depth: int, num_words: int):
        self._steps, self._depth, self._num_words = steps, depth, num_words

    def result(self) -> np.ndarray:
        """What grammars allow each row, int32 words [B * W, words]; rows of sequences without one allow everything."""
        width = self._depth + 1
        words = np.full((len(self._steps) * width, self._num_words), -1, dtype=np.int32)
        for b, step in enumerate(self._steps):
            if step is not None and step.wait() and step.rows is not None:
                rows = step.rows[:width]
                words[b * width : b * width + len(rows)] = rows
        return words


class Steps:
    """The newest step of every slot that has a grammar."""

    def __init__(self, vocab_size: int):
        self.num_words = -(-vocab_size // 32)
        self._newest: dict[int, Step] = {}
        self._slow: dict[int, int] = {}
        self._quick_threads = Threads(NUM_QUICK, "grammar-masks")
        self._slow_threads = Threads(NUM_SLOW, "grammar-slow", SLOW_NICE)

    def begin(self, slot: int, constraint: Guarded, tokens: list[int], drafts: list[int]) -> None:
        """Starts on the rows after committed tokens and these drafts, or what is forced in their place."""
        self._judge(slot)
        step = self._newest[slot] = Step(constraint, tokens, drafts, self.num_words)
        threads = self._slow_threads if self._slow.get(slot) else self._quick_threads
        threads.submit(step.run)

    def release(self, slot: int) -> None:
        """The slot's grammar is gone, or another one comes."""
        self._newest.pop(slot, None)
        self._slow.pop(slot, None)

    def ready(self, slot: int) -> bool:
        """Whether a round may take the slot: it has no grammar, or its step is near its end."""
        step = self._newest.get(slot)
        if step is None or step.is_settled or step.ended.is_set():
            return True
        # being left out costs a sequence one round, waiting for it costs the others
        is_near = not self._slow.get(slot) and step.knows_forced.wait(LOOK_SECONDS)
        return is_near or step.is_late(LIMIT_SECONDS)

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
