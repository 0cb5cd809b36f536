"""One speculative round for a batch of sequences: verify, choose, accept, repair, draft, report."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from pilotfish.engine.runner import Batch, Runner, SequenceReport


class Round(Protocol):
    """A launched round. `graph`: it was replayed, not launched operator by operator."""

    @property
    def graph(self) -> bool: ...

    def collect(self) -> tuple[list[SequenceReport], dict[str, float]]:
        """Waits for it. A report for each sequence of its batch in order, and seconds by phase."""
        ...


@dataclass(frozen=True)
class FinishedRound:
    """A round that was waited for when it was launched."""

    reports: list[SequenceReport]
    seconds: dict[str, float]
    graph: bool = False

    def collect(self) -> tuple[list[SequenceReport], dict[str, float]]:
        """See Round."""
        return self.reports, self.seconds


class Rounds(Protocol):
    """Launches rounds. `asynchronous`: launching does not wait for the round, so the next one may be launched first."""

    @property
    def runner(self) -> Runner: ...

    @property
    def asynchronous(self) -> bool: ...

    @property
    def num_graphs(self) -> int: ...

    @property
    def num_missed(self) -> int:
        """Launches of rounds, or of parts of one, for which there was no graph."""
        ...

    @property
    def max_captured(self) -> int:
        """Sequences of the largest captured round."""
        ...

    @property
    def pending_bytes(self) -> int:
        """Pending rows that rounds keep themselves."""
        ...

    @property
    def buffer_bytes(self) -> int:
        """What rounds hold beside the model's and the batch's own memory, pending rows and graphs apart."""
        ...

    @property
    def graph_bytes(self) -> int: ...

    @property
    def start_seconds(self) -> dict[str, float]:
        """What getting ready took, by part; {} where there was nothing to compile or capture."""
        ...

    def compile(self) -> None:
        """Compiles what rounds of any batch launch, so that none waits for it."""
        ...

    def take_compiled(self) -> int:
        """Kernels compiled since the last call: once serving, each one has made a round wait."""
        ...

    def launch(self, batch: Batch, next_depth: int) -> Round: ...


@dataclass(frozen=True)
class EagerRounds:
    """Rounds launched operator by operator and waited for; nothing of them is compiled or captured."""

    runner: Runner
    asynchronous: bool = False
    num_graphs: int = 0
    num_missed: int = 0
    max_captured: int = 0
    pending_bytes: int = 0
    buffer_bytes: int = 0
    graph_bytes: int = 0

    @property
    def start_seconds(self) -> dict[str, float]:
        """See Rounds."""
        return {}

    def compile(self) -> None:
        """See Rounds."""

    def take_compiled(self) -> int:
        """See Rounds."""
        return 0

    def launch(self, batch: Batch, next_depth: int) -> Round:
        """See Rounds."""
        reports, clock = run_round(self.runner, batch, next_depth)
        return FinishedRound(reports, clock.seconds)


class PhaseClock:
    """Seconds of each phase of one round, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = perf_counter()

    def mark(self, phase: str) -> None:
        """Ends `phase`, which began at the previous mark."""
        now = perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now


def run_round(runner: Runner, batch: Batch, next_depth: int) -> tuple[list[SequenceReport], PhaseClock]:
    """Each sequence commits the accepted drafts and the trunk's own next token, and gets next_depth new drafts.

    Recurrent state stays where it was: the window's rows are left pending, and the next round replays as many of them
    as were committed. Keys and values of rejected rows stay behind the length, unread until overwritten.
    """
    clock = PhaseClock()
    verified = runner.verify(batch)
    clock.mark("verify")
    if verified.masks is not None:
        verified.masks.result()
        clock.mark("mask")
    chosen = runner.choose(verified)
    clock.mark("choose")
    verdict, offered = runner.accept(verified, chosen)
    clock.mark("accept")
    if runner.head_on:
        hidden = runner.repair(verified, chosen, verdict)
        clock.mark("repair")
        if next_depth:
            runner.draft(verified, hidden, next_depth, batch.tables)
        clock.mark("draft")
    reports = runner.report(batch, verified, chosen, verdict, offered)
    clock.mark("report")
    return reports, clock
