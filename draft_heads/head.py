"""What a draft head offers. A head owns its cache; the trunk's embedding and lm_head are lent to it.

B = sequences, W = window rows, H = hidden, T = prompt rows, K = drafts. The pair (h_i, t_(i+1)) stands at position i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

ChooseDraft = Callable[[torch.Tensor, int], torch.Tensor]
"""(hidden rows padded to whole tiles, step 0..K-1) -> token ids [B]: lm_head and the requests' own sampling rule."""

StepWindow = Callable[[int], Any]
"""Step -> the one-row window that step's token of every sequence stands at."""


@dataclass(frozen=True)
class Frontier:
    """Where drafting starts: after each sequence's last committed token, at `positions`.

    hidden [R, H]: the rows (padded) that `fill` or `repair` gave at the positions before. `slots` int64 [B]; `history`
    int32 [slots, L] holds every slot's committed tokens by position, None unless the head reads it.
    """

    hidden: torch.Tensor
    slots: torch.Tensor
    positions: list[int]
    history: torch.Tensor | None = None


@dataclass(frozen=True)
class Drafts:
    """tokens int64 [B, K], of which the first counts[b] are meant (int64 [B]; None: all of them)."""

    tokens: torch.Tensor
    counts: torch.Tensor | None = None


class DraftHead(Protocol):
    """`fill` and `repair` return hidden rows; `propose` goes on from one of them per sequence.

    `caches`: keys and values that live on the trunk's page tables. `reads_history`: it wants Frontier.history.
    """

    @property
    def caches(self) -> Sequence[Any]: ...

    @property
    def reads_history(self) -> bool: ...

    def fill(self, next_tokens: torch.Tensor, hidden: torch.Tensor, span: Any) -> torch.Tensor:
        """Prompt rows [T, H]: the pairs of a span, next_tokens int64 [T]."""
        ...

    def repair(self, next_tokens: torch.Tensor, hidden: torch.Tensor, window: Any) -> torch.Tensor:
        """All rows of a verified window [R, H], with the trunk's hidden states and the trunk's own next tokens.

        Overwrites what drafting left there. Rows past the first rejection hold noise beyond the sequence's length.
        """
        ...

    def propose(self, frontier: Frontier, num_drafts: int, choose: ChooseDraft, step_window: StepWindow) -> Drafts:
        """At most num_drafts drafts for each sequence."""
        ...
