"""A piece of one prompt, read in steps between which rounds may run, and what follows a prompt: its first token and the
head's first drafts, captured as rounds are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch

from pilotfish.engine.link.messages import TokenLogprob
from pilotfish.engine.round.buffers import read_report
from pilotfish.engine.round.pinned import HostCopy
from pilotfish.engine.round.prompt import MOST_ROWS, Taken
from pilotfish.engine.round.reports import RowLogprobs, SequenceReport, num_forced
from pilotfish.spec.slots import FILTERED

if TYPE_CHECKING:
    from pilotfish.engine.round.executor import RoundExecutor

END = object()
FIRST, HEAD = "first", "head"
"""What follows a prompt: the choice of the first token, and the head's part."""


@dataclass(frozen=True)
class Piece:
    """prompt[start:end] of the sequence that owns `slot` and the pages `table`; see RoundExecutor.prefill. With a
    `middle` it is two pieces, cut there, that are read together."""

    slot: int
    table: list[int]
    prompt: list[int]
    start: int
    end: int
    depth: int
    logprobs: int | None
    prompt_logprobs: int | None
    generates: bool
    middle: int | None = None


class Once(NamedTuple):
    """FIRST or HEAD, with `depth` drafts for the next round; `flags`: bits that the sequence may have."""

    part: str
    depth: int
    flags: int

    @property
    def key(self) -> tuple[str, int, bool]:
        """What it is captured by: as for rounds, whether with the launches that filters need."""
        return self.part, self.depth, bool(self.flags & FILTERED)


