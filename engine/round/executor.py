"""Stands between the loop and the device: admits requests, reads prompts, launches rounds and collects them.

Rounds of fixed shapes (kernels) are launched without a wait and read one behind: a batch runs in the smallest shape
that holds it, filled up with the null slot, captured as a graph or operator by operator. Others run as they are
launched. A batch with a grammar runs in two parts: masks are computed on the host while the first one, the trunk, runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter
from typing import NamedTuple

import msgspec
import torch
from tqdm import tqdm

from pilotfish.engine.guard import Guarded
from pilotfish.engine.ledger import tensor_bytes
from pilotfish.engine.link.messages import SamplingParams, TokenLogprob
from pilotfish.engine.model.build import Model
from pilotfish.engine.round.batch_state import BatchState
from pilotfish.engine.round.body import RoundBody, unmarked
from pilotfish.engine.round.buffers import RoundBuffers, read_report, report_size
from pilotfish.engine.round.grammars import SlotGrammars
from pilotfish.engine.round.graphs import Graphs
from pilotfish.engine.round.operators import Operators, operators_of
from pilotfish.engine.round.pinned import HostCopy, PinnedRing, Placement
from pilotfish.engine.round.prompt import NULL_SLOT, PromptPass
from pilotfish.engine.round.reading import FIRST, HEAD, Once, Piece, Reading
from pilotfish.engine.round.reports import Batch, RowLogprobs, SequenceReport, num_forced
from pilotfish.engine.round.shapes import Shape, Shapes, Sizes
from pilotfish.spec.accept import rows_left
from pilotfish.spec.slots import EVERYTHING, FILTERED

Observer = Callable[[str, torch.Tensor, list[int], list[int]], None]
"""Sees (name, rows, slot of each row, position of each row), in the order things are computed."""

ReadLogprobs = Callable[[list[int]], list[TokenLogprob]]
"""Log-probabilities of the tokens that a sequence's window committed."""

MORE_FOR_ROUNDS = 0.055
"""Rounds beside a prompt take so much more of its steps' measured time, as a share, than rounds after each whole piece
of the most rows would: of what a long prompt takes in fact, less than 5 %."""
HOST_ROUNDS_SHARE = 1
"""Where steps are not captured, rounds are longer and a pause costs nothing: there a piece of a prompt pauses before it
has run longer than so many rounds, and those beside it take half of the time."""
WHOLE, PLAIN, VERIFY, FINISH = "round", "plain", "verify", "finish"
"""Parts of a round. What is captured for a shape: all of it, for any batch; all but what min_p, top_k and top_p need,
for batches without them; the part before and the part after a grammar's masks."""


class Work(NamedTuple):
    """What a launch runs: `drafts` of each sequence for the next round, None where the head has no part in this one;
    `flags`, bits that any sequence may have."""

    shape: Shape
    drafts: int | None
    flags: int


