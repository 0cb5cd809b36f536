"""The trunk: embedding, layers of two kinds, final norm, lm_head. The residual stream is fp32.

R = rows of a decode window padded to whole tiles, T = rows of a prompt span, H = hidden, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from pilotfish.engine.cache.tensors import KvCache, RecurrentState
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.model.delta_net import GatedDeltaNet
from pilotfish.engine.model.mlp import DenseMlp, FusedMoeMlp, MoeMlp, SeeExperts
from pilotfish.engine.model.parallel import sum_over_ranks
from pilotfish.engine.model.window import Span, Window
from pilotfish.kernels.cuda.packing import PackedRows
from pilotfish.kernels.linear import AnyLinear
from pilotfish.kernels.norm import rms_norm

Trace = Callable[[str, torch.Tensor], None]
"""Sees named tensors of a decode window in the order they are computed, rows first; the audit compares runs by them."""

Embedding = torch.Tensor | PackedRows
"""[V, H]; `embedding[tokens]` are their rows."""


@dataclass(frozen=True)
class Norm:
    """An RMSNorm of the (1 + w) kind; `scale` fp32 [H] holds 1 + w. `prompt_kernels`: sums with their norms by one
    launch, in place of plain torch."""

    scale: torch.Tensor
    eps: float
    dtype: torch.dtype
    prompt_kernels: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.scale, self.eps, self.dtype)

    def of_sum(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """The norm of x + delta, which x fp32 [T, H] becomes."""
        if not self.prompt_kernels:
            return self(x.add_(delta))
        from pilotfish.kernels.cuda.norm import add_norm  # imports Triton

        normed = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        add_norm(x, delta, self.scale, self.eps, normed)
        return normed


@dataclass(frozen=True)
class Layer:
    """x + mixer(norm(x)), then x + mlp(norm(x)); fp32 in and out."""

    input_norm: Norm
    mixer: GatedAttention | GatedDeltaNet
    post_norm: Norm
    mlp: DenseMlp | MoeMlp | FusedMoeMlp

    def attention_rows(self, x: torch.Tensor, window: Window, cache: KvCache) -> torch.Tensor:
        """A full-attention layer over a window; the MTP head's layer is one too."""
        x = x + self.mix_attention(x, window, cache)
        return x + self.feed_forward(x, window)

    def mix_attention(self, x: torch.Tensor, window: Window, cache: KvCache) -> torch.Tensor:
        assert isinstance(self.mixer, GatedAttention)
        return sum_over_ranks(self.mixer.rows(self.input_norm(x), window, cache))

    def feed_forward(self, x: torch.Tensor, window: Window, see: SeeExperts | None = None) -> torch.Tensor:
        return sum_over_ranks(self.mlp.rows(self.post_norm(x), window.num_rows, see))

    def attention_bulk(self, x: torch.Tensor, span: Span, cache: KvCache, after: Norm) -> torch.Tensor:
        """A full-attention layer over a prompt span, all of it: the norm `after` of what x becomes."""
        assert isinstance(self.mixer, GatedAttention)
        mixed = self.mixer.bulk(self.input_norm(x), span, cache)
        return self.end_bulk(x, mixed, after)

    def end_bulk(self, x: torch.Tensor, mixed: torch.Tensor, after: Norm) -> torch.Tensor:
        """What follows the mixer over a prompt span; x becomes the layer's output, of which this is the norm."""
        normed = self.post_norm.of_sum(x, sum_over_ranks(mixed))
        if isinstance(self.mlp, FusedMoeMlp) and self.mlp.experts.as_packed:
            return self.mlp.bulk_into(x, normed, after.scale, after.eps)
        return after.of_sum(x, sum_over_ranks(self.mlp.bulk(normed)))

    def feed_forward_bulk(self, x: torch.Tensor) -> torch.Tensor:
        return sum_over_ranks(self.mlp.bulk(self.post_norm(x)))


@dataclass(frozen=True)
class Trunk:
    """`kv` (one cache a full layer, in order) and `state` hold every sequence."""

    embedding: Embedding
    layers: list[Layer]
    norm: Norm
    lm_head: AnyLinear
    kv: list[KvCache]
    state: RecurrentState

    def rows(
        self, tokens_R: torch.Tensor, window: Window, pending_counts: list[int], trace: Trace | None = None
    ) -> torch.Tensor:
        """Final-norm hidden [R, H] of a window; row-invariant.

        Replays each sequence's pending rows, stores that state once, runs on through the window without storing, and
        leaves the window's own rows pending.
        """
        states, histories = self.state.replay(window.slots, pending_counts)
        x = self.embed(tokens_R)
        pending: list[tuple[torch.Tensor, ...]] = []
        caches = iter(self.kv)
        for index, layer in enumerate(self.layers):
            if isinstance(layer.mixer, GatedAttention):
                mixed, kind = layer.mix_attention(x, window, next(caches)), "self_attn"
            else:
                state, history = states[len(pending)], histories[len(pending)]
                mixed, rows = layer.mixer.rows(layer.input_norm(x), window, state, history)
                mixed = sum_over_ranks(mixed)
                pending.append(rows)
                kind = "linear_attn"
            if trace is not None:
                trace(f"layers.{index}.{kind}", mixed)
            x = x + mixed
            out = layer.feed_forward(x, window, None if trace is None else partial(trace, f"layers.{index}.experts"))
            if trace is not None:
                trace(f"layers.{index}.mlp", out)
            x = x + out
        self.state.pending.store(window.slots, pending)
        return self.norm(x)

    def bulk(self, tokens_T: torch.Tensor, span: Span) -> torch.Tensor:
        """Final-norm hidden [T, H] of a prompt span; the slot's state and the pages hold it afterwards."""
        x = self.embed(tokens_T)
        caches, number = iter(self.kv), 0
        norms = [*(layer.input_norm for layer in self.layers), self.norm]
        normed = norms[0](x)
        for layer, after in zip(self.layers, norms[1:], strict=True):
            if isinstance(layer.mixer, GatedAttention):
                mixed = layer.mixer.bulk(normed, span, next(caches))
            else:
                mixed = layer.mixer.bulk(normed, self.state.s[number, span.slot], self.state.conv[number, span.slot])
                number += 1
            normed = layer.end_bulk(x, mixed, after)
        return normed

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token embeddings as the residual stream's fp32."""
        return self.embedding[tokens].float()

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """fp32 [R, V]; row-invariant, R a multiple of the tile."""
        return self.lm_head.rows(hidden_RH).float()
