"""The look-up head: what followed the newest tokens where they stood before in the same text. It has no weights.

Prompt look-up decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) with three choices of its own: the
longest match wins, the latest of equally long ones, and a match that runs into the end is read on in a circle, so that
text which repeats itself is drafted in full. B = sequences, L = longest history, K = drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from pilotfish.draft_heads.head import ChooseDraft, Drafts, Frontier, StepWindow


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

    def fill(self, next_tokens: torch.Tensor, hidden: torch.Tensor, span: Any) -> torch.Tensor:
        """See DraftHead; there is nothing to fill."""
        return hidden

    def repair(self, next_tokens: torch.Tensor, hidden: torch.Tensor, window: Any) -> torch.Tensor:
        """See DraftHead; there is nothing to repair."""
        return hidden

    def propose(self, frontier: Frontier, num_drafts: int, choose: ChooseDraft, step_window: StepWindow) -> Drafts:
        """See DraftHead. Reads the history alone; never waits for the device."""
        assert frontier.history is not None
        last = torch.tensor(frontier.positions, device=frontier.slots.device)
        history = frontier.history[frontier.slots, : max(frontier.positions) + 1]
        return look_up(history, last, num_drafts, self.longest, self.shortest)


def look_up(history_BL: torch.Tensor, last_B: torch.Tensor, num_drafts: int, longest: int, shortest: int) -> Drafts:
    """Drafts to follow history[b, : last[b] + 1]; what stands behind is not looked at. last: int64, in [0, L)."""
    width = history_BL.shape[1]
    places = torch.arange(width, device=history_BL.device)
    lengths = _match_lengths(history_BL, last_B, longest)
    lengths = torch.where(places < last_B[:, None], lengths, 0)
    best, end = (lengths * width + places).max(dim=1)
    counts = torch.where(torch.div(best, width, rounding_mode="floor") >= shortest, num_drafts, 0)
    steps = torch.arange(num_drafts, device=history_BL.device)
    # the tokens behind the match, again from its start once they have been used up
    period = (last_B - end).clamp(min=1)
    sources = end[:, None] + 1 + steps % period[:, None]
    tokens = history_BL.gather(1, sources.clamp(max=width - 1)).long()
    return Drafts(torch.where(counts[:, None] > 0, tokens, 0), counts)


def _match_lengths(history_BL: torch.Tensor, last_B: torch.Tensor, longest: int) -> torch.Tensor:
    """int64 [B, L]: how many tokens that end at each place equal the newest ones, at most `longest`."""
    width = history_BL.shape[1]
    running = torch.ones_like(history_BL, dtype=torch.bool)
    lengths = torch.zeros_like(history_BL, dtype=torch.int64)
    for back in range(longest):
        wanted = history_BL.gather(1, (last_B - back).clamp(min=0)[:, None])
        shifted = F.pad(history_BL, (back, 0), value=-1)[:, :width]
        running &= (shifted == wanted) & (last_B >= back)[:, None]
        lengths += running
    return lengths
