"""The process that tries grammars: it forks a child for each, which may take so much and no more, and may die of it.

Started by trials.py as `python -m pilotfish.engine.grammar.worker TOKENIZER_JSON VOCAB_SIZE`; tasks come in on stdin
and verdicts go out on stdout, msgpack behind a 4-byte length. It imports no torch, and reads the tokenizer once: a
child has it by being forked, in about a millisecond. Nothing that a client wrote is looked at outside a child.

One at a time runs on the quick lane; what needs more CPU time than that allows starts again on the slow lane, so that
costly grammars wait for each other and small ones pass them. On both, API keys take turns. The end of stdin ends
everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import selectors
import signal
import sys
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from llguidance import LLTokenizer

from pilotfish.engine.grammar.form import load_tokenizer
from pilotfish.engine.grammar.trial import PAGE_BYTES, Task, TrialVerdict, attempt

STACK_BYTES = 32 << 20
"""Less than the engine's own threads have (threads.py), so that what passes here has room there."""
MEMORY_BYTES = 256 << 20
"""Memory beside the stack and what the process holds before it begins."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class TrialLane:
    """Seconds of CPU time, and by the clock, that a trial may take; how many run at a time; how far they give way to
    rounds, which need every processor where there is no GPU."""

    cpu_seconds: float
    wall_seconds: float
    num_places: int
    nice: int


QUICK = TrialLane(0.15, 15.0, 1, 10)
SLOW = TrialLane(1.0, 30.0, 1, 19)


@dataclass
class Child:
    pid: int
    task: Task
    lane: TrialLane
    deadline: float
    answer: bytearray = field(default_factory=bytearray)

    def is_answered(self) -> bool:
        """Whether the whole of a verdict has come."""
        return len(self.answer) > 4 and len(self.answer) == 4 + int.from_bytes(self.answer[:4], "big")


class Line:
    """Tasks that wait: one of each key in turn, those of a key in order."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[str, deque[Task]] = OrderedDict()

    def add(self, task: Task) -> None:
        self._by_key.setdefault(task.key, deque()).append(task)

    def next(self) -> Task | None:
        """Takes out the next one."""
        if not self._by_key:
            return None
        key, tasks = next(iter(self._by_key.items()))
        task = tasks.popleft()
        if tasks:
            self._by_key.move_to_end(key)
        else:
            del self._by_key[key]
        return task

    def drop(self, number: int) -> None:
        for key, tasks in list(self._by_key.items()):
            kept = deque(task for task in tasks if task.number != number)
            if kept:
                self._by_key[key] = kept
            else:
                del self._by_key[key]


def frame(message: Task | TrialVerdict) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


