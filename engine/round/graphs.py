"""Work captured once and replayed: CUDA graphs on a GPU, plain calls elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import perf_counter

import torch

WARM_UPS = 2
"""Calls before a capture: the first compiles and allocates, which a capture must not."""


@dataclass(frozen=True)
class GraphCounts:
    """How many graphs there are, what capturing them took, and the device memory they hold."""

    number: int
    seconds: float
    num_bytes: int


class Graphs:
    """Captured calls by key, all in one memory pool. Captured work must only read and write memory that stays."""

    def __init__(self, device: torch.device):
        self.device = device
        self._calls: dict[Hashable, Callable[[], None]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._seconds, self._bytes = 0.0, 0

    @property
    def counts(self) -> GraphCounts:
        return GraphCounts(len(self._calls), self._seconds, self._bytes)

    def capture(self, key: Hashable, work: Callable[[], None], warm_ups: int = WARM_UPS) -> None:
        """Runs `work` to warm it up and records it."""
        began = perf_counter()
        if self.device.type == "cuda":
            self._calls[key] = self._record(work, warm_ups)
        else:
            self._calls[key] = work
        self._seconds += perf_counter() - began

    def _record(self, work: Callable[[], None], warm_ups: int) -> Callable[[], None]:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(warm_ups):
                work()
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        before, _ = torch.cuda.mem_get_info(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        torch.cuda.synchronize(self.device)
        self._bytes += max(0, before - torch.cuda.mem_get_info(self.device)[0])
        return graph.replay

    def __contains__(self, key: Hashable) -> bool:
        return key in self._calls

    def replay(self, key: Hashable) -> None:
        """Launches what was recorded under `key`, on the current stream."""
        self._calls[key]()
