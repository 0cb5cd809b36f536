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


LONGEST = (
    "unit/engine/check/test_mutation.py",
    "unit/engine/round/test_compiles.py",
    "unit/engine/check/test_audit.py",
    "unit/kernels/cuda/test_compile_rounds.py",
    "unit/kernels/cuda/test_small_operators.py",
    "unit/kernels/cuda/test_run_products.py",
    "unit/engine/round/test_sit_out.py",
    "unit/engine/test_guard.py",
    "unit/engine/test_prefix_histories.py",
    "unit/kernels/cuda/test_run_delta_net.py",
    "unit/kernels/cuda/test_run_attention.py",
    "unit/kernels/cuda/test_moe_prompt.py",
    "e2e/test_gate.py",
    "e2e/test_command.py",
    "e2e/test_sweep.py",
    "e2e/test_release.py",
    "e2e/test_release_gates.py",
    "e2e/test_real_engine.py",
    "e2e/test_routers.py",
    "e2e/test_documents.py",
)
"""The files that take longest, in this order: a file is one worker's (`make test`), and none of these is to begin when
the others have no more to do."""


def pytest_collection_modifyitems(items):
    places = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish():
    """What was imported is not looked at again by each collection that a fixture below asks for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def file_tells_what_it_left_open():
    """A socket that nobody closed is an error of this file's, not of the test during which it is collected. What is
    left then is modules, which no later collection looks at."""
    yield
    gc.collect()
    gc.freeze()
