"""Grammars beside rounds: each slot's steps, and the masks of a window's rows, computed on other threads."""

from __future__ import annotations

from time import monotonic

from pilotfish.engine.grammar.steps import Masks, Steps
from pilotfish.engine.guard import Guarded
from pilotfish.engine.round.batch_state import BatchState
from pilotfish.engine.round.reports import SequenceReport


class SlotGrammars:
    """The grammar of each slot that has one."""

    def __init__(self, state: BatchState):
        self.state, self.steps = state, Steps(state.vocab_size)
        self.constraints: dict[int, Guarded] = {}

    def admit(self, slot: int, constraint: Guarded | None) -> None:
        """A slot's new request has this grammar, or none."""
        self.release(slot)
        if constraint is not None:
            self.constraints[slot] = constraint
            self.steps.begin(slot, constraint, [], [])

    def release(self, slot: int) -> None:
        """The slot's grammar is needed no more, or was another sequence's."""
        self.constraints.pop(slot, None)
        self.steps.release(slot)

    def settle(self, slots: list[int], patience: float) -> list[int]:
        """Those that a round can take now, or within so many seconds: what their grammars force is drafted in place of
        what the head drafted."""
        until = monotonic() + patience
        ready = [slot for slot in slots if self.steps.ready(slot, until)]
        for slot in ready:
            self.state.force_drafts(slot, self.steps.settle(slot))
        return ready

    def forced(self, slots: list[int]) -> list[list[int]]:
        """The tokens that each of these settled slots must write next by its grammar."""
        if not self.constraints:
            return [[] for _ in slots]
        return [self.steps.forced(slot) if slot in self.constraints else [] for slot in slots]

    def start_masks(self, slots: list[int], depth: int) -> Masks | None:
        """What grammars allow each row of a window over settled slots, computed while the trunk runs. None without a
        grammar."""
        return self.steps.masks(slots, depth)

    def unready(self, slots: list[int], patience: float) -> set[int]:
        """Those whose masks of the token after the prompt are not there, now or within so many seconds."""
        until = monotonic() + patience
        return {slot for slot in slots if not self.steps.ready(slot, until, whole=True)}

    def advance(self, reports: list[SequenceReport]) -> None:
        """Starts each grammar on what was committed, and on the masks of the next round."""
        going = [report for report in reports if not report.done and report.slot in self.constraints]
        if not going:
            return
        # all slots' in one copy: to pick some takes another one, of their numbers
        drafts = self.state.drafts.tolist()
        for report in going:
            constraint = self.constraints[report.slot]
            if constraint.error is None:
                self.steps.begin(report.slot, constraint, report.token_ids, drafts[report.slot])
