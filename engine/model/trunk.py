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
    """An RMSNorm of the (1 + w) kind; `scale` fp32 [H] holds 1 + w."""

    scale: torch.Tensor
    eps: float
    dtype: torch.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.scale, self.eps, self.dtype)


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

    def attention_bulk(self, x: torch.Tensor, span: Span, cache: KvCache) -> torch.Tensor:
        """A full-attention layer over a prompt span."""
        assert isinstance(self.mixer, GatedAttention)
        x = x + sum_over_ranks(self.mixer.bulk(self.input_norm(x), span, cache))
        return x + self.feed_forward_bulk(x)

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
        for layer in self.layers:
            if isinstance(layer.mixer, GatedAttention):
                x = layer.attention_bulk(x, span, next(caches))
                continue
            state, history = self.state.s[number, span.slot], self.state.conv[number, span.slot]
            mixed, after, inputs = layer.mixer.bulk(layer.input_norm(x), state, history)
            state.copy_(after)
            history.copy_(inputs)
            number += 1
            x = x + sum_over_ranks(mixed)
            x = x + layer.feed_forward_bulk(x)
        return self.norm(x)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token embeddings as the residual stream's fp32."""
        return self.embedding[tokens].float()

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """fp32 [R, V]; row-invariant, R a multiple of the tile."""
        return self.lm_head.rows(hidden_RH).float()
