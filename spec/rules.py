"""Rules that depend on the tokens so far: penalties' histories, word bans, early stops, a spent thinking budget.

Row j of a window obeys what the sequence's own tokens and its drafts 1 .. j say, and the commit adds what was accepted,
so the text is the same for every k. On a device kernels.cuda.scores applies the rules and kernels.cuda.commit keeps
them; tests/support/small_operators.py (run by tests/unit/kernels/cuda and tests/gpu) holds both to these functions.
S = slots, B = sequences, W = rows of each, R = B * W, V = vocabulary, n = drafts that the last row has before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pilotfish.spec.slots import ANY, NEVER, NO_TOKEN, SlotState


@dataclass(frozen=True)
class Rows:
    """The last W of n + 1 rows of each sequence: row j is chosen after the committed tokens and drafts 0 .. n - W + j.

    slots [B]; `positions` int64 [B, W] are those that the rows' tokens will take; `drafts` int64 [B, n].
    """

    state: SlotState
    slots: torch.Tensor
    positions: torch.Tensor
    drafts: torch.Tensor

    @classmethod
    def of(cls, state: SlotState, slots_B: torch.Tensor, width: int, first: int = 0, offset: int = 1) -> Rows:
        """Rows that follow each sequence's committed tokens and drafts 0 .. first + j - 1. `offset` 1: a last token is
        committed and not in the caches; 0: none is, as after a prompt."""
        places = torch.arange(first + offset, first + offset + width, device=slots_B.device)
        positions = state.length[slots_B][:, None] + places
        return cls(state, slots_B, positions, state.drafts[slots_B, : first + width - 1])

    @property
    def width(self) -> int:
        return self.positions.shape[1]

    def each(self, parameter_S: torch.Tensor) -> torch.Tensor:
        """A slot's parameter for each row, [R, ...]."""
        values = parameter_S[self.slots]
        return values if self.width == 1 else values.repeat_interleave(self.width, 0)


def history(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """counts int32 [R, V] of generated tokens, seen bool [R, V] of those in prompt or output; drafts count too."""
    state, width, num_drafts = rows.state, rows.width, rows.drafts.shape[1]
    counts = state.counts[rows.slots][:, None].repeat(1, width, 1)
    shared = num_drafts + 1 - width
    for i in range(num_drafts):
        first = max(0, i + 1 - shared)
        draft = rows.drafts[:, i, None, None].expand(-1, width - first, 1)
        counts[:, first:].scatter_add_(2, draft, torch.ones_like(draft, dtype=torch.int32))
    seen = state.seen.view(torch.bool)[rows.slots][:, None] | (counts > 0)
    return counts.flatten(0, 1), seen.flatten(0, 1)


def early_stops(rows: Rows) -> torch.Tensor:
    """Stop ids of rows whose token would come before min_tokens, bool [R, V]."""
    vocab = rows.state.counts.shape[1]
    early = rows.positions < rows.state.min_until[rows.slots][:, None]
    ids = rows.state.stop_ids[rows.slots]
    # the padding id goes to a column of its own, cut off below
    mask = torch.zeros((len(ids), vocab + 1), dtype=torch.bool, device=ids.device)
    mask.scatter_(1, torch.where(ids < 0, vocab, ids), True)
    return (mask[:, None, :vocab] & early[..., None]).flatten(0, 1)


def banned_words(rows: Rows) -> torch.Tensor:
    """Last tokens of banned sequences whose other tokens stand before, bool [R, V]. Only generated tokens count, as in
    vLLM."""
    state, vocab = rows.state, rows.state.counts.shape[1]
    recent = state.recent[rows.slots]
    context = torch.cat((recent, rows.drafts), dim=1)
    before = context.unfold(1, recent.shape[1], 1)[:, -rows.width :, None]
    prefixes, lasts = state.bad_prefixes[rows.slots][:, None], state.bad_lasts[rows.slots][:, None]
    hits = ((prefixes == ANY) | (prefixes == before)).all(-1) & (lasts != NO_TOKEN)
    # what does not apply bans a token past the vocabulary
    ids = torch.where(hits, lasts, vocab)
    table = torch.zeros((*ids.shape[:2], vocab + 1), dtype=torch.bool, device=ids.device)
    return table.scatter_(2, ids, True)[..., :vocab].flatten(0, 1)


def forced(rows: Rows) -> torch.Tensor:
    """int64 [R]: the token that a spent thinking budget forces, NO_TOKEN where any may be chosen.

    From a position on, `think_budget` tokens after the block was opened (by the prompt, or by the first start id that
    is written), unless the end id was written before it, tokens are those of the closing sequence.
    """
    state, slots, drafts = rows.state, rows.slots, rows.drafts
    num_drafts = drafts.shape[1]
    places = rows.positions[:, -1:] - num_drafts + torch.arange(num_drafts, device=slots.device)

    def first(known: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        found = torch.where(drafts == ids[slots][:, None], places, NEVER)
        return torch.cat((known[slots][:, None], found), dim=1).cummin(1).values[:, -rows.width :]

    opened, closed = first(state.think_opened, state.think_start), first(state.think_closed, state.think_end)
    deadline = opened + 1 + state.think_budget[slots][:, None]
    step = rows.positions - deadline
    closing = state.closing[slots]
    token = closing.gather(1, step.clamp(0, closing.shape[1] - 1))
    in_force = (step >= 0) & (step < state.num_closing[slots][:, None]) & (closed >= deadline)
    return torch.where(in_force, token, NO_TOKEN).flatten()


def keep_history(state: SlotState, slots_B: torch.Tensor, chosen_BW: torch.Tensor, count_B: torch.Tensor) -> None:
    """Adds the first count_B tokens to the penalties' histories."""
    taken = torch.arange(chosen_BW.shape[1], device=slots_B.device) < count_B[:, None]
    counts = state.counts[slots_B].scatter_add_(1, chosen_BW, taken.int())
    state.counts[slots_B] = counts
    state.seen[slots_B] |= (counts > 0).view(torch.uint8)


def keep_recent(state: SlotState, slots_B: torch.Tensor, chosen_BW: torch.Tensor, count_B: torch.Tensor) -> None:
    """Adds the first count_B tokens to those that word bans look at."""
    tokens = torch.cat((state.recent[slots_B], chosen_BW), dim=1)
    places = count_B[:, None] + torch.arange(state.recent.shape[1], device=tokens.device)
    state.recent[slots_B] = tokens.gather(1, places)


def keep_thinking(
    state: SlotState, slots_B: torch.Tensor, chosen_BW: torch.Tensor, count_B: torch.Tensor, first_B: torch.Tensor
) -> None:
    """Notes where thinking blocks were opened and closed; row 0's token takes position first_B."""
    index = torch.arange(chosen_BW.shape[1], device=slots_B.device)
    for known, ids in ((state.think_opened, state.think_start), (state.think_closed, state.think_end)):
        is_one = (chosen_BW == ids[slots_B][:, None]) & (index < count_B[:, None])
        found = torch.where(is_one, first_B[:, None] + index, NEVER).amin(1)
        known[slots_B] = torch.minimum(known[slots_B], found)
