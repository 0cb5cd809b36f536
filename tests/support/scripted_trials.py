"""The real worker, whose children do what a grammar's source says in place of trying it: for tests of how they die."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from pilotfish.engine.grammar import worker
from pilotfish.engine.grammar.trial import Task, TrialVerdict


def attempt(task: Task, tokenizer: object, vocab_size: int) -> TrialVerdict:
    assert task.grammar is not None
    words = task.grammar.source.split()
    if words[0] == "sleep":
        time.sleep(float(words[1]))
    elif words[0] == "sleep-without":
        while not os.path.exists(words[1]):
            time.sleep(0.01)
    elif words[0] == "spin":
        end = time.thread_time() + float(words[1])
        while time.thread_time() < end:
            pass
    elif words[0] == "allocate":
        held = bytearray(int(words[1]) << 20)
        return TrialVerdict(number=task.number, form=str(len(held)))
    elif words[0] == "signal":
        os.kill(os.getpid(), signal.Signals[words[1]])
        time.sleep(60)
    elif words[0] == "babble":
        # a whole message, but no verdict
        for fd in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(fd, b"\0\0\0\x02xx")
        os._exit(0)
    elif words[0] == "exit":
        os._exit(int(words[1]))
    elif words[0] == "shout":
        os.write(1, b"\xff" * 100)
        os.write(2, b"not to be seen")
    return TrialVerdict(number=task.number, form=threading.current_thread().name)


limit = worker._limit


def limit_late(lane: worker.TrialLane, parent: int) -> None:
    time.sleep(float(os.environ.get("CHILD_WAITS", "0")))
    limit(lane, parent)


worker.attempt = attempt
worker._limit = limit_late

if __name__ == "__main__":
    worker.main()
