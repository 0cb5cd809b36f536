"""What `choose` and `accept_commit` of kernels.cuda mean, in plain torch on the CPU path's own code."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pilotfish.draft_heads.lookup.head import look_up
from pilotfish.engine.batch_state import BatchState
from pilotfish.engine.device_round.state import slot_state
from pilotfish.kernels.cuda.commit import Verdicts
from pilotfish.kernels.cuda.slots import MASKED
from pilotfish.spec import sampling
from pilotfish.spec.accept import accept


class Reference:
    """The operators' signatures, over the state they were given as a SlotState; that argument is ignored."""

    def __init__(self, state: BatchState):
        self.state, self.slots = state, slot_state(state)

    def choose(
        self,
        logits: torch.Tensor,
        slots_B: torch.Tensor,
        state: Any,
        width: int,
        out: torch.Tensor,
        scratch: Any = None,
        has_nan: torch.Tensor | None = None,
        allowed: torch.Tensor | None = None,
        kept: torch.Tensor | None = None,
        first: int = 0,
        draft: bool = False,
        filters: bool = True,
    ) -> None:
        state, slots = self.state, slots_B.long()
        rows, depth = len(slots) * width, first + width - 1
        values = logits[:rows].float()
        if kept is not None:
            # what was left out cannot be chosen
            values = values.new_full((rows, state.vocab_size), float("-inf"))
            values[:, kept.long()] = logits[:rows, : len(kept)].float()
        values = values[:, : state.vocab_size]
        positions = state.length[slots][:, None] + 1 + first + torch.arange(width, device=slots.device)
        features = state.batch_features(slots.tolist())
        assert filters or not (features.filtered or features.min_p)
        forbidden = None
        if allowed is not None:
            is_allowed = np.unpackbits(allowed[:rows].cpu().numpy().view(np.uint8), axis=1, bitorder="little")
            forbidden = torch.from_numpy(is_allowed == 0)[:, : state.vocab_size].to(values.device)
            forbidden &= ((state.flags[slots] & MASKED) != 0).repeat_interleave(width)[:, None]
        rules = state.sampling_rows(slots, features, positions, state.drafts[slots, :depth], forbidden)
        chosen = sampling.choose(values, rules, positions.flatten())
        out[:rows] = chosen
        if has_nan is not None:
            has_nan[:rows] = values.gather(1, chosen[:, None])[:, 0].isnan().to(has_nan.dtype)
        if draft:
            state.drafts[slots, first] = chosen

    def accept_commit(
        self,
        chosen_R: torch.Tensor,
        slots_B: torch.Tensor,
        state: Any,
        verdicts: Verdicts,
        width: int,
        next_depth: int,
        pending: bool = True,
    ) -> None:
        state, slots = self.state, slots_B.long()
        chosen = chosen_R[: len(slots) * width].view(-1, width)
        drafts = state.drafts[slots, : width - 1]
        offered = state.num_offered[slots].clamp(max=width - 1)
        remaining = state.remaining(slots) + (0 if pending else 1)
        verdict = accept(chosen, drafts, offered, state.stop_ids[slots], remaining, state.done[slots])
        state.commit(slots, chosen, verdict, pending=pending)
        state.set_drafts(slots, state.drafts[slots, :next_depth])
        rows = torch.arange(len(slots), device=slots.device) * width
        values = (verdict.num_accepted, verdict.num_committed, offered, verdict.stopped, verdict.done)
        for target, value in zip(verdicts, (*values, rows + verdict.num_accepted), strict=True):
            target.copy_(value)

    def look_up(
        self, slots_B: torch.Tensor, state: Any, depth: int, longest: int, shortest: int, scratch: Any = None
    ) -> None:
        state, slots = self.state, slots_B.long()
        assert state.history is not None
        drafts = look_up(state.history[slots], state.length[slots], depth, longest, shortest)
        state.set_drafts(slots, drafts.tokens, drafts.counts)
