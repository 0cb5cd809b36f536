"""Static memory of a round, for its largest batch; every captured graph reads and writes the same.

B = sequences, W = window rows, P = rows of the largest shape as the table pads them, H = hidden, V = vocabulary,
S = slots.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pilotfish.engine.config import ModelConfig
from pilotfish.engine.model.build import Model
from pilotfish.engine.round.operators import Operators, Rows
from pilotfish.engine.round.shapes import Sizes
from pilotfish.kernels.attention import pages_for
from pilotfish.spec.accept import Verdicts


class RoundBuffers:
    """See the module's docstring. Views of one buffer never live at the same time unless they are of other names.

    `scratch` is what the table's operators work in. What stands between two of them for a product to read, `h` and what
    mixers and dense MLPs have inside, is in the table's own order (Operators.rows_in); all else is row-major.
    """

    def __init__(self, model: Model, sizes: Sizes, operators: Operators):
        config, device, dtype = model.config, model.device, model.dtype
        rows, hidden, sequences = operators.padded(sizes.max_rows), config.hidden_size, sizes.max_sequences
        drafted, index = operators.padded(sequences), operators.index_dtype
        # not the table itself, whose memory is no buffer's
        self.sizes, self._make_rows = sizes, operators.rows_in
        whole = -(-rows // operators.whole_rows) * operators.whole_rows

        def buffer(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.scratch = operators.make_scratch(model, sizes)
        self.slots = buffer(sequences, kind=index)
        # pages of the longest sequence, its last window included
        self.tables = buffer(sizes.num_slots, pages_for(sizes.max_model_len + sizes.max_width), kind=index)
        self.tokens = buffer(rows, kind=torch.int64)
        self.x = buffer(rows, hidden, kind=torch.float32)
        self.delta, self.hidden, self.head_hidden = (buffer(rows, hidden) for _ in range(3))
        self._h = buffer(whole * hidden)
        self.pair = buffer(rows, 2 * hidden)
        self.logits = buffer(rows, config.vocab_size, kind=torch.float32)
        # of their own: whoever asked for log-probabilities reads the window's after the drafts have been drawn
        self.draft_logits = buffer(drafted, config.vocab_size, kind=torch.float32)
        self._projected = buffer(rows * _widest_projection(config))
        self._mixed = buffer(whole * max(config.value_dim, config.num_attention_heads * config.head_dim))
        if config.is_moe:
            top_k = config.num_experts_per_tok
            # at most: some packs have dropped experts, layer by layer
            self._router_logits = buffer(rows * (config.num_experts + 1), kind=torch.float32)
            self.expert_weights = buffer(rows, top_k, kind=torch.float32)
            self.expert_ids = buffer(rows, top_k, kind=torch.int32)
            self.shared_gate = buffer(rows, kind=torch.float32)
        else:
            self._inner = buffer(whole * config.intermediate_size)
        self.allowed = buffer(rows, -(-config.vocab_size // 32), kind=torch.int32)
        # one block, so that one copy brings a round's outcome to the host
        self.report = buffer(report_size(sizes), kind=torch.uint8)
        self._counts, self.chosen, self.has_nan = split_report(self.report, sizes)
        self._head_row = buffer(sequences, kind=torch.int32)
        self.draft = buffer(drafted, kind=torch.int64)
        self._first: dict[int, FirstRows] = {}

    def verdicts(self, count: int) -> Verdicts:
        """Verdicts of the first `count` sequences."""
        accepted, committed, offered, stopped, done = self._counts[:, :count]
        return Verdicts(accepted, committed, offered, stopped, done, self._head_row[:count])

    def first(self, rows: int) -> FirstRows:
        """What a pass over the first `rows` rows works on."""
        if rows not in self._first:
            self._first[rows] = FirstRows(self, rows)
        return self._first[rows]

    def matrix(self, name: str, rows: int, width: int) -> torch.Tensor:
        """A buffer's front as [rows, width]."""
        flat: torch.Tensor = getattr(self, name).flatten()
        return flat[: rows * width].view(rows, width)

    def rows_in(self, name: str, rows: int, width: int) -> Rows:
        """The same in the order that the table's products read it in."""
        return self._make_rows(getattr(self, name), rows, width)


class FirstRows:
    """The first rows of the buffers that every layer goes through, and of those whose width is the layer's: views, made
    once, since on a CPU making them costs as much as some operators."""

    def __init__(self, buffers: RoundBuffers, rows: int):
        b = buffers
        shared = (b.x, b.delta, b.hidden, b.head_hidden, b.pair)
        self.x, self.delta, self.hidden, self.head_hidden, self.pair = (buffer[:rows] for buffer in shared)
        self.h = b.rows_in("_h", rows, b.x.shape[1])
        self._buffers, self._rows = buffers, rows
        self._views: dict[tuple[str, int], Rows] = {}

    def _view(self, make: Callable[[str, int, int], Rows], name: str, width: int) -> Rows:
        key = (name, width)
        if key not in self._views:
            self._views[key] = make(name, self._rows, width)
        return self._views[key]

    def _matrix(self, name: str, width: int) -> torch.Tensor:
        return self._view(self._buffers.matrix, name, width)

    def _rows_in(self, name: str, width: int) -> Rows:
        return self._view(self._buffers.rows_in, name, width)

    def projected(self, width: int) -> torch.Tensor:
        """What a mixer's input product gives, [rows, width]."""
        return self._matrix("_projected", width)

    def mixed(self, width: int) -> Rows:
        """What a mixer's output product reads, [rows, width]."""
        return self._rows_in("_mixed", width)

    def inner(self, width: int) -> Rows:
        """What stands between the products of a dense MLP, [rows, width]."""
        return self._rows_in("_inner", width)

    def router_logits(self, width: int) -> torch.Tensor:
        """fp32 [rows, experts + 1]."""
        return self._matrix("_router_logits", width)

    def drafting(self, width: int) -> torch.Tensor:
        """fp32 [rows, width]: logits to choose drafts from."""
        return self._matrix("draft_logits", width)


def report_size(sizes: Sizes) -> int:
    """Bytes of a report."""
    return sum(_report_parts(sizes))


def split_report(report: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the report's bytes hold: counts int64 [5, B] in the order of Verdicts, chosen tokens int64 [R], has_nan
    int32 [R]."""
    counts, chosen, nan = report.split(_report_parts(sizes))
    return counts.view(torch.int64).view(5, -1), chosen.view(torch.int64), nan.view(torch.int32)


def read_report(report: np.ndarray, sizes: Sizes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same of a report on the host."""
    counts, chosen, _ = _report_parts(sizes)
    tokens = report[counts : counts + chosen].view(np.int64)
    return report[:counts].view(np.int64).reshape(5, -1), tokens, report[counts + chosen :].view(np.int32)


def _report_parts(sizes: Sizes) -> list[int]:
    """Bytes of counts, tokens and marks. Everything begins at a multiple of 16 bytes: Triton compiles anew for what
    does not, and the number of sequences must not choose the kernels."""
    sequences, rows = (number + number % 2 for number in (sizes.max_sequences, sizes.max_rows))
    return [40 * sequences, 8 * rows, 4 * rows]


def _widest_projection(config: ModelConfig) -> int:
    linear = config.conv_dim + config.value_dim + 2 * config.linear_num_value_heads
    full = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    return max(linear, full)