class RoundExecutor:
    """See the module's docstring. Slots and page tables are the scheduler's; a page holds PAGE tokens.

    `head_on`: draft, and keep the head's cache repaired; off, the head's memory is never touched. `run_ahead` overrides
    whether rounds are read one behind. `num_missed` counts rounds of a fixed shape that had not been captured.
    """

    def __init__(
        self, model: Model, state: BatchState, head_on: bool, sizes: Sizes, shapes: Shapes, operators: Operators
    ):
        assert not head_on or model.head is not None
        self.model, self.state, self.head_on, self.shapes, self.ops = model, state, head_on, shapes, operators
        self.body = RoundBody(model, state, RoundBuffers(model, sizes, operators), operators)
        self.prompt = PromptPass(model, operators)
        if sizes.max_piece and operators.captures_prompts:
            self.prompt.reserve(sizes.max_piece, sizes.max_model_len)
        self.grammars = SlotGrammars(state)
        self.observers: list[Observer] = []
        self.graphs, self.prompt_graphs = Graphs(model.device), Graphs(model.device)
        self.num_missed, self.run_ahead = 0, None if operators.fixed_shapes else False
        self._placement = Placement(self.body.buffers.slots, self.body.buffers.tables)
        self._reports = PinnedRing((report_size(sizes),), torch.uint8, model.device)
        self._compile_seconds = 0.0

    @property
    def asynchronous(self) -> bool:
        """Whether launching does not wait for the round, so that the next one may be launched before this one is
        collected: then a sequence that ended in the one commits nothing in the other, and keeps its slot and pages
        until that is read. Not so beside observers: what they see must belong to what has been read."""
        return not self.observers if self.run_ahead is None else self.run_ahead

    # -- requests ---------------------------------------------------------------------------------------------------

    def admit(
        self, slot: int, prompt: list[int], params: SamplingParams, limit: int, own_k: int,
        constraint: Guarded | None = None,
    ) -> None:  # fmt: skip
        """Takes a free slot for a request; its caches start empty. Waits for nothing."""
        self.grammars.admit(slot, constraint)
        self.state.admit(slot, prompt, params, limit, own_k)
        self.model.trunk.state.reset(slot)

    def prefill(
        self, slot: int, table: list[int], prompt: list[int], start: int, end: int, depth: int, logprobs: int | None,
        prompt_logprobs: int | None = None, generates: bool = True, middle: int | None = None,
    ) -> Reading:  # fmt: skip
        """Begins to read prompt[start:end], nothing where the state of all of it was restored: in steps, between which
        rounds may run. The piece that ends the prompt also chooses the first token, which is waited for, and drafts
        `depth` tokens from it; not so, and the sequence is done, unless it `generates`. One piece is read at a time, or
        two, cut at `middle`, where the prompt pass `reads_pairs`; neither has prompt_logprobs then. The state between
        them is `prompt.between`, until others are read."""
        assert middle is None or prompt_logprobs is None
        fields = (slot, table, prompt, start, end, depth, logprobs, prompt_logprobs, generates, middle)
        return Reading(self, Piece(*fields))

    def state_at(self, slot: int, is_middle: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A slot's state, as RecurrentState.of_slot has it: after the newest piece of its prompt, or before the second
        of the two that were read last."""
        if not is_middle:
            return self.model.trunk.state.of_slot(slot)
        between = self.prompt.between
        assert between is not None
        return between.s, between.conv, between.last_hidden

    def steps_at_a_time(self, num_rows: int, round_seconds: float, read_seconds: float) -> int | None:
        """Captured steps of a piece until the next round of running sequences, of which one takes `round_seconds`;
        those since the last round took `read_seconds`. At least 1, and possibly more than the piece has; None where it
        is not known what they take. Changes no bit."""
        known = self.prompt.step_seconds
        seconds = known.get(num_rows)
        if not seconds:
            return None
        whole = len(self.prompt.groups) * known[max(known)]
        at_a_time = 1 / (1 / whole + MORE_FOR_ROUNDS / round_seconds)
        return max(1, round((at_a_time - read_seconds) / seconds))

    def seconds_at_a_time(self, round_seconds: float) -> float:
        """Seconds of a piece between two such rounds, where steps end before they return. Changes no bit."""
        on_host = self.model.device.type == "cpu" and not self.ops.fixed_shapes
        return HOST_ROUNDS_SHARE * round_seconds if on_host else math.inf

    def run_once(self, once: Once) -> None:
        """What follows a prompt, for the one sequence in place."""
        if once.key in self.prompt_graphs:
            self.prompt_graphs.replay(once.key)
        else:
            self._work_once(once)

    def _work_once(self, once: Once) -> None:
        part, depth, flags = once
        if part == FIRST:
            self.body.choose_first(depth, flags)
        else:
            self.body.start_head(depth, flags)

    def place(self, slots: list[int], tables: list[list[int]], size: int) -> None:
        """Puts a batch, filled up to `size`, where operators read it."""
        self._placement.place(slots, tables, size)

    def fetch_report(self) -> HostCopy:
        """Starts the copy of what was decided last."""
        return self._reports.fetch(self.body.buffers.report)

    # -- rounds -----------------------------------------------------------------------------------------------------

    def launch(self, batch: Batch, next_depth: int) -> LaunchedRound:
        """One round: each sequence commits the accepted drafts and the trunk's own next token, and gets new drafts: in
        a fixed shape for a next round as deep as this one, whatever next_depth says.

        Recurrent state stays where it was: the window's rows are left pending, and the next round replays as many of
        them as were committed. Keys and values of rejected rows stay behind the length, unread until overwritten.
        """
        clock = PhaseClock()
        body, flags = self.body, self.state.flags_of(batch.slots)
        work = self._fit(batch, next_depth, flags)
        shape = work.shape
        self.place(batch.slots, batch.tables, shape.num_sequences)
        forced = self.grammars.forced(batch.slots)
        masks = self.grammars.start_masks(batch.slots, shape.depth)
        missed: list[int] = []
        body.mark = clock.mark
        if masks is None:
            graph = self._run(work, WHOLE if flags & FILTERED else PLAIN)
        else:
            graph = self._run(work, VERIFY)
            found, missed = masks.result(self._verified(), batch.patience)
            words = torch.from_numpy(found)
            clock.mark("mask")
            body.buffers.allowed[: len(words)].copy_(words)
            if missed:
                self._sit_out(batch, shape, missed)
            graph &= self._run(work, FINISH)
        body.mark = unmarked
        logprobs = self._logprobs(batch, shape)
        fetched = self.fetch_report()
        phases = {"launch": clock.elapsed} if self.ops.fixed_shapes else clock.seconds
        return LaunchedRound(self, batch, shape, fetched, logprobs, forced, frozenset(missed), graph, phases)

    def _logprobs(self, batch: Batch, shape: Shape) -> dict[int, ReadLogprobs]:
        """Of each window row of the sequences that asked for them, by place in the batch, before the next round
        overwrites the logits."""
        asked = [(place, wanted) for place, wanted in enumerate(batch.logprobs) if wanted is not None]
        if not asked:
            return {}
        b, width = self.body.buffers, shape.width
        logits, chosen = (
            torch.cat([rows[place * width : (place + 1) * width] for place, _ in asked]) if len(asked) > 1
            else rows[asked[0][0] * width : (asked[0][0] + 1) * width]
            for rows in (b.logits, b.chosen)
        )  # fmt: skip
        rows = RowLogprobs(logits, chosen, max(wanted for _, wanted in asked))
        return {
            place: partial(rows.read, first=number * width, wanted=wanted)
            for number, (place, wanted) in enumerate(asked)
        }

    def _verified(self) -> Callable[[], bool]:
        """Whether what has been launched has ended."""
        if self.model.device.type != "cuda":
            return lambda: True
        event = torch.cuda.Event()
        event.record()
        return event.query

    def _sit_out(self, batch: Batch, shape: Shape, missed: list[int]) -> None:
        """Sequences whose masks have not come commit nothing: the null slot stands in their places from here on. What
        they had accepted the trunk has replayed, or left pending, and nothing of this window follows; their drafts stay
        for the next round."""
        slots = [NULL_SLOT if b in missed else slot for b, slot in enumerate(batch.slots)]
        most_pending = self.ops.most_pending(shape.width, shape.num_sequences)
        for b in missed:
            count = self.state.pending_count[batch.slots[b]]
            count.copy_(rows_left(count, shape.width, most_pending))
        self._placement.place_slots(slots, shape.num_sequences)

    def _fit(self, batch: Batch, next_depth: int, flags: int) -> Work:
        count = len(batch.slots)
        if not self.ops.fixed_shapes:
            return Work(Shape(count, batch.depth), next_depth if self.head_on else None, flags)
        return self._work_of(self.shapes.fit(count, batch.depth) or Shape(count, batch.depth), flags)

    def _work_of(self, shape: Shape, flags: int = EVERYTHING) -> Work:
        """A fixed shape's: the head rests where nothing is drafted."""
        return Work(shape, shape.depth if shape.depth and self.head_on else None, flags)

    def _run(self, work: Work, part: str) -> bool:
        """Whether there was a graph for it. What observers want to see is launched operator by operator."""
        if self.observers:
            self._work_in_view(work, part)
            return False
        if (work.shape, part) in self.graphs:
            self.graphs.replay((work.shape, part))
            return True
        self.num_missed += self.ops.fixed_shapes
        self._work(work, part)
        return False

    def _work(self, work: Work, part: str) -> None:
        if part != FINISH:
            self.body.verify(work.shape)
        if part != VERIFY:
            flags = work.flags & ~FILTERED if part == PLAIN else work.flags
            self.body.decide(work.shape, work.drafts or 0, flags)
            if work.drafts is not None:
                self.body.draft(work.shape, work.drafts, flags)

    def _work_in_view(self, work: Work, part: str) -> None:
        width = work.shape.width
        slots = self.body.buffers.slots[: work.shape.num_sequences].repeat_interleave(width).tolist()
        starts = self.state.length.tolist()
        positions = [starts[slot] + row % width for row, slot in enumerate(slots)]
        shown = [row for row, slot in enumerate(slots) if slot]

        def trace(name: str, rows: torch.Tensor) -> None:
            self.observe(name, rows[shown], [slots[row] for row in shown], [positions[row] for row in shown])

        self.body.trace = trace
        try:
            self._work(work, part)
        finally:
            self.body.trace = None
        if part != VERIFY and work.drafts:
            state, own = self.state, sorted({slot for slot in slots if slot})
            self.observe("draft", state.drafts[own, :1], own, state.length[own].tolist())

    def observe(self, name: str, rows: torch.Tensor, slots: list[int], positions: list[int]) -> None:
        """Shows rows to all observers."""
        for observer in self.observers:
            observer(name, rows, slots, positions)

    # -- getting ready ----------------------------------------------------------------------------------------------

    def capture(self, shapes: Iterable[Shape] | None = None, progress: bool = True, prompts: bool = True) -> None:
        """Captures these shapes, by default every one, and prompts, after compiling what they launch, in parallel.

        The null slot alone is in the batches that this runs.
        """
        chosen = list(self.shapes if shapes is None else shapes)
        self.compile(chosen)
        for shape in tqdm(chosen, desc="capturing rounds", unit="shape", disable=not progress):
            for part in (WHOLE, PLAIN, VERIFY, FINISH):
                self.graphs.capture((shape, part), lambda s=shape, p=part: self._work(self._work_of(s), p))  # type: ignore[misc]
        if prompts:
            self.prompt.capture(self.prompt_graphs, self.head_on, progress)
            for once in self._after_prompts():
                self.prompt_graphs.capture(once.key, partial(self._work_once, once))
        # the null slot's, which `choose_first` has counted up
        self.state.length[NULL_SLOT] = 0

    @torch.inference_mode()
    def compile(self, shapes: Iterable[Shape] | None = None) -> None:
        """Compiles what these shapes launch, by default all of them, and what prompts do. Products differ by the number
        of rows."""
        chosen = list(self.shapes if shapes is None else shapes)
        began = perf_counter()
        self.place([], [], len(self.body.buffers.slots))
        self.ops.compile(lambda: self._work_each(chosen))
        self._compile_seconds += perf_counter() - began

    def _work_each(self, shapes: Iterable[Shape]) -> None:
        # batches without filters launch some of the same kernels
        for shape in shapes:
            self._work(self._work_of(shape), WHOLE)
        self.prompt.launch_each(self.head_on)
        for once in self._after_prompts():
            self._work_once(once)

    def _after_prompts(self) -> list[Once]:
        """What follows a prompt at the depth that is served."""
        depth, parts = max(self.shapes.depths), (FIRST, HEAD) if self.head_on else (FIRST,)
        return [Once(part, depth, flags) for part in parts for flags in (EVERYTHING & ~FILTERED, EVERYTHING)]

    def take_compiled(self) -> int:
        """Kernels compiled since the last call: once serving, each one has made a round wait."""
        return self.ops.take_compiled()

    @property
    def start_seconds(self) -> dict[str, float]:
        """What getting ready took, by part: kernels compiled or read from disk, then graphs captured. {} where there is
        nothing to compile."""
        if not self.ops.fixed_shapes:
            return {}
        graphs = self.graphs.counts.seconds + self.prompt_graphs.counts.seconds
        return {"kernels": self._compile_seconds, "graphs": graphs}

    @property
    def num_graphs(self) -> int:
        """How many graphs of rounds were captured."""
        return self.graphs.counts.number

    @property
    def graph_bytes(self) -> int:
        """Device memory that captured graphs of rounds and prompts hold."""
        return self.graphs.counts.num_bytes + self.prompt_graphs.counts.num_bytes

    @property
    def max_captured(self) -> int:
        """Sequences of the largest captured round."""
        return max((shape.num_sequences for shape in self.shapes if (shape, WHOLE) in self.graphs), default=0)

    @property
    def pending_bytes(self) -> int:
        """Pending rows that rounds keep themselves."""
        return int(self.body.buffers.scratch.pending_bytes)

    @property
    def buffer_bytes(self) -> int:
        """What rounds and prompts hold beside the model's and the batch's own memory, pending rows and graphs apart."""
        return tensor_bytes(self.body.buffers) - self.pending_bytes + self.prompt.num_bytes


class LaunchedRound(msgspec.Struct, frozen=True, eq=False):
    """A launched round. `graph`: it was replayed, not launched operator by operator. `logprobs` has the rows of those
    that asked for log-probabilities, by place in the batch; `forced` what each sequence's grammar said must come;
    `missed` the places of those that sit the round out."""

    executor: RoundExecutor
    batch: Batch
    shape: Shape
    fetched: HostCopy
    logprobs: dict[int, ReadLogprobs]
    forced: list[list[int]]
    missed: frozenset[int]
    graph: bool
    phases: dict[str, float]

    def collect(self) -> tuple[list[SequenceReport | None], dict[str, float]]:
        """Waits for it. A report for each sequence of its batch in order, None for one that sat the round out, and
        seconds of the host: of launching (or of each phase), and of waiting for the device."""
        began = perf_counter()
        counts, chosen, nans = read_report(self.fetched.read(), self.executor.body.buffers.sizes)
        waited = perf_counter() - began
        num_rows, verdicts = self.shape.num_rows, counts[:, : len(self.batch.slots)].T.tolist()
        tokens, is_nan = chosen[:num_rows].tolist(), nans[:num_rows].tolist()
        reports = [
            None if b in self.missed else self._report(b, verdict, tokens, is_nan) for b, verdict in enumerate(verdicts)
        ]
        self.executor.grammars.advance([report for report in reports if report is not None])
        last = {"wait": waited} if self.executor.ops.fixed_shapes else {"report": perf_counter() - began}
        return reports, self.phases | last

    def _report(self, b: int, verdict: list[int], tokens: list[int], is_nan: list[int]) -> SequenceReport:
        """Of place b, from all rows' tokens."""
        accepted, committed, offered, stopped, done = verdict
        first = b * self.shape.width
        kept, rows = tokens[first : first + committed], self.logprobs.get(b)
        logprobs = None if rows is None else rows(kept)
        has_nan = any(is_nan[first : first + committed])
        return SequenceReport(
            self.batch.slots[b], kept, offered, min(accepted, committed), bool(stopped), bool(done), has_nan, logprobs,
            num_forced=num_forced(kept, self.forced[b]),
        )  # fmt: skip


class PhaseClock:
    """Seconds of each phase of one round, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = self._last = perf_counter()

    def mark(self, phase: str) -> None:
        """Ends `phase`, which began at the previous mark."""
        now = perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now

    @property
    def elapsed(self) -> float:
        return perf_counter() - self._began


def make_executor(
    model: Model,
    state: BatchState,
    depth: int,
    max_num_seqs: int,
    max_model_len: int,
    fast_rows: int,
    operators: Operators | None = None,
    prefill_chunk: int = 0,
) -> RoundExecutor:
    """An executor for rounds of k = 0 and `depth` over up to max_num_seqs sequences; nothing is captured yet.
    `operators`: in place of the model's own table. `prefill_chunk`: the longest piece of a prompt that may be captured.

    The null slot gets a state of its own, so that rows which fill up a batch are finite.
    """
    operators = operators or operators_of(model)
    shapes = Shapes((0, depth), fast_rows, max_num_seqs)
    sizes = Sizes(
        num_slots=state.num_slots,
        max_sequences=max(shape.num_sequences for shape in shapes),
        max_rows=operators.padded(max(fast_rows, *(shape.num_rows for shape in shapes))),
        max_width=state.max_depth + 1,
        max_model_len=max_model_len,
        max_piece=prefill_chunk,
    )
    model.trunk.state.reset(0)
    return RoundExecutor(model, state, depth > 0 and model.head is not None, sizes, shapes, operators)
