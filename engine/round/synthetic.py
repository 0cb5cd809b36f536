"""Acceptance by decree, for servers of random weights: what a round accepts follows from a chosen length, not from a
model. The text means nothing then, and is another one at each k.

Whether a draft counts as right is spread evenly, not drawn: round c of slot s has the place u = (1/2 + c phi + s sqrt
2) mod 1, phi the golden ratio, and its first j drafts are right where u < a_1 a_2 .. a_j. Of a batch's rounds a share
near a_1 .. a_j accepts j drafts and more, as with independent draws, which over 200 rounds miss the length by 2.5 %.
S = slots, B = sequences, W = window rows, K = drafts.
"""

from __future__ import annotations

import math

import torch

from pilotfish.spec.slots import MASKED, SlotState

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


class Places:
    """Which drafts of each slot's next round are right. `rates`: of each draft, if those before it are right."""

    def __init__(self, num_slots: int, rates: list[float], device: torch.device):
        # of rounds, those whose first j drafts are right
        self.shares = torch.tensor(rates, dtype=torch.float64, device=device).cumprod(0)
        self._places = ((0.5 + SLOT_STEP * torch.arange(num_slots, dtype=torch.float64)) % 1).to(device)

    def restart(self, slot: int) -> None:
        """A new sequence has got this slot."""
        self._places[slot] = (0.5 + slot * SLOT_STEP) % 1

    def next_round(self, slots: torch.Tensor, depth: int) -> torch.Tensor:
        """bool [B, depth], true up to the first that is wrong; `slots` int64."""
        places = self._places[slots]
        self._places[slots] = (places + ROUND_STEP) % 1
        return places[:, None] < self.shares[:depth]


class SyntheticAcceptance:
    """Makes the trunk's choices those of the drafts that are to be accepted. Looks at nothing on the host, and is
    captured with the round."""

    def __init__(self, num_slots: int, length: float, depth: int, vocab_size: int, device: torch.device):
        self.places = Places(num_slots, [acceptance_rate(length, depth)] * depth, device)
        self.vocab_size = vocab_size

    def impose(self, chosen: torch.Tensor, slots: torch.Tensor, state: SlotState, width: int) -> None:
        """Overwrites what was chosen, int64 [B * W]: of a window's first rows by its drafts, as many as are accepted,
        and never by the next one. A sequence with a grammar keeps what its trunk chose."""
        if width == 1:
            return
        slots = slots.long()
        window, drafts = chosen.view(-1, width)[:, :-1], state.drafts[slots, : width - 1]
        agreed = self.places.next_round(slots, width - 1)
        other = torch.where(window == drafts, (drafts + 1) % self.vocab_size, window)
        is_free = (state.flags[slots] & MASKED == 0)[:, None]
        window.copy_(torch.where(is_free, torch.where(agreed, drafts, other), window))
