"""Launches rounds on the device and reads them one behind: no wait between two launches.

A batch is placed in the smallest captured shape that holds it, filled up with the null slot. A batch with a grammar
runs two graphs: masks are computed on the host while the first one, the trunk, runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

import torch
from tqdm import tqdm

from pilotfish.engine.device_round.body import RoundBody
from pilotfish.engine.device_round.buffers import num_bytes, report_size, split_report
from pilotfish.engine.device_round.graphs import Graphs
from pilotfish.engine.device_round.mailbox import Letter, Mailbox
from pilotfish.engine.device_round.runner import DeviceRunner
from pilotfish.engine.device_round.shapes import Shape, Shapes
from pilotfish.engine.runner import Batch, Runner, SequenceReport, token_logprobs
from pilotfish.kernels.cuda.warm import Compilations, compile_all

WHOLE, PLAIN, VERIFY, FINISH = "round", "plain", "verify", "finish"
"""What is captured for a shape: all of it, for any batch; all but what min_p, top_k and top_p need, for batches without
them; the part before and the part after a grammar's masks."""


class DeviceRounds:
    """See Rounds. `num_missed` counts rounds whose shape had not been captured: launched operator by operator."""

    @property
    def asynchronous(self) -> bool:
        """See Rounds. What observers see must belong to what has been read."""
        return not self.runner.observers

    def __init__(self, runner: DeviceRunner, shapes: Shapes):
        self.runner, self.body, self.shapes = runner, runner.body, shapes
        body = runner.body
        device = runner.model.device
        self.graphs = Graphs(device)
        self.num_missed = 0
        self._compile_seconds = 0.0
        self._compilations = Compilations.now()
        self._report_mail = Mailbox((report_size(body.buffers.sizes),), torch.uint8, device)

    def take_compiled(self) -> int:
        """See Rounds."""
        before, self._compilations = self._compilations, Compilations.now()
        return (self._compilations - before).compiled

    @property
    def num_graphs(self) -> int:
        """See Rounds."""
        return self.graphs.counts.number

    @property
    def max_captured(self) -> int:
        """See Rounds."""
        return max((shape.num_sequences for shape in self.shapes if (shape, WHOLE) in self.graphs), default=0)

    @property
    def pending_bytes(self) -> int:
        """See Rounds."""
        return sum(layer.nbytes for layer in self.body.buffers.pending)

    @property
    def buffer_bytes(self) -> int:
        """See Rounds."""
        return num_bytes(self.body.buffers) - self.pending_bytes

    @property
    def graph_bytes(self) -> int:
        """See Rounds."""
        return self.graphs.counts.num_bytes

    @property
    def start_seconds(self) -> dict[str, float]:
        """See Rounds: kernels compiled or read from disk, then graphs captured."""
        return {"kernels": self._compile_seconds, "graphs": self.graphs.counts.seconds}

    def capture(self, shapes: Iterable[Shape] | None = None, progress: bool = True) -> None:
        """Captures these shapes, by default every one, after compiling what they launch, in parallel.

        The null slot alone is in the batches that this runs.
        """
        chosen = list(self.shapes if shapes is None else shapes)
        self.compile(chosen)
        for shape in tqdm(chosen, desc="capturing rounds", unit="shape", disable=not progress):
            for part in (WHOLE, PLAIN, VERIFY, FINISH):
                self.graphs.capture((shape, part), lambda s=shape, p=part: self._work(s, p))  # type: ignore[misc]

    @torch.inference_mode()
    def compile(self, shapes: Iterable[Shape] | None = None) -> None:
        """See Rounds: what these shapes launch, by default all of them. Products differ by the number of rows."""
        chosen = list(self.shapes if shapes is None else shapes)
        self.body.buffers.slots.zero_()
        if self.runner.model.device.type == "cuda":
            began = perf_counter()
            compile_all(lambda: self._work_each(chosen), load=True)
            self._compile_seconds += perf_counter() - began

    def _work_each(self, shapes: Iterable[Shape]) -> None:
        # batches without filters launch some of the same kernels
        for shape in shapes:
            self._work(shape, WHOLE)

    def _work(self, shape: Shape, part: str) -> None:
        if part != FINISH:
            self.body.verify(shape)
        if part != VERIFY:
            filters = part != PLAIN
            self.body.decide(shape, shape.depth, filters)
            if shape.depth and self.runner.head_on:
                self.body.draft(shape, shape.depth, filters)

    def launch(self, batch: Batch, next_depth: int) -> DeviceRound:
        """See Rounds. The drafts are for a next round as deep as this one, whatever next_depth says."""
        began = perf_counter()
        body, count = self.body, len(batch.slots)
        shape = self.shapes.fit(count, batch.depth) or Shape(count, batch.depth)
        self.runner.placement.place(batch.slots, batch.tables, shape.num_sequences)
        masks = self.runner.start_masks(batch.slots, shape.depth)
        if masks is None:
            features = self.runner.state.batch_features(batch.slots)
            graph = self._run(shape, WHOLE if features.filtered or features.min_p else PLAIN)
        else:
            graph = self._run(shape, VERIFY)
            words = torch.from_numpy(masks.result())
            body.buffers.allowed[: len(words)].copy_(words)
            graph &= self._run(shape, FINISH)
        letter = self._report_mail.fetch(body.buffers.report)
        # the next round overwrites the logits
        rows = body.buffers.logits[: shape.num_rows].unflatten(0, (-1, shape.width))
        logits = {b: rows[b].clone() for b, wanted in enumerate(batch.logprobs) if wanted is not None}
        return DeviceRound(self.runner, body, batch, shape, letter, logits, graph, perf_counter() - began)

    def _run(self, shape: Shape, part: str) -> bool:
        """Whether there was a graph for it. What observers want to see is launched operator by operator."""
        if self.runner.observers:
            self._work_in_view(shape, part)
            return False
        if (shape, part) in self.graphs:
            self.graphs.replay((shape, part))
            return True
        self.num_missed += 1
        self._work(shape, part)
        return False

    def _work_in_view(self, shape: Shape, part: str) -> None:
        slots = self.body.buffers.slots[: shape.num_sequences].repeat_interleave(shape.width).tolist()
        starts = self.runner.state.length.tolist()
        positions = [starts[slot] + row % shape.width for row, slot in enumerate(slots)]
        shown = [row for row, slot in enumerate(slots) if slot]

        def trace(name: str, rows: torch.Tensor) -> None:
            self.runner.observe(name, rows[shown], [slots[row] for row in shown], [positions[row] for row in shown])

        self.body.trace = trace
        try:
            self._work(shape, part)
        finally:
            self.body.trace = None
        if part != VERIFY and shape.depth:
            state, own = self.runner.state, sorted({slot for slot in slots if slot})
            self.runner.observe("draft", state.drafts[own, :1], own, state.length[own].tolist())


