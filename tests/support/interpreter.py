"""Kernels in Triton's interpreter. It is chosen when a kernel is defined: their tests have a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_interpreted(beside: str, name: str) -> None:
    """Runs the tests of file `name`, in the folder of `beside`, under TRITON_INTERPRET; fails with their output."""
    # triton 3.6 makes numbers of arrays in a way that numpy warns of
    quiet = ("-W", "ignore:Conversion of an array:DeprecationWarning")
    tests = str(Path(beside).parent / name)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *quiet, tests]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


def stay_patched() -> None:
    """For a process that runs kernels in the interpreter alone. Before each call of a function, Triton patches the
    language that the function sees, over again, which is half of what a test takes: here it is once, and for good."""
    from triton.runtime import interpreter

    patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope()
    seen: set[Any] = set()

    def patch_once(function: Any) -> Any:
        if function not in seen:
            seen.add(function)
            patch(function)
        return nothing

    interpreter._patch_lang = patch_once
