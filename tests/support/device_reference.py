"""The torch table's operators that decide, called as the kernels' launchers are: what those are held to."""

from __future__ import annotations

from typing import Any

import torch

from pilotfish.engine.round.batch_state import BatchState
from pilotfish.engine.round.torch_table import TorchOperators
from pilotfish.spec import accept
from pilotfish.spec.accept import Verdicts


class Reference:
    """`slots` is the tuple that launchers take."""

    def __init__(self, state: BatchState):
        self.state, self.slots = state, state.fields
        self.ops = TorchOperators()

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
        flags = self.state.flags_of(slots_B.tolist())
        given = (logits[:, : self.state.vocab_size], slots_B.long(), state, width, out, scratch, flags)
        self.ops.choose(*given, has_nan, allowed, kept, first, draft)

    def accept_commit(
        self,
        chosen_R: torch.Tensor,
        slots_B: torch.Tensor,
        state: Any,
        verdicts: Verdicts,
        width: int,
        next_depth: int,
        pending: bool = True,
        most_pending: int = 0,
    ) -> None:
        self.ops.most_pending = lambda width, num_sequences: most_pending  # type: ignore[method-assign]
        slots, flags = slots_B.long(), self.state.flags_of(slots_B.tolist())
        if pending:
            self.ops.accept_commit(chosen_R, slots, state, verdicts, width, next_depth, flags)
            return
        # after a prompt: no draft, and the length has moved already
        chosen, done = chosen_R.view(-1, 1), state.done[slots].bool()
        left = accept.remaining(state, slots) + 1
        offered = torch.zeros_like(left)
        verdict = accept.accept(chosen, chosen[:, :0], offered, state.stop_ids[slots], left, done)
        accept.commit(state, slots, chosen, verdict, flags, pending=False)
        accept.offer(state, slots, next_depth)
        rows = torch.arange(len(slots), device=slots.device) + verdict.num_accepted
        values = (verdict.num_accepted, verdict.num_committed, offered, verdict.stopped, verdict.done, rows)
        for target, value in zip(verdicts, values, strict=True):
            target.copy_(value)

    def look_up(
        self, slots_B: torch.Tensor, state: Any, depth: int, longest: int, shortest: int, scratch: Any = None
    ) -> None:
        self.ops.look_up(slots_B.long(), state, depth, longest, shortest, scratch)