class Worker:
    """Everything of one worker process but its children."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, inbox: int, outbox: int):
        self.file, self.vocab_size, self.inbox, self.outbox = tokenizer_file, vocab_size, inbox, outbox
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._waiting = {QUICK: Line(), SLOW: Line()}
        self._children: dict[int, Child] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(inbox, selectors.EVENT_READ)
        self._unread = bytearray()

    def run(self) -> None:
        """Works until stdin ends."""
        while True:
            for key, _ in self._selector.select(self._patience()):
                if key.fd != self.inbox:
                    self._read_child(key.fd)
                elif not self._read_tasks():
                    for child in self._children.values():
                        os.kill(child.pid, signal.SIGKILL)
                    return
            self._end_late()
            for lane in (QUICK, SLOW):
                self._fill(lane)

    def _patience(self) -> float | None:
        if not self._children:
            return None
        return max(0.0, min(child.deadline for child in self._children.values()) - time.monotonic())

    def _read_tasks(self) -> bool:
        """False at the end of the stream."""
        data = os.read(self.inbox, 1 << 20)
        self._unread += data
        while len(self._unread) >= 4 and len(self._unread) >= 4 + (size := int.from_bytes(self._unread[:4], "big")):
            task = msgspec.msgpack.decode(self._unread[4 : 4 + size], type=Task)
            del self._unread[: 4 + size]
            if task.grammar is None and task.eos_token_ids:
                # what cannot be read is told to whoever asks for more
                with contextlib.suppress(OSError, ValueError, TypeError):
                    self._tokenizer(task.eos_token_ids)
            elif task.grammar is None:
                self._give_up(task.number)
            else:
                self._waiting[QUICK].add(task)
        return bool(data)

    def _give_up(self, number: int) -> None:
        """Nobody waits for it any more; no verdict follows."""
        for line in self._waiting.values():
            line.drop(number)
        for fd, child in list(self._children.items()):
            if child.task.number == number:
                os.kill(child.pid, signal.SIGKILL)
                self._reap(fd)

    def _fill(self, lane: TrialLane) -> None:
        while sum(child.lane is lane for child in self._children.values()) < lane.num_places:
            if (task := self._waiting[lane].next()) is None:
                return
            self._start(task, lane)

    def _start(self, task: Task, lane: TrialLane) -> None:
        read = write = -1
        try:
            tokenizer = self._tokenizer(task.eos_token_ids)
            read, write = os.pipe()
            parent, pid = os.getpid(), os.fork()
        except (OSError, ValueError, TypeError) as error:
            for fd in (read, write):
                with contextlib.suppress(OSError):
                    os.close(fd)
            self._tell(TrialVerdict(number=task.number, error=f"grammar: it cannot be tried: {error}"))
            return
        if pid == 0:
            _be_child(task, lane, tokenizer, self.vocab_size, write, parent)
        os.close(write)
        self._children[read] = Child(pid, task, lane, time.monotonic() + lane.wall_seconds)
        self._selector.register(read, selectors.EVENT_READ)

    def _tokenizer(self, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
        if eos_token_ids not in self._tokenizers:
            text = self.file.read_text(encoding="utf-8")
            self._tokenizers[eos_token_ids] = load_tokenizer(text, self.vocab_size, eos_token_ids)
        return self._tokenizers[eos_token_ids]

    def _read_child(self, fd: int) -> None:
        if fd not in self._children:
            # given up since the selector spoke
            return
        data = os.read(fd, 1 << 20)
        if data:
            self._children[fd].answer += data
            return
        child = self._children[fd]
        status = self._reap(fd)
        if status == 0 and child.is_answered():
            self._write(child.answer)
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF and child.lane is QUICK:
            self._waiting[SLOW].add(child.task)
        else:
            self._tell(_death(child, status))

    def _reap(self, fd: int) -> int:
        """Waits for a child that is ending; its status."""
        self._selector.unregister(fd)
        os.close(fd)
        return os.waitpid(self._children.pop(fd).pid, 0)[1]

    def _end_late(self) -> None:
        now = time.monotonic()
        for fd, child in list(self._children.items()):
            if now >= child.deadline:
                os.kill(child.pid, signal.SIGKILL)
                self._reap(fd)
                seconds = child.lane.wall_seconds
                self._tell(TrialVerdict(number=child.task.number, error=f"grammar: not tried within {seconds:g} s"))

    def _tell(self, verdict: TrialVerdict) -> None:
        self._write(frame(verdict))

    def _write(self, data: bytes | bytearray) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.outbox, view) :]


def _death(child: Child, status: int) -> TrialVerdict:
    assert child.task.grammar is not None
    kind, ended = child.task.grammar.kind, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if ended == signal.SIGPROF:
        why = f"it takes more than {child.lane.cpu_seconds:g} s of CPU time to compile"
    elif ended in (signal.SIGSEGV, signal.SIGBUS):
        why = "its parts are nested or follow one another too deeply to compile"
    else:
        why = f"it needs more than the {MEMORY_BYTES >> 20} MiB that a grammar may to compile"
    return TrialVerdict(number=child.task.number, error=f"{kind}: {why}")


def _be_child(task: Task, lane: TrialLane, tokenizer: LLTokenizer, vocab_size: int, answer: int, parent: int) -> None:
    """Never returns."""
    try:
        _limit(lane, parent)
        verdicts: list[TrialVerdict] = []
        threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=lambda: verdicts.append(attempt(task, tokenizer, vocab_size)))
        thread.start()
        thread.join()
        view = memoryview(frame(verdicts[0]))
        while view:
            view = view[os.write(answer, view) :]
        os._exit(0)
    finally:
        os._exit(1)


def _limit(lane: TrialLane, parent: int) -> None:
    """What this process may take from here on, and that it dies with its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # it was gone before that; while this process held its output, nobody would know
        os._exit(1)
    # what the library says when it panics is of no use to anybody
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.nice(lane.nice)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        # where memory runs out, the kernel takes this process first
        file.write("1000")
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_BYTES
    room, most = mapped + STACK_BYTES + MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]
    room = room if most == resource.RLIM_INFINITY else min(room, most)
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    signal.setitimer(signal.ITIMER_PROF, lane.cpu_seconds)


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # a collection in a child would copy every page that it looks at
    gc.disable()
    # nothing else may write where the verdicts go
    outbox = os.dup(1)
    os.dup2(2, 1)
    with contextlib.suppress(BrokenPipeError):
        Worker(Path(sys.argv[1]), int(sys.argv[2]), 0, outbox).run()


if __name__ == "__main__":
    main()
