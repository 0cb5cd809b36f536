"""The same modules with weights in the order of the GPU kernels: no other copy of them is kept."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import torch

from pilotfish.engine.checkpoint.load import Weight
from pilotfish.engine.errors import LayoutError
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.model.build import Builder, Model
from pilotfish.engine.model.delta_net import GatedDeltaNet
from pilotfish.engine.model.mlp import DenseMlp, FusedMoeMlp
from pilotfish.engine.model.trunk import Embedding, Norm
from pilotfish.kernels.cuda import attention, delta_net
from pilotfish.kernels.cuda.delta_prefill import is_installed
from pilotfish.kernels.cuda.linear import PackedLinear
from pilotfish.kernels.cuda.modules import BulkScratch, FusedExperts, FusedLinear, FusedMlp
from pilotfish.kernels.cuda.moe import ExpertWeights, GroupedExperts
from pilotfish.kernels.cuda.packing import PackedRows
from pilotfish.kernels.linear import AnyLinear

logger = logging.getLogger(__name__)


class FusedBuilder(Builder):
    """Packs each product once; the parts are let go as they are packed.

    Raises LayoutError for sizes or weights that the kernels do not hold.
    """

    def model(self, draft_ids: Sequence[int] | None = None) -> Model:
        self.scratch = BulkScratch(self.device)
        self.prompt_kernels = self.device.type == "cuda" and is_installed()
        if not self.prompt_kernels:
            logger.warning("prompts run through GatedDeltaNet by plain torch: fla-core is missing (the extra `gpu`)")
        try:
            self.check_sizes()
            return super().model(draft_ids)
        except ValueError as error:
            raise LayoutError(f"fused kernels: {error}; --kernels torch serves it") from error

    def check_sizes(self) -> None:
        config = self.config
        attention.check_sizes(
            config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rotary_dim
        )
        delta_net.check_sizes(
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            config.linear_conv_kernel_dim,
        )

    def product(self, parts: Sequence[Weight]) -> AnyLinear:
        return FusedLinear(PackedLinear(self.packable(parts)), self.scratch)

    def tied(self, embedding: torch.Tensor) -> tuple[Embedding, AnyLinear]:
        """lm_head's order is the only one that is kept."""
        packed = PackedLinear(self.packable([embedding]))
        return PackedRows(packed.ranges[0], embedding.shape[1]), FusedLinear(packed, self.scratch)

    def norm(self, name: str) -> Norm:
        return dataclasses.replace(super().norm(name), prompt_kernels=self.device.type == "cuda")

    def attention(self, name: str) -> GatedAttention:
        return dataclasses.replace(super().attention(name), prompt_kernels=self.device.type == "cuda")

    def delta_net(self, name: str) -> GatedDeltaNet:
        return dataclasses.replace(super().delta_net(name), prompt_kernels=self.prompt_kernels)

    def dense(self, name: str) -> DenseMlp:
        gate, up, down = self.packable([self.take(f"{name}.{part}_proj.weight") for part in ("gate", "up", "down")])
        gate_up = FusedLinear(PackedLinear([gate, up], swiglu=True), self.scratch)
        return DenseMlp(FusedMlp(gate_up, FusedLinear(PackedLinear([down]), self.scratch)))

    def moe(self, name: str) -> FusedMoeMlp:
        router, top_k = self.router(name), self.config.num_experts_per_tok
        experts = [self.expert(f"{name}.experts.{i}") for i in range(len(router[0]))]
        packed = GroupedExperts(experts, self.expert(f"{name}.shared_expert"), top_k)
        return FusedMoeMlp(self.product(router), FusedExperts(packed, self.scratch), top_k)

    def expert(self, name: str) -> ExpertWeights:
        names = (f"{name}.{part}_proj.weight" for part in ("gate", "up", "down"))
        return ExpertWeights(*self.packable([self.take(full) for full in names]))

    def packable(self, parts: Sequence[Weight]) -> list[Weight]:
        """Plain parts in the dtype that kernels multiply."""
        return [part.to(self.device, self.dtype) if isinstance(part, torch.Tensor) else part for part in parts]
