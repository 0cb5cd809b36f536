"""`gdn_prompt`: its kernels in Triton's interpreter (interpret_delta_prefill.py), and what becomes of fla's tuning."""

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from pilotfish.kernels.cuda.delta_prefill import Pinned
from tests.support.interpreter import run_interpreted


def test_kernels_in_the_interpreter():
    run_interpreted(__file__, "interpret_delta_prefill.py")


@triton.heuristics({"HAS": lambda given: given["b"] is not None, "TWICE": lambda given: 2 * given["n"] * given["HAS"]})
@triton.autotune([triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((1, 1), (2, 8), (4, 2))], ["n"])
@triton.jit
def _tuned(a, b, n, HAS: tl.constexpr, TWICE: tl.constexpr, BLOCK: tl.constexpr):
    pass


def test_a_tuned_kernel_keeps_one_configuration(monkeypatch):
    seen = []

    def run(self, *args, **kwargs):
        assert not args and self is _tuned.fn.fn
        seen.append(kwargs)

    monkeypatch.setattr(JITFunction, "run", run)
    pinned = Pinned(_tuned)
    pinned[(3,)](5, b=None, n=7)
    pinned[(4,)](a=5, b=6, n=7)
    monkeypatch.setattr(_tuned.fn, "configs", [_tuned.fn.configs[1]])
    # as the tuner launches it when it has but one
    _tuned[(3,)](a=5, b=None, n=7)
    _tuned[(4,)](a=5, b=6, n=7)
    assert seen[:2] == seen[2:]
    assert [launch["TWICE"] for launch in seen] == [0, 14, 0, 14] and seen[0]["num_warps"] == 8