@dataclass(frozen=True)
class DeviceRound:
    """See Round. `logits` has the rows of sequences that asked for log-probabilities, by place in the batch."""

    runner: Runner
    body: RoundBody
    batch: Batch
    shape: Shape
    letter: Letter
    logits: dict[int, torch.Tensor]
    graph: bool
    launch_seconds: float

    def collect(self) -> tuple[list[SequenceReport], dict[str, float]]:
        """See Round. Seconds of the host: of launching, and of waiting for the device."""
        began = perf_counter()
        counts, chosen, nans = split_report(self.letter.read(), self.body.buffers.sizes)
        waited = perf_counter() - began
        tokens = chosen[: self.shape.num_rows].view(-1, self.shape.width).tolist()
        is_nan = nans[: self.shape.num_rows].view(-1, self.shape.width).tolist()
        reports = [
            self._report(b, slot, values, tokens[b], is_nan[b])
            for b, (slot, values) in enumerate(zip(self.batch.slots, counts.T.tolist(), strict=False))
        ]
        self.runner.advance_grammars(reports)
        return reports, {"launch": self.launch_seconds, "wait": waited}

    def _report(self, b: int, slot: int, values: list[int], tokens: list[int], is_nan: list[int]) -> SequenceReport:
        accepted, committed, offered, stopped, done = values
        kept, wanted = tokens[:committed], self.batch.logprobs[b]
        logprobs = None if wanted is None else token_logprobs(self.logits[b][:committed], kept, wanted)
        has_nan = any(is_nan[:committed])
        return SequenceReport(
            slot, kept, offered, min(accepted, committed), bool(stopped), bool(done), has_nan, logprobs
        )
