"""Packed weights behind the faces that the rest of the model calls: products that return their result.

Captured rounds call the launchers themselves, on static buffers; prefill and checks come through here.
"""

from __future__ import annotations

import torch

from pilotfish.kernels.cuda import moe_prompt, router
from pilotfish.kernels.cuda.linear import MAX_ROWS, PackedLinear
from pilotfish.kernels.cuda.moe import GroupedExperts, Scratch, combine


class BulkScratch:
    """Memory for one expanded layer at a time, as large as the largest that asked."""

    def __init__(self, device: torch.device):
        self._memory = torch.empty(0, dtype=torch.bfloat16, device=device)

    def reserve(self, size: int) -> None:
        """Makes room for `size` numbers."""
        if size > self._memory.numel():
            self._memory = torch.empty(size, dtype=torch.bfloat16, device=self._memory.device)

    @property
    def memory(self) -> torch.Tensor:
        return self._memory

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes


class FusedLinear:
    """A product [N, K]; with gate and up packed together, silu(gate x) * up x."""

    def __init__(self, packed: PackedLinear, scratch: BulkScratch):
        self.packed, self.scratch = packed, scratch
        self.in_features, self.out_features, self.num_bytes = packed.in_features, packed.out_features, packed.num_bytes
        scratch.reserve(packed.scratch_size)

    def rows(self, x_RK: torch.Tensor) -> torch.Tensor:
        """[R, N] in x's dtype; row-invariant, any R."""
        out = torch.empty((len(x_RK), self.out_features), dtype=x_RK.dtype, device=x_RK.device)
        for start in range(0, len(x_RK), MAX_ROWS):
            self.packed.rows(x_RK[start : start + MAX_ROWS].contiguous(), out[start : start + MAX_ROWS])
        return out

    def bulk(self, x_TK: torch.Tensor) -> torch.Tensor:
        """[T, N] for prefill: any T."""
        return self.packed.bulk(x_TK, self.scratch.memory)


class FusedMlp:
    """down(silu(gate x) * up x)."""

    def __init__(self, gate_up: FusedLinear, down: FusedLinear):
        self.gate_up, self.down = gate_up, down

    def rows(self, x_RH: torch.Tensor) -> torch.Tensor:
        """[R, H], row-invariant."""
        return self.down.rows(self.gate_up.rows(x_RH))

    def bulk(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] for prefill."""
        return self.down.bulk(self.gate_up.bulk(x_TH))


class FusedExperts:
    """Routed experts and the shared one, weighted and summed in rank order."""

    def __init__(self, packed: GroupedExperts, scratch: BulkScratch):
        self.packed, self.scratch, self.num_bytes = packed, scratch, packed.num_bytes
        # by kernels that read them as they are packed; else expanded
        self.as_packed = packed.groups[0].gate_up.data.is_cuda and moe_prompt.takes(packed)
        if not self.as_packed:
            scratch.reserve(packed.scratch_size)

    def rows(
        self, x_RH: torch.Tensor, weights_Rk: torch.Tensor, ids_Rk: torch.Tensor, shared_gate_R: torch.Tensor
    ) -> torch.Tensor:
        """fp32 [R, H], row-invariant, R up to MAX_ROWS. ids int32."""
        packed, rows = self.packed, len(ids_Rk)
        total = torch.zeros((rows, packed.hidden), dtype=torch.float32, device=x_RH.device)
        scratch = Scratch.make(rows, packed.top_k, packed.num_experts, packed.width, packed.hidden, x_RH.device)
        combine(packed.rows(x_RH, ids_Rk, scratch), weights_Rk, shared_gate_R, total)
        return total

    def bulk(self, x_TH: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """fp32 [T, H] for prefill: any T. logits [T, E + 1]: the router's, the shared expert's gate last."""
        weights, ids, gate = self._route(logits)
        if self.as_packed:
            return moe_prompt.experts(self.packed, x_TH, weights, ids, gate)
        return self.packed.bulk(x_TH, weights, ids, gate, self.scratch.memory)

    def bulk_into(
        self, stream: torch.Tensor, x_TH: torch.Tensor, logits: torch.Tensor, scale: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds what `bulk` gives to the stream fp32 [T, H], if as_packed; x's dtype [T, H], the stream's norm."""
        assert self.as_packed
        weights, ids, gate = self._route(logits)
        normed = torch.empty_like(x_TH)
        combine(moe_prompt.parts(self.packed, x_TH, ids), weights, gate, stream, scale, eps, normed)
        return normed

    def _route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        (rows, _), top_k, device = logits.shape, self.packed.top_k, logits.device
        weights = torch.empty((rows, top_k), dtype=torch.float32, device=device)
        ids = torch.empty((rows, top_k), dtype=torch.int32, device=device)
        gate = torch.empty(rows, dtype=torch.float32, device=device)
        route = router.route if logits.is_cuda else router.route_reference
        route(logits, self.packed.num_experts, weights, ids, gate)
        return weights, ids, gate
