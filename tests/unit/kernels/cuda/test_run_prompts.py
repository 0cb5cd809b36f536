"""Experts over a prompt, compiled for a GPU and run on the CPU by their PTX (tests/support/ptx.py): values and bits."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.support.prompt_experts import *  # noqa: F403
from tests.support.ptx import running


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture(autouse=True)
def on_the_cpu():
    with running():
        yield
