"""A runner and its rounds on a device, sized for what will be served."""

from __future__ import annotations

from pilotfish.engine.batch_state import BatchState
from pilotfish.engine.device_round.body import RoundBody
from pilotfish.engine.device_round.buffers import RoundBuffers, Sizes
from pilotfish.engine.device_round.operators import Operators
from pilotfish.engine.device_round.rounds import DeviceRounds
from pilotfish.engine.device_round.runner import DeviceRunner
from pilotfish.engine.device_round.shapes import Shapes
from pilotfish.engine.model.build import Model


def make_rounds(
    model: Model,
    state: BatchState,
    depth: int,
    max_num_seqs: int,
    max_model_len: int,
    fast_rows: int,
    operators: Operators | None = None,
) -> DeviceRounds:
    """For rounds of k = 0 and `depth` over up to max_num_seqs sequences; nothing is captured yet. `state` is complete.

    The null slot gets a state of its own, so that rows which fill up a batch are finite.
    """
    shapes = Shapes((0, depth), fast_rows, max_num_seqs)
    sizes = Sizes(
        num_slots=state.num_slots,
        max_sequences=max(shape.num_sequences for shape in shapes),
        max_rows=max(fast_rows, *(shape.num_rows for shape in shapes)),
        max_width=state.max_depth + 1,
        max_model_len=max_model_len,
    )
    model.trunk.state.reset(0)
    body = RoundBody(model, state, RoundBuffers(model, sizes), operators or Operators())
    head_on = depth > 0 and model.head is not None
    return DeviceRounds(DeviceRunner(model, state, head_on, body), shapes)
