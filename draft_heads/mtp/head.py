"""The MTP head: one decoder layer over [norm(embedding of the next token), norm(trunk hidden)], used recursively.

The hidden state is the trunk's after its final norm; from the second draft on it is the head's own output after
`mtp.norm` (DeepSeek-V3, arXiv:2412.19437, section 2.2, with one module). B = sequences, R = padded rows, H = hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pilotfish.draft_heads.head import ChooseDraft, Drafts, Frontier, StepWindow
from pilotfish.kernels.linear import AnyLinear, padded_rows


class HeadNorm(Protocol):
    """An RMSNorm: `scale` fp32 [H] is 1 + w."""

    @property
    def scale(self) -> torch.Tensor: ...

    @property
    def eps(self) -> float: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class MtpHead:
    """`layer` is a full-attention layer of the trunk's kind; `cache` its keys and values, on the same page tables."""

    fc: AnyLinear
    embedding_norm: HeadNorm
    hidden_norm: HeadNorm
    layer: Any
    norm: HeadNorm
    embed: Callable[[torch.Tensor], torch.Tensor]
    cache: Any

    @property
    def caches(self) -> Sequence[Any]:
        return (self.cache,)

    @property
    def reads_history(self) -> bool:
        return False

    def fill(self, next_tokens: torch.Tensor, hidden: torch.Tensor, span: Any) -> torch.Tensor:
        """See DraftHead."""
        x = self.fc.bulk(self._pair(next_tokens, hidden)).float()
        normed: torch.Tensor = self.layer.attention_bulk(x, span, self.cache, self.norm)
        return normed

    def repair(self, next_tokens: torch.Tensor, hidden: torch.Tensor, window: Any) -> torch.Tensor:
        """See DraftHead. next_tokens int64 [R], hidden [R, H], both padded to whole tiles."""
        x = self.fc.rows(self._pair(next_tokens, hidden)).float()
        return self.norm(self.layer.attention_rows(x, window, self.cache))

    def propose(self, frontier: Frontier, num_drafts: int, choose: ChooseDraft, step_window: StepWindow) -> Drafts:
        """See DraftHead. Every step but the last appends one entry to the head's own cache."""
        hidden = frontier.hidden
        drafts = [choose(hidden, 0)]
        for step in range(1, num_drafts):
            tokens = drafts[-1].new_zeros(padded_rows(len(drafts[-1])))
            tokens[: len(drafts[-1])] = drafts[-1]
            hidden = self.repair(tokens, hidden, step_window(step))
            drafts.append(choose(hidden, step))
        return Drafts(torch.stack(drafts, dim=1))

    def _pair(self, next_tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.embedding_norm(self.embed(next_tokens)), self.hidden_norm(hidden)), dim=-1)
