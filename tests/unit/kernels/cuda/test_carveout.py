"""Kernels that ask for their division of a multiprocessor's memory: once each, and only what is on a device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from triton.compiler import CompiledKernel

from pilotfish.kernels.cuda import carveout


def kernel(function: int | None) -> CompiledKernel:
    made = CompiledKernel.__new__(CompiledKernel)
    made.function, made.name = function, "_rows_kernel"
    return made


@pytest.fixture
def calls(monkeypatch):
    """What the driver was asked, and `code`, what it answers."""
    seen = SimpleNamespace(asked=[], code=0)

    def set_attribute(function, attribute, value):
        seen.asked.append((function.value, attribute, value))
        return seen.code

    monkeypatch.setattr(carveout, "_driver", lambda: SimpleNamespace(cuFuncSetAttribute=set_attribute))
    monkeypatch.setattr(carveout, "_asked", set())
    return seen


def test_a_kernel_asks_once(calls):
    for function in (11, 12, 11):
        carveout.leave_to_l1(kernel(function))
    assert calls.asked == [(11, 9, carveout.PERCENT), (12, 9, carveout.PERCENT)]


class StillCompiling:
    """As Triton 3.7's: a look at any attribute waits for the compiler."""

    def __getattr__(self, name: str) -> None:
        pytest.fail(f"waited for {name}")


@pytest.mark.parametrize("what", [None, StillCompiling(), kernel(None)], ids=["interpreted", "compiling", "not loaded"])
def test_what_is_not_on_a_device_is_let_alone(calls, what):
    carveout.leave_to_l1(what)
    assert not calls.asked


def test_a_driver_that_refuses_is_an_error_that_names_the_kernel(calls):
    calls.code = 1
    with pytest.raises(RuntimeError, match="44 for _rows_kernel, got CUDA error 1"):
        carveout.leave_to_l1(kernel(11))
