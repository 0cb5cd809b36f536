"""An engine whose rounds have fixed shapes, as kernels' have, over the torch table: what does not depend on a device.

Batches are filled up with the null slot, captured parts are replayed (as plain calls), rounds run ahead of what is
read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from pilotfish.engine.assemble import Engine
from pilotfish.engine.loop import EngineLoop
from pilotfish.engine.plan import FAST_ROWS
from pilotfish.engine.round.batch_state import BatchState
from pilotfish.engine.round.executor import make_executor
from pilotfish.engine.round.spans import padded_length
from pilotfish.engine.round.torch_table import TorchOperators
from tests.support.loops import LoopDriver
from tests.support.rounds import CPU, MAX_DEPTH, make_engine


class FixedShapes(TorchOperators):
    """Made for a few shapes. Prompts are not padded, for on a CPU another number of rows is other bits, and these are
    compared with those of the torch table; `PaddedPrompts` pads them."""

    fixed_shapes = True
    captures_prompts = True


class PaddedPrompts(FixedShapes):
    """And pads prompts, as kernels' table does."""

    def prompt_rows(self, length: int) -> int:
        return padded_length(length)


def fixed_engine(
    kind: str,
    depth: int,
    dtype: str = "float32",
    *,
    max_num_seqs: int = 4,
    captured: bool = True,
    look_up: Any = None,
    operators: FixedShapes | None = None,
    **options: Any,
) -> Engine:
    """An engine over a tiny model; `look_up`: a head in place of its own, `operators`: others than FixedShapes."""
    engine = make_engine(kind, dtype, depth=depth, max_num_seqs=max_num_seqs, **options)
    model = engine.executor.model
    seqs, longest = engine.ready.max_num_seqs, engine.ready.max_model_len
    history_length = 0
    if look_up is not None:
        model, history_length = dataclasses.replace(model, head=look_up), longest + MAX_DEPTH + 1
    state = BatchState(seqs + 1, max(1, depth), model.config.vocab_size, CPU, history_length)
    table = operators or FixedShapes()
    executor = make_executor(model, state, depth, seqs, longest, FAST_ROWS, table, engine.ready.prefill_chunk)
    if captured:
        with torch.inference_mode():
            executor.capture(progress=False)
    engine.scheduler.pairs = executor.prompt.reads_pairs
    return dataclasses.replace(engine, executor=executor)


class FixedDriver(LoopDriver):
    """A LoopDriver over a fixed_engine. `observed`: logits are kept, and rounds are read as they are launched."""

    def __init__(
        self,
        kind: str,
        depth: int,
        *,
        agreeing: int | str | None = None,
        seed: int = 0,
        observed: bool = True,
        captured: bool = True,
        **options: Any,
    ):
        super().__init__(kind, depth=depth, agreeing=agreeing, seed=seed, **options)
        self.loop = EngineLoop(fixed_engine(kind, depth, captured=captured, **options))
        if observed:
            self.loop.executor.observers.append(self._observe)
