"""What a draft head offers, and what of a round and of a prompt it may use.

A head owns its cache; the trunk's embedding and lm_head are lent to it.

B = sequences, W = window rows, H = hidden, T = prompt rows, K = drafts. The pair (h_i, t_(i+1)) has position i, and is
stored at place i + 1: the head's cache lags by one (engine.cache.tensors.KvCache), so that what is stored up to a place
depends on the tokens before it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from pilotfish.spec.slots import SlotState


class RoundPass(Protocol):
    """A round, after its commit, as a head records its own part in it: operators in order, over static memory.

    `ops` is the table of operators (engine.round.operators). Of `buffers` a head reads `slots` [B], `chosen` (the
    trunk's own token of every row, int64), `hidden` (the trunk's final-norm hidden of every row) and `verdicts(B)`; it
    writes `x` (the stream, fp32), `pair` [., 2H] and `head_hidden`, from which drafts are chosen; `first(n)` has views
    of their first rows. `state` is every slot's. A head waits for nothing and looks at no value: what it records may be
    captured.
    """

    @property
    def ops(self) -> Any: ...

    @property
    def buffers(self) -> Any: ...

    @property
    def state(self) -> SlotState: ...

    @property
    def embedding(self) -> Any: ...

    @property
    def mark(self) -> Any:
        """mark(phase) ends a phase."""
        ...

    def plan(self, count: int, width: int, step: int) -> None:
        """Row b * W + j of the next pass stands at position length + step + j."""
        ...

    def full_layer(
        self, layer: Any, cache: Any, count: int, width: int, norm: Any, out: torch.Tensor,
        chosen: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """A full-attention layer over the stream `x`; then out = `norm` of all its rows, or of those chosen."""
        ...

    def choose_draft(self, count: int, number: int, flags: int) -> None:
        """Draft `number` of each sequence, from head_hidden, by the request's own rule, into the state and `draft`."""
        ...

    def see(self, name: str, rows: torch.Tensor) -> None: ...


class PromptRows(Protocol):
    """A prompt's span, as a head fills its cache from it: engine.round.prompt.PromptPass."""

    @property
    def ops(self) -> Any: ...

    @property
    def model(self) -> Any: ...

    def full_layer(self, x: torch.Tensor, layer: Any, span: Any, cache: Any, after: Any) -> torch.Tensor:
        """A full-attention layer over x fp32 [T, H], all of it: the norm `after` of what x becomes."""
        ...

    def enter_layer(self, x: torch.Tensor, layer: Any, span: Any, cache: Any) -> None:
        """What such a layer stores, alone."""
        ...


class DraftHead(Protocol):
    """`caches`: keys and values that live on the trunk's page tables. `reads_history`: slots keep their tokens."""

    @property
    def caches(self) -> Sequence[Any]: ...

    @property
    def reads_history(self) -> bool: ...

    def fill(self, prompt: PromptRows, next_tokens: torch.Tensor, hidden: torch.Tensor, span: Any) -> torch.Tensor:
        """Hidden rows [T, H] of the pairs at a span's positions; next_tokens int64 [T], hidden [T, H] the trunk's."""
        ...

    def enter(self, prompt: PromptRows, next_tokens: torch.Tensor, hidden: torch.Tensor, span: Any) -> None:
        """Stores what `fill` stores, and no more: of a prompt's pairs but the last nobody reads the hidden rows."""
        ...

    def record(self, round: RoundPass, count: int, width: int, depth: int, flags: int) -> None:
        """The head's part of a round: its own state brought to exactly what was committed, then `depth` drafts of each
        of `count` sequences into the state (0: none).

        All window rows are repaired, with the trunk's own next tokens: that overwrites what drafting left there, and
        rows past the first rejection hold noise beyond the sequence's length. A prompt's last pair is made here too, as
        a window of one row. `flags`: bits that any sequence may have.
        """
        ...
