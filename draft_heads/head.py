"""What a draft head offers. A head owns its cache; the trunk's embedding and lm_head are lent to it.

B = sequences, W = window rows, H = hidden, T = prompt rows, K = drafts. The pair (h_i, t_(i+1)) stands at position i.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

ChooseDraft = Callable[[torch.Tensor, int], torch.Tensor]
"""(hidden rows padded to whole tiles, step 0..K-1) -> token ids [B]: lm_head and the requests' own sampling rule."""

StepWindow = Callable[[int], Any]
"""Step -> the one-row window that step's token of every sequence stands at."""


class DraftHead(Protocol):
    """`fill` and `repair` return the head's hidden rows; `propose` goes on from one of them per sequence."""

    def fill(self, next_tokens: torch.Tensor, hidden: torch.Tensor, span: Any) -> torch.Tensor:
        """Prompt rows [T, H]: the pairs of a span, next_tokens int64 [T]."""
        ...

    def repair(self, next_tokens: torch.Tensor, hidden: torch.Tensor, window: Any) -> torch.Tensor:
        """All rows of a verified window [R, H], with the trunk's hidden states and the trunk's own next tokens.

        Overwrites what drafting left there. Rows past the first rejection hold noise beyond the sequence's length.
        """
        ...

    def propose(
        self, hidden: torch.Tensor, num_drafts: int, choose: ChooseDraft, step_window: StepWindow
    ) -> torch.Tensor:
        """Drafts int64 [B, K] from the rows (padded) that `repair` gave at each sequence's last accepted position."""
        ...
