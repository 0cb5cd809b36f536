"""What all tests share: how modules are found, Ctrl-C, threads, and that what is left open is told where it was."""

import gc
import signal
import sys
from pathlib import Path

import pytest
import torch

# The checkout's top-level folders are imported as `pilotfish.*` only.
ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

# A shell's job in the background ignores Ctrl-C, and so would all that tests start and send it to.
signal.signal(signal.SIGINT, signal.default_int_handler)
# So it is with nohup, which is kept for this process alone: a handler is no part of what a child is given.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# Tiny models on shared cores: two threads that wait for each other cost far more than they bring.
torch.set_num_threads(1)


def pytest_collection_finish():
    """What was imported is not looked at again by each collection that a fixture below asks for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def file_tells_what_it_left_open():
    """A socket that nobody closed is an error of this file's, not of the test during which it is collected."""
    yield
    gc.collect()
