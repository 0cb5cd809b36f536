"""A model's trunk and head over windows of any tokens, through the round's own body; nothing is chosen or committed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pilotfish.engine.model.build import Model
from pilotfish.engine.round.batch_state import BatchState
from pilotfish.engine.round.body import RoundBody
from pilotfish.engine.round.buffers import RoundBuffers
from pilotfish.engine.round.operators import Operators, operators_of
from pilotfish.engine.round.shapes import Shape, Sizes
from pilotfish.kernels.attention import PAGE

MAX_WIDTH, MAX_SEQUENCES = 9, 4


class Windows:
    """`body` of a round for a few sequences; `logits` are those of the last window's rows."""

    def __init__(self, model: Model, num_slots: int = 5, operators: Operators | None = None):
        ops = operators or operators_of(model)
        rows = ops.padded(MAX_SEQUENCES * MAX_WIDTH)
        num_pages = next(len(cache.k) for cache in (*model.trunk.kv, *(model.head.caches if model.head else ())))
        sizes = Sizes(num_slots, MAX_SEQUENCES, rows, MAX_WIDTH, num_pages * PAGE)
        self.model = model
        self.state = BatchState(num_slots, MAX_WIDTH - 1, model.config.vocab_size, model.device)
        self.body = RoundBody(model, self.state, RoundBuffers(model, sizes, ops), ops)
        self.logits = torch.empty(0)

    def place(self, slots: Sequence[int], starts: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        """Sequence b stands at starts[b] in its own slot and pages."""
        b = self.body.buffers
        b.slots[: len(slots)] = torch.tensor(slots)
        for slot, start, table in zip(slots, starts, tables, strict=True):
            b.tables[slot, : len(table)] = torch.tensor(table, dtype=b.tables.dtype)
            self.state.length[slot] = start

    @torch.inference_mode()
    def trunk(
        self,
        tokens_BW: torch.Tensor,
        slots: Sequence[int],
        starts: Sequence[int],
        tables: Sequence[Sequence[int]],
        pending: Sequence[int],
    ) -> torch.Tensor:
        """Final-norm hidden [B * W, H] of a window, after each sequence's pending rows."""
        batch, width = tokens_BW.shape
        self.place(slots, starts, tables)
        for slot, tokens, count in zip(slots, tokens_BW, pending, strict=True):
            self.state.last_token[slot], self.state.pending_count[slot] = tokens[0], count
            self.state.drafts[slot, : width - 1] = tokens[1:]
        self.body.verify(Shape(batch, width - 1))
        self.logits = self.body.buffers.logits[: batch * width].clone()
        return self.body.buffers.hidden[: batch * width].clone()

    @torch.inference_mode()
    def head(
        self,
        tokens_BW: torch.Tensor,
        hidden_BWH: torch.Tensor,
        slots: Sequence[int],
        starts: Sequence[int],
        tables: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """The MTP head's hidden [B, W, H] of a window of pairs."""
        (batch, width), body, b = tokens_BW.shape, self.body, self.body.buffers
        num_rows = batch * width
        rows = body.ops.padded(num_rows)
        self.place(slots, starts, tables)
        b.chosen[:num_rows], b.hidden[:num_rows] = tokens_BW.flatten(), hidden_BWH.flatten(0, 1)
        body.plan(batch, width, 0)
        self.model.head.rows(body, b.chosen[:rows], b.hidden[:rows], batch, width, b.head_hidden[:rows])
        return b.head_hidden[:num_rows].view(batch, width, -1).clone()

    @torch.inference_mode()
    def propose(
        self,
        hidden_BH: torch.Tensor,
        slots: Sequence[int],
        lengths: Sequence[int],
        tables: Sequence[Sequence[int]],
        depth: int,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Greedy drafts [B, K] from hidden rows on, and the rows that each was chosen from."""
        body, count, asked = self.body, len(slots), []
        self.place(slots, lengths, tables)
        body.buffers.head_hidden[:count] = hidden_BH
        choose = body.choose_draft

        def watched(count: int, number: int, flags: int) -> None:
            asked.append(body.buffers.head_hidden[:count].clone())
            choose(count, number, flags)

        body.choose_draft = watched  # type: ignore[method-assign]
        try:
            self.model.head.propose(body, count, depth, 0)
        finally:
            del body.choose_draft  # type: ignore[method-assign]
        return self.state.drafts[list(slots), :depth].clone(), asked
