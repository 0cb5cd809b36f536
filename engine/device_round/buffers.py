"""Static memory of the device round, for its largest batch; every captured graph reads and writes the same.

B = sequences, W = window rows, R = rows of the largest shape, H = hidden, V = vocabulary, S = slots, L = linear layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pilotfish.engine.cache.tensors import KvCache
from pilotfish.engine.config import ModelConfig
from pilotfish.engine.model.build import Model
from pilotfish.kernels.attention import PAGE
from pilotfish.kernels.cuda.attention import AttentionScratch, RowPlan
from pilotfish.kernels.cuda.commit import Verdicts
from pilotfish.kernels.cuda.delta_net import DeltaScratch, pending_width
from pilotfish.kernels.cuda.lookup import Scratch as LookUpScratch
from pilotfish.kernels.cuda.moe import Scratch as ExpertScratch
from pilotfish.kernels.cuda.sample import Scratch as ChoiceScratch


@dataclass(frozen=True)
class Sizes:
    """Of the largest round, and of what it may read."""

    num_slots: int
    max_sequences: int
    max_rows: int
    max_width: int
    max_model_len: int

    @property
    def max_pages(self) -> int:
        """Pages of the longest sequence, its last window included."""
        return -(-(self.max_model_len + self.max_width) // PAGE)


class RoundBuffers:
    """See the module's docstring. Views of one buffer never live at the same time unless they are of other names."""

    def __init__(self, model: Model, sizes: Sizes):
        config, device, dtype = model.config, model.device, model.dtype
        rows, hidden = sizes.max_rows, config.hidden_size
        self.sizes = sizes

        def buffer(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.slots = buffer(sizes.max_sequences, kind=torch.int32)
        self.tables = buffer(sizes.num_slots, sizes.max_pages, kind=torch.int32)
        self.plan = RowPlan.empty(rows, sizes.max_sequences, config.rotary_dim, device)
        self.tokens = buffer(rows, kind=torch.int64)
        self.x = buffer(rows, hidden, kind=torch.float32)
        self.h, self.delta, self.hidden, self.head_hidden = (buffer(rows, hidden) for _ in range(4))
        self.pair = buffer(rows, 2 * hidden)
        self.logits = buffer(rows, config.vocab_size, kind=torch.float32)
        # of their own: whoever asked for log-probabilities reads the window's after the drafts have been drawn
        self.draft_logits = buffer(sizes.max_sequences, config.vocab_size, kind=torch.float32)
        # a tensor a layer: each begins where tensors begin, and kernels are compiled for that, whatever slots and width
        held = pending_width(config.conv_dim, config.linear_num_value_heads)
        self.pending = tuple(buffer(sizes.num_slots, sizes.max_width, held) for _ in config.linear_layers)
        heads = config.num_attention_heads
        self._projected = buffer(rows * _widest_projection(config))
        self._mixed = buffer(rows * max(config.value_dim, heads * config.head_dim))
        self.delta_scratch = DeltaScratch.empty(
            rows, config.linear_num_value_heads, config.linear_value_head_dim, device
        )
        num_pages, kv_dtype = _pages(model)
        self.attention = AttentionScratch.empty(
            rows, sizes.max_sequences, sizes.max_width, sizes.max_model_len, num_pages, heads,
            config.num_key_value_heads, config.head_dim, kv_dtype, device,
        )  # fmt: skip
        self.choice = ChoiceScratch.empty(rows, config.vocab_size, device)
        if config.is_moe:
            top_k = config.num_experts_per_tok
            self._router_logits = buffer(rows * (config.num_experts + 1), kind=torch.float32)
            self.expert_weights = buffer(rows, top_k, kind=torch.float32)
            self.expert_ids = buffer(rows, top_k, kind=torch.int32)
            self.shared_gate = buffer(rows, kind=torch.float32)
            width = max(config.moe_intermediate_size, config.shared_expert_intermediate_size)
            self.experts = ExpertScratch.make(rows, top_k, config.num_experts, width, hidden, device)
        else:
            self._inner = buffer(rows * config.intermediate_size)
        self.allowed = buffer(rows, -(-config.vocab_size // 32), kind=torch.int32)
        # one block, so that one copy brings a round's outcome to the host
        self.report = buffer(report_size(sizes), kind=torch.uint8)
        self._counts, self.chosen, self.has_nan = split_report(self.report, sizes)
        self._head_row = buffer(sizes.max_sequences, kind=torch.int32)
        self.draft = buffer(sizes.max_sequences, kind=torch.int64)
        self.look_up = LookUpScratch.empty(sizes.max_sequences, device)

    def verdicts(self, count: int) -> Verdicts:
        """Of the first `count` sequences."""
        accepted, committed, offered, stopped, done = self._counts[:, :count]
        return Verdicts(accepted, committed, offered, stopped, done, self._head_row[:count])

    def projected(self, rows: int, width: int) -> torch.Tensor:
        """What a mixer's input product gives, [rows, width]."""
        return _matrix(self._projected, rows, width)

    def mixed(self, rows: int, width: int) -> torch.Tensor:
        """What a mixer's output product reads, [rows, width]."""
        return _matrix(self._mixed, rows, width)

    def drafting(self, rows: int, width: int) -> torch.Tensor:
        """fp32 [rows, width]: logits to choose drafts from."""
        return _matrix(self.draft_logits.flatten(), rows, width)

    def inner(self, rows: int, width: int) -> torch.Tensor:
        """Between the products of a dense MLP, [rows, width]."""
        return _matrix(self._inner, rows, width)

    def router_logits(self, rows: int, width: int) -> torch.Tensor:
        """fp32 [rows, experts + 1]."""
        return _matrix(self._router_logits, rows, width)


def report_size(sizes: Sizes) -> int:
    """Bytes of a report."""
    return sum(_report_parts(sizes))


def split_report(report: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the bytes: counts int64 [5, B] in the order of Verdicts, chosen tokens int64 [R], has_nan int32 [R]."""
    counts, chosen, nan = report.split(_report_parts(sizes))
    return counts.view(torch.int64).view(5, -1), chosen.view(torch.int64), nan.view(torch.int32)


def _report_parts(sizes: Sizes) -> list[int]:
    """Bytes of counts, tokens and marks. Everything begins at a multiple of 16 bytes: Triton compiles anew for what
    does not, and the number of sequences must not choose the kernels."""
    sequences, rows = (number + number % 2 for number in (sizes.max_sequences, sizes.max_rows))
    return [40 * sequences, 8 * rows, 4 * rows]


def _matrix(buffer: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    return buffer[: rows * width].view(rows, width)


def _widest_projection(config: ModelConfig) -> int:
    linear = config.conv_dim + config.value_dim + 2 * config.linear_num_value_heads
    full = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    return max(linear, full)


def _pages(model: Model) -> tuple[int, torch.dtype]:
    """How many every cache has, and what they hold."""
    caches: list[KvCache] = [*model.trunk.kv, *(model.head.caches if model.head else ())]
    return (caches[0].k.shape[0], caches[0].k.dtype) if caches else (1, model.dtype)


def num_bytes(buffers: RoundBuffers) -> int:
    """Of all its tensors."""
    return sum(math.prod(t.shape) * t.element_size() for t in _tensors(buffers))


def _tensors(root: object) -> list[torch.Tensor]:
    values = root if isinstance(root, tuple) else vars(root).values()
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if value._base is None:
                found.append(value)
        elif isinstance(value, RowPlan | AttentionScratch | DeltaScratch | ExpertScratch | tuple):
            found += _tensors(value)
    return found
