"""The engine's side of the worker process: started with the first grammar, and again whenever it is lost.

Tasks may come from any thread and never wait: one thread writes them, another reads verdicts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from pilotfish.engine.grammar.trial import Task, TrialVerdict
from pilotfish.engine.link.messages import Grammar

logger = logging.getLogger(__name__)

WORKER = "pilotfish.engine.grammar.worker"
NUM_TRIES = 2
"""Workers that a task may be lost with before it is refused."""


@dataclass
class Open:
    """A task without a verdict, and how many workers have had it."""

    task: Task
    on_verdict: Callable[[TrialVerdict], None]
    tries: int = 1


class Trials:
    """One worker process. Verdicts are told from a thread of this class, one for each task that is not given up."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, module: str = WORKER):
        self._command = [sys.executable, "-P", "-m", module, str(tokenizer_file), str(vocab_size)]
        self._todo: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: dict[int, Open] = {}
        self._num_started = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(
        self, grammar: Grammar, eos_token_ids: tuple[int, ...], key: str, on_verdict: Callable[[TrialVerdict], None]
    ) -> int:
        """The trial's number."""
        with self._lock:
            self._num_started += 1
            task = Task(number=self._num_started, grammar=grammar, eos_token_ids=eos_token_ids, key=key)
            # what cannot be sent is told to who asks
            msgspec.msgpack.encode(task)
            self._open[task.number] = Open(task, on_verdict)
        self._put(task)
        return task.number

    def _put(self, task: Task) -> None:
        with self._lock:
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name="grammar-tasks", daemon=True)
                self._writer.start()
        self._todo.put(task)

    def warm_up(self, eos_token_ids: tuple[int, ...]) -> None:
        """Starts the worker, which reads the tokenizer."""
        self._put(Task(number=0, eos_token_ids=eos_token_ids))

    def give_up(self, number: int) -> None:
        """Ends a trial, wherever it is, without a verdict."""
        with self._lock:
            if self._open.pop(number, None) is None:
                return
        self._todo.put(Task(number=number))

    def close(self) -> None:
        """Ends the worker; open tasks get no verdict."""
        with self._lock:
            self._open.clear()
        self._todo.put(None)

    def _write_all(self) -> None:
        while (task := self._todo.get()) is not None:
            try:
                process = self._worker()
            except OSError as error:
                logger.error("the process that tries grammars cannot be started: %s", error)
                self._refuse(task.number, f"it cannot be started: {error}")
                continue
            body = msgspec.msgpack.encode(task)
            try:
                assert process.stdin is not None
                process.stdin.write(len(body).to_bytes(4, "big") + body)
                process.stdin.flush()
            except OSError:
                # its reader sees the end too, and asks again
                continue
        self._hang_up()

    def _hang_up(self) -> None:
        """A worker ends with its input. Only the writing thread comes here."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _worker(self) -> subprocess.Popen[bytes]:
        """The running one, or a new one. Only the writing thread comes here."""
        if self._process is None or self._process.poll() is not None:
            self._hang_up()
            # one thread and one arena: it forks, and its children's memory is limited
            single = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | single
            )
            assert self._process.stdout is not None
            arguments = (self._process, self._process.stdout)
            threading.Thread(target=self._read_all, args=arguments, name="grammar-verdicts", daemon=True).start()
        return self._process

    def _read_all(self, process: subprocess.Popen[bytes], stream: BinaryIO) -> None:
        while len(header := stream.read(4)) == 4:
            size = int.from_bytes(header, "big")
            if len(body := stream.read(size)) < size:
                break
            try:
                verdict = msgspec.msgpack.decode(body, type=TrialVerdict)
            except msgspec.DecodeError as error:
                logger.error("the process that tries grammars cannot be understood: %s", error)
                process.kill()
                break
            with self._lock:
                known = self._open.pop(verdict.number, None)
            if known is not None:
                known.on_verdict(verdict)
        stream.close()
        process.wait()
        self._try_again()

    def _try_again(self) -> None:
        """The worker is lost: what it had goes to the next one, or is refused if it was with the one before too."""
        with self._lock:
            lost = list(self._open.values())
            for known in lost:
                known.tries += 1
                if known.tries > NUM_TRIES:
                    del self._open[known.task.number]
        if lost:
            logger.error("the process that tries grammars was lost with %d of them", len(lost))
        for known in lost:
            if known.tries <= NUM_TRIES:
                self._todo.put(known.task)
            else:
                known.on_verdict(TrialVerdict(number=known.task.number, error="grammar: its trial was lost, twice"))

    def _refuse(self, number: int, why: str) -> None:
        with self._lock:
            known = self._open.pop(number, None)
        if known is not None:
            known.on_verdict(TrialVerdict(number=number, error=f"grammar: the process that tries it: {why}"))
