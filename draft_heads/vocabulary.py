"""A trimmed draft vocabulary: lm_head over the ids that are written most, for drafting alone.

The full lm_head costs more than the head's own layer. A token that is not in the vocabulary is never drafted, so it
costs a rejection and nothing else: what is accepted is still what the trunk chooses. Noise is indexed by vocabulary id,
so that sampled drafts use the trunk's own numbers.
N = kept ids, V = vocabulary, H = hidden, R = rows padded to whole tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pilotfish.kernels.linear import AnyLinear


@dataclass(frozen=True)
class DraftVocabulary:
    """`ids` int32 [N], rising; `lm_head` [N, H] are their rows."""

    ids: torch.Tensor
    lm_head: AnyLinear
