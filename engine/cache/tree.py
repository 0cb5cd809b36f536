"""What was read of prompts, by their tokens: a tree whose nodes are the chunks between two boundaries.

A node keeps the KV pages of its chunk, and may have a snapshot: the number of a place where the recurrent state at its
end is kept. A prompt goes on from the deepest node with a snapshot on its way. Nodes are found by the token ids
themselves, under a salt each: dictionaries hash a chunk and compare it. What has no snapshot below it is of no use and
goes at once. No torch, and nothing of sequences: who stands at a node is a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pilotfish.engine.cache.grid import Grid
from pilotfish.engine.cache.pool import Pool

SELDOM = 0.125
"""How often, beside the last boundary of a conversation, one within it is gone back to: a guess."""
MAX_REMEMBERED = 4096
"""Chunks that have gone and are still known by name."""


@dataclass(eq=False)
class Node:
    """The tokens `chunk` (int32) after those of `parent`, up to the boundary `end`; a root has none.

    `num_readers` stand here: they hold the pages from the root on, and need the snapshot. `lasting`: others are likely
    to begin so too. `checked`: the snapshot's state was seen to be sound. `name` stands for all tokens up to here.
    `touched` and `rank`: when it was last of use, and in which order snapshots are given up, the lowest first.
    `keys`, of a root: the labels of those who have asked under its salt.
    """

    parent: Node | None
    chunk: bytes
    end: int
    name: int
    salt: str
    children: dict[bytes, Node] = field(default_factory=dict)
    snapshot: int | None = None
    num_readers: int = 0
    lasting: bool = False
    checked: bool = False
    touched: float = 0.0
    rank: float = 0.0
    linked: bool = True
    keys: set[str] = field(default_factory=set)

    @property
    def path(self) -> list[Node]:
        """From the first chunk to this node."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PrefixTree:
    """`pages` are the pool's that sequences take theirs from; snapshots are numbered 0 .. num_snapshots - 1. A snapshot
    takes the memory of `snapshot_tokens` tokens of keys and values."""

    def __init__(self, grid: Grid, pages: Pool, num_snapshots: int, snapshot_tokens: float):
        self.grid, self.pages = grid, pages
        self.num_snapshots, self.snapshot_tokens = num_snapshots, max(1.0, snapshot_tokens)
        self.num_evictions = 0
        self._roots: dict[str, Node] = {}
        self._free = list(range(num_snapshots - 1, -1, -1))
        # in order of their last use
        self._kept: dict[int, Node] = {}
        self._clock = 0.0
        self._gone: dict[int, None] = {}

    # -- finding ----------------------------------------------------------------------------------------------------

    def root(self, salt: str) -> Node:
        """The start of all prompts under a salt; it is of the tree once somebody stands there."""
        return self._roots.get(salt) or Node(None, b"", 0, hash(salt), salt, linked=False)

    @property
    def roots(self) -> list[Node]:
        return list(self._roots.values())

    def walk(self, node: Node, chunks: list[bytes]) -> Iterator[Node]:
        """The nodes of `chunks` after `node`, as far as they are known."""
        for chunk in chunks:
            following = node.children.get(chunk)
            if following is None:
                return
            node = following
            yield node

    def is_gone(self, node: Node, chunk: bytes) -> bool:
        """Whether a chunk after `node` was there once, as far as that is remembered."""
        return _name(node, chunk) in self._gone

    def pages_of(self, node: Node) -> list[int]:
        """The pages of all tokens up to a node."""
        return [page for step in node.path for page in self.pages.kept_by(step)]

    # -- readers ----------------------------------------------------------------------------------------------------

    def enter(self, node: Node) -> None:
        """Somebody stands at a node, whose pages they hold."""
        if node.parent is None and not node.linked:
            node.linked = True
            self._roots[node.salt] = node
        node.num_readers += 1

    def leave(self, node: Node) -> None:
        """Somebody who stood at a node has left."""
        node.num_readers -= 1
        assert node.num_readers >= 0
        if node.linked:
            self._prune(node)
        elif node.snapshot is not None and not node.num_readers:
            self._give_up_snapshot(node)

    def grow(self, node: Node, chunk: bytes, end: int, pages: list[int]) -> Node:
        """The node of a chunk after `node`, where a reader stands; if there is none yet, it keeps the reader's
        pages."""
        known = node.children.get(chunk)
        if known is not None:
            return known
        child = Node(node, chunk, end, _name(node, chunk), node.salt, touched=self._clock)
        self.pages.keep(child, pages)
        node.children[chunk] = child
        self._rank(node)
        return child

    # -- snapshots --------------------------------------------------------------------------------------------------

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def keep(self, node: Node) -> int | None:
        """The number of a snapshot for a node that has none; None where all others are needed."""
        assert node.snapshot is None
        if not self._free:
            least = min((other for other in self._kept.values() if not other.num_readers), key=_by_rank, default=None)
            if least is None:
                return None
            self._evict(least)
        number = node.snapshot = self._free.pop()
        node.checked = False
        self._kept[number] = node
        self.touch(node)
        self._rank_below(node)
        return number

    def touch(self, node: Node) -> None:
        """A node's snapshot is of use now."""
        assert node.snapshot is not None
        self._kept[node.snapshot] = self._kept.pop(node.snapshot)
        node.touched = self._clock
        self._rank(node)

    def thin(self, node: Node) -> None:
        """Gives up snapshots before `node` where they stand close: the two last are kept, and the farther back, the
        fewer. What is kept for n chunks is kept for n - 1 too, if it is there."""
        newest = node.end // self.grid.spacing
        for step in node.path[:-1]:
            number = step.end // self.grid.spacing
            if (
                step.snapshot is not None
                and not step.num_readers
                and not step.lasting
                and len(step.children) < 2
                and not _stays(number, newest)
            ):
                self._drop(step)

    def remove(self, node: Node) -> None:
        """Forgets a node and all that is below it: it was read wrongly. Those who stand there go on by themselves, from
        snapshots that they may still need."""
        assert node.parent is not None
        found = [node]
        for step in found:
            found += step.children.values()
        for step in reversed(found):
            if step.snapshot is not None and not step.num_readers:
                self._give_up_snapshot(step)
            self._unlink(step, remember=False)
        self._prune(node.parent)

    def make_room(self, count: int) -> None:
        """Gives up what nobody needs until `count` pages are free; so many are free or idle."""
        while count > self.pages.num_free:
            ends = (node for node in self._kept.values() if not (node.children or node.num_readers))
            self._evict(min(ends, key=_by_rank))

    def clear(self) -> None:
        """Gives up whatever nobody needs."""
        for node in list(self._kept.values()):
            if not node.num_readers:
                self._drop(node)

    def _evict(self, node: Node) -> None:
        self._clock = max(self._clock, node.rank)
        self.num_evictions += 1
        self._drop(node)

    def _drop(self, node: Node) -> None:
        self._give_up_snapshot(node)
        self._rank_below(node)
        self._prune(node)

    def _give_up_snapshot(self, node: Node) -> None:
        assert node.snapshot is not None
        del self._kept[node.snapshot]
        self._free.append(node.snapshot)
        node.snapshot = None

    def _prune(self, node: Node) -> None:
        """Nodes that lead to no snapshot, and where nobody stands, go, from this one up."""
        while node.snapshot is None and not node.children and not node.num_readers:
            if node.parent is None:
                self._roots.pop(node.salt, None)
                node.linked = False
                return
            parent = node.parent
            self._unlink(node, remember=True)
            node = parent

    def _unlink(self, node: Node, remember: bool) -> None:
        assert node.parent is not None
        node.linked = False
        del node.parent.children[node.chunk]
        self.pages.give_up(node)
        self._rank(node.parent)
        if remember:
            self._gone[node.name] = None
            if len(self._gone) > MAX_REMEMBERED:
                del self._gone[next(iter(self._gone))]

    # -- which snapshot goes first ----------------------------------------------------------------------------------

    def _rank(self, node: Node) -> None:
        """Reading saved for each token's worth of memory, from when it was last of use on (GreedyDual-Size, Cao and
        Irani 1997: what goes sets the clock)."""
        if node.snapshot is None:
            return
        above = node.parent
        while above is not None and above.parent is not None and above.snapshot is None:
            above = above.parent
        saved = node.end - (above.end if above is not None else 0)
        inner = bool(node.children)
        chance = SELDOM if inner and not node.lasting and len(node.children) == 1 else 1.0
        node.rank = node.touched + chance * saved / (self.snapshot_tokens + (0 if inner else saved))

    def _rank_below(self, node: Node) -> None:
        """A snapshot has come or gone: those below save less or more."""
        self._rank(node)
        todo = list(node.children.values())
        while todo:
            below = todo.pop()
            if below.snapshot is None:
                todo += below.children.values()
            else:
                self._rank(below)

    # -- invariants -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every invariant of the tree, and that the pool knows of no other keeper."""
        nodes, todo = [], list(self._roots.values())
        while todo:
            node = todo.pop()
            nodes.append(node)
            todo += node.children.values()
        for node in nodes:
            assert node.linked and node.num_readers >= 0
            assert node.children or node.num_readers or node.snapshot is not None, f"nothing needs {node.end}"
            for chunk, child in node.children.items():
                assert child.parent is node and child.chunk == chunk and child.salt == node.salt
                length = child.end - node.end
                assert child.end == self.grid.next_boundary(node.end) and len(chunk) == 4 * length
                assert len(self.pages.kept_by(child)) * self.grid.page == length
        left = [node for node in self._kept.values() if not node.linked]
        assert all(node.num_readers for node in left), "a snapshot of what is gone, which nobody needs"
        kept = {node.snapshot: node for node in (*nodes, *left) if node.snapshot is not None}
        assert kept == self._kept and len(kept) + len(self._free) == self.num_snapshots
        assert sorted([*kept, *self._free]) == list(range(self.num_snapshots)), "snapshots lost or kept twice"
        assert sum(node.parent is not None for node in nodes) == self.pages.num_keepers, "pages of nodes that are gone"


def _name(node: Node, chunk: bytes) -> int:
    return hash((node.name, chunk))


def _by_rank(node: Node) -> float:
    return node.rank


def _stays(number: int, newest: int) -> bool:
    """Whether a chunk's snapshot stays, of chunks 0 .. newest - 1: the last one does, then multiples of 2, of 4, of 8,
    .. as the distance doubles."""
    return number % (1 << (newest - number).bit_length() - 1) == 0
