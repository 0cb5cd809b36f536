"""The table of kernels on a CUDA device, bound to one choice: whether a kernel may start while the one before it still
runs (programmatic dependent launch). Each method is a launcher of kernels.cuda, see there and Operators for what it
means; nothing here allocates or waits in a round.

A model's weights may be packed where there is no GPU, for tests of what is launched: `on_device` says what would be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pilotfish.engine.cache.tensors import KvCache, RecurrentState
from pilotfish.engine.config import ModelConfig
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.model.build import Model
from pilotfish.engine.model.delta_net import GatedDeltaNet
from pilotfish.engine.model.mlp import PackedMoeMlp
from pilotfish.engine.model.trunk import Embedding, Norm
from pilotfish.engine.round.operators import AnyMoe
from pilotfish.engine.round.shapes import Sizes
from pilotfish.engine.round.spans import Span, padded_length
from pilotfish.engine.round.torch_table import TorchOperators
from pilotfish.kernels.cuda import attention, commit, delta_net, lookup, moe, moe_prompt, router, sample
from pilotfish.kernels.cuda import norm as norm_kernels
from pilotfish.kernels.cuda.attention_prompt import attend_prompt, project_prompt
from pilotfish.kernels.cuda.delta_prefill import gdn_prompt, is_installed
from pilotfish.kernels.cuda.linear import MAX_ROWS, PackedLinear
from pilotfish.kernels.cuda.packing import UNIT
from pilotfish.kernels.cuda.tiled_rows import MOST_AT_ONCE, AnyRows, TiledRows
from pilotfish.kernels.cuda.warm import Compilations, compile_all
from pilotfish.kernels.delta_net import MOST_PENDING, most_pending
from pilotfish.kernels.linear import AnyLinear
from pilotfish.kernels.moe import GatedMlp
from pilotfish.spec.accept import Verdicts
from pilotfish.spec.sampling import See
from pilotfish.spec.slots import FILTERED, SlotState

FEW_ROWS = 128
"""Rows of a prompt up to which a product is no slower by the round's kernel than by writing its weights out."""


@dataclass(frozen=True)
class CudaScratch:
    """What the kernels work in. `pending`: the rows that each linear layer leaves for the next round's replay."""

    plan: attention.RowPlan
    heads: tuple[int, int]
    attention: attention.AttentionScratch
    delta: delta_net.DeltaScratch
    pending: tuple[torch.Tensor, ...]
    choice: sample.ChoiceScratch
    look_up: lookup.LookupScratch
    experts: moe.ExpertScratch | None

    @property
    def pending_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.pending)


