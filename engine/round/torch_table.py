"""The table in plain torch: what every operator means, over kernels/*.py and spec/, and what a CPU runs.

Products run over whole tiles; attention over tiles of a sequence's rows and its pages in order; the recurrence of all
layers is replayed at once; what no request of a batch uses is skipped. Reads lengths and counts on the host. See
Operators for what each does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from pilotfish.draft_heads.lookup.match import look_up
from pilotfish.engine.cache.tensors import KvCache, RecurrentState
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.model.build import Model
from pilotfish.engine.model.delta_net import GatedDeltaNet
from pilotfish.engine.model.mlp import MoeMlp
from pilotfish.engine.model.trunk import Embedding, Norm
from pilotfish.engine.round.operators import AnyMoe
from pilotfish.engine.round.shapes import Sizes
from pilotfish.engine.round.spans import Span
from pilotfish.kernels.activation import sigmoid, silu, softplus
from pilotfish.kernels.attention import (
    PAGE,
    RowTile,
    pages_for,
    prefill_attention,
    row_tiles,
    window_attention,
    write_kv,
)
from pilotfish.kernels.conv import causal_conv
from pilotfish.kernels.delta_net import delta_prefill, delta_window
from pilotfish.kernels.linear import AnyLinear, padded_rows
from pilotfish.kernels.moe import GatedMlp, combine, expert_bulk, expert_parts, mlp_bulk, route
from pilotfish.kernels.norm import l2_norm, rms_norm
from pilotfish.kernels.rope import apply_rope, rope_angles
from pilotfish.spec import accept, sampling
from pilotfish.spec.rules import Rows
from pilotfish.spec.sampling import See
from pilotfish.spec.slots import MASKED, SlotState


@dataclass(frozen=True)
class Places:
    """Where a window's keys and values go in a cache, pages and offsets int64 [R], and what attention reads of it."""

    pages: torch.Tensor
    offsets: torch.Tensor
    tiles: list[RowTile]


