"""The prefix cache as the scheduler and the loop use it: what sequences find, hold and leave in the tree.

A sequence looks for its prompt when it is admitted and before each of its chunks: what another one has read meanwhile
it need not read either. After a chunk that ends at a boundary it leaves a snapshot there. Only prompts are looked for
and left, never what a round wrote. No torch: snapshots are numbers; the loop copies states there and back.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from pilotfish.engine.cache.grid import Grid
from pilotfish.engine.cache.misses import miss_of
from pilotfish.engine.cache.pool import Pool
from pilotfish.engine.cache.tree import Node, PrefixTree
from pilotfish.engine.link.messages import MAX_MISSES, CacheMiss, PrefixCacheStats
from pilotfish.engine.requests.sequence import Sequence


@dataclass(frozen=True)
class PrefixSizes:
    """`num_snapshots` of `snapshot_bytes` each, beside pages of `page_bytes`. Without snapshots nothing is kept."""

    num_snapshots: int = 0
    snapshot_bytes: int = 0
    page_bytes: int = 1


@dataclass(eq=False)
class Reader:
    """Where a running sequence stands in the tree: `depth` chunks from the root. `lasting`: boundaries at which other
    prompts are likely to leave this one."""

    node: Node
    depth: int
    lasting: set[int] = field(default_factory=set)


class PrefixCache:
    """`is_sound` tells whether a snapshot's state is free of NaN. It may wait for the device, and is asked once, before
    the first use."""

    def __init__(self, grid: Grid, pages: Pool, sizes: PrefixSizes, is_sound: Callable[[int], bool] = lambda _: True):
        self.grid, self.pages, self.sizes, self.is_sound = grid, pages, sizes, is_sound
        snapshot_tokens = sizes.snapshot_bytes * grid.page / sizes.page_bytes
        self.tree = PrefixTree(grid, pages, sizes.num_snapshots, snapshot_tokens)
        self._readers: dict[Sequence, Reader] = {}
        self._misses: list[CacheMiss] = []
        self._num_queried = self._num_hit = self._num_evictions = 0
        self._told = (0, 0, 0)

    @property
    def is_on(self) -> bool:
        return self.sizes.num_snapshots > 0

    # -- admission --------------------------------------------------------------------------------------------------

    def find(self, sequence: Sequence) -> Node | None:
        """From where a waiting sequence's prompt can go on; None where it takes no part."""
        if not self.is_on or not sequence.uses_cache:
            return None
        if sequence.chunks is None:
            sequence.chunks = self._chunks(sequence.prompt)
        root = self.tree.root(sequence.request.cache_salt)
        return self._deepest(root, sequence.chunks) or root

    def pages_of(self, node: Node | None) -> list[int]:
        """The pages that a sequence shares which goes on from `node`."""
        return [] if node is None else self.tree.pages_of(node)

    def make_room(self, count: int) -> None:
        """What is kept gives way until `count` pages are free; so many are free or idle."""
        self.tree.make_room(count)

    def enter(self, sequence: Sequence, node: Node | None) -> None:
        """A sequence was admitted, and has the pages of `node`."""
        if node is not None:
            assert sequence.chunks is not None
            self._num_queried += len(sequence.prompt)
            self.tree.enter(node)
            self.tree.root(sequence.request.cache_salt).keys.add(sequence.request.key)
            self._readers[sequence] = reader = Reader(node, len(node.path))
            way = [node, *self.tree.walk(node, sequence.chunks[reader.depth :])]
            self._mark(sequence, reader, way)
            self._go_on(sequence, node)
        elif self.is_on and sequence.request.sampling.prompt_logprobs is not None:
            way = [self.tree.root(sequence.request.cache_salt)]
        else:
            # a check of the engine's own is nobody's miss
            return
        self._tell(sequence, way)

    def _mark(self, sequence: Sequence, reader: Reader, way: list[Node]) -> None:
        """Where a snapshot shall last: at the end of the system prompt, and where two prompts part that were kept as
        one."""
        system_tokens = sequence.request.system_tokens
        if system_tokens is not None:
            reader.lasting.add(self.grid.last_boundary(max(0, min(system_tokens, len(sequence.prompt)))))
        if way[-1] is not reader.node:
            reader.lasting.add(way[-1].end)
        reader.node.lasting |= reader.node.end in reader.lasting

    def _tell(self, sequence: Sequence, way: list[Node]) -> None:
        depth = len(way[-1].path)
        miss = miss_of(sequence, self.tree, way[-1], depth, self._is_coming(sequence, depth + 1))
        if miss is not None:
            self._misses = [*self._misses, miss][-MAX_MISSES:]

    def _is_coming(self, sequence: Sequence, depth: int) -> bool:
        """Whether somebody else is about to read this sequence's first `depth` chunks."""
        wanted, salt = (sequence.chunks or [])[:depth], sequence.request.cache_salt
        return any(
            other is not sequence
            and other.request.cache_salt == salt
            and not other.is_prefilled
            and (other.chunks or [])[:depth] == wanted
            for other in self._readers
        )

    # -- while a prompt is read -------------------------------------------------------------------------------------

    def advance(self, sequence: Sequence) -> None:
        """Before a chunk: goes on from what has been found since."""
        reader = self._readers.get(sequence)
        if reader is None:
            return
        assert sequence.chunks is not None
        node = self._deepest(reader.node, sequence.chunks[reader.depth :])
        if node is None:
            return
        sequence.pages = self.pages.exchange(sequence, self.tree.pages_of(node))
        self._move(reader, node)
        self._go_on(sequence, node)

    def publish(self, sequence: Sequence) -> int | None:
        """After a chunk: the snapshot to copy its slot's state to, if there shall be one."""
        reader, end = self._readers.get(sequence), sequence.num_prefilled
        if reader is None or not reader.node.linked or not reader.node.end < end or not self.grid.is_boundary(end):
            return None
        assert sequence.chunks is not None
        before = reader.node
        own = sequence.pages[before.end // self.grid.page : end // self.grid.page]
        node = self.tree.grow(before, sequence.chunks[reader.depth], end, own)
        self._move(reader, node)
        if self.pages.kept_by(node) != own:
            # another's, read alike; only its snapshot had gone
            sequence.pages = self.pages.exchange(sequence, self.tree.pages_of(node))
        if node.snapshot is not None:
            return None
        self.tree.thin(node)
        return self.tree.keep(node)

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended, and is about to give its pages back."""
        reader = self._readers.pop(sequence, None)
        if reader is not None:
            self.tree.leave(reader.node)

    def forget(self) -> None:
        """Gives up whatever no running sequence stands on, and forgets what was counted."""
        self.tree.clear()
        self.take_stats()

    def _chunks(self, prompt: list[int]) -> list[bytes]:
        # half the time of an array, and nearly all of an admission's
        tokens, chunks, start = struct.pack(f"{len(prompt)}i", *prompt), [], 0
        while (end := self.grid.next_boundary(start)) <= len(prompt):
            chunks.append(tokens[4 * start : 4 * end])
            start = end
        return chunks

    def _deepest(self, node: Node, chunks: list[bytes]) -> Node | None:
        """The last node below `node` on a prompt's way with a snapshot that can be used."""
        while True:
            kept = [step for step in self.tree.walk(node, chunks) if step.snapshot is not None]
            if not kept or self._check_soundness(kept[-1]):
                return kept[-1] if kept else None

    def _check_soundness(self, node: Node) -> bool:
        assert node.snapshot is not None
        if not node.checked and not self.is_sound(node.snapshot):
            self.tree.remove(node)
            return False
        node.checked = True
        return True

    def _move(self, reader: Reader, node: Node) -> None:
        before = reader.node
        self.tree.enter(node)
        reader.node, reader.depth = node, len(node.path)
        node.lasting |= node.end in reader.lasting
        self.tree.leave(before)

    def _go_on(self, sequence: Sequence, node: Node) -> None:
        """The sequence's state is to be a snapshot's."""
        if node.snapshot is None:
            return
        self.tree.touch(node)
        found = node.end - sequence.num_prefilled
        sequence.num_cached += found
        self._num_hit += found
        sequence.num_prefilled, sequence.restore = node.end, node.snapshot

    # -- what can be seen -------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """What is kept that nobody uses: snapshots, and pages that the cache alone holds."""
        return self.tree.num_kept * self.sizes.snapshot_bytes + self.pages.num_idle * self.sizes.page_bytes

    def take_stats(self) -> PrefixCacheStats | None:
        """Counts since the last call, and gauges; None where nothing has changed."""
        gauges = self.tree.num_kept, self.num_bytes, self.capacity_bytes
        num_evictions = self.tree.num_evictions - self._num_evictions
        if gauges == self._told and not (self._num_queried or self._num_hit or num_evictions or self._misses):
            return None
        stats = PrefixCacheStats(
            num_queried_tokens=self._num_queried,
            num_hit_tokens=self._num_hit,
            num_evictions=num_evictions,
            misses=tuple(self._misses),
            num_snapshots=gauges[0],
            num_bytes=gauges[1],
            capacity_bytes=gauges[2],
        )
        self._told = gauges
        self._num_queried = self._num_hit = 0
        self._num_evictions, self._misses = self.tree.num_evictions, []
        return stats if self.is_on else None

    @property
    def capacity_bytes(self) -> int:
        """The most that can be kept, while no sequence runs."""
        return self.sizes.num_snapshots * self.sizes.snapshot_bytes + self.pages.capacity * self.sizes.page_bytes

    def check(self) -> None:
        """Every invariant of the tree, and that each sequence in it has the pages of the node where it stands."""
        self.tree.check()
        for sequence, reader in self._readers.items():
            node = reader.node
            assert node.num_readers == sum(other.node is node for other in self._readers.values())
            if node.linked:
                pages = self.tree.pages_of(node)
                assert sequence.pages[: len(pages)] == pages, f"{sequence.request_id} does not share what it stands on"
                assert node.end <= sequence.num_prefilled and len(node.path) == reader.depth
                assert [step.chunk for step in node.path] == (sequence.chunks or [])[: reader.depth]