class Reading:
    """See the module's docstring. One at a time: a piece has the executor's memory for prompts until it is finished or
    given up. Its sequence may be given up at any time."""

    def __init__(self, executor: RoundExecutor, piece: Piece):
        self.executor, self.piece = executor, piece
        self._taken: tuple[Taken, ...] = ()
        tokens = piece.prompt[piece.start : piece.end]
        if piece.middle is not None:
            self._taken = executor.prompt.take_pair(piece.slot, piece.start, piece.middle, tokens, piece.table)
        elif tokens:
            self._taken = (executor.prompt.take(piece.slot, piece.start, tokens, piece.table),)
        self._logprobs: list[TokenLogprob] | None = None
        self._steps = self._all_steps()
        self._is_read, self._longest_step = False, 0.0
        self.num_advanced = 0

    def advance(self, num_steps: int | None = None, until: float = math.inf) -> bool:
        """Runs steps that are left: all, or so many, or as many as should end before `until` by perf_counter(), but one
        at least; `num_advanced` of them. Whether nothing is left but `finish`, which should end before then too. Waits
        for nothing where launches do not."""
        self.num_advanced = 0
        while not self._is_read:
            began = perf_counter()
            if self.num_advanced and (self.num_advanced == num_steps or began + self._longest_step > until):
                return False
            self.num_advanced += 1
            self._is_read = next(self._steps, END) is END
            self._longest_step = max(self._longest_step, perf_counter() - began)
        first_token_seconds = self.executor.prompt.first_token_seconds
        return not self.num_advanced or not self._ends or perf_counter() + first_token_seconds <= until

    @property
    def advanced_seconds(self) -> float:
        """What the steps of the newest `advance` take, as measured at the start; 0 where that is not known."""
        return self.num_advanced * self.executor.prompt.step_seconds.get(self.num_rows, 0.0)

    def _all_steps(self) -> Iterator[None]:
        if self._taken:
            (rows, span), *after = self._taken
            yield from self.executor.prompt.steps(rows, span, *after)
        if not self.executor.ops.fixed_shapes:
            # no round and no first token is waiting to be read behind these
            yield
            yield from self._read_logprobs()
            self._end_span()

    def _read_logprobs(self) -> Iterator[None]:
        piece, wanted = self.piece, self.piece.prompt_logprobs
        if wanted is None:
            return
        self._logprobs, hidden, following = [], self._hidden, piece.prompt[piece.start + 1 : piece.end + 1]
        for start in range(0, len(following), MOST_ROWS):
            tokens = following[start : start + MOST_ROWS]
            self._logprobs += self.executor.prompt.logprobs(hidden[start : start + len(tokens)], tokens, wanted)
            yield

    def _end_span(self) -> None:
        if self._taken:
            self.executor.prompt.end_spans(self._taken, self.executor.head_on)

    @property
    def num_rows(self) -> int:
        """Of each of its pieces, which are alike."""
        return self._taken[-1][1].num_rows if self._taken else 0

    @property
    def _ends(self) -> bool:
        """Whether a first token follows."""
        return self.piece.generates and self.piece.end == len(self.piece.prompt)

    @property
    def _hidden(self) -> torch.Tensor:
        """Its rows [n, H]: of a prompt that was found whole the last one, which came with its state."""
        if not self._taken:
            return self.executor.model.trunk.state.last_hidden[self.piece.slot, None]
        rows, span = self._taken[-1]
        return rows.hidden[: span.length]

    def finish(self) -> SequenceReport | None:
        """`end`, and waits for the first token."""
        ended = self.end()
        return ended.collect() if isinstance(ended, FirstToken) else ended

    def end(self) -> FirstToken | SequenceReport | None:
        """Runs what is left. The piece that ends the prompt has a report: with the first token, unless nothing is to be
        generated; so has one whose tokens' log-probabilities were asked for. Where launches are not waited for, neither
        is the first token: a round of its sequence may be launched before it is collected."""
        self.advance()
        executor, piece, began = self.executor, self.piece, perf_counter()
        launches = executor.ops.fixed_shapes
        if launches:
            for _ in self._read_logprobs():
                pass
        first = self._choose_first(self._hidden[-1]) if self._ends else None
        # where launches are not waited for, the head reads before the first token is looked at
        is_done = first is not None and not launches and first.report.done
        if launches:
            self._end_span()
        if first is None:
            ends, read = piece.end == len(piece.prompt), self._logprobs
            return SequenceReport.of_prompt(piece.slot, read, done=ends) if ends or read is not None else None
        if executor.head_on and not is_done:
            self._start_head()
        if not launches:
            executor.prompt.first_token_seconds = perf_counter() - began
        return first

    def _choose_first(self, hidden: torch.Tensor) -> FirstToken:
        """Launches the choice of the token that follows the prompt, from its last hidden row [H], and its commit."""
        executor, piece = self.executor, self.piece
        slot, b = piece.slot, executor.body.buffers
        executor.place([slot], [piece.table], 1)
        executor.state.length[slot].fill_(piece.end - 1)
        b.hidden[0] = hidden
        forced = executor.grammars.forced([slot])
        masks = executor.grammars.start_masks([slot], 0)
        if masks is not None:
            words = torch.from_numpy(masks.result()[0])
            b.allowed[: len(words)].copy_(words)
        executor.run_once(Once(FIRST, piece.depth, executor.state.host_flags[slot]))
        executor.observe("prefill.logits", b.logits[:1], [slot], [piece.end - 1])
        rows = None if piece.logprobs is None else RowLogprobs(b.logits[:1], b.chosen[:1], piece.logprobs)
        return FirstToken(executor, piece, executor.fetch_report(), rows, forced[0], self._logprobs)

    def _start_head(self) -> None:
        """The head's part of a round whose only row was the prompt's last one. At depth 0 too: a later round may draft,
        and then reads all of the head's entries."""
        executor, piece = self.executor, self.piece
        slot = piece.slot
        executor.body.buffers.hidden[0] = executor.model.trunk.state.last_hidden[slot]
        executor.run_once(Once(HEAD, piece.depth, executor.state.host_flags[slot]))
        if piece.depth:
            executor.observe("draft", executor.state.drafts[slot : slot + 1, :1], [slot], [piece.end])


class FirstToken:
    """The token after a prompt, launched; its row, if log-probabilities were asked for. `forced`: what the grammar said
    must come. `prompt_logprobs`: what was asked for of the prompt's tokens."""

    def __init__(
        self, executor: RoundExecutor, piece: Piece, fetched: HostCopy, logprobs: RowLogprobs | None, forced: list[int],
        prompt_logprobs: list[TokenLogprob] | None,
    ):  # fmt: skip
        self._executor, self._piece, self._fetched, self._logprobs = executor, piece, fetched, logprobs
        self._forced, self._prompt_logprobs = forced, prompt_logprobs

    def collect(self) -> SequenceReport:
        """Waits for it; the sequence's grammar goes on from it."""
        self._executor.grammars.advance([self.report])
        return self.report

    @cached_property
    def report(self) -> SequenceReport:
        """Waits for it."""
        counts, chosen, nans = read_report(self._fetched.read(), self._executor.body.buffers.sizes)
        _, committed, _, stopped, done = counts[:, 0].tolist()
        tokens = chosen[:committed].tolist()
        return SequenceReport(
            self._piece.slot, tokens, 0, 0, bool(stopped), bool(done), bool(nans[:committed].any()),
            None if self._logprobs is None else self._logprobs.read(tokens),
            prompt_logprobs=self._prompt_logprobs, num_forced=num_forced(tokens, self._forced),
        )  # fmt: skip
