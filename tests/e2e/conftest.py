"""Fixtures of the end-to-end tests: the real application and engine process, a scripted core in place of a model."""

import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parents[1] / "support"
if str(SUPPORT) not in sys.path:
    sys.path.append(str(SUPPORT))

from byte_model import write_model  # noqa: E402  (the path above makes it importable)
from serving import serving_in_thread  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for all tests of a file that leave it as they found it."""
    with serving_in_thread(write_model(tmp_path_factory.mktemp("model")), engine={"max_num_seqs": 8}) as running:
        yield running
