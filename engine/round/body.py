"""The round's operators in order, over static buffers: verify, decide, and the head's own part.

Nothing here waits for the device, allocates, or looks at a value, so that with a table of kernels each part can be
captured once for a shape and replayed.
B = sequences, W = window rows, R = B * W, P = R as the table pads it, H = hidden, V = vocabulary, S = slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pilotfish.engine.cache.tensors import KvCache
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.model.build import Model
from pilotfish.engine.model.delta_net import GatedDeltaNet
from pilotfish.engine.model.parallel import sum_over_ranks
from pilotfish.engine.model.trunk import Embedding, Layer, Norm
from pilotfish.engine.round.batch_state import BatchState
from pilotfish.engine.round.buffers import RoundBuffers
from pilotfish.engine.round.operators import Operators, Rows
from pilotfish.engine.round.shapes import Shape
from pilotfish.kernels.moe import GatedMlp

Trace = Callable[[str, torch.Tensor], None]
"""Sees named rows [R, ...] in the order they are computed; the audit compares runs by them."""


def unmarked(phase: str) -> None:
    """Takes no note of the end of a phase: nobody times this round."""


class RoundBody:
    """The round's parts; also what a draft head gets to record its part with: draft_heads.head.RoundPass.

    `trace` sees rows as they are computed, `mark` the end of each phase; both only while nothing is captured.
    """

    def __init__(self, model: Model, batch_state: BatchState, buffers: RoundBuffers, operators: Operators):
        self.model, self.buffers, self.ops = model, buffers, operators
        self.batch_state, self.state = batch_state, batch_state.fields
        self._one = torch.ones(1, dtype=torch.int64, device=model.device)
        self.trace: Trace | None = None
        self.mark: Callable[[str], None] = unmarked

    # -- parts ------------------------------------------------------------------------------------------------------

    def verify(self, shape: Shape) -> None:
        """The trunk over all window rows: hidden states, logits, keys and values; leaves the rows pending."""
        trunk, b, state, ops = self.model.trunk, self.buffers, self.state, self.ops
        count, width, num_rows = shape.num_sequences, shape.width, shape.num_rows
        slots, rows = b.slots[:count], ops.padded(shape.num_rows)
        v, first = b.first(rows), trunk.layers[0].input_norm
        self.plan(count, width, 0)
        ops.embed_rows(trunk.embedding, first, slots, state, width, b.tokens[:rows], v.x, v.h, b.scratch)
        ops.replay(slots, state, trunk.state, b.scratch)
        caches, number, norms = iter(trunk.kv), 0, trunk.norms_after()
        for index, (layer, after) in enumerate(zip(trunk.layers, norms, strict=True)):
            if isinstance(layer.mixer, GatedAttention):
                kind = "self_attn"
                self._attention(layer.mixer, next(caches), count, width, settled=True)
            else:
                kind = "linear_attn"
                self._delta_net(layer.mixer, number, count, width)
                number += 1
            mixed = sum_over_ranks(v.delta)
            if self.is_watched:
                self.see(f"layers.{index}.{kind}", mixed[:num_rows])
            ops.add_norm(v.x, mixed, layer.post_norm, v.h)
            out = v.hidden if after is trunk.norm else v.h
            self._feed_forward(layer, num_rows, after, out, name=f"layers.{index}")
        ops.keep_rows(slots, trunk.state, b.scratch)
        ops.linear(trunk.lm_head, v.hidden, b.logits[:rows])
        self.see("logits", b.logits[:num_rows])
        self.mark("verify")

    def decide(self, shape: Shape, next_depth: int, flags: int) -> None:
        """The trunk's own token of every row, how many are committed, and the commit. `flags`: bits of spec.slots that
        any sequence may have."""
        b, ops, state = self.buffers, self.ops, self.state
        slots, num_rows, width = b.slots[: shape.num_sequences], shape.num_rows, shape.width
        ops.choose(
            b.logits[:num_rows], slots, state, width, b.chosen[:num_rows], b.scratch, flags, b.has_nan[:num_rows],
            b.allowed[:num_rows], see=self.trace,
        )  # fmt: skip
        if self.batch_state.synthetic is not None:
            self.batch_state.synthetic.impose(b.chosen[:num_rows], slots, state, width)
        self.see("tokens", b.chosen[:num_rows])
        self.mark("choose")
        verdicts = b.verdicts(shape.num_sequences)
        ops.accept_commit(b.chosen[:num_rows], slots, state, verdicts, width, next_depth, flags)
        self.mark("accept")

    def draft(self, shape: Shape, next_depth: int, flags: int) -> None:
        """The head's part: its state brought to what was committed, then next_depth drafts."""
        assert self.model.head is not None
        self.model.head.record(self, shape.num_sequences, shape.width, next_depth, flags)
        self._replace_drafts(shape.num_sequences, next_depth)
        self.mark("draft")

    def choose_first(self, next_depth: int, flags: int) -> None:
        """The token after a prompt, for the one sequence in place, from the first row of buffers.hidden: chosen and
        committed as in a round whose only row is the prompt's last one. The length counts all rows but that one."""
        b, ops, state = self.buffers, self.ops, self.state
        slots, padded = b.slots[:1], ops.padded(1)
        ops.linear(self.model.trunk.lm_head, b.hidden[:padded], b.logits[:padded])
        ops.choose(b.logits[:1], slots, state, 1, b.chosen[:1], b.scratch, flags, b.has_nan[:1], b.allowed[:1])
        # the row is in the caches and the state already
        state.length.index_add_(0, slots, self._one)
        ops.accept_commit(b.chosen[:1], slots, state, b.verdicts(1), 1, next_depth, flags, pending=False)

    def start_head(self, depth: int, flags: int) -> None:
        """The head's part after `choose_first`, from the same row."""
        # the length counts the prompt, so its last row stands one before
        self.plan(1, 1, -1)
        self.draft(Shape(1, 0), depth, flags)

    def _replace_drafts(self, count: int, depth: int) -> None:
        """Puts other drafts in place of the head's, for measurements."""
        if self.batch_state.oracle is not None and depth:
            self.batch_state.oracle.replace(self.state.drafts, self.buffers.slots[:count], self.state.length, depth)

    # -- what a head records its part with --------------------------------------------------------------------------

    @property
    def embedding(self) -> Embedding:
        return self.model.trunk.embedding

    def plan(self, count: int, width: int, step: int) -> None:
        """Where the rows of the next pass stand: length + step on."""
        b = self.buffers
        self.ops.plan_rows(b.slots[:count], self.state, self.model.inv_freq, width, step, b.tables, b.scratch)

    def full_layer(
        self, layer: Layer, cache: KvCache, count: int, width: int, norm: Norm, out: torch.Tensor,
        chosen: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """A full-attention layer over the stream's first count * width rows, in place; then out = `norm` of all rows,
        or of those chosen."""
        ops, v = self.ops, self.buffers.first(self.ops.padded(count * width))
        assert isinstance(layer.mixer, GatedAttention)
        ops.add_norm(v.x, None, layer.input_norm, v.h)
        self._attention(layer.mixer, cache, count, width)
        ops.add_norm(v.x, sum_over_ranks(v.delta), layer.post_norm, v.h)
        self._feed_forward(layer, count * width, norm, out, chosen)

    def choose_draft(self, count: int, number: int, flags: int) -> None:
        """Draft `number` of each sequence by its own rule and noise, from head_hidden, into the state and `draft`."""
        b, ops, vocabulary = self.buffers, self.ops, self.model.draft_vocabulary
        lm_head = self.model.trunk.lm_head if vocabulary is None else vocabulary.lm_head
        v = b.first(ops.padded(count))
        logits = v.drafting(lm_head.out_features)
        ops.linear(lm_head, v.head_hidden, logits)
        ops.choose(
            logits, b.slots[:count], self.state, 1, b.draft[:count], b.scratch, flags,
            kept=None if vocabulary is None else vocabulary.ids, first=number, draft=True,
        )  # fmt: skip

    def see(self, name: str, rows: torch.Tensor) -> None:
        """Shows rows of the window to whoever looks."""
        if self.trace is not None:
            self.trace(name, rows)

    @property
    def is_watched(self) -> bool:
        return self.trace is not None

    # -- operators of a layer ---------------------------------------------------------------------------------------

    def _attention(self, mixer: GatedAttention, cache: KvCache, count: int, width: int, settled: bool = False) -> None:
        b, ops = self.buffers, self.ops
        v = b.first(ops.padded(count * width))
        projected, mixed = v.projected(mixer.qkvg.out_features), v.mixed(mixer.output.in_features)
        ops.linear(mixer.qkvg, v.h, projected)
        ops.attention_window(mixer, projected, b.slots[:count], width, b.tables, cache, b.scratch, mixed, settled)
        ops.linear(mixer.output, mixed, v.delta)

    def _delta_net(self, mixer: GatedDeltaNet, number: int, count: int, width: int) -> None:
        b, ops = self.buffers, self.ops
        v = b.first(ops.padded(count * width))
        projected, mixed = v.projected(mixer.in_proj.out_features), v.mixed(mixer.output.in_features)
        ops.linear(mixer.in_proj, v.h, projected)
        ops.gdn_window(
            mixer, number, projected, b.slots[:count], width, self.state, self.model.trunk.state, b.scratch, mixed
        )
        ops.linear(mixer.output, mixed, v.delta)

    def _feed_forward(
        self, layer: Layer, num_rows: int, norm: Norm, out: Rows, chosen: torch.Tensor | None = None,
        name: str | None = None,
    ) -> None:  # fmt: skip
        """x += the layer's second half of h; then out = `norm` of x, of all rows or those chosen.

        x may stay as it was where rows are chosen: it is read no more. A layer with a `name` is shown.
        """
        b, ops = self.buffers, self.ops
        v = b.first(ops.padded(num_rows))
        x = v.x
        if isinstance(layer.mlp, GatedMlp):
            inner = v.inner(layer.mlp.down.in_features)
            ops.gate_up(layer.mlp, v.h, inner)
            ops.linear(layer.mlp.down, inner, v.delta)
            added = sum_over_ranks(v.delta)
            ops.add_norm(x, added, norm, out, chosen)
            if chosen is not None and self.is_watched:
                x += added
        else:
            moe = layer.mlp
            weights, ids, gate = b.expert_weights[:num_rows], b.expert_ids[:num_rows], b.shared_gate[:num_rows]
            logits = v.router_logits(moe.router.out_features)
            ops.linear(moe.router, v.h, logits)
            parts: Any = sum_over_ranks(ops.experts(moe, v.h, logits, weights, ids, gate, b.scratch))
            if name is not None:
                self.see(f"{name}.experts", ids)
            if chosen is None:
                ops.combine(parts, weights, gate, x, norm, out)
            else:
                ops.combine(parts, weights, gate, x)
                ops.add_norm(x, None, norm, out, chosen)
        if name is not None and self.is_watched:
            self.see(f"{name}.mlp", x[:num_rows])
