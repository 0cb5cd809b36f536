"""Accept and commit in one launch: how much of each window becomes text, and what every table then holds.

One program a sequence, integers only; meaning as in spec.accept: `accept`, `commit`, and the
counts of `offer`, which define it. B = sequences, W = window rows, K = W - 1. Launch-bound.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pilotfish.spec.accept import Verdicts
from pilotfish.spec.slots import BAD_SEQUENCES, PENALISED, THINKING, SlotState

_BAD_SEQUENCES = tl.constexpr(BAD_SEQUENCES)
_PENALISED = tl.constexpr(PENALISED)
_THINKING = tl.constexpr(THINKING)
_NEVER = tl.constexpr(1 << 40)


@triton.jit
def _first_position(token, id, count, cols, first):
    """The position of the first committed token that is `id`."""
    return tl.min(tl.where((token == id) & (cols < count), first + cols, _NEVER), 0)


@triton.jit(do_not_specialize=["W", "next_depth", "most_pending"])
def _accept_commit_kernel(
    chosen,
    slots,
    s,
    v,
    W,
    next_depth,
    most_pending,
    V: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    RECENT: tl.constexpr,
    HISTORY: tl.constexpr,
    PENDING: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_RECENT: tl.constexpr,
    PDL: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + b).to(tl.int64)
    length = tl.load(s.length + slot)
    limit = tl.load(s.limit + slot)
    was_done = tl.load(s.done + slot) != 0
    flags = tl.load(s.flags + slot)
    in_window = cols < W
    token = tl.load(chosen + b * W + cols, in_window, other=-3)
    draft = tl.load(s.drafts + slot * MAX_DEPTH + cols, cols < W - 1, other=-4)
    offered = tl.minimum(tl.load(s.num_offered + slot), W - 1)
    # the first row whose draft was not offered or is not the trunk's token
    accepted = tl.min(tl.where((token == draft) & (cols < offered), BLOCK, cols), 0)
    stop_ids = tl.load(s.stop_ids + slot * NUM_STOPS + tl.arange(0, NUM_STOPS))
    is_stop = tl.max((token[:, None] == stop_ids[None, :]).to(tl.int32), 1) > 0
    until_stop = tl.min(tl.where(is_stop, cols + 1, BLOCK), 0)
    remaining = limit - length - PENDING
    count = tl.minimum(tl.minimum(accepted + 1, until_stop), remaining)
    count = tl.where(was_done, 0, count)
    # the last committed column; none if nothing is committed
    is_last = cols == count - 1
    stopped = tl.max((is_last & is_stop).to(tl.int32), 0) > 0
    done = was_done | stopped | (count == remaining)
    first = length + PENDING
    after = length
    if PENDING:
        after = length + count
        tl.store(s.length + slot, after)
        before = tl.load(s.pending_count + slot)
        tl.store(s.pending_count + slot, tl.where(before + W <= most_pending, before, 0) + count)
    last = tl.where(count > 0, tl.sum(tl.where(is_last, token, 0), 0), tl.load(s.last_token + slot))
    tl.store(s.last_token + slot, last)
    tl.store(s.done + slot, done.to(tl.uint8))
    # drafts that could not be committed any more are not offered
    offer = tl.minimum(tl.minimum(tl.load(s.own_k + slot), next_depth), limit - after - 2)
    offer = tl.where(done, 0, tl.maximum(offer, 0))
    tl.store(s.num_offered + slot, offer)
    tl.store(v.num_accepted + b, accepted)
    tl.store(v.num_committed + b, count)
    tl.store(v.num_offered + b, offered)
    tl.store(v.stopped + b, stopped.to(tl.int64))
    tl.store(v.done + b, done.to(tl.int64))
    tl.store(v.head_row + b, (b * W + accepted).to(tl.int32))
    if s.history is not None:
        # rows past the committed ones are noise beyond the length, overwritten before they are read
        tl.store(s.history + slot * HISTORY + first + cols, token.to(tl.int32), in_window)
    committed = cols < count
    if flags & _PENALISED:
        # integers: the order of the additions does not show
        tl.atomic_add(s.counts + slot * V + token, tl.full((BLOCK,), 1, tl.int32), committed)
        tl.store(s.seen + slot * V + token, tl.full((BLOCK,), 1, tl.uint8), committed)
    if flags & _BAD_SEQUENCES:
        place = tl.arange(0, BLOCK_RECENT)
        inside = place < RECENT
        source = place + count
        old = tl.load(s.recent + slot * RECENT + source, inside & (source < RECENT), other=0)
        new = tl.load(chosen + b * W + source - RECENT, inside & (source >= RECENT), other=0)
        tl.debug_barrier()
        tl.store(s.recent + slot * RECENT + place, tl.where(source < RECENT, old, new), inside)
    if flags & _THINKING:
        opened = _first_position(token, tl.load(s.think_start + slot), count, cols, first)
        closed = _first_position(token, tl.load(s.think_end + slot), count, cols, first)
        tl.store(s.think_opened + slot, tl.minimum(tl.load(s.think_opened + slot), opened))
        tl.store(s.think_closed + slot, tl.minimum(tl.load(s.think_closed + slot), closed))


def accept_commit(
    chosen_R: torch.Tensor,
    slots_B: torch.Tensor,
    state: SlotState,
    verdicts: Verdicts,
    width: int,
    next_depth: int,
    pending: bool = True,
    most_pending: int = 0,
    pdl: bool = False,
) -> None:
    """Commits the chosen tokens (int64, row b * width + j) of slots_B (int32 or int64) into `state`, and fills
    `verdicts`.

    next_depth: drafts of the next round, of which as many are offered as a request's own k and limit allow. `pending`:
    the rows wait for replay and the length grows (not so after prefill). most_pending: see `spec.accept.rows_left`.
    Slots that are done commit nothing; several sequences may be the null slot, which must be done.
    """
    max_depth = state.drafts.shape[1]
    assert 1 <= width <= max_depth + 1 and 0 <= next_depth <= max_depth and len(chosen_R) >= len(slots_B) * width
    assert chosen_R.dtype == torch.int64 and chosen_R.is_contiguous()
    recent = state.recent.shape[1]
    _accept_commit_kernel[(len(slots_B),)](
        chosen_R,
        slots_B,
        state,
        verdicts,
        width,
        next_depth,
        most_pending,
        V=state.counts.shape[1],
        MAX_DEPTH=max_depth,
        NUM_STOPS=state.stop_ids.shape[1],
        RECENT=recent,
        HISTORY=0 if state.history is None else state.history.shape[1],
        PENDING=int(pending),
        BLOCK=max(16, triton.next_power_of_2(max_depth + 1)),
        BLOCK_RECENT=triton.next_power_of_2(recent),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
