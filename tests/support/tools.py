"""Programs that a test needs and that a machine may lack."""

import shutil

import pytest


def needed(program: str, package: str) -> str:
    """The program's name, for a command; the test is skipped without it."""
    if shutil.which(program) is None:
        # an operator's program, no Python package: no setup of ours installs it, and CI's machine has it
        pytest.skip(f"{program} is not installed: {package}")
    return program
