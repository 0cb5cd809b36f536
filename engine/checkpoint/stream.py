"""Brings tensors of safetensors files onto a device, in pieces of the files that several threads read at once.

On the CPU a piece is read straight into the memory where its weights stay. For another device it is read into one of a
few buffers, pinned for CUDA, from where it goes on in one copy while others are read. Packed parts of small matrices,
of which a model has tens of thousands, lie together in one allocation a piece; every other tensor has memory of its
own. So who keeps one such part and lets its neighbours go keeps up to PIECE bytes.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch

from pilotfish.engine.checkpoint.headers import TensorInfo, fingerprint
from pilotfish.engine.checkpoint.layouts import Module
from pilotfish.engine.errors import CheckpointError, HeaderError

TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
NUM_READERS = max(4, min(8, os.cpu_count() or 1))  # more than cores, so that the disk never waits
NUM_PIECES = NUM_READERS + 2  # under way at once
PIECE, SMALLEST_PIECE = 16 << 20, 1 << 20  # bytes
SMALL = SMALLEST_PIECE  # bytes up to which a tensor may share an allocation
HUGE = 2 << 20  # bytes from which memory comes in huge pages: page faults took more time than the disk
ALIGNMENT = 256
MAX_GAP = 64 << 10  # bytes of tensors that are left, and read along rather than passed over
MAX_BUFFERS = 1024  # of one call: Linux's IOV_MAX

Identity = tuple[int, ...]
"""What tells a file: the same for as long as nobody writes to it."""


class TensorPlace(Enum):
    """Where a tensor comes to lie."""

    SHARED = "with others of its piece"
    OWN = "by itself"
    HOST = "in host memory, whatever the device"


@dataclass(eq=False, slots=True)
class TensorPart:
    """One tensor to read. `checked`: its bytes are shown to the caller's check."""

    module: Module
    suffix: str
    info: TensorInfo
    place: TensorPlace
    checked: bool


@dataclass(eq=False, slots=True)
class FileSpan:
    """Bytes [begin, begin + size) of a tensor, which lie at `offset` among those of the piece with the same place."""

    part: TensorPart
    begin: int
    size: int
    offset: int

    @property
    def is_last(self) -> bool:
        return self.begin + self.size == self.part.info.num_bytes


