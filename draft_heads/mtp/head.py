"""The MTP head: one decoder layer over [norm(embedding of the next token), norm(trunk hidden)], used recursively.

The hidden state is the trunk's after its final norm; from the second draft on it is the head's own output after
`mtp.norm` (DeepSeek-V3, arXiv:2412.19437, section 2.2, with one module). B = sequences, H = hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pilotfish.draft_heads.head import PromptRows, RoundPass
from pilotfish.kernels.linear import AnyLinear


@dataclass(frozen=True)
class MtpHead:
    """`layer` is a full-attention layer of the trunk's kind; `cache` its keys and values, on the same page tables."""

    fc: AnyLinear
    embedding_norm: Any
    hidden_norm: Any
    layer: Any
    norm: Any
    cache: Any

    @property
    def caches(self) -> Sequence[Any]:
        return (self.cache,)

    @property
    def reads_history(self) -> bool:
        return False

    def fill(self, prompt: PromptRows, next_tokens: torch.Tensor, hidden: torch.Tensor, span: Any) -> torch.Tensor:
        """See DraftHead."""
        return prompt.full_layer(self._read(prompt, next_tokens, hidden), self.layer, span, self.cache, self.norm)

    def enter(self, prompt: PromptRows, next_tokens: torch.Tensor, hidden: torch.Tensor, span: Any) -> None:
        """See DraftHead."""
        prompt.enter_layer(self._read(prompt, next_tokens, hidden), self.layer, span, self.cache)

    def _read(self, prompt: PromptRows, next_tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's input, fp32 [T, H]."""
        ops = prompt.ops
        embedded = ops.embed(prompt.model.trunk.embedding, next_tokens)
        pair = self.pair(ops.norm(embedded, self.embedding_norm), ops.norm(hidden, self.hidden_norm))
        return ops.product(self.fc, pair).float()

    def pair(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What fc multiplies, [T, 2H]."""
        return torch.cat((embedded, hidden), dim=-1)

    def record(self, round: RoundPass, count: int, width: int, depth: int, flags: int) -> None:
        """See DraftHead: one pass over all window rows, then drafts from the last accepted row on."""
        b, num_rows = round.buffers, count * width
        rows = round.ops.padded(num_rows)
        accepted = b.verdicts(count).head_row
        self.rows(round, b.chosen[:rows], b.first(rows).hidden, count, width, b.head_hidden[:count], accepted)
        round.see("head", b.x[:num_rows])
        round.mark("repair")
        self.propose(round, count, depth, flags)

    def propose(self, round: RoundPass, count: int, depth: int, flags: int) -> None:
        """Drafts from head_hidden on. Every one but the last appends one entry to the head's own cache."""
        b, rows = round.buffers, round.ops.padded(count)
        hidden = b.first(rows).head_hidden
        for number in range(depth):
            if number:
                round.plan(count, 1, number - 1)
                self.rows(round, b.draft[:rows], hidden, count, 1, hidden)
            round.choose_draft(count, number, flags)

    def rows(
        self, round: RoundPass, tokens: torch.Tensor, hidden: torch.Tensor, count: int, width: int, out: torch.Tensor,
        chosen: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """The head over count * width planned rows; its last norm, of all rows or those chosen, goes to `out`."""
        ops = round.ops
        v = round.buffers.first(ops.padded(count * width))
        ops.pair_norm(tokens, round.embedding, hidden, (self.embedding_norm, self.hidden_norm), v.pair)
        ops.linear(self.fc, v.pair, v.x)
        round.full_layer(self.layer, self.cache, count, width, self.norm, out, chosen)
