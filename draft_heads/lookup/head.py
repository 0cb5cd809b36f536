"""The look-up head: what followed the newest tokens where they stood before in the same text. It has no weights.

Prompt look-up decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) with three choices of its own: the
longest match wins, the latest of equally long ones, and a match that runs into the end is read on in a circle, so that
text which repeats itself is drafted in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pilotfish.draft_heads.head import PromptRows, RoundPass


@dataclass(frozen=True)
class LookupHead:
    """Matches of `longest` newest tokens down to `shortest` count; without one nothing is drafted."""

    longest: int
    shortest: int

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"want 1 <= shortest <= longest, got {self.shortest} and {self.longest}")

    @property
    def caches(self) -> Sequence[Any]:
        return ()

    @property
    def reads_history(self) -> bool:
        return True

    def fill(self, prompt: PromptRows, next_tokens: torch.Tensor, hidden: torch.Tensor, span: Any) -> torch.Tensor:
        """See DraftHead; there is nothing to fill."""
        return hidden

    def enter(self, prompt: PromptRows, next_tokens: torch.Tensor, hidden: torch.Tensor, span: Any) -> None:
        """See DraftHead; there is nothing to store."""

    def record(self, round: RoundPass, count: int, width: int, depth: int, flags: int) -> None:
        """See DraftHead; there is nothing to repair. Reads the text so far, which the commit has written."""
        if depth:
            b = round.buffers
            round.ops.look_up(b.slots[:count], round.state, depth, self.longest, self.shortest, b.scratch)
