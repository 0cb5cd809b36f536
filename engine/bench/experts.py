"""How many experts a round's rows really take, layer by layer, beside what uniform routing would give.

Counted in rounds of their own, which nobody times: their routers' outcomes are looked at on the host. All sequences are
live: those whose prompt was read first must not have ended when the last one's has been read.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from pilotfish.engine.bench.measure import live_batch
from pilotfish.engine.loop import EngineLoop

ROUNDS = 16
"""At least so many are counted."""


class ExpertCounts:
    """An observer of an executor: distinct experts of each trunk layer, for every round of `batch` sequences."""

    def __init__(self, batch: int):
        self.batch = batch
        self.rounds: dict[str, list[int]] = defaultdict(list)

    def observe(self, name: str, rows: torch.Tensor, slots: list[int], positions: list[int]) -> None:
        if name.endswith(".experts") and len(set(slots)) == self.batch:
            self.rounds[name].append(rows.unique().numel())

    @property
    def by_layer(self) -> list[float]:
        """Means over the rounds, first layer first; [] for a dense trunk, or where no round had all sequences."""
        return [sum(counts) / len(counts) for counts in self.rounds.values()]


def count_experts(loop: EngineLoop, prompts: list[list[int]]) -> list[float]:
    """Mean number of distinct experts of each layer while all prompts are decoded together; greedily."""
    counts = ExpertCounts(len(prompts))
    loop.executor.observers.append(counts.observe)
    try:
        with live_batch(loop, prompts, ROUNDS):
            for _ in range(ROUNDS):
                loop.step()
    finally:
        loop.executor.observers.remove(counts.observe)
    return counts.by_layer