@dataclass(eq=False, slots=True)
class FilePiece:
    """Spans in the order of the file, and the bytes that they take by place."""

    file: Path
    identity: Identity
    spans: list[FileSpan] = field(default_factory=list)
    sizes: dict[TensorPlace, int] = field(default_factory=lambda: dict.fromkeys(TensorPlace, 0))
    size: int = 0

    def add(self, part: TensorPart, begin: int, size: int) -> None:
        offset, room = self.sizes[part.place], -(-size // ALIGNMENT) * ALIGNMENT
        self.spans.append(FileSpan(part, begin, size, offset))
        self.sizes[part.place] = offset + room
        self.size += room


def cut(parts: Sequence[TensorPart], identity: Identity, limit: int) -> Iterator[FilePiece]:
    """Pieces of at most `limit` bytes, a multiple of ALIGNMENT, of parts of one file in the order of its bytes.

    A tensor with memory of its own may be divided among several; any other must fit one.
    """
    piece, end = FilePiece(parts[0].info.file, identity), parts[0].info.start
    for part in parts:
        info, begin = part.info, 0
        if info.start - end > MAX_GAP:
            yield piece
            piece = FilePiece(info.file, identity)
        end = info.end
        while True:
            left, room = info.num_bytes - begin, limit - piece.size
            if left <= room:
                piece.add(part, begin, left)
                break
            if part.place is TensorPlace.OWN and room:
                piece.add(part, begin, room)
                begin += room
            yield piece
            piece = FilePiece(info.file, identity)
    yield piece


def stream(
    files: Mapping[Path, Sequence[TensorPart]], device: torch.device, check: Callable[[TensorPart, memoryview], None]
) -> Generator[tuple[TensorPart, torch.Tensor], None, None]:
    """Each part's tensor as it comes, in the order of `files` and of bytes in them.

    `check(part, some of its bytes)` is called in threads. Raises what it raises, and CheckpointError for a file that
    is not what it was when its header was read first.
    """
    largest = max((sum(part.info.num_bytes for part in parts) for parts in files.values()), default=0)
    limit = min(PIECE, max(SMALLEST_PIECE, largest // NUM_PIECES // ALIGNMENT * ALIGNMENT))
    memory = HostMemory() if device.type == "cpu" else StagedMemory(device, limit)
    under_way: deque[tuple[FilePiece, Landing, Future[None]]] = deque()
    pool = ThreadPoolExecutor(NUM_READERS, "checkpoint reader")
    try:
        for piece in _pieces(files, limit):
            if len(under_way) == NUM_PIECES:
                yield from _arrived(memory, *under_way.popleft())
            landing = memory.land(piece)
            under_way.append((piece, landing, pool.submit(_read, piece, landing.buffers, check)))
        while under_way:
            yield from _arrived(memory, *under_way.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def _pieces(files: Mapping[Path, Sequence[TensorPart]], limit: int) -> Iterator[FilePiece]:
    for file, parts in files.items():
        if parts:
            yield from cut(sorted(parts, key=lambda part: part.info.start), _recognise(file, parts), limit)


def _recognise(file: Path, parts: Sequence[TensorPart]) -> Identity:
    """Raises CheckpointError unless header and size of the file are what they were when the parts were told from it."""
    try:
        identity = _identity(os.stat(file))
        now = fingerprint(file)
    except (HeaderError, OSError) as error:
        raise CheckpointError(f"{file}: changed or unreadable since it was opened: {error}") from error
    if any(part.info.fingerprint != now for part in parts):
        raise CheckpointError(f"{file}: its header or its size changed since it was opened")
    return identity


def _identity(status: os.stat_result) -> Identity:
    # no inode: some network file systems number a file anew each time
    return status.st_size, status.st_mtime_ns


def _read(piece: FilePiece, buffers: Sequence[memoryview], check: Callable[[TensorPart, memoryview], None]) -> None:
    """Fills the buffers, one a span."""
    try:
        # opened anew: the system reads ahead for each open file by itself
        descriptor = os.open(piece.file, os.O_RDONLY)
        try:
            if _identity(os.fstat(descriptor)) != piece.identity:
                raise CheckpointError(f"{piece.file}: changed since it was opened")
            _fill(descriptor, *_with_gaps(piece, buffers))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{piece.file}: changed or unreadable since it was opened: {error}") from error
    for span, buffer in zip(piece.spans, buffers, strict=True):
        if span.part.checked:
            check(span.part, buffer)


def _with_gaps(piece: FilePiece, buffers: Sequence[memoryview]) -> tuple[int, list[memoryview]]:
    """Where the piece begins, and buffers for all its bytes in turn."""
    start = end = piece.spans[0].part.info.start + piece.spans[0].begin
    everything = []
    for span, buffer in zip(piece.spans, buffers, strict=True):
        begin = span.part.info.start + span.begin
        if begin > end:
            everything.append(memoryview(bytearray(begin - end)))
        if span.size:
            everything.append(buffer)
        end = begin + span.size
    return start, everything


def _fill(descriptor: int, position: int, buffers: list[memoryview]) -> None:
    """Reads on from a position until all buffers are full. Raises OSError if the file ends before."""
    first = 0
    while first < len(buffers):
        count = os.preadv(descriptor, buffers[first : first + MAX_BUFFERS], position)
        if not count:
            raise OSError(f"it ends at byte {position}")
        position += count
        while first < len(buffers) and count >= len(buffers[first]):
            count -= len(buffers[first])
            first += 1
        if count:
            buffers[first] = buffers[first][count:]


@dataclass(eq=False, slots=True)
class Landing:
    """Where a piece is read to: a buffer for each span, and the blocks they are of, uint8 [n]."""

    buffers: list[memoryview]
    blocks: dict[TensorPlace, torch.Tensor]


class HostMemory:
    """The CPU's: pieces are read to where they stay. `own` holds what has memory of its own and is not whole yet."""

    def __init__(self) -> None:
        self.own: dict[TensorPart, torch.Tensor] = {}

    def land(self, piece: FilePiece) -> Landing:
        """Memory for a piece, before it is read."""
        blocks = {place: host_memory(piece.sizes[place]) for place in (TensorPlace.SHARED, TensorPlace.HOST)}
        views = {place: block.numpy().data for place, block in blocks.items()}
        buffers = []
        for span in piece.spans:
            if span.part.place is not TensorPlace.OWN:
                view, begin = views[span.part.place], span.offset
            else:
                if span.begin == 0:
                    self.own[span.part] = host_memory(span.part.info.num_bytes)
                view, begin = self.own[span.part].numpy().data, span.begin
            buffers.append(view[begin : begin + span.size])
        return Landing(buffers, blocks)

    def take(self, piece: FilePiece, landing: Landing) -> dict[TensorPlace, torch.Tensor]:
        """When it is read: the blocks of what shares them. Pieces are taken in the order in which they landed."""
        return landing.blocks


class StagedMemory:
    """A device's own: as HostMemory, but pieces are read into NUM_PIECES buffers, and copied on the current stream."""

    def __init__(self, device: torch.device, piece_size: int):
        self.own: dict[TensorPart, torch.Tensor] = {}
        self._device, self._is_cuda = device, device.type == "cuda"
        buffers = (torch.empty(piece_size, dtype=torch.uint8, pin_memory=self._is_cuda) for _ in range(NUM_PIECES))
        # with each buffer what tells that it has been copied
        self._free = deque((buffer, torch.cuda.Event() if self._is_cuda else None) for buffer in buffers)
        self._landed: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def land(self, piece: FilePiece) -> Landing:
        buffer, copied = self._free.popleft()
        if copied is not None:
            copied.synchronize()
        self._landed.append((buffer, copied))
        blocks, begin = {}, 0
        for place, size in piece.sizes.items():
            blocks[place] = buffer[begin : begin + size]
            begin += size
        views = {place: block.numpy().data for place, block in blocks.items()}
        spans = ((views[span.part.place], span.offset, span.size) for span in piece.spans)
        return Landing([view[offset : offset + size] for view, offset, size in spans], blocks)

    def take(self, piece: FilePiece, landing: Landing) -> dict[TensorPlace, torch.Tensor]:
        staged = landing.blocks
        shared = self._empty(piece.sizes[TensorPlace.SHARED]).copy_(staged[TensorPlace.SHARED], non_blocking=True)
        for span in piece.spans:
            if span.part.place is TensorPlace.OWN:
                if span.begin == 0:
                    self.own[span.part] = self._empty(span.part.info.num_bytes)
                target = self.own[span.part][span.begin : span.begin + span.size]
                target.copy_(staged[TensorPlace.OWN][span.offset : span.offset + span.size], non_blocking=True)
        host = staged[TensorPlace.HOST].clone()
        buffer, copied = self._landed.popleft()
        if copied is not None:
            copied.record(torch.cuda.current_stream(self._device))
        self._free.append((buffer, copied))
        return {TensorPlace.SHARED: shared, TensorPlace.HOST: host}

    def _empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


def _arrived(
    memory: HostMemory | StagedMemory, piece: FilePiece, landing: Landing, done: Future[None]
) -> Iterator[tuple[TensorPart, torch.Tensor]]:
    """The tensors that are whole with this piece."""
    done.result()
    blocks = memory.take(piece, landing)
    for span in piece.spans:
        if span.is_last:
            part = span.part
            own = part.place is TensorPlace.OWN
            raw = memory.own.pop(part) if own else blocks[part.place][span.offset : span.offset + span.size]
            yield part, raw.view(TORCH_DTYPES[part.info.dtype]).view(part.info.shape)


def host_memory(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes], not initialised."""
    if num_bytes < HUGE:
        return torch.empty(num_bytes, dtype=torch.uint8)
    block = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # without huge pages it is slower, and no less right
    with suppress(OSError, AttributeError):
        block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)
