"""The file of a trimmed draft vocabulary: JSON with the ids that drafts are chosen from, and the size they are of."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from pilotfish.engine.errors import OptionError


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
