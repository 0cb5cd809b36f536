"""Prefill beside device rounds: the first token by torch's operators, the first drafts by the round's own."""

from __future__ import annotations

import torch

from pilotfish.draft_heads.mtp.head import MtpHead
from pilotfish.engine.batch_state import BatchState, Features
from pilotfish.engine.device_round.body import RoundBody
from pilotfish.engine.device_round.mailbox import Mailbox
from pilotfish.engine.model.build import Model
from pilotfish.engine.runner import Runner


class Placement:
    """Puts slots and page tables where the round's operators read them."""

    def __init__(self, body: RoundBody):
        buffers, device = body.buffers, body.model.device
        self.slots, self.tables = buffers.slots, buffers.tables
        self._slot_mail = Mailbox((len(self.slots),), torch.int32, device)
        self._table_mail = Mailbox((self.tables.shape[1],), torch.int32, device)
        self._known: dict[int, list[int]] = {}

    def place(self, slots: list[int], tables: list[list[int]], size: int) -> None:
        """A batch, filled up to `size` with the null slot."""
        for slot, pages in zip(slots, tables, strict=True):
            # a list of pages is made for each sequence anew
            if self._known.get(slot) is not pages:
                self._table_mail.send(pages + [0] * (self.tables.shape[1] - len(pages)), self.tables[slot])
                self._known[slot] = pages
        self._slot_mail.send(slots + [0] * (size - len(slots)), self.slots)


class DeviceRunner(Runner):
    """A runner whose rounds are DeviceRounds'."""

    def __init__(self, model: Model, state: BatchState, head_on: bool, body: RoundBody):
        super().__init__(model, state, head_on)
        self.body, self.placement = body, Placement(body)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.empty((len(hidden), self.model.config.vocab_size), device=hidden.device)
        self.body.ops.linear(self.model.trunk.lm_head, hidden, logits)
        return logits

    def _propose(
        self,
        slots: torch.Tensor,
        hidden: torch.Tensor,
        lengths: list[int],
        tables: list[list[int]],
        depth: int,
        features: Features,
    ) -> None:
        if not isinstance(self.model.head, MtpHead):
            super()._propose(slots, hidden, lengths, tables, depth, features)
            return
        count, own = len(lengths), slots.tolist()
        self.placement.place(own, tables, count)
        self.body.buffers.head_hidden[:count] = hidden[:count]
        self.body.propose(count, depth)
        # offers them, within each request's own k and limit
        self.state.set_drafts(slots, self.state.drafts[slots, :depth])
        self.observe("draft", self.state.drafts[slots, :1], own, lengths)
