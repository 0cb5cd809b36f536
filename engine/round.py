"""One speculative round for a batch of sequences: verify, choose, accept, repair, draft, report."""

from __future__ import annotations

from time import perf_counter

from pilotfish.engine.runner import Batch, Runner, SequenceReport


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
