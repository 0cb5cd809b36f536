"""The operators of a device round in plain torch, over the CPU path's own modules: what their composition must give."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from pilotfish.engine.batch_state import BatchState
from pilotfish.kernels.activation import silu
from pilotfish.kernels.cuda import attention, delta_net, moe, norm, router
from pilotfish.kernels.linear import padded_rows
from tests.support.device_reference import Reference


class ReferenceOperators(Reference):
    """Takes the place of device_round.operators.Operators."""

    def __init__(self, state: BatchState):
        super().__init__(state)
        self.plan_rows = attention.plan_rows_reference
        self.embed_rows = norm.embed_rows_reference
        self.pair_norm = norm.pair_norm_reference
        self.add_norm = norm.add_norm_reference
        self.gdn_window = delta_net.gdn_window_reference
        self.attention_window = attention.attention_window_reference
        self.route = router.route_reference
        self.combine = moe.combine_reference

    def linear(self, weight: Any, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(weight.rows(_tiles(x))[: len(out)])

    def gate_up(self, mlp: Any, x: torch.Tensor, out: torch.Tensor) -> None:
        gate, up = mlp.gate_up.rows(_tiles(x))[: len(out)].chunk(2, dim=-1)
        out.copy_(silu(gate) * up)

    def experts(self, mlp: Any, x: torch.Tensor, ids: torch.Tensor, scratch: Any) -> torch.Tensor:
        rows, top_k = ids.shape
        parts = scratch.out[:rows]
        parts[:, top_k] = mlp.shared.rows(_tiles(x))[:rows]
        for row, chosen in enumerate(ids.tolist()):
            for rank, expert in enumerate(chosen):
                parts[row, rank] = mlp.experts[expert].rows(_tiles(x[row : row + 1]))[0]
        return parts


def _tiles(rows: torch.Tensor) -> torch.Tensor:
    return F.pad(rows, (0, 0, 0, padded_rows(len(rows)) - len(rows)))
