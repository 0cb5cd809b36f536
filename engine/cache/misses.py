"""Why a prompt was not found in the prefix cache as far as the grid allows. No torch."""

from __future__ import annotations

from array import array

from pilotfish.engine.cache.tree import Node, PrefixTree
from pilotfish.engine.link.messages import CacheMiss, MissReason
from pilotfish.engine.requests.sequence import Sequence

NUM_COMPARED = 8
"""Kept prompts, the newest, of which the nearest is looked for."""
NUM_SHOWN = 8
"""Tokens that are shown from a difference on."""


def miss_of(sequence: Sequence, tree: PrefixTree, last: Node, depth: int, is_coming: bool) -> CacheMiss | None:
    """What is told of an admitted sequence; None where all was found that could be. `last`: the last node on its
    prompt's way, `depth` chunks from the root. `is_coming`: the next one is being read just now."""
    length = len(sequence.prompt)
    reason, difference, there = _reason(sequence, tree, last, depth, is_coming)
    if reason is None:
        return None
    return CacheMiss(
        request_id=sequence.request_id,
        reason=reason,
        key=sequence.request.key,
        num_prompt_tokens=length,
        num_cached_tokens=sequence.num_cached,
        num_allowed_tokens=tree.grid.last_boundary(length),
        first_difference=difference,
        here=() if difference is None else tuple(sequence.prompt[difference : difference + NUM_SHOWN]),
        there=there,
    )


def _reason(
    sequence: Sequence, tree: PrefixTree, last: Node, depth: int, is_coming: bool
) -> tuple[MissReason | None, int | None, tuple[int, ...]]:
    chunks = sequence.chunks or []
    if not sequence.uses_cache:
        return "logprobs", None, ()
    if not chunks:
        return "short", None, ()
    if depth == len(chunks):
        return None if sequence.num_cached == last.end else "evicted", None, ()
    chunk = chunks[depth]
    if is_coming:
        return "unread", None, ()
    if tree.is_gone(last, chunk):
        return "evicted", None, ()
    newest = list(last.children)[-NUM_COMPARED:]
    common, nearest = max(((_num_common(chunk, other), other) for other in newest), default=(0, b""))
    if common or (newest and last.parent is not None):
        there = array("i", nearest[4 * common : 4 * (common + NUM_SHOWN)])
        return "differs", last.end + common, tuple(there)
    if last.parent is not None:
        # it only goes on where the kept prompt ended
        return None if sequence.num_cached == last.end else "evicted", None, ()
    # of a salt that none of this key's requests had it learns nothing
    own = (root for root in tree.roots if sequence.request.key in root.keys)
    return "salt" if any(chunk in root.children for root in own) else "new", None, ()


def _num_common(one: bytes, other: bytes) -> int:
    """Tokens at the start that are the same."""
    low, high = 0, min(len(one), len(other)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if one[4 * low : 4 * middle] == other[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low
