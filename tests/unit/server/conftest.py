"""Fixtures of the server's unit tests: a byte-level model folder without weights."""

import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parents[2] / "support"
if str(SUPPORT) not in sys.path:
    sys.path.append(str(SUPPORT))

from byte_model import write_model  # noqa: E402  (the path above makes it importable)

from pilotfish.server.model_files import load_model_files  # noqa: E402


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("byte-model"))


@pytest.fixture(scope="session")
def files(model_folder):
    return load_model_files(model_folder)


@pytest.fixture(scope="session")
def tokenizer(files):
    return files.tokenizer
