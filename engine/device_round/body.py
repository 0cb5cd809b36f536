"""The round's operators in order, over static buffers: verify, decide, and repair with drafting (or a look-up).

Nothing here waits for the device, allocates, or looks at a value: what depends on lengths, counts and flags is decided
on the device, so each part can be captured once for a shape and replayed.
B = sequences, W = window rows, R = B * W, H = hidden, V = vocabulary, S = slots.
"""

from __future__ import annotations

from typing import Any

import torch

from pilotfish.draft_heads.lookup.head import LookupHead
from pilotfish.draft_heads.mtp.head import MtpHead
from pilotfish.engine.batch_state import BatchState
from pilotfish.engine.device_round.buffers import RoundBuffers
from pilotfish.engine.device_round.operators import Operators
from pilotfish.engine.device_round.shapes import Shape
from pilotfish.engine.device_round.state import slot_state
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.model.build import Model
from pilotfish.engine.model.delta_net import GatedDeltaNet
from pilotfish.engine.model.mlp import DenseMlp
from pilotfish.engine.model.parallel import sum_over_ranks
from pilotfish.engine.model.trunk import Layer, Trace


class RoundBody:
    """`trace` sees named rows as they are computed; only while nothing is captured."""

    def __init__(self, model: Model, batch_state: BatchState, buffers: RoundBuffers, operators: Operators):
        self.model, self.buffers, self.ops = model, buffers, operators
        self.batch_state, self.state = batch_state, slot_state(batch_state)
        self.trace: Trace | None = None

    # -- parts ------------------------------------------------------------------------------------------------------

    def verify(self, shape: Shape) -> None:
        """The trunk over all window rows: hidden states, logits, keys and values; leaves the rows pending."""
        trunk, b, state, ops = self.model.trunk, self.buffers, self.state, self.ops
        slots, rows = b.slots[: shape.num_sequences], shape.num_rows
        first, eps = trunk.layers[0].input_norm, trunk.norm.eps
        x, h = b.x[:rows], b.h[:rows]
        self._plan(slots, shape.width, 0)
        ops.embed_rows(
            trunk.embedding, first.scale, eps, slots, state.last_token, state.drafts, state.length, shape.width,
            b.tokens[:rows], b.plan.positions[:rows], x, h,
        )  # fmt: skip
        norms = [layer.input_norm for layer in trunk.layers[1:]] + [trunk.norm]
        caches, number = iter(trunk.kv), 0
        for index, (layer, norm) in enumerate(zip(trunk.layers, norms, strict=True)):
            if isinstance(layer.mixer, GatedAttention):
                kind = "self_attn"
                self._attention(layer.mixer, next(caches), shape.num_sequences, shape.width)
            else:
                kind = "linear_attn"
                self._delta_net(layer.mixer, number, shape)
                number += 1
            mixed = sum_over_ranks(b.delta[:rows])
            self._see(f"layers.{index}.{kind}", mixed)
            ops.add_norm(x, mixed, layer.post_norm.scale, eps, h)
            last = index == len(norms) - 1
            self._feed_forward(layer, rows, norm.scale, b.hidden[:rows] if last else h)
            if not isinstance(layer.mlp, DenseMlp):
                self._see(f"layers.{index}.experts", b.expert_ids[:rows])
            self._see(f"layers.{index}.mlp", x)
        ops.linear(trunk.lm_head, b.hidden[:rows], b.logits[:rows])
        self._see("logits", b.logits[:rows])

    def decide(self, shape: Shape, next_depth: int, filters: bool = True) -> None:
        """The trunk's own token of every row, how many are committed, and the commit. `filters` off: no sequence has
        min_p, top_k or top_p."""
        b, ops = self.buffers, self.ops
        slots, rows = b.slots[: shape.num_sequences], shape.num_rows
        ops.choose(
            b.logits[:rows], slots, self.state, shape.width, b.chosen[:rows], b.choice, b.has_nan[:rows],
            b.allowed[:rows], filters=filters,
        )  # fmt: skip
        self._see("tokens", b.chosen[:rows])
        ops.accept_commit(b.chosen[:rows], slots, self.state, b.verdicts(shape.num_sequences), shape.width, next_depth)

    def draft(self, shape: Shape, next_depth: int, filters: bool = True) -> None:
        """The head over all window rows with the trunk's own tokens, then next_depth drafts from the last accepted; or
        drafts from the text so far, which the commit has written."""
        head, b, ops = self.model.head, self.buffers, self.ops
        count, rows = shape.num_sequences, shape.num_rows
        if isinstance(head, LookupHead):
            ops.look_up(b.slots[:count], self.state, next_depth, head.longest, head.shortest, b.look_up)
            self._replace_drafts(count, next_depth)
            return
        assert isinstance(head, MtpHead)
        accepted = b.verdicts(count).head_row
        self._head_rows(head, b.chosen[:rows], b.hidden[:rows], count, shape.width, b.head_hidden[:count], accepted)
        self._see("head", b.x[:rows])
        self.propose(count, next_depth, filters)

    def propose(self, count: int, next_depth: int, filters: bool = True) -> None:
        """Drafts of `count` sequences, from their rows in head_hidden on; the head's cache follows."""
        head, b, ops = self.model.head, self.buffers, self.ops
        assert isinstance(head, MtpHead)
        slots, hidden = b.slots[:count], b.head_hidden[:count]
        vocabulary = self.model.draft_vocabulary
        lm_head = self.model.trunk.lm_head if vocabulary is None else vocabulary.lm_head
        kept = None if vocabulary is None else vocabulary.ids
        logits = b.drafting(count, lm_head.out_features)
        for step in range(next_depth):
            if step:
                self._plan(slots, 1, step - 1)
                self._head_rows(head, b.draft[:count], hidden, count, 1, hidden)
            ops.linear(lm_head, hidden, logits)
            ops.choose(
                logits, slots, self.state, 1, b.draft[:count], b.choice, kept=kept, first=step, draft=True,
                filters=filters,
            )  # fmt: skip
        self._replace_drafts(count, next_depth)

    def _replace_drafts(self, count: int, next_depth: int) -> None:
        """For measurements."""
        if self.batch_state.oracle is not None:
            slots = self.buffers.slots[:count]
            self.batch_state.oracle.replace(self.state.drafts, slots, self.state.length, next_depth)

    # -- operators of a layer ---------------------------------------------------------------------------------------

    def _plan(self, slots: torch.Tensor, width: int, step: int) -> None:
        """Where the rows of the next pass stand: length + step on."""
        config, b = self.model.config, self.buffers
        heads = (config.num_attention_heads, config.num_key_value_heads)
        self.ops.plan_rows(slots, self.state.length, self.model.inv_freq, width, step, *heads, b.plan)

    def _head_rows(
        self, head: MtpHead, tokens: torch.Tensor, hidden: torch.Tensor, count: int, width: int, out: torch.Tensor,
        chosen: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """The head over count * width rows; its last norm, of all rows or those chosen, goes to `out`."""
        b, ops, rows = self.buffers, self.ops, count * width
        layer: Layer = head.layer
        pair, x, h = b.pair[:rows], b.x[:rows], b.h[:rows]
        scales = (head.embedding_norm.scale, head.hidden_norm.scale)
        ops.pair_norm(tokens, self.model.trunk.embedding, hidden, *scales, head.norm.eps, pair, rows)
        ops.linear(head.fc, pair, x)
        ops.add_norm(x, None, layer.input_norm.scale, layer.input_norm.eps, h)
        assert isinstance(layer.mixer, GatedAttention)
        self._attention(layer.mixer, head.cache, count, width)
        ops.add_norm(x, sum_over_ranks(b.delta[:rows]), layer.post_norm.scale, layer.post_norm.eps, h)
        self._feed_forward(layer, rows, head.norm.scale, out, chosen)

    def _attention(self, mixer: GatedAttention, cache: Any, count: int, width: int) -> None:
        b, ops, rows = self.buffers, self.ops, count * width
        projected = b.projected(rows, mixer.qkvg.out_features)
        mixed = b.mixed(rows, mixer.output.in_features)
        ops.linear(mixer.qkvg, b.h[:rows], projected)
        ops.attention_window(
            projected, b.slots[:count], b.plan, b.tables, cache.k, cache.v, mixer.qk_norm, mixer.eps, width,
            b.attention, mixed, cache.k_scale, cache.v_scale,
        )  # fmt: skip
        ops.linear(mixer.output, mixed, b.delta[:rows])

    def _delta_net(self, mixer: GatedDeltaNet, number: int, shape: Shape) -> None:
        b, ops, rows, state = self.buffers, self.ops, shape.num_rows, self.model.trunk.state
        projected = b.projected(rows, mixer.in_proj.out_features)
        mixed = b.mixed(rows, mixer.output.in_features)
        ops.linear(mixer.in_proj, b.h[:rows], projected)
        ops.gdn_window(
            projected, b.slots[: shape.num_sequences], self.state.pending_count, state.s[number], state.conv[number],
            b.pending[number], mixer.conv_weight, mixer.decay_rate, mixer.dt_bias, mixer.gate_norm, mixer.eps,
            shape.width, b.delta_scratch, mixed,
        )  # fmt: skip
        ops.linear(mixer.output, mixed, b.delta[:rows])

    def _feed_forward(
        self, layer: Layer, rows: int, scale: torch.Tensor, out: torch.Tensor, chosen: torch.Tensor | None = None
    ) -> None:
        """x += the layer's second half of h; then out = the norm of x with `scale`, of all rows or those chosen.

        x may stay as it was where rows are chosen: it is read no more.
        """
        b, ops, x, h = self.buffers, self.ops, self.buffers.x[:rows], self.buffers.h[:rows]
        eps = layer.post_norm.eps
        if isinstance(layer.mlp, DenseMlp):
            mlp = layer.mlp.mlp
            inner = b.inner(rows, mlp.down.in_features)
            ops.gate_up(mlp, h, inner)
            ops.linear(mlp.down, inner, b.delta[:rows])
            added = sum_over_ranks(b.delta[:rows])
            ops.add_norm(x, added, scale, eps, out, chosen)
            if chosen is not None and self.trace is not None:
                x += added
            return
        moe = layer.mlp
        weights, ids, gate = b.expert_weights[:rows], b.expert_ids[:rows], b.shared_gate[:rows]
        logits = b.router_logits(rows, moe.router.out_features)
        ops.linear(moe.router, h, logits)
        ops.route(logits, moe.router.out_features - 1, weights, ids, gate)
        parts = sum_over_ranks(ops.experts(moe, h, ids, b.experts))
        if chosen is None:
            ops.combine(parts, weights, gate, x, scale, eps, out)
        else:
            ops.combine(parts, weights, gate, x)
            ops.add_norm(x, None, scale, eps, out, chosen)

    def _see(self, name: str, rows: torch.Tensor) -> None:
        if self.trace is not None:
            self.trace(name, rows)