def has_dependent_launch(device: torch.device) -> bool:
    """Whether kernels may begin while the one before them ends. Devices below compute capability 9.0 have no
    instructions for it, and a kernel that has them does not assemble; on a CPU kernels are compiled, for 9.0, to be
    looked at."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


class CudaOperators:
    """See the module's docstring."""

    fixed_shapes = True
    index_dtype = torch.int32
    whole_rows = MOST_AT_ONCE

    def __init__(self, model: Model, on_device: bool | None = None):
        assert model.scratch is not None
        self.pdl, self.bulk_scratch = has_dependent_launch(model.device), model.scratch
        self.on_device = model.device.type == "cuda" if on_device is None else on_device
        # the plain form of the recurrence goes by lengths that the host knows
        self.captures_prompts = not self.on_device or is_installed()
        self._compilations = Compilations.now()
        # what no kernel does
        self.plain = TorchOperators()

    def use_pdl(self, pdl: bool) -> None:
        """What has been captured stays as it was."""
        self.pdl = pdl

    def padded(self, num_rows: int) -> int:
        """See Operators."""
        return num_rows

    def most_pending(self, width: int, num_sequences: int) -> int:
        """See Operators."""
        return most_pending(width, num_sequences)

    def make_scratch(self, model: Model, sizes: Sizes) -> CudaScratch:
        """See Operators."""
        config, device, rows = model.config, model.device, sizes.max_rows
        heads = (config.num_attention_heads, config.num_key_value_heads)
        caches = [*model.trunk.kv, *(model.head.caches if model.head else ())]
        num_pages = caches[0].k.shape[0] if caches else 1
        held = delta_net.pending_width(config.conv_dim, config.linear_num_value_heads)
        most_rows = max(sizes.max_width, MOST_PENDING)
        return CudaScratch(
            attention.RowPlan.empty(rows, sizes.max_sequences, config.rotary_dim, device),
            heads,
            attention.AttentionScratch.empty(
                sizes.max_sequences, sizes.max_width, sizes.max_model_len, num_pages, *heads, config.head_dim, device
            ),
            delta_net.DeltaScratch.empty(rows, config.linear_num_value_heads, config.linear_value_head_dim, device),
            # a tensor a layer: each begins where tensors begin, and kernels are compiled for that
            tuple(
                torch.zeros((sizes.num_slots, most_rows, held), dtype=model.dtype, device=device)
                for _ in config.linear_layers
            ),
            sample.ChoiceScratch.empty(rows, config.vocab_size, device),
            lookup.LookupScratch.empty(sizes.max_sequences, device),
            _expert_scratch(config, rows, device) if config.is_moe else None,
        )  # fmt: skip

    def rows_in(self, memory: torch.Tensor, num_rows: int, width: int) -> AnyRows:
        """See Operators: the one place that decides which rows are tiled."""
        if width % UNIT == 0:
            return TiledRows(memory, num_rows, width)
        return self.plain.rows_in(memory, num_rows, width)

    def compile(self, launch: Callable[[], None]) -> None:
        """See Operators; in parallel."""
        if self.on_device:
            compile_all(launch, load=True)

    def take_compiled(self) -> int:
        """See Operators."""
        before, self._compilations = self._compilations, Compilations.now()
        return (self._compilations - before).compiled

    # -- a window ---------------------------------------------------------------------------------------------------

    def plan_rows(
        self, slots_B: torch.Tensor, state: SlotState, inv_freq: torch.Tensor, width: int, step: int,
        tables: torch.Tensor, scratch: CudaScratch,
    ) -> None:  # fmt: skip
        attention.plan_rows(slots_B, state.length, inv_freq, width, step, *scratch.heads, scratch.plan, pdl=self.pdl)

    def embed_rows(
        self, embedding: Embedding, norm: Norm, slots_B: torch.Tensor, state: SlotState, width: int,
        tokens: torch.Tensor, x: torch.Tensor, h: AnyRows, scratch: CudaScratch,
    ) -> None:  # fmt: skip
        norm_kernels.embed_rows(
            embedding, norm.scale, norm.eps, slots_B, state.last_token, state.drafts, state.length, width, tokens,
            scratch.plan.positions[: len(tokens)], x, h, pdl=self.pdl,
        )  # fmt: skip

    def replay(self, slots_B: torch.Tensor, state: SlotState, recurrent: RecurrentState, scratch: CudaScratch) -> None:
        pass

    def keep_rows(self, slots_B: torch.Tensor, recurrent: RecurrentState, scratch: CudaScratch) -> None:
        pass

    def linear(self, weight: AnyLinear, x: AnyRows, out: AnyRows) -> None:
        assert isinstance(weight, PackedLinear)
        weight.rows(x, out, pdl=self.pdl)

    def gate_up(self, mlp: GatedMlp, x: AnyRows, out: AnyRows) -> None:
        self.linear(mlp.gate_up, x, out)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, out: AnyRows,
        chosen: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        norm_kernels.add_norm(x, delta, norm.scale, norm.eps, out, chosen, pdl=self.pdl)

    def pair_norm(
        self, tokens: torch.Tensor, embedding: Embedding, hidden: torch.Tensor, norms: tuple[Norm, Norm],
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        first, second = norms
        norm_kernels.pair_norm(
            tokens, embedding, hidden, first.scale, second.scale, first.eps, out, len(out), pdl=self.pdl
        )

    def attention_window(
        self, mixer: GatedAttention, projected: torch.Tensor, slots_B: torch.Tensor, width: int, tables: torch.Tensor,
        cache: KvCache, scratch: CudaScratch, out: AnyRows, settled: bool = False,
    ) -> None:  # fmt: skip
        attention.attention_window(
            projected, slots_B, scratch.plan, tables, cache.k, cache.v, mixer.qk_norm, mixer.eps, width,
            scratch.attention, out, cache.k_scale, cache.v_scale, cache.lag, settled=settled and self.pdl,
            pdl=self.pdl,
        )  # fmt: skip

    def gdn_window(
        self, mixer: GatedDeltaNet, number: int, projected: torch.Tensor, slots_B: torch.Tensor, width: int,
        state: SlotState, recurrent: RecurrentState, scratch: CudaScratch, out: AnyRows,
    ) -> None:  # fmt: skip
        delta_net.gdn_window(
            projected, slots_B, state.pending_count, recurrent.s[number], recurrent.conv[number],
            scratch.pending[number], mixer.conv_weight, mixer.decay_rate, mixer.dt_bias, mixer.gate_norm, mixer.eps,
            width, scratch.delta, out, self.most_pending(width, len(slots_B)), pdl=self.pdl,
        )  # fmt: skip

    def experts(
        self, mlp: AnyMoe, x: AnyRows, logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
        gate: torch.Tensor, scratch: CudaScratch,
    ) -> torch.Tensor:  # fmt: skip
        """See Operators; [R, k + 1, H], each row's experts in rank order, then the shared one."""
        assert isinstance(mlp, PackedMoeMlp) and scratch.experts is not None
        return mlp.experts.rows(x, logits, weights, ids, gate, scratch.experts, pdl=self.pdl)

    def combine(
        self, parts: torch.Tensor, weights: torch.Tensor, gate: torch.Tensor, x: torch.Tensor,
        norm: Norm | None = None, out: AnyRows | None = None,
    ) -> None:  # fmt: skip
        if norm is None:
            moe.combine(parts, weights, gate, x, pdl=self.pdl)
        else:
            moe.combine(parts, weights, gate, x, norm.scale, norm.eps, out, pdl=self.pdl)

    # -- decide -----------------------------------------------------------------------------------------------------

    def choose(
        self, logits: torch.Tensor, slots_B: torch.Tensor, state: SlotState, width: int, out: torch.Tensor,
        scratch: CudaScratch, flags: int, has_nan: torch.Tensor | None = None, allowed: torch.Tensor | None = None,
        kept: torch.Tensor | None = None, first: int = 0, draft: bool = False, see: See | None = None,
    ) -> None:  # fmt: skip
        """See Operators; each row reads its own flags, and there is no history to see."""
        sample.choose(
            logits, slots_B, state, width, out, scratch.choice, has_nan, allowed, kept=kept, first=first, draft=draft,
            filters=bool(flags & FILTERED), pdl=self.pdl,
        )  # fmt: skip

    def accept_commit(
        self, chosen: torch.Tensor, slots_B: torch.Tensor, state: SlotState, verdicts: Verdicts, width: int,
        next_depth: int, flags: int, pending: bool = True,
    ) -> None:  # fmt: skip
        most_pending = self.most_pending(width, len(slots_B))
        commit.accept_commit(chosen, slots_B, state, verdicts, width, next_depth, pending, most_pending, pdl=self.pdl)

    def look_up(
        self, slots_B: torch.Tensor, state: SlotState, depth: int, longest: int, shortest: int, scratch: CudaScratch
    ) -> None:
        lookup.look_up(slots_B, state, depth, longest, shortest, scratch.look_up, pdl=self.pdl)

    # -- a prompt ---------------------------------------------------------------------------------------------------

    def embed(self, embedding: Embedding, tokens_T: torch.Tensor) -> torch.Tensor:
        return self.plain.embed(embedding, tokens_T)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self.plain.norm(x, norm)

    def norm_of_sum(self, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        if not self.on_device:
            return self.plain.norm_of_sum(x, delta, norm)
        normed = torch.empty(x.shape, dtype=norm.dtype, device=x.device)
        norm_kernels.add_norm(x, delta, norm.scale, norm.eps, normed)
        return normed

    def prompt_rows(self, length: int) -> int:
        """See Operators: one of a few."""
        return padded_length(length)

    def product(self, weight: AnyLinear, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See Operators: few rows by a round's kernel, which unpacks on the way, more from weights written out."""
        assert isinstance(weight, PackedLinear)
        if not self._are_few(x):
            return weight.bulk(x, self.bulk_scratch.memory, out)
        if out is None:
            out = torch.empty((len(x), weight.out_features), dtype=x.dtype, device=x.device)
        weight.rows(x.contiguous(), out)
        return out

    def products(
        self, weight: AnyLinear, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """See Operators: weights are written out once for all."""
        assert isinstance(weight, PackedLinear)
        if any(map(self._are_few, xs)):
            given: Sequence[torch.Tensor | None] = outs or [None] * len(xs)
            return [self.product(weight, x, out) for x, out in zip(xs, given, strict=True)]
        return weight.bulk_each(xs, self.bulk_scratch.memory, outs)

    def _are_few(self, x: torch.Tensor) -> bool:
        return self.on_device and len(x) <= FEW_ROWS

    def project_prompt(
        self, mixer: GatedAttention, projected: torch.Tensor, span: Span, cache: KvCache, q: torch.Tensor
    ) -> None:
        if not self.on_device:
            return self.plain.project_prompt(mixer, projected, span, cache, q)
        project_prompt(
            projected, span.positions, span.cos, span.sin, span.table, cache.k, cache.v, mixer.qk_norm, mixer.eps, q,
            cache.k_scale, cache.v_scale, cache.lag,
        )  # fmt: skip

    def attend_prompt(
        self, mixer: GatedAttention, q: torch.Tensor, projected: torch.Tensor, span: Span, cache: KvCache,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """See Operators: the library's product between two launches of ours."""
        if not self.on_device:
            return self.plain.attend_prompt(mixer, q, projected, span, cache, out)
        attend_prompt(
            q, projected, span.start, span.length, span.table, cache.k, cache.v, out, cache.k_scale, cache.v_scale,
            cache.lag,
        )  # fmt: skip

    def gdn_prompt(
        self, mixer: GatedDeltaNet, number: int, projected: torch.Tensor, span: Span, recurrent: RecurrentState
    ) -> torch.Tensor:
        """See Operators: by fla-core where it is installed."""
        if not (self.on_device and is_installed()):
            return self.plain.gdn_prompt(mixer, number, projected, span, recurrent)
        weights = (mixer.conv_weight, mixer.decay_rate, mixer.dt_bias, mixer.gate_norm)
        memory = (recurrent.s[number], recurrent.conv[number], span.numbers)
        return gdn_prompt(projected, *memory, *weights, mixer.eps)

    def feed_forward_prompt(
        self, mlp: GatedMlp | AnyMoe, xs: Sequence[torch.Tensor], normed: Sequence[torch.Tensor], after: Norm
    ) -> list[torch.Tensor]:
        """See Operators."""
        if isinstance(mlp, GatedMlp):
            deltas = self.products(mlp.down, self.products(mlp.gate_up, normed))
            return [self.norm_of_sum(x, delta, after) for x, delta in zip(xs, deltas, strict=True)]
        assert isinstance(mlp, PackedMoeMlp)
        return [self._experts_prompt(mlp, x, rows, after) for x, rows in zip(xs, normed, strict=True)]

    def _experts_prompt(self, mlp: PackedMoeMlp, x: torch.Tensor, normed: torch.Tensor, after: Norm) -> torch.Tensor:
        """Experts from their packed weights, of few rows by a round's kernels, of many by those of moe_prompt.py where
        they hold them."""
        packed, rows, device = mlp.experts, len(normed), normed.device
        logits = self.product(mlp.router, normed)
        weights = torch.empty((rows, packed.top_k), dtype=torch.float32, device=device)
        ids = torch.empty((rows, packed.top_k), dtype=torch.int32, device=device)
        gate = torch.empty(rows, dtype=torch.float32, device=device)
        if self.on_device and rows <= MAX_ROWS:
            parts = moe_prompt.parts_of_few(packed, normed, logits, weights, ids, gate)
        else:
            route = router.route if self.on_device else router.route_reference
            route(logits, packed.num_experts, weights, ids, gate)
            if not (self.on_device and moe_prompt.takes(packed)):
                return self.norm_of_sum(x, packed.bulk(normed, weights, ids, gate, self.bulk_scratch.memory), after)
            parts = moe_prompt.parts(packed, normed, ids)
        out = torch.empty_like(normed)
        moe.combine(parts, weights, gate, x, after.scale, after.eps, out)
        return out


def _expert_scratch(config: ModelConfig, rows: int, device: torch.device) -> moe.ExpertScratch:
    width = max(config.moe_intermediate_size, config.shared_expert_intermediate_size)
    return moe.ExpertScratch.make(
        rows, config.num_experts_per_tok, config.num_experts, width, config.hidden_size, device
    )
