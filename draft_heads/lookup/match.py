"""What followed the newest tokens where they stood before in the same text.

This is the definition; kernels.cuda.lookup carries it out on a CUDA device, and tests/support/small_operators.py holds
it to this. B = sequences, L = longest history, K = drafts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def look_up(
    history_BL: torch.Tensor, last_B: torch.Tensor, num_drafts: int, longest: int, shortest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts int64 [B, K] to follow history[b, : last[b] + 1], of which the first counts[b] are meant, int64 [B].

    What stands behind is not looked at. last: int64, in [0, L).
    """
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
    return torch.where(counts[:, None] > 0, tokens, 0), counts


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
