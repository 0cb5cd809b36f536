"""The device buffers of every slot that choosing and committing read and write.

They are those of `engine.batch_state.BatchState`, all of them allocated; kernels take the whole tuple.
S = slots, K = largest depth, V = vocabulary, N and M = word bans and the tokens before their last one, L = positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Bits of `flags`: what of sampling a slot's request uses. Temperature 0 is greedy and needs no bit.
BIASED = 1
PENALISED = 2
MIN_TOKENS = 4
BAD_SEQUENCES = 8
THINKING = 16
MIN_P = 32
TOP_K = 64
TOP_P = 128
MASKED = 256
"""A grammar's mask stands in `choose`'s `allowed` words for the rows of this slot."""
FILTERED = MIN_P | TOP_K | TOP_P


class SlotState(NamedTuple):
    """int64 [S] where nothing else is said. Contiguous, on one device; `done` and `seen` as uint8 (`Tensor.view`)."""

    flags: torch.Tensor
    """int32 [S]."""
    length: torch.Tensor
    last_token: torch.Tensor
    limit: torch.Tensor
    pending_count: torch.Tensor
    own_k: torch.Tensor
    num_offered: torch.Tensor
    min_until: torch.Tensor
    drafts: torch.Tensor
    """int64 [S, K]."""
    done: torch.Tensor
    """uint8 [S]."""
    stop_ids: torch.Tensor
    """int64 [S, 64], the unused -1 at the end."""
    seed: torch.Tensor
    choice: torch.Tensor
    top_k: torch.Tensor
    temperature: torch.Tensor
    """This and the next five fp32 [S]."""
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    counts: torch.Tensor
    """int32 [S, V]."""
    seen: torch.Tensor
    """uint8 [S, V]."""
    bias: torch.Tensor
    """fp32 [S, V]."""
    bad_prefixes: torch.Tensor
    """int64 [S, N, M]."""
    bad_lasts: torch.Tensor
    """int64 [S, N], the unused -2 at the end."""
    recent: torch.Tensor
    """int64 [S, M]."""
    think_start: torch.Tensor
    think_end: torch.Tensor
    think_budget: torch.Tensor
    think_opened: torch.Tensor
    think_closed: torch.Tensor
    num_closing: torch.Tensor
    closing: torch.Tensor
    """int64 [S, 64]."""
    history: torch.Tensor | None = None
    """int32 [S, L], for heads that read it."""
