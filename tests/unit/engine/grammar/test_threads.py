"""Threads with room: deep recursion in C has it, the cheap jobs come first, and a fault ends one job alone."""

import os
import queue
import sys
import threading

import pytest

from pilotfish.engine.grammar import worker
from pilotfish.engine.grammar.threads import STACK_BYTES, Threads


def done(threads, jobs):
    """Runs jobs, given as (cost, function), that all wait for the thread; the order of their ends."""
    ended, begin, end = [], threading.Event(), threading.Event()
    threads.submit(begin.wait, -1.0)
    for number, (cost, job) in enumerate(jobs):

        def run(number=number, job=job):
            try:
                job()
            finally:
                ended.append(number)

        threads.submit(run, cost)
    threads.submit(end.set, 1e9)
    begin.set()
    assert end.wait(60)
    return ended


def deep(left):
    """Each level is a call of C code that calls Python."""
    return sorted([left - 1], key=deep) if left else []


def test_deep_recursion_has_room():
    """More than a usual thread's 8 MiB."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1 << 20)
    found = []
    try:
        done(Threads(1, "x"), [(0.0, lambda: found.append(deep(12_000)))])
    finally:
        sys.setrecursionlimit(before)
    assert found == [[11_999]]
    assert threading.stack_size() == 0


def test_what_passes_a_trial_has_room_in_the_engine():
    assert worker.STACK_BYTES * 4 <= STACK_BYTES


def test_cheap_jobs_come_first_and_equal_ones_in_order():
    jobs = [(cost, lambda: None) for cost in (3.0, 1.0, 2.0, 1.0, 0.0)]
    assert done(Threads(1, "x"), jobs) == [4, 1, 3, 2, 0]


@pytest.mark.parametrize("fault", [ValueError("x"), KeyboardInterrupt(), SystemExit()])
def test_a_fault_ends_its_job_alone(fault):
    def broken():
        raise fault

    assert done(Threads(1, "x"), [(0.0, broken), (1.0, lambda: None)]) == [0, 1]


def test_a_job_that_takes_long_is_set_apart_and_its_thread_ends_with_it():
    threads, go_on, told = Threads(1, "x", nice_apart=7), threading.Event(), queue.Queue()

    def job():
        told.put((threading.get_native_id(), threading.current_thread()))
        go_on.wait(60)

    threads.submit(job)
    number, thread = told.get(timeout=60)
    threads.submit(lambda: told.put(threading.get_native_id()))
    with pytest.raises(queue.Empty):
        told.get(timeout=0.05)
    threads.set_apart(number)
    assert os.getpriority(os.PRIO_PROCESS, number) == 7
    other = told.get(timeout=60)
    assert other != number and os.getpriority(os.PRIO_PROCESS, other) == os.getpriority(os.PRIO_PROCESS, 0)
    go_on.set()
    thread.join(60)
    assert not thread.is_alive()
