"""Parts of a round, composed over packed weights and run on the CPU by their PTX: logits and hidden states are those
that they would be if all that stands between kernels were row-major."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from pilotfish.engine.checkpoint.dummy import dummy_weights
from pilotfish.engine.config import ModelConfig
from pilotfish.engine.model.build import CacheSizes, build_model
from pilotfish.engine.round.batch_state import BatchState
from pilotfish.engine.round.body import RoundBody
from pilotfish.engine.round.buffers import RoundBuffers
from pilotfish.engine.round.cuda_table import CudaOperators
from pilotfish.engine.round.shapes import Shape, Sizes
from pilotfish.engine.round.torch_table import TorchOperators
from pilotfish.kernels.cuda import attention
from pilotfish.kernels.cuda.tiled_rows import TiledRows
from tests.support.kernel_references import plan_rows_reference
from tests.support.ptx import running
from tests.support.rounds import CPU

DEMO = Path(__file__).parents[4] / "demo" / "model"
SMALL = {
    "hidden_size": 128, "num_hidden_layers": 2, "layer_types": ("linear_attention", "full_attention"),
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rotary_dim": 8, "vocab_size": 96,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
KINDS = {
    "dense": {"num_experts": 0, "intermediate_size": 256},
    "moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32},
}  # fmt: skip


def body_of(kind: str) -> RoundBody:
    config = dataclasses.replace(ModelConfig.load(DEMO), **SMALL, **KINDS[kind])
    model = build_model(
        dummy_weights(config, "nvfp4", CPU), config, CacheSizes(4, 4, 4), torch.bfloat16, CPU, fused=True
    )
    state, sizes = BatchState(4, 3, config.vocab_size, CPU), Sizes(4, 3, 12, 4, 256)
    ops = CudaOperators(model)
    body = RoundBody(model, state, RoundBuffers(model, sizes, ops), ops)
    # what nobody writes must not be read
    for name in {"_h", "_mixed", "_inner"} & vars(body.buffers).keys():
        getattr(body.buffers, name).fill_(float("nan"))
    # as before a prompt's first token
    model.trunk.state.s.zero_()
    model.trunk.state.conv.zero_()
    body.buffers.slots[:] = torch.tensor([1, 2, 3])
    body.buffers.tables[:, 0] = torch.arange(4)
    state.fields.last_token[:] = torch.tensor([0, 5, 17, 80])
    state.fields.drafts[:] = torch.arange(12).view(4, 3)
    return body


@pytest.mark.parametrize(("kind", "count", "width"), [("dense", 3, 4), ("moe", 3, 4), ("moe", 1, 3)])
def test_tiled_rows_give_the_bits_of_row_major_ones(kind, count, width, monkeypatch):
    """A window and the head's pass over it; of 3 rows, and of 12, whose experts are listed."""
    # the library's sine: a kernel's is another
    monkeypatch.setattr(attention, "plan_rows", lambda *operands, pdl: plan_rows_reference(*operands))
    seen, num_rows = [], count * width
    for tiled in (True, False):
        if not tiled:
            monkeypatch.setattr(CudaOperators, "rows_in", TorchOperators.rows_in)
        body = body_of(kind)
        b = body.buffers
        v, chosen = b.first(num_rows), torch.arange(count) * width
        between = [v.h, v.mixed(128), *([v.inner(256)] if kind == "dense" else [])]
        assert {isinstance(rows, TiledRows) for rows in between} == {tiled}
        with running(), torch.inference_mode():
            body.verify(Shape(count, width - 1))
            b.chosen[:num_rows] = torch.arange(num_rows)
            head, out = body.model.head, b.head_hidden[:count]
            head.rows(body, b.chosen[:num_rows], v.hidden, count, width, out, chosen)
        seen.append((b.logits[:num_rows].clone(), v.hidden.clone(), out.clone()))
    for mine, others in zip(*seen, strict=True):
        assert mine.isfinite().all() and torch.equal(mine, others)
