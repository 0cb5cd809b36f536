"""Drafts of a chosen quality: those of the text that comes anyway, wrong as often as asked, by a fixed seed.

The head runs as it always does, so that rounds cost what they cost; its drafts are then replaced. Whatever is drafted,
the text stays the same: that is what speculation here means, and it is checked by whoever uses this.
S = slots, L = positions, K = drafts.

Errors are spread evenly, not drawn: round c of slot s has the place u = (1/2 + c phi + s sqrt 2) mod 1, phi the golden
ratio, and its first j drafts are right where u < a_1 a_2 .. a_j. Of the rounds of a batch a share near a_1 .. a_j
accepts j drafts and more, as with independent draws, which over 200 rounds miss the length by 2.5 % (one deviation).
"""

from __future__ import annotations

import math

import torch

ROUND_STEP = (math.sqrt(5) - 1) / 2
SLOT_STEP = math.sqrt(2)
"""No multiples of each other: a lattice that fills 0..1 evenly, whether a batch is wide or long."""


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
    """`texts` int64 [S, L]: the token at each position of a slot's sequence, as far as it is known beforehand; then any
    tokens. `shares` fp64 [K]: of rounds, those whose first j drafts are right."""

    def __init__(self, num_slots: int, length: int, vocab_size: int, rates: list[float], device: torch.device):
        self.vocab_size = vocab_size
        generator = torch.Generator().manual_seed(0)
        # where a text is not known its drafts are wrong, and differ among each other as a text's do
        self._unknown = torch.randint(0, vocab_size, (length,), generator=generator).to(device)
        self.texts = torch.zeros((num_slots, length), dtype=torch.int64, device=device)
        self._known: dict[tuple[int, ...], list[int]] = {}
        self.shares = torch.tensor(rates, dtype=torch.float64, device=device).cumprod(0)
        self._steps = torch.arange(len(rates), device=device)
        # where each slot's next round stands in 0..1
        self._places = torch.zeros(num_slots, dtype=torch.float64, device=device)

    def tell(self, prompt: list[int], tokens: list[int]) -> None:
        """What follows a prompt."""
        self._known[tuple(prompt)] = tokens

    def admit(self, slot: int, prompt: list[int]) -> None:
        """See DraftSource."""
        text = (prompt + self._known[tuple(prompt)])[: self.texts.shape[1]]
        self.texts[slot] = self._unknown.roll(slot)
        self.texts[slot, : len(text)] = torch.tensor(text, device=self.texts.device)
        self._places[slot] = (0.5 + slot * SLOT_STEP) % 1

    def replace(self, drafts_SK: torch.Tensor, slots: torch.Tensor, length_S: torch.Tensor, depth: int) -> None:
        """Writes the next `depth` drafts of `slots`, whose next token stands after position length[slot]."""
        slots = slots.long()
        positions = length_S[slots][:, None] + 1 + self._steps[:depth]
        right = self.texts[slots[:, None], positions.clamp(max=self.texts.shape[1] - 1)]
        places = self._places[slots]
        is_right = places[:, None] < self.shares[:depth]
        drafts_SK[slots, :depth] = torch.where(is_right, right, (right + 1) % self.vocab_size)
        self._places[slots] = (places + ROUND_STEP) % 1
