"""The same modules with weights in the order of the GPU kernels: no other copy of them is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from pilotfish.engine.checkpoint.load import Weight
from pilotfish.engine.errors import LayoutError
from pilotfish.engine.model.build import Builder, Model
from pilotfish.engine.model.mlp import PackedMoeMlp
from pilotfish.engine.model.trunk import Embedding
from pilotfish.kernels.cuda import attention, delta_net, moe_prompt
from pilotfish.kernels.cuda.linear import PackedLinear
from pilotfish.kernels.cuda.moe import ExpertWeights, GroupedExperts
from pilotfish.kernels.cuda.packing import PackedRows
from pilotfish.kernels.cuda.scratch import BulkScratch
from pilotfish.kernels.moe import GatedMlp


class FusedBuilder(Builder):
    """Packs each product once; the parts are let go as they are packed.

    Raises LayoutError for sizes or weights that the kernels do not hold.
    """

    def model(self, draft_ids: Sequence[int] | None = None) -> Model:
        self.scratch = BulkScratch(self.device)
        try:
            self.check_sizes()
            return dataclasses.replace(super().model(draft_ids), scratch=self.scratch)
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

    def product(self, parts: Sequence[Weight], num_segments: int = 0) -> PackedLinear:
        return self.packed(self.packable(parts), segments=num_segments)

    def vocabulary(self, lm_head: Weight) -> PackedLinear:
        """Reserves little scratch for it: no prompt expands it, and who does takes what the layers have."""
        product = PackedLinear(self.packable([lm_head]))
        self.scratch.reserve(product.least_scratch)
        return product

    def packed(self, parts: Sequence[Weight], swiglu: bool = False, segments: int = 0) -> PackedLinear:
        product = PackedLinear(parts, swiglu, segments)
        self.scratch.reserve(product.scratch_size)
        return product

    def tied(self, embedding: torch.Tensor) -> tuple[Embedding, PackedLinear]:
        """lm_head's order is the only one that is kept."""
        packed = self.vocabulary(embedding)
        return PackedRows(packed.ranges[0], embedding.shape[1]), packed

    def dense_mlp(self, name: str) -> GatedMlp:
        gate_up = self.packable([self.take(f"{name}.{part}_proj.weight") for part in ("gate", "up")])
        return GatedMlp(self.packed(gate_up, swiglu=True), self.row_parallel(f"{name}.down_proj"))

    def moe(self, name: str) -> PackedMoeMlp:
        router, top_k = self.router(name), self.config.num_experts_per_tok
        experts = [self.expert(f"{name}.experts.{i}") for i in range(len(router[0]))]
        packed = GroupedExperts(experts, self.expert(f"{name}.shared_expert"), top_k)
        if not (self.device.type == "cuda" and moe_prompt.takes(packed)):
            self.scratch.reserve(packed.scratch_size)
        return PackedMoeMlp(self.product(router), packed, top_k)

    def expert(self, name: str) -> ExpertWeights:
        names = (f"{name}.{part}_proj.weight" for part in ("gate", "up", "down"))
        return ExpertWeights(*self.packable([self.take(full) for full in names]))

    def packable(self, parts: Sequence[Weight]) -> list[Weight]:
        """Plain parts in the dtype that kernels multiply."""
        return [part.to(self.device, self.dtype) if isinstance(part, torch.Tensor) else part for part in parts]
