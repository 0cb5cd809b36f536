"""`gdn_prompt`: its kernels in Triton's interpreter (interpret_delta_prefill.py), and what becomes of fla's tuning."""

from types import SimpleNamespace

from pilotfish.kernels.cuda.delta_prefill import pin
from tests.support.interpreter import run_interpreted


def test_kernels_in_the_interpreter():
    run_interpreted(__file__, "interpret_delta_prefill.py")


def test_a_tuned_kernel_keeps_one_configuration():
    tuner = SimpleNamespace(configs=["a", "b", "c"], fn=SimpleNamespace())
    pin(SimpleNamespace(fn=tuner))
    assert tuner.configs == ["b"]
    pin(SimpleNamespace(fn=tuner))
    assert tuner.configs == ["b"]
