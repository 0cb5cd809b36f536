"""Drafts of a chosen quality: those of the text that comes anyway, wrong as often as asked, by a fixed seed.

The head runs as it always does, so that rounds cost what they cost; its drafts are then replaced. Whatever is drafted,
the text stays the same: that is what speculation here means, and it is checked by whoever uses this.
S = slots, L = positions, K = drafts.
"""

from __future__ import annotations

import torch


def acceptance_rate(length: float, depth: int) -> float:
    """The chance a with which each draft must be right for 1 + a + a^2 + .. + a^depth = length tokens a round."""
    if not 1 <= length <= depth + 1:
        raise ValueError(f"want an acceptance length in 1..{depth + 1} for k = {depth}, got {length}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        reached = sum(middle**j for j in range(depth + 1))
        low, high = (middle, high) if reached < length else (low, middle)
    return (low + high) / 2


class Oracle:
    """`texts` int64 [S, L]: the token at each position of a slot's sequence, known beforehand."""

    def __init__(self, num_slots: int, length: int, vocab_size: int, rates: list[float], device: torch.device):
        self.vocab_size = vocab_size
        self.texts = torch.zeros((num_slots, length), dtype=torch.int64, device=device)
        self._known: dict[tuple[int, ...], list[int]] = {}
        self.rates = torch.tensor(rates, device=device)
        generator = torch.Generator(device).manual_seed(0)
        self._luck = torch.rand((length, len(rates)), generator=generator, device=device)

    def tell(self, prompt: list[int], tokens: list[int]) -> None:
        """What follows a prompt."""
        self._known[tuple(prompt)] = tokens

    def admit(self, slot: int, prompt: list[int]) -> None:
        """See DraftSource."""
        text = (prompt + self._known[tuple(prompt)])[: self.texts.shape[1]]
        self.texts[slot, : len(text)] = torch.tensor(text, device=self.texts.device)

    def replace(self, drafts_SK: torch.Tensor, slots: torch.Tensor, length_S: torch.Tensor, depth: int) -> None:
        """Writes the next `depth` drafts of `slots`, whose next token stands after position length[slot]."""
        slots = slots.long()
        start = length_S[slots][:, None] + 1
        places = (start + torch.arange(depth, device=slots.device)).clamp(max=self.texts.shape[1] - 1)
        right = self.texts[slots].gather(1, places)
        luck = self._luck[start[:, 0].clamp(max=len(self._luck) - 1), :depth]
        drafts_SK[slots, :depth] = torch.where(luck < self.rates[:depth], right, (right + 1) % self.vocab_size)