@dataclass(frozen=True)
class Window:
    """Where the rows of a pass stand: row b * W + j is position starts[b] + j; `cos`, `sin` fp32 [R, 1, rotary / 2]."""

    width: int
    starts: list[int]
    tables: list[list[int]]
    cos: torch.Tensor
    sin: torch.Tensor
    _places: dict[int, Places] = field(default_factory=dict)

    @classmethod
    def build(cls, width: int, starts: list[int], tables: list[list[int]], inv_freq: torch.Tensor) -> Window:
        rows = [start + j for start in starts for j in range(width)]
        padded = torch.zeros(padded_rows(len(rows)), dtype=torch.int64)
        padded[: len(rows)] = torch.tensor(rows)
        # angles of whole tiles, so that the library's vector code meets every row alike
        cos, sin = rope_angles(padded.to(inv_freq.device), inv_freq)
        return cls(width, starts, tables, cos[: len(rows)], sin[: len(rows)])

    @property
    def num_rows(self) -> int:
        return len(self.starts) * self.width

    def places(self, lag: int) -> Places:
        """Where the rows stand in caches of this lag; made once for all layers."""
        if lag not in self._places:
            self._places[lag] = self._make_places(lag)
        return self._places[lag]

    def _make_places(self, lag: int) -> Places:
        rows = [
            (table, start + lag + j)
            for start, table in zip(self.starts, self.tables, strict=True)
            for j in range(self.width)
        ]
        device = self.cos.device
        return Places(
            torch.tensor([table[place // PAGE] for table, place in rows]).to(device),
            torch.tensor([place % PAGE for _, place in rows]).to(device),
            row_tiles(self.starts, self.tables, self.width, device, lag),
        )


@dataclass
class TorchScratch:
    """What goes between the operators of one pass: its window, the states that its rows start from, [L, B, ...], and
    the rows that each linear layer leaves pending."""

    window: Window | None = None
    states: torch.Tensor | None = None
    histories: torch.Tensor | None = None
    pending: list[tuple[torch.Tensor, ...]] = field(default_factory=list)

    @property
    def pending_bytes(self) -> int:
        """0: the pending rows are in the model's recurrent state."""
        return 0


class TorchOperators:
    """See the module's docstring, and Operators."""

    fixed_shapes = False
    captures_prompts = False
    index_dtype = torch.int64
    whole_rows = 1

    def padded(self, num_rows: int) -> int:
        """See Operators."""
        return padded_rows(num_rows)

    def most_pending(self, width: int, num_sequences: int) -> int:
        """See Operators."""
        return 0

    def make_scratch(self, model: Model, sizes: Sizes) -> TorchScratch:
        """See Operators."""
        return TorchScratch()

    def rows_in(self, memory: torch.Tensor, num_rows: int, width: int) -> torch.Tensor:
        """See Operators."""
        return memory[: num_rows * width].view(num_rows, width)

    def compile(self, launch: Callable[[], None]) -> None:
        """See Operators."""

    def take_compiled(self) -> int:
        """See Operators."""
        return 0

    # -- a window ---------------------------------------------------------------------------------------------------

    def plan_rows(
        self, slots_B: torch.Tensor, state: SlotState, inv_freq: torch.Tensor, width: int, step: int,
        tables: torch.Tensor, scratch: TorchScratch,
    ) -> None:  # fmt: skip
        starts = [length + step for length in state.length[slots_B].tolist()]
        used = [
            # a lagging cache's last entry too
            tables[slot, : pages_for(start + width + 1)].tolist()
            for slot, start in zip(slots_B.tolist(), starts, strict=True)
        ]
        scratch.window = Window.build(width, starts, used, inv_freq)

    def embed_rows(
        self, embedding: Embedding, norm: Norm, slots_B: torch.Tensor, state: SlotState, width: int,
        tokens: torch.Tensor, x: torch.Tensor, h: torch.Tensor, scratch: TorchScratch,
    ) -> None:  # fmt: skip
        window = torch.cat((state.last_token[slots_B][:, None], state.drafts[slots_B, : width - 1]), dim=1)
        tokens[: window.numel()] = window.flatten()
        x.copy_(embedding[tokens])
        _norm_into(h, x, norm)

    def replay(self, slots_B: torch.Tensor, state: SlotState, recurrent: RecurrentState, scratch: TorchScratch) -> None:
        counts = state.pending_count[slots_B].tolist()
        scratch.states, scratch.histories = recurrent.replay(slots_B, counts)
        scratch.pending = []

    def keep_rows(self, slots_B: torch.Tensor, recurrent: RecurrentState, scratch: TorchScratch) -> None:
        if scratch.pending:
            recurrent.pending.store(slots_B, scratch.pending)

    def linear(self, weight: AnyLinear, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(weight.rows(x))

    def gate_up(self, mlp: GatedMlp, x: torch.Tensor, out: torch.Tensor) -> None:
        gate, up = mlp.gate_up.rows(x).chunk(2, dim=-1)
        torch.mul(silu(gate), up, out=out)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, out: torch.Tensor,
        chosen: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        if chosen is not None:
            # float, since a sum must not be rounded to a narrower dtype
            chosen = chosen.long()
            x = x[chosen] if delta is None else x[chosen] + delta[chosen].float()
            out = out[: len(x)]
        elif delta is not None:
            x.add_(delta)
        _norm_into(out, x, norm)

    def pair_norm(
        self, tokens: torch.Tensor, embedding: Embedding, hidden: torch.Tensor, norms: tuple[Norm, Norm],
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        width = hidden.shape[1]
        _norm_into(out[:, :width], embedding[tokens], norms[0])
        _norm_into(out[:, width:], hidden, norms[1])

    def attention_window(
        self, mixer: GatedAttention, projected: torch.Tensor, slots_B: torch.Tensor, width: int, tables: torch.Tensor,
        cache: KvCache, scratch: TorchScratch, out: torch.Tensor, settled: bool = False,
    ) -> None:  # fmt: skip
        window = scratch.window
        assert window is not None
        num_rows, places = window.num_rows, window.places(cache.lag)
        q, k, v, gate = project_heads(mixer, projected[:num_rows], window.cos, window.sin)
        write_kv(cache.k, cache.v, places.pages, places.offsets, k, v, cache.k_scale, cache.v_scale)
        mixed = window_attention(q, cache.k, cache.v, places.tiles, cache.k_scale, cache.v_scale)
        out[:num_rows] = mixed.flatten(1) * sigmoid(gate.float())

    def gdn_window(
        self, mixer: GatedDeltaNet, number: int, projected: torch.Tensor, slots_B: torch.Tensor, width: int,
        state: SlotState, recurrent: RecurrentState, scratch: TorchScratch, out: torch.Tensor,
    ) -> None:  # fmt: skip
        assert scratch.states is not None and scratch.histories is not None
        batch = len(slots_B)
        num_rows = batch * width
        u, z, beta, log_decay = split_gates(mixer, projected)
        u = u[:num_rows].view(batch, width, -1)
        beta, decay = (t[:num_rows].view(batch, width, -1) for t in (beta, log_decay.exp()))
        inputs = torch.cat((scratch.histories[number], u), dim=1)
        q, k, v = split_heads(mixer, causal_conv(inputs, mixer.conv_weight))
        read = delta_window(scratch.states[number], q, k, v, beta, decay)
        out[:num_rows] = gated_norm(mixer, read.view(num_rows, mixer.num_value_heads, -1), z[:num_rows])
        # its own memory: the next layer's projection overwrites what it was cut from
        scratch.pending.append((k, v, beta, decay, u.clone()))

    def experts(
        self, mlp: AnyMoe, x: torch.Tensor, logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
        gate: torch.Tensor, scratch: TorchScratch,
    ) -> torch.Tensor:  # fmt: skip
        assert isinstance(mlp, MoeMlp)
        num_experts = logits.shape[1] - 1
        chosen_weights, chosen_ids = route(logits[: len(ids), :num_experts], ids.shape[1])
        weights.copy_(chosen_weights)
        ids.copy_(chosen_ids)
        gate.copy_(sigmoid(logits[: len(ids), num_experts]))
        return expert_parts(x, len(ids), mlp.experts, mlp.shared, ids)

    def combine(
        self, parts: torch.Tensor, weights: torch.Tensor, gate: torch.Tensor, x: torch.Tensor,
        norm: Norm | None = None, out: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        x[: len(weights)] += combine(parts, weights, gate)
        if norm is not None and out is not None:
            _norm_into(out, x, norm)

    # -- decide -----------------------------------------------------------------------------------------------------

    def choose(
        self, logits: torch.Tensor, slots_B: torch.Tensor, state: SlotState, width: int, out: torch.Tensor,
        scratch: TorchScratch, flags: int, has_nan: torch.Tensor | None = None, allowed: torch.Tensor | None = None,
        kept: torch.Tensor | None = None, first: int = 0, draft: bool = False, see: See | None = None,
    ) -> None:  # fmt: skip
        num_rows, vocab = len(slots_B) * width, state.counts.shape[1]
        values = logits[:num_rows].float()
        if kept is not None:
            # what was left out cannot be chosen
            values = values.new_full((num_rows, vocab), float("-inf"))
            values[:, kept.long()] = logits[:num_rows, : len(kept)].float()
        forbidden = None
        if allowed is not None and flags & MASKED:
            masked = (state.flags[slots_B] & MASKED != 0).repeat_interleave(width)
            forbidden = forbidden_of(allowed[:num_rows], vocab) & masked[:, None]
        chosen = sampling.choose(values, Rows.of(state, slots_B, width, first), flags, forbidden, see)
        out[:num_rows] = chosen
        if has_nan is not None:
            # argmax takes a NaN for the largest value: a row that has one has chosen it
            has_nan[:num_rows] = values.gather(1, chosen[:, None])[:, 0].isnan()
        if draft:
            state.drafts[slots_B, first] = chosen

    def accept_commit(
        self, chosen: torch.Tensor, slots_B: torch.Tensor, state: SlotState, verdicts: accept.Verdicts, width: int,
        next_depth: int, flags: int, pending: bool = True,
    ) -> None:  # fmt: skip
        batch = len(slots_B)
        window = chosen[: batch * width].view(batch, width)
        offered = state.num_offered[slots_B].clamp(max=width - 1)
        done, left = state.done[slots_B].view(torch.bool), accept.remaining(state, slots_B) + int(not pending)
        drafts = state.drafts[slots_B, : width - 1]
        verdict = accept.accept(window, drafts, offered, state.stop_ids[slots_B], left, done)
        accept.commit(state, slots_B, window, verdict, flags, pending, self.most_pending(width, batch))
        accept.offer(state, slots_B, next_depth)
        rows = torch.arange(0, batch * width, width, device=chosen.device) + verdict.num_accepted
        values = (verdict.num_accepted, verdict.num_committed, offered, verdict.stopped, verdict.done, rows)
        for target, value in zip(verdicts, values, strict=True):
            target.copy_(value)

    def look_up(
        self, slots_B: torch.Tensor, state: SlotState, depth: int, longest: int, shortest: int, scratch: TorchScratch
    ) -> None:
        assert state.history is not None
        last = state.length[slots_B]
        history = state.history[slots_B, : int(last.max()) + 1]
        drafts, counts = look_up(history, last, depth, longest, shortest)
        state.drafts[slots_B, :depth] = drafts
        accept.offer(state, slots_B, depth, counts)

    # -- a prompt ---------------------------------------------------------------------------------------------------

    def embed(self, embedding: Embedding, tokens_T: torch.Tensor) -> torch.Tensor:
        return embedding[tokens_T].float()

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return rms_norm(x, norm.scale, norm.eps, norm.dtype)

    def norm_of_sum(self, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self.norm(x.add_(delta), norm)

    def prompt_rows(self, length: int) -> int:
        return length

    def product(self, weight: AnyLinear, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return weight.bulk(x) if out is None else out.copy_(weight.bulk(x))

    def products(
        self, weight: AnyLinear, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        if outs is None:
            return [self.product(weight, x) for x in xs]
        return [self.product(weight, x, out) for x, out in zip(xs, outs, strict=True)]

    def project_prompt(
        self, mixer: GatedAttention, projected: torch.Tensor, span: Span, cache: KvCache, q: torch.Tensor
    ) -> None:
        rows, k, v, _ = project_heads(mixer, projected, span.cos, span.sin)
        places = span.positions + cache.lag
        write_kv(cache.k, cache.v, span.table[places // PAGE], places % PAGE, k, v, cache.k_scale, cache.v_scale)
        q.copy_(rows)

    def attend_prompt(
        self, mixer: GatedAttention, q: torch.Tensor, projected: torch.Tensor, span: Span, cache: KvCache,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        rows, gate = q[: span.length].float(), projected[: span.length, -out.shape[1] :]
        scales = cache.k_scale, cache.v_scale
        mixed = prefill_attention(rows, cache.k, cache.v, span.table, span.start, *scales, cache.lag)
        out[: span.length] = mixed.flatten(1) * sigmoid(gate.float())
        out[span.length :] = 0

    def gdn_prompt(
        self, mixer: GatedDeltaNet, number: int, projected: torch.Tensor, span: Span, recurrent: RecurrentState
    ) -> torch.Tensor:
        state, history = recurrent.s[number, span.slot], recurrent.conv[number, span.slot]
        u, z, beta, log_decay = split_gates(mixer, projected[: span.length])
        inputs = torch.cat((history, u))
        q, k, v = split_heads(mixer, causal_conv(inputs[None], mixer.conv_weight)[0])
        read, after = delta_prefill(state, q, k, v, beta, log_decay)
        state.copy_(after)
        history.copy_(inputs[-history.shape[0] :])
        return F.pad(gated_norm(mixer, read, z).to(mixer.dtype), (0, 0, 0, span.num_rows - span.length))

    def feed_forward_prompt(
        self, mlp: GatedMlp | AnyMoe, xs: Sequence[torch.Tensor], normed: Sequence[torch.Tensor], after: Norm
    ) -> list[torch.Tensor]:
        return [self._feed_forward(mlp, x, rows, after) for x, rows in zip(xs, normed, strict=True)]

    def _feed_forward(self, mlp: GatedMlp | AnyMoe, x: torch.Tensor, normed: torch.Tensor, after: Norm) -> torch.Tensor:
        if isinstance(mlp, GatedMlp):
            return self.norm_of_sum(x, mlp_bulk(mlp, normed), after)
        assert isinstance(mlp, MoeMlp)
        logits, gate = mlp.router.bulk(normed).float().split([len(mlp.experts), 1], dim=-1)
        routed = expert_bulk(normed, mlp.experts, *route(logits, mlp.top_k))
        return self.norm_of_sum(x, torch.addcmul(routed, mlp_bulk(mlp.shared, normed).float(), sigmoid(gate)), after)


# -- between the products of a layer -----------------------------------------------------------------------------------


def project_heads(
    mixer: GatedAttention, projected: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """q, k (normed, rotated, fp32) and v, [rows, heads, D] each, and the output gate."""
    heads, kv, dim = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    qk, v, gate = projected.split([(heads + kv) * dim, kv * dim, heads * dim], dim=-1)
    qk = rms_norm(qk.reshape(-1, heads + kv, dim), mixer.qk_norm, mixer.eps, torch.float32)
    q, k = apply_rope(qk, cos, sin).split([heads, kv], dim=1)
    return q.contiguous(), k, v.reshape(-1, kv, dim), gate


def split_gates(mixer: GatedDeltaNet, projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """u, z as they come, and beta and the log decay in fp32 [rows, Hv]."""
    heads, value_dim = mixer.num_value_heads, mixer.num_value_heads * mixer.value_head_dim
    u, z, ba = projected.split([projected.shape[1] - value_dim - 2 * heads, value_dim, 2 * heads], -1)
    b, a = (part.float() for part in ba.chunk(2, dim=-1))
    return u, z, sigmoid(b), mixer.decay_rate * softplus(a + mixer.dt_bias)


def split_heads(mixer: GatedDeltaNet, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (normed and scaled), k (normed), v of the convolved channels, fp32 [..., Hv, width] each."""
    key_dim, dk = mixer.num_key_heads * mixer.key_head_dim, mixer.key_head_dim
    qk, v = mixed.split([2 * key_dim, mixed.shape[-1] - 2 * key_dim], dim=-1)
    qk = l2_norm(qk.unflatten(-1, (2, mixer.num_key_heads, dk)), mixer.qk_factor)
    q, k = qk.repeat_interleave(mixer.num_value_heads // mixer.num_key_heads, dim=-2).unbind(-3)
    return q, k, v.unflatten(-1, (mixer.num_value_heads, mixer.value_head_dim))


def gated_norm(mixer: GatedDeltaNet, read: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """fp32 [rows, Hv dv]."""
    normed = rms_norm(read, mixer.gate_norm, mixer.eps, torch.float32)
    return normed.flatten(1) * silu(z.float())


def forbidden_of(allowed: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """bool [R, V]: tokens without their bit in int32 words [R, ceil(V / 32)]."""
    words = allowed.cpu().numpy().view(np.uint8)
    is_allowed = np.unpackbits(words, axis=1, count=vocab_size, bitorder="little")
    return torch.from_numpy(is_allowed == 0).to(allowed.device)


def _norm_into(out: torch.Tensor, x: torch.Tensor, norm: Norm) -> None:
    """The norm in fp32, rounded once as it is stored."""
    out.copy_(F.rms_norm(x.float(), (x.shape[-1],), norm.scale, norm.eps))
