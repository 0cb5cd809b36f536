"""A trimmed draft vocabulary: lm_head over the ids that are written most, for drafting alone.

The full lm_head costs more than the head's own layer. A token that is not in the vocabulary is never drafted, so it
costs a rejection and nothing else: what is accepted is still what the trunk chooses. Noise is indexed by vocabulary id,
so that sampled drafts use the trunk's own numbers.
N = kept ids, V = vocabulary, H = hidden, R = rows padded to whole tiles.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from pilotfish.engine.convert.write import write_text
from pilotfish.engine.errors import OptionError
from pilotfish.kernels.linear import AnyLinear


@dataclass(frozen=True)
class DraftVocabulary:
    """`ids` int32 [N], rising; `lm_head` [N, H] are their rows."""

    ids: torch.Tensor
    lm_head: AnyLinear

    def logits(self, hidden_RH: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """fp32 [R, V], -inf for what was left out; row-invariant."""
        kept = self.lm_head.rows(hidden_RH).float()
        logits = kept.new_full((len(kept), vocab_size), float("-inf"))
        logits[:, self.ids.long()] = kept
        return logits


def build_draft_vocab(counts_V: np.ndarray, size: int, always: Iterable[int] = ()) -> list[int]:
    """The `always` ids and then the most frequent, `size` in all (ties to the lower id), in rising order."""
    kept = sorted(set(always))
    if not len(kept) <= size <= len(counts_V):
        raise OptionError(f"draft vocabulary: want {max(1, len(kept))}..{len(counts_V)} ids, got {size}")
    ranked = np.argsort(-counts_V, kind="stable")
    chosen = ranked[~np.isin(ranked, kept)][: size - len(kept)]
    return sorted([*kept, *chosen.tolist()])


def write_draft_vocab(path: Path, ids: list[int], vocab_size: int) -> None:
    write_text(path, json.dumps({"vocab_size": vocab_size, "ids": ids}) + "\n")


def read_draft_vocab(path: Path, vocab_size: int) -> list[int]:
    """Raises OptionError naming what is wrong with the file."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        ids, made_for = fields["ids"], fields["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f'{path}: want JSON with "vocab_size" and "ids": {error!r}') from error
    if made_for != vocab_size:
        raise OptionError(f"{path}: want a vocabulary of {vocab_size} ids, as the model's, got one of {made_for}")
    if not isinstance(ids, list) or not ids or not all(type(id) is int and 0 <= id < vocab_size for id in ids):
        raise OptionError(f"{path}: ids: want a list of whole numbers in 0..{vocab_size - 1}")
    if any(a >= b for a, b in pairwise(ids)):
        raise OptionError(f"{path}: ids: want them rising, each once")
    return ids
