"""Programs that a test needs and that a machine may lack."""

import shutil

import pytest


def needed(program: str, package: str) -> str:
    """The program's name, for a command; the test is skipped without it."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: {package}")
    return program
