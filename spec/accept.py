"""Accept and commit: how much of a window becomes text, and what every slot then holds.

B = sequences, K = drafted tokens, W = K + 1 window rows. The rule is agreement: a draft is accepted iff it equals the
token the trunk itself chooses at that position (Leviathan et al. 2023, arXiv:2211.17192, with a shared random source).

This is the definition. On a CUDA device kernels.cuda.commit carries out `accept`, `commit` and `offer` in one launch;
tests/support/small_operators.py (run by tests/unit/kernels/cuda and tests/gpu) holds it to them, integer for integer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from pilotfish.spec import rules
from pilotfish.spec.slots import BAD_SEQUENCES, PENALISED, THINKING, SlotState


@dataclass(frozen=True)
class Verdict:
    """int64 [B] each: drafts accepted, and tokens committed (accepted + 1, fewer at a stop or the limit; 0 if done
    before). `stopped` and `done` bool [B]: the last committed token is a stop id; nothing more will be committed."""

    num_accepted: torch.Tensor
    num_committed: torch.Tensor
    stopped: torch.Tensor
    done: torch.Tensor


class Verdicts(NamedTuple):
    """What the host is told of a round, int64 [B] each, and `head_row` int32 [B]: b * W + num_accepted, the row of the
    head's repair pass that drafting goes on from. `stopped` and `done` are 0 or 1."""

    num_accepted: torch.Tensor
    num_committed: torch.Tensor
    num_offered: torch.Tensor
    stopped: torch.Tensor
    done: torch.Tensor
    head_row: torch.Tensor

    @classmethod
    def empty(cls, batch: int, device: torch.device | str) -> Verdicts:
        # at addresses of 16 bytes for every batch: Triton compiles anew for others
        rows = torch.zeros((5, batch + batch % 2), dtype=torch.int64, device=device)[:, :batch]
        accepted, committed, offered, stopped, done = rows
        return cls(accepted, committed, offered, stopped, done, torch.zeros(batch, dtype=torch.int32, device=device))


def accept(
    chosen_BW: torch.Tensor,
    drafts_BK: torch.Tensor,
    num_offered_B: torch.Tensor,
    stop_ids_BS: torch.Tensor,
    remaining_B: torch.Tensor,
    done_B: torch.Tensor,
) -> Verdict:
    """chosen: the trunk's token of every row. Drafts at or past num_offered[b] cannot match.

    stop_ids pad with -1; remaining: tokens the sequence may still commit, >= 1 unless done.
    """
    width = chosen_BW.shape[1]
    columns = torch.arange(width, device=chosen_BW.device)
    offered = columns[: width - 1] < num_offered_B[:, None]
    matches = (chosen_BW[:, : width - 1] == drafts_BK) & offered
    num_accepted = matches.long().cumprod(1).sum(1)
    is_stop = (chosen_BW[:, :, None] == stop_ids_BS[:, None, :]).any(-1)
    # tokens up to and with the first stop; a row without a stop id counts them all
    until_stop = (is_stop.long().cumsum(1) - is_stop.long() == 0).sum(1)
    num_committed = torch.minimum(torch.minimum(num_accepted + 1, until_stop), remaining_B)
    num_committed = torch.where(done_B, 0, num_committed)
    last = (num_committed - 1).clamp_(min=0)
    stopped = is_stop.gather(1, last[:, None])[:, 0] & (num_committed > 0)
    done = done_B | stopped | (num_committed == remaining_B)
    return Verdict(num_accepted, num_committed, stopped, done)


def rows_left(count: torch.Tensor, width: int, most_pending: int) -> torch.Tensor:
    """Of `count` pending rows those that still are when a window of `width` rows has passed: all, with the window's
    behind them, if they are no more than most_pending together; else none, for the state has taken them in."""
    return count * (count + width <= most_pending)


def commit(
    state: SlotState,
    slots_B: torch.Tensor,
    chosen_BW: torch.Tensor,
    verdict: Verdict,
    flags: int,
    pending: bool = True,
    most_pending: int = 0,
) -> None:
    """Appends each sequence's committed tokens; its drafts are used up.

    flags: the bits that any of the slots has. `pending`: the tokens' rows wait for replay and the length grows (not so
    after a prompt). most_pending: see `rows_left`.
    """
    count = verdict.num_committed
    last = chosen_BW.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
    state.last_token[slots_B] = torch.where(count > 0, last, state.last_token[slots_B])
    state.done[slots_B] = verdict.done.view(torch.uint8)
    state.num_offered[slots_B] = 0
    first = state.length[slots_B] + int(pending)
    if flags & PENALISED:
        rules.keep_history(state, slots_B, chosen_BW, count)
    if flags & BAD_SEQUENCES:
        rules.keep_recent(state, slots_B, chosen_BW, count)
    if flags & THINKING:
        rules.keep_thinking(state, slots_B, chosen_BW, count, first)
    if state.history is not None:
        # rows past the committed ones are noise beyond the length, overwritten before they are read
        places = first[:, None] + torch.arange(chosen_BW.shape[1], device=slots_B.device)
        state.history[slots_B[:, None], places] = chosen_BW.int()
    if pending:
        state.length[slots_B] = first - 1 + count
        state.pending_count[slots_B] = rows_left(state.pending_count[slots_B], chosen_BW.shape[1], most_pending) + count


def remaining(state: SlotState, slots_B: torch.Tensor) -> torch.Tensor:
    """Tokens that each sequence may still commit, int64 [B]; its last token, not yet in the caches, is counted."""
    return state.limit[slots_B] - state.length[slots_B] - 1


def offer(state: SlotState, slots_B: torch.Tensor, depth: int, counts_B: torch.Tensor | None = None) -> None:
    """Offers the next round `depth` drafts or counts_B, within each request's own k, and never those that could not be
    committed any more."""
    offered = torch.minimum(state.own_k[slots_B].clamp(max=depth), remaining(state, slots_B) - 1)
    if counts_B is not None:
        offered = torch.minimum(offered, counts_B)
    state.num_offered[slots_B] = torch.where(state.done[slots_B].view(torch.bool), 0, offered.clamp_(min=0))
