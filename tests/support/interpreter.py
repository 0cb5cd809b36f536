"""Kernels in Triton's interpreter. It is chosen when a kernel is defined: their tests have a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(beside: str, name: str) -> None:
    """Runs the tests of file `name`, in the folder of `beside`, under TRITON_INTERPRET; fails with their output."""
    # triton 3.6 makes numbers of arrays in a way that numpy warns of
    quiet = ("-W", "ignore:Conversion of an array:DeprecationWarning")
    tests = str(Path(beside).parent / name)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *quiet, tests]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout
