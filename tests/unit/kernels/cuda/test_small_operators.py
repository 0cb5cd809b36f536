"""Embedding, norms, router, choosing and committing, in Triton's interpreter: interpret_small_operators.py."""

from tests.support.interpreter import run_interpreted


def test_kernels_in_the_interpreter():
    run_interpreted(__file__, "interpret_small_operators.py")
