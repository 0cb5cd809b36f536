"""Kernels that run in Triton's interpreter (tests/support/interpreter.py) find its language made once."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.support.interpreter import stay_patched

    stay_patched()
