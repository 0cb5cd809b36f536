"""Runs a model over its buffers: prefill chunks, and the steps that a round is made of.

B = sequences, W = window rows, R = B * W rows padded to whole tiles, K = drafts, H = hidden, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from pilotfish.draft_heads.head import Frontier
from pilotfish.engine.batch_state import BatchState, Features
from pilotfish.engine.grammar.steps import Masks, Steps
from pilotfish.engine.guard import Guarded
from pilotfish.engine.link.messages import SamplingParams, TokenLogprob
from pilotfish.engine.model.build import Model
from pilotfish.engine.model.window import Span, Window
from pilotfish.kernels.linear import padded_rows
from pilotfish.spec.accept import Verdict, accept
from pilotfish.spec.sampling import choose

Observer = Callable[[str, torch.Tensor, list[int], list[int]], None]
"""Sees (name, rows, slot of each row, position of each row), in the order things are computed."""


@dataclass(frozen=True)
class Batch:
    """Sequences of one round. `logprobs` holds what each asked for (None: nothing)."""

    slots: list[int]
    tables: list[list[int]]
    depth: int
    logprobs: list[int | None]


@dataclass(frozen=True)
class Verified:
    """hidden [R, H] and raw logits fp32 [B * W, V] of a window, and the drafts int64 [B, K] it held.

    `masks`, where a sequence has a grammar: what it allows each row, computed meanwhile.
    """

    window: Window
    features: Features
    drafts: torch.Tensor
    hidden: torch.Tensor
    logits: torch.Tensor
    masks: Masks | None


@dataclass(frozen=True)
class SequenceReport:
    """What a round added to one sequence. Drafts that were accepted but lie past a stop are not counted.

    `has_nan`: a committed token was chosen from logits with a NaN, so it means nothing.
    """

    slot: int
    token_ids: list[int]
    num_drafted: int
    num_accepted: int
    stopped: bool
    done: bool
    has_nan: bool
    logprobs: list[TokenLogprob] | None


class Runner:
    """`head_on`: draft, and keep the head's cache repaired; off, the head's memory is never touched."""

    def __init__(self, model: Model, state: BatchState, head_on: bool):
        assert not head_on or model.head is not None
        self.model, self.state, self.head_on = model, state, head_on
        self.observers: list[Observer] = []
        self.constraints: dict[int, Guarded] = {}
        self.grammar_steps = Steps(state.vocab_size)

    # -- prefill ----------------------------------------------------------------------------------------------------

    def admit(
        self,
        slot: int,
        prompt: list[int],
        params: SamplingParams,
        limit: int,
        own_k: int,
        constraint: Guarded | None = None,
    ) -> None:
        """Takes a free slot for a request; its caches start empty."""
        self.release_grammar(slot)
        if constraint is not None:
            self.constraints[slot] = constraint
            self.grammar_steps.begin(slot, constraint, [], [])
        self.state.admit(slot, prompt, params, limit, own_k)
        self.model.trunk.state.reset(slot)

    def prefill(
        self, slot: int, table: list[int], prompt: list[int], start: int, end: int, depth: int, logprobs: int | None
    ) -> SequenceReport | None:
        """Runs prompt[start:end]. The chunk that ends the prompt also chooses the first token and drafts from it."""
        trunk, device = self.model.trunk, self.model.device
        span = Span.build(slot, start, end - start, table, self.model.inv_freq)
        hidden = trunk.bulk(torch.tensor(prompt[start:end], device=device), span)
        if end < len(prompt):
            if self.head_on:
                self._fill(prompt[start + 1 : end + 1], hidden, span)
            return None
        slots = torch.tensor([slot], device=device)
        self.state.length[slot] = end
        logits = self._logits(hidden[-1:])
        self.observe("prefill.logits", logits, [slot], [end - 1])
        features = self.state.features[slot]
        position = torch.tensor([[end]], device=device)
        empty = position.new_zeros((1, 0))
        rows = self.state.sampling_rows(slots, features, position, empty, self._forbidden(self.start_masks([slot], 0)))
        chosen = choose(logits, rows, position[0])[:, None]
        remaining = self.state.limit[slots] - end
        done = self.state.done[slots]
        verdict = accept(chosen, empty, done.long() * 0, self.state.stop_ids[slots], remaining, done)
        self.state.commit(slots, chosen, verdict, pending=False)
        if self.head_on and not bool(verdict.done[0]):
            # at depth 0 too: a later round may draft, and then reads all of the head's entries
            head_hidden = self._fill([*prompt[start + 1 :], int(chosen[0, 0])], hidden, span)
            if depth:
                self._propose(slots, _tile(head_hidden[-1:]), [end], [table], depth, features)
        return self._reports([slot], chosen, verdict, verdict.num_committed * 0, logits, [logprobs])[0]

    def _fill(self, next_tokens: list[int], hidden: torch.Tensor, span: Span) -> torch.Tensor:
        assert self.model.head is not None
        return self.model.head.fill(torch.tensor(next_tokens, device=self.model.device), hidden, span)

    # -- the steps of a round ---------------------------------------------------------------------------------------

    def verify(self, batch: Batch) -> Verified:
        """The trunk over every sequence's last token and drafts."""
        state, width = self.state, batch.depth + 1
        slots = torch.tensor(batch.slots, device=self.model.device)
        masks = self.start_masks(batch.slots, batch.depth)
        starts, counts = state.length[slots].tolist(), state.pending_count[slots].tolist()
        window = Window.build(width, slots, starts, batch.tables, self.model.inv_freq)
        drafts = state.drafts[slots, : batch.depth]
        tokens = drafts.new_zeros(padded_rows(window.num_rows))
        tokens[: window.num_rows] = torch.cat((state.last_token[slots][:, None], drafts), dim=1).flatten()
        trace = (lambda name, rows: self._see(name, rows, window)) if self.observers else None
        hidden = self.model.trunk.rows(tokens, window, counts, trace)
        logits = self.model.trunk.logits(hidden)[: window.num_rows]
        self._see("logits", logits, window)
        return Verified(window, state.batch_features(batch.slots), drafts, hidden, logits, masks)

    def choose(self, verified: Verified) -> torch.Tensor:
        """The trunk's own token of every row, int64 [B, W]."""
        window = verified.window
        forbidden = self._forbidden(verified.masks)
        positions = (window.positions + 1).view(window.num_sequences, window.width)
        rows = self.state.sampling_rows(window.slots, verified.features, positions, verified.drafts, forbidden)
        if rows.counts is not None:
            self._see("history", rows.counts, window)
        chosen = choose(verified.logits, rows, positions.flatten())
        self._see("tokens", chosen, window)
        return chosen.view_as(positions)

    def accept(self, verified: Verified, chosen: torch.Tensor) -> tuple[Verdict, torch.Tensor]:
        """The verdict, and the number of drafts each sequence was offered; commits on the device."""
        state, slots = self.state, verified.window.slots
        offered = state.num_offered[slots].clamp(max=verified.drafts.shape[1])
        verdict = accept(
            chosen, verified.drafts, offered, state.stop_ids[slots], state.remaining(slots), state.done[slots]
        )
        state.commit(slots, chosen, verdict)
        return verdict, offered

    def repair(self, verified: Verified, chosen: torch.Tensor, verdict: Verdict) -> torch.Tensor:
        """The head over all window rows with the trunk's hidden states and tokens; its rows at the last accepted
        positions, padded to whole tiles."""
        assert self.model.head is not None
        window = verified.window
        tokens = chosen.new_zeros(len(verified.hidden))
        tokens[: window.num_rows] = chosen.flatten()
        hidden = self.model.head.repair(tokens, verified.hidden, window)
        self._see("head", hidden, window)
        first = torch.arange(window.num_sequences, device=tokens.device) * window.width
        return _tile(hidden[first + verdict.num_accepted])

    def draft(self, verified: Verified, head_hidden: torch.Tensor, depth: int, tables: list[list[int]]) -> None:
        """Drafts for the next round, drawn by each request's own rule and noise, into the state."""
        slots = verified.window.slots
        self._propose(slots, head_hidden, self.state.length[slots].tolist(), tables, depth, verified.features)

    def report(
        self, batch: Batch, verified: Verified, chosen: torch.Tensor, verdict: Verdict, offered: torch.Tensor
    ) -> list[SequenceReport]:
        """The round's outcome on the host; the one place that waits for the device."""
        return self._reports(batch.slots, chosen, verdict, offered, verified.logits, batch.logprobs)

    def settle_grammars(self, slots: list[int]) -> list[int]:
        """Those that a round can take now: what their grammars force is drafted in place of what the head drafted."""
        ready = [slot for slot in slots if self.grammar_steps.ready(slot)]
        for slot in ready:
            self.state.force_drafts(slot, self.grammar_steps.settle(slot))
        return ready

    def start_masks(self, slots: list[int], depth: int) -> Masks | None:
        """What grammars allow each row of a window over settled slots, computed on other threads while the trunk runs.
        None without a grammar."""
        return self.grammar_steps.masks(slots, depth)

    def _forbidden(self, masks: Masks | None) -> torch.Tensor | None:
        """Tokens that each row must not choose, bool [B * W, V]."""
        if masks is None:
            return None
        allowed = np.unpackbits(masks.result().view(np.uint8), axis=1, count=self.state.vocab_size, bitorder="little")
        return torch.from_numpy(allowed == 0).to(self.state.device)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [n, V] of a few rows."""
        return self.model.trunk.logits(_tile(hidden))[: len(hidden)]

    # -- shared -----------------------------------------------------------------------------------------------------

    def _propose(
        self,
        slots: torch.Tensor,
        hidden: torch.Tensor,
        lengths: list[int],
        tables: list[list[int]],
        depth: int,
        features: Features,
    ) -> None:
        assert self.model.head is not None
        state, batch = self.state, len(lengths)
        next_positions = torch.tensor(lengths, device=slots.device)[:, None] + 1
        drafts = next_positions.new_zeros((batch, depth))

        def choose_draft(rows: torch.Tensor, step: int) -> torch.Tensor:
            logits = self.model.draft_logits(rows)[:batch]
            positions = next_positions + step
            sampling = state.sampling_rows(slots, features, positions, drafts[:, :step])
            chosen = choose(logits, sampling, positions[:, 0])
            drafts[:, step] = chosen
            return chosen

        def step_window(step: int) -> Window:
            starts = [length + step - 1 for length in lengths]
            return Window.build(1, slots, starts, tables, self.model.inv_freq)

        frontier = Frontier(hidden, slots, lengths, state.history)
        proposed = self.model.head.propose(frontier, depth, choose_draft, step_window)
        state.set_drafts(slots, proposed.tokens, proposed.counts)
        self.observe("draft", proposed.tokens[:, :1], slots.tolist(), lengths)

    def _reports(
        self,
        slots: list[int],
        chosen: torch.Tensor,
        verdict: Verdict,
        offered: torch.Tensor,
        logits: torch.Tensor,
        logprobs: list[int | None],
    ) -> list[SequenceReport]:
        # argmax takes a NaN for the largest value: a row that has one has chosen it
        is_nan = logits.view(*chosen.shape, -1).gather(-1, chosen[..., None])[..., 0].isnan()
        fields = (chosen, verdict.num_committed, verdict.num_accepted, offered, verdict.stopped, verdict.done, is_nan)
        reports = []
        for b, (tokens, count, accepted, drafted, stopped, done, nan) in enumerate(
            zip(*(field.tolist() for field in fields), strict=True)
        ):
            first = b * chosen.shape[1]
            wanted = logprobs[b]
            probabilities = (
                None if wanted is None else token_logprobs(logits[first : first + count], tokens[:count], wanted)
            )
            kept, has_nan = tokens[:count], any(nan[:count])
            reports.append(
                SequenceReport(slots[b], kept, drafted, min(accepted, count), stopped, done, has_nan, probabilities)
            )
        self.advance_grammars(reports)
        return reports

    def advance_grammars(self, reports: list[SequenceReport]) -> None:
        """Starts each grammar on what was committed, and on the masks of the next round."""
        going = [report for report in reports if not report.done and report.slot in self.constraints]
        if not going:
            return
        drafts = self.state.drafts[[report.slot for report in going]].tolist()
        for report, own in zip(going, drafts, strict=True):
            constraint = self.constraints[report.slot]
            if constraint.error is None:
                self.grammar_steps.begin(report.slot, constraint, report.token_ids, own)

    def release_grammar(self, slot: int) -> None:
        """The slot's grammar is needed no more, or was another sequence's."""
        self.constraints.pop(slot, None)
        self.grammar_steps.release(slot)

    def _see(self, name: str, rows: torch.Tensor, window: Window) -> None:
        if self.observers:
            slots = window.slots.repeat_interleave(window.width).tolist()
            self.observe(name, rows[: window.num_rows], slots, window.positions.tolist())

    def observe(self, name: str, rows: torch.Tensor, slots: list[int], positions: list[int]) -> None:
        """Shows rows to all observers."""
        for observer in self.observers:
            observer(name, rows, slots, positions)


def _tile(rows: torch.Tensor) -> torch.Tensor:
    """Rows [n, H] followed by zero rows up to whole tiles."""
    return F.pad(rows, (0, 0, 0, padded_rows(len(rows)) - len(rows)))


def token_logprobs(logits: torch.Tensor, tokens: list[int], wanted: int) -> list[TokenLogprob]:
    """Of the raw logits, as vLLM's default is: before penalties and temperature."""
    table = logits.log_softmax(-1)
    top = table.sort(dim=-1, descending=True, stable=True)
    return [
        TokenLogprob(
            token,
            float(table[row, token]),
            list(zip(top.indices[row, :wanted].tolist(), top.values[row, :wanted].tolist(), strict=True)),
        )
        for row, token in enumerate(tokens)
    ]
