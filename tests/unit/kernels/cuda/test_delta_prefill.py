"""What fla-core is asked for, with a stand-in that computes what its documentation says; tests/gpu has the real one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from pilotfish.kernels import delta_net
from pilotfish.kernels.cuda import delta_prefill


@pytest.fixture
def stand_in(monkeypatch):
    """`fla.ops.gated_delta_rule`, its arguments checked against what it documents."""

    def chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state):
        assert output_final_state and q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert [t.dim() for t in (q, k, v, g, beta, initial_state)] == [4, 4, 4, 3, 3, 4] and len(q) == 1
        rows = (t[0].float() for t in (q * scale, k, v, beta, g))
        output, after = delta_net.delta_prefill(initial_state[0], *rows)
        return output[None].bfloat16(), after[None]

    tuner = SimpleNamespace(configs=["a", "b", "c"], fn=SimpleNamespace())
    module = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule
    module.kernel = SimpleNamespace(fn=tuner)
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.ops", ModuleType("fla.ops"))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)
    delta_prefill._chunked.cache_clear()
    yield tuner
    delta_prefill._chunked.cache_clear()


def test_asks_for_the_same_rule(stand_in):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    q, k = (torch.nn.functional.normalize(draw(70, 3, 16), dim=-1) for _ in range(2))
    state, v, beta = draw(3, 16, 8), draw(70, 3, 8), draw(70, 3).sigmoid()
    operands = (state, q * 16**-0.5, k, v, beta, -draw(70, 3).exp() * 0.3)
    output, after = delta_prefill.delta_prefill(*operands)
    wanted, wanted_after = delta_net.delta_prefill(*operands)
    assert output.dtype == after.dtype == torch.float32
    torch.testing.assert_close(output, wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(after, wanted_after, rtol=2e-2, atol=2e-2)


def test_a_tuned_kernel_keeps_one_configuration(stand_in):
    delta_prefill._chunked()
    assert stand_in.configs == ["b"]
