"""The memory of snapshots: recurrent states as they were at boundaries of prompts, copied from and to slots.

N = snapshots, L = linear layers, Hv = value heads, C = convolution channels, J = convolution width, H = hidden. Copies
run in the order of the device's stream: what a chunk leaves is copied after it, and before the slot goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pilotfish.engine.cache.tensors import RecurrentState


@dataclass(frozen=True)
class Snapshots:
    """Each is all that a sequence carries from chunk to chunk beside its pages: s [N, L, Hv, dk, dv] fp32, conv
    [N, L, J-1, C], last_hidden [N, H]. `state` are the slots.

    `sums` and `sums_on_host` [N] hold NaN where a state does, the latter once `copied` has happened.
    """

    state: RecurrentState
    s: torch.Tensor
    conv: torch.Tensor
    last_hidden: torch.Tensor
    sums: torch.Tensor
    sums_on_host: torch.Tensor
    copied: dict[int, torch.cuda.Event]

    @classmethod
    def empty(cls, state: RecurrentState, count: int) -> Snapshots:
        def like(slots: torch.Tensor, dim: int) -> torch.Tensor:
            shape = slots.shape[:dim] + slots.shape[dim + 1 :]
            return torch.full((count, *shape), float("nan"), dtype=slots.dtype, device=slots.device)

        on_gpu = state.s.device.type == "cuda"
        sums = torch.full((count,), float("nan"), device=state.s.device)
        on_host = torch.full((count,), float("nan"), pin_memory=on_gpu) if on_gpu else sums
        return cls(state, like(state.s, 1), like(state.conv, 1), like(state.last_hidden, 0), sums, on_host, {})

    @property
    def num_bytes(self) -> int:
        return self.s.nbytes + self.conv.nbytes + self.last_hidden.nbytes

    @torch.inference_mode()
    def save(self, number: int, source: Iterable[torch.Tensor]) -> None:
        """Copies a state, as RecurrentState.of_slot has it, and begins to look for NaN in it."""
        parts = self.s[number], self.conv[number], self.last_hidden[number]
        for part, own in zip(parts, source, strict=True):
            part.copy_(own)
        self.sums[number] = sum(part.sum(dtype=torch.float32) for part in parts)
        if self.sums.device.type == "cuda":
            self.sums_on_host[number].copy_(self.sums[number], non_blocking=True)
            self.copied[number] = torch.cuda.Event()
            self.copied[number].record()

    @torch.inference_mode()
    def load(self, number: int, slot: int) -> None:
        """Copies a snapshot to a slot."""
        parts = self.s[number], self.conv[number], self.last_hidden[number]
        for part, slots in zip(parts, self.state.of_slot(slot), strict=True):
            slots.copy_(part)

    def is_sound(self, number: int) -> bool:
        """Whether there is no NaN in what was saved last; waits until that is known."""
        if number in self.copied:
            self.copied.pop(number).synchronize()
        return not bool(self.sums_on_host[number].isnan())
