"""Drafts of a chosen quality: those of the text that comes anyway, wrong as often as asked, by a fixed seed.

The head runs as it always does, so that rounds cost what they cost; its drafts are then replaced. Whatever is drafted,
the text stays the same: that is what speculation here means, and it is checked by whoever uses this.
S = slots, L = positions, K = drafts.

Errors are spread evenly, not drawn (engine/round/synthetic.py).
"""

from __future__ import annotations

import torch

from pilotfish.engine.round.synthetic import Places


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
        self.places = Places(num_slots, rates, device)
        self._steps = torch.arange(len(rates), device=device)

    def tell(self, prompt: list[int], tokens: list[int]) -> None:
        """What follows a prompt."""
        self._known[tuple(prompt)] = tokens

    def admit(self, slot: int, prompt: list[int]) -> None:
        """See DraftSource."""
        text = (prompt + self._known[tuple(prompt)])[: self.texts.shape[1]]
        self.texts[slot] = self._unknown.roll(slot)
        self.texts[slot, : len(text)] = torch.tensor(text, device=self.texts.device)
        self.places.restart(slot)

    def replace(self, drafts_SK: torch.Tensor, slots: torch.Tensor, length_S: torch.Tensor, depth: int) -> None:
        """Writes the next `depth` drafts of `slots`, whose next token stands after position length[slot]."""
        slots = slots.long()
        positions = length_S[slots][:, None] + 1 + self._steps[:depth]
        right = self.texts[slots[:, None], positions.clamp(max=self.texts.shape[1] - 1)]
        is_right = self.places.next_round(slots, depth)
        drafts_SK[slots, :depth] = torch.where(is_right, right, (right + 1) % self.vocab_size)
