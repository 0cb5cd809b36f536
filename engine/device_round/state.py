"""The scheduler's view of every slot, `BatchState`, as the tuple of buffers that kernels take."""

from __future__ import annotations

import torch

from pilotfish.engine.batch_state import BatchState
from pilotfish.kernels.cuda.slots import SlotState


def slot_state(state: BatchState) -> SlotState:
    """Views of the same memory. `state` must be complete."""
    counts, seen, bias = state.counts, state.seen, state.bias
    bad, thinking = state.bad_sequences, state.thinking
    assert counts is not None and seen is not None and bias is not None and bad is not None and thinking is not None
    return SlotState(
        flags=state.flags,
        length=state.length,
        last_token=state.last_token,
        limit=state.limit,
        pending_count=state.pending_count,
        own_k=state.own_k,
        num_offered=state.num_offered,
        min_until=state.min_until,
        drafts=state.drafts,
        done=state.done.view(torch.uint8),
        stop_ids=state.stop_ids,
        seed=state.seed,
        choice=state.choice,
        top_k=state.top_k,
        temperature=state.temperature,
        top_p=state.top_p,
        min_p=state.min_p,
        repetition=state.repetition,
        presence=state.presence,
        frequency=state.frequency,
        counts=counts,
        seen=seen.view(torch.uint8),
        bias=bias,
        bad_prefixes=bad.prefixes,
        bad_lasts=bad.lasts,
        recent=bad.recent,
        think_start=thinking.start,
        think_end=thinking.end,
        think_budget=thinking.budget,
        think_opened=thinking.opened,
        think_closed=thinking.closed,
        num_closing=thinking.num_closing,
        closing=thinking.closing,
        history=state.history,
    )
