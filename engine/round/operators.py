"""The operators that a round and a prompt are made of, and the one place where a device is chosen.

Two tables offer them: `TorchOperators` (the definition, in plain torch over kernels/*.py and spec/, as fast as a CPU
allows) and `CudaOperators` (the kernels of kernels/cuda). The body above them is the same for both. Each operator says
where it is defined and which test holds the kernel to that; tests/unit/engine/round holds both tables, composed, to a
forward that shares nothing with them (tests/support/naive_forward.py).

Nothing here is waited for but by the torch table, which reads lengths and counts where it needs them: it is never
captured. B = sequences, W = window rows, R = B * W, P = R padded as `padded` says, S = slots, H = hidden, T = prompt
rows. Results go into `out` and what is named so; memory is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pilotfish.engine.cache.tensors import KvCache, RecurrentState
from pilotfish.engine.model.attention import GatedAttention
from pilotfish.engine.model.build import Model
from pilotfish.engine.model.delta_net import GatedDeltaNet
from pilotfish.engine.model.mlp import MoeMlp, PackedMoeMlp
from pilotfish.engine.model.trunk import Embedding, Norm
from pilotfish.engine.round.shapes import Sizes
from pilotfish.kernels.linear import AnyLinear
from pilotfish.kernels.moe import GatedMlp
from pilotfish.spec.accept import Verdicts
from pilotfish.spec.sampling import See
from pilotfish.spec.slots import SlotState

if TYPE_CHECKING:
    from pilotfish.engine.round.spans import Span

AnyMoe = MoeMlp | PackedMoeMlp
Rows = Any
"""What stands between a round's operators for a product to read, [P, K], as the table's `rows_in` makes it; it may be a
tensor in any case."""


class Operators(Protocol):
    """`fixed_shapes`: work reads nothing on the host, so that it can be captured, runs ahead of the host, and is made
    for a few shapes. `captures_prompts`: so does a prompt's but for its attention. `index_dtype`: of slots and page
    tables. `whole_rows`: memory of what `rows_in` makes has room for whole groups of so many rows."""

    fixed_shapes: bool
    captures_prompts: bool
    index_dtype: torch.dtype
    whole_rows: int

    def padded(self, num_rows: int) -> int:
        """Rows that products run over for so many: whole tiles in torch, no more than asked in CUDA. What stands in the
        rows past R is never read by another row."""
        ...

    def most_pending(self, width: int, num_sequences: int) -> int:
        """Rows of a sequence that may be pending at once, in rounds of that shape: see spec.accept.rows_left. Torch: 0,
        for a replay costs it more than a store."""
        ...

    def make_scratch(self, model: Model, sizes: Sizes) -> Any:
        """What the operators below work in, for rounds of these sizes; one for all layers. Its `plan` is where the rows
        of the current pass stand."""
        ...

    def rows_in(self, memory: torch.Tensor, num_rows: int, width: int) -> Rows:
        """Rows [num_rows, width] at the front of `memory`, which is flat and has room for whole groups of `whole_rows`;
        operators alone write and read them. Torch: a tensor; CUDA: TiledRows, of a width that products can read so."""
        ...

    def compile(self, launch: Callable[[], None]) -> None:
        """Compiles what `launch` launches, without running it. Torch: nothing."""
        ...

    def take_compiled(self) -> int:
        """Kernels compiled since the last call."""
        ...

    # -- a window ---------------------------------------------------------------------------------------------------

    def plan_rows(
        self, slots_B: torch.Tensor, state: SlotState, inv_freq: torch.Tensor, width: int, step: int,
        tables: torch.Tensor, scratch: Any,
    ) -> None:  # fmt: skip
        """Row b * W + j stands at position length + step + j; for all layers of a pass.

        Definition: kernels.attention.row_tiles and kernels.rope; held by tests/support/attention_windows.py.
        """
        ...

    def embed_rows(
        self, embedding: Embedding, norm: Norm, slots_B: torch.Tensor, state: SlotState, width: int,
        tokens: torch.Tensor, x: torch.Tensor, h: Rows, scratch: Any,
    ) -> None:  # fmt: skip
        """tokens int64 [P]: last token, then drafts; x fp32 [P, H] their embeddings, h their norm.

        Definition: kernels.norm; held by tests/support/small_operators.py.
        """
        ...

    def replay(self, slots_B: torch.Tensor, state: SlotState, recurrent: RecurrentState, scratch: Any) -> None:
        """Brings the recurrent state to the accepted prefix before the first layer, all layers at once. CUDA: nothing,
        each layer's `gdn_window` does.

        Definition: RecurrentState.replay (kernels.delta_net.delta_replay).
        """
        ...

    def keep_rows(self, slots_B: torch.Tensor, recurrent: RecurrentState, scratch: Any) -> None:
        """Leaves the window's rows pending, after the last layer. CUDA: nothing, as for `replay`."""
        ...

    def linear(self, weight: AnyLinear, x: Rows, out: torch.Tensor) -> None:
        """out [P, N] = x [P, K] times a weight [N, K].

        Definition: kernels.linear; held by tests/unit/kernels/cuda/test_run_products.py and tests/gpu/test_linear.py.
        """
        ...

    def gate_up(self, mlp: GatedMlp, x: Rows, out: Rows) -> None:
        """out [P, I] = silu(gate x) * up x. Definition: kernels.moe.swiglu; held as `linear` is."""
        ...

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, out: Rows,
        chosen: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """x fp32 [P, H] += delta, out = its norm: of all rows, or of those chosen (then x stays).

        Definition: kernels.norm.rms_norm; held by tests/support/small_operators.py.
        """
        ...

    def pair_norm(
        self, tokens: torch.Tensor, embedding: Embedding, hidden: torch.Tensor, norms: tuple[Norm, Norm],
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """out [P, 2H] = [norm of the tokens' embeddings, norm of hidden]. Definition and test as for `add_norm`."""
        ...

    def attention_window(
        self, mixer: GatedAttention, projected: torch.Tensor, slots_B: torch.Tensor, width: int, tables: torch.Tensor,
        cache: KvCache, scratch: Any, out: Rows, settled: bool = False,
    ) -> None:  # fmt: skip
        """Full attention between its two products: writes the window's keys and values, then out [R, h D]. `settled`:
        `embed_rows` has run since anything else of cache and plan was written.

        Definition: kernels.attention.window_attention; held by tests/support/attention_windows.py.
        """
        ...

    def gdn_window(
        self, mixer: GatedDeltaNet, number: int, projected: torch.Tensor, slots_B: torch.Tensor, width: int,
        state: SlotState, recurrent: RecurrentState, scratch: Any, out: Rows,
    ) -> None:  # fmt: skip
        """Linear layer `number` between its two products, out [R, Hv dv].

        Definition: kernels.delta_net.delta_window; held by tests/support/delta_windows.py.
        """
        ...

    def experts(
        self, mlp: AnyMoe, x: Rows, logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate: torch.Tensor,
        scratch: Any,
    ) -> torch.Tensor:  # fmt: skip
        """What each row's experts give, then the shared one, for `combine` of the same table. The router's fp32 logits
        [>= R, E + 1] choose them: writes weights fp32 and ids [R, k] in rank order, the shared expert's gate fp32 [R].

        Definition: kernels.moe.route and expert_parts; held by tests/support/small_operators.py
        (kernels.cuda.router.route_reference: the same but where probabilities of different logits round to equal ones),
        tests/unit/kernels/cuda/test_experts.py, tests/gpu/test_moe.py.
        """
        ...

    def combine(
        self, parts: torch.Tensor, weights: torch.Tensor, gate: torch.Tensor, x: torch.Tensor,
        norm: Norm | None = None, out: Rows | None = None,
    ) -> None:  # fmt: skip
        """x += the weighted parts in rank order, the shared one last; with a norm, out = its norm of x.

        Definition: kernels.moe.combine; held by tests/unit/kernels/cuda/test_run_products.py.
        """
        ...

    # -- decide -----------------------------------------------------------------------------------------------------

    def choose(
        self, logits: torch.Tensor, slots_B: torch.Tensor, state: SlotState, width: int, out: torch.Tensor,
        scratch: Any, flags: int, has_nan: torch.Tensor | None = None, allowed: torch.Tensor | None = None,
        kept: torch.Tensor | None = None, first: int = 0, draft: bool = False, see: See | None = None,
    ) -> None:  # fmt: skip
        """out int64 [R]: the token of every row, or (draft) draft number `first` of each sequence, into the state too.

        flags: bits that any slot may have. has_nan int32 [R]: whether the chosen token's own logit is a NaN. allowed:
        int32 words with a bit for each id that a grammar allows a row. kept: the vocabulary ids of the logits.
        Definition: spec.sampling.choose; held by tests/support/small_operators.py.
        """
        ...

    def accept_commit(
        self, chosen: torch.Tensor, slots_B: torch.Tensor, state: SlotState, verdicts: Verdicts, width: int,
        next_depth: int, flags: int, pending: bool = True,
    ) -> None:  # fmt: skip
        """How much of each window becomes text, and the commit. `pending`: the rows wait for replay and the length
        grows (not so after a prompt). Definition: spec.accept; held by tests/support/small_operators.py."""
        ...

    def look_up(
        self, slots_B: torch.Tensor, state: SlotState, depth: int, longest: int, shortest: int, scratch: Any
    ) -> None:
        """Drafts from the text so far. Definition: draft_heads.lookup.match.look_up; held by
        tests/support/small_operators.py."""
        ...

    # -- a prompt ---------------------------------------------------------------------------------------------------

    def embed(self, embedding: Embedding, tokens_T: torch.Tensor) -> torch.Tensor:
        """fp32 [T, H]."""
        ...

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Definition: kernels.norm.rms_norm, for both tables."""
        ...

    def norm_of_sum(self, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        """The norm of x + delta, which x fp32 [T, H] becomes; as `add_norm`."""
        ...

    def prompt_rows(self, length: int) -> int:
        """Rows that a prompt's piece of so many tokens runs over; those past them are padding. A function of the length
        alone. Torch: no padding."""
        ...

    def product(self, weight: AnyLinear, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[T, N] for any T, in `out` if that is given, contiguous, and a multiple of 8 wide; bits depend on T.

        Definition: AnyLinear.bulk; held by tests/gpu/test_linear.py.
        """
        ...

    def products(
        self, weight: AnyLinear, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """`product` of each, with the bits that it has alone.

        Definition: AnyLinear.bulk; held by tests/unit/kernels/cuda/test_experts.py, tests/gpu/test_linear.py.
        """
        ...

    def project_prompt(
        self, mixer: GatedAttention, projected: torch.Tensor, span: Span, cache: KvCache, q: torch.Tensor
    ) -> None:
        """Full attention over a span up to its product: writes the span's keys and values, and q [T, h, D].

        Definition: kernels.rope and kernels.attention.write_kv; held by tests/support/prompt_attention.py.
        """
        ...

    def attend_prompt(
        self, mixer: GatedAttention, q: torch.Tensor, projected: torch.Tensor, span: Span, cache: KvCache,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """out [T, h D], what q sees of the context, times its gate. Never captured: it may read on the host how long
        the context is.

        Definition: kernels.attention.prefill_attention; held by tests/support/prompt_attention.py.
        """
        ...

    def gdn_prompt(
        self, mixer: GatedDeltaNet, number: int, projected: torch.Tensor, span: Span, recurrent: RecurrentState
    ) -> torch.Tensor:
        """[T, Hv dv] of linear layer `number`; the slot's state and history become those after the span. Rows of
        padding give 0 and change nothing.

        Definition: kernels.delta_net.delta_prefill; held by tests/support/delta_prompts.py.
        """
        ...

    def feed_forward_prompt(
        self, mlp: GatedMlp | AnyMoe, xs: Sequence[torch.Tensor], normed: Sequence[torch.Tensor], after: Norm
    ) -> list[torch.Tensor]:
        """Each x fp32 [T, H] += the layer's second half of its `normed`; the norm `after` of it. Bits of each are those
        that it has alone.

        Definition: kernels.moe.expert_bulk; held by tests/support/prompt_experts.py.
        """
        ...


def operators_of(model: Model) -> Operators:
    """The table for the form that a model's weights were packed in."""
    if model.is_packed:
        from pilotfish.engine.round.cuda_table import CudaOperators  # imports Triton

        return CudaOperators(model)
    from pilotfish.engine.round.torch_table import TorchOperators

    return TorchOperators()
