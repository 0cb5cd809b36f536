"""A piece of one prompt on the device: where its rows stand, and the memory that they go through.

A piece runs over a few numbers of rows, which follow from its length alone: so what is launched for one can be captured
and replayed for all. The rows past its length are padding. They change no state, their keys go to the null page, and no
other row looks at them.
T = rows, padding included; H = hidden, h = query heads, D = head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pilotfish.engine.model.build import Model
from pilotfish.kernels.attention import PAGE, pages_for, prompt_dtype
from pilotfish.kernels.rope import rope_angles

LENGTHS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
"""Rows that pieces are padded to: from 128 on at most half too many. Each is some whole chunks of the recurrence."""
BEYOND = 1024
"""Longer pieces are padded to a multiple of this."""
NULL_PAGE = 0


def padded_length(length: int) -> int:
    """Rows of a piece of so many tokens, where they are padded."""
    return next((rows for rows in LENGTHS if rows >= length), -(-length // BEYOND) * BEYOND)


@dataclass(frozen=True)
class Span:
    """Positions [start, start + length) of one prompt, whose sequence owns `slot` and the pages `table`.

    `table` int64, the null page last. `numbers` int32 (slot, length, start): what work that is captured reads.
    `positions` int64 [T], `cos` and `sin` fp32 [T, 1, rotary / 2]: of the rows; those of padding are in the null page.
    """

    slot: int
    start: int
    length: int
    table: torch.Tensor
    numbers: torch.Tensor
    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def build(
        cls,
        slot: int,
        start: int,
        length: int,
        table: list[int] | torch.Tensor,
        inv_freq: torch.Tensor,
        num_rows: int | None = None,
    ) -> Span:
        """In memory of its own. A table that another span has may be given; `num_rows`: `length`, if not given."""
        device = inv_freq.device
        owned = table if isinstance(table, torch.Tensor) else torch.tensor([*table, NULL_PAGE], device=device)
        numbers = torch.tensor((slot, length, start), dtype=torch.int32, device=device)
        rows = num_rows or length
        cos, sin = (torch.empty((rows, 1, len(inv_freq)), device=device) for _ in range(2))
        positions = torch.empty(rows, dtype=torch.int64, device=device)
        span = cls(slot, start, length, owned, numbers, positions, cos, sin)
        span.place(inv_freq)
        return span

    @property
    def num_rows(self) -> int:
        return len(self.positions)

    def beside(self, numbers: torch.Tensor, inv_freq: torch.Tensor) -> Span:
        """Another span of the sequence, over as many rows, that only the device knows: by its `numbers`."""
        rows = (torch.empty_like(tensor) for tensor in (self.positions, self.cos, self.sin))
        span = Span(self.slot, -1, -1, self.table, numbers, *rows)
        span.place(inv_freq)
        return span

    def place(self, inv_freq: torch.Tensor) -> None:
        """Fills in the positions and angles, by `numbers`."""
        row = torch.arange(self.num_rows, device=inv_freq.device)
        beyond = (len(self.table) - 1) * PAGE
        self.positions.copy_(torch.where(row < self.numbers[1], row + self.numbers[2], beyond))
        for target, angles in zip((self.cos, self.sin), rope_angles(self.positions, inv_freq), strict=True):
            target.copy_(angles)


@dataclass(frozen=True)
class SpanRows:
    """What a span's rows go through. `tokens` int64 [T]; `x` fp32 [T, H], the stream; `hidden` [T, H], its last norm.

    Where attention stands between two parts of the work: `projected` [T, (2h + 2kv) D], `q` [T, h, D], and `mixed`
    [T, h D], what comes of them.
    """

    tokens: torch.Tensor
    x: torch.Tensor
    hidden: torch.Tensor
    projected: torch.Tensor
    q: torch.Tensor
    mixed: torch.Tensor

    @classmethod
    def empty(cls, model: Model, num_rows: int, tokens: torch.Tensor | None = None) -> SpanRows:
        config, device, dtype = model.config, model.device, model.dtype
        heads, kv, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        kv_dtype = model.trunk.kv[0].k.dtype if model.trunk.kv else dtype

        def buffer(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty((num_rows, *shape), dtype=kind, device=device)

        return cls(
            buffer(kind=torch.int64) if tokens is None else tokens,
            buffer(config.hidden_size, kind=torch.float32),
            buffer(config.hidden_size),
            buffer((2 * heads + 2 * kv) * dim),
            buffer(heads, dim, kind=prompt_dtype(kv_dtype, device)),
            buffer(heads * dim),
        )

    def first(self, num_rows: int) -> SpanRows:
        """Views of the first rows."""
        return SpanRows(*(getattr(self, name)[:num_rows] for name in self.__dataclass_fields__))


def padded_tokens(tokens: Sequence[int], num_rows: int) -> list[int]:
    """The tokens, over and over: rows of padding then choose experts as the others do, and no expert gets them all."""
    return (list(tokens) * -(-num_rows // len(tokens)))[:num_rows]


class StaticSpan:
    """Memory that stays, for one piece at a time of up to `num_rows` rows of prompts of up to `max_length` tokens."""

    def __init__(self, model: Model, num_rows: int, max_length: int):
        self.num_rows, self.max_length, self._device = num_rows, max_length, model.device
        self._num_pages = pages_for(max_length) + 1
        # numbers, table and tokens in one block, so that one copy brings them
        self._table_at = 16
        self._tokens_at = self._table_at + 8 * -(-(self._num_pages + 1) // 2) * 2
        self._block = torch.zeros(self._tokens_at + 8 * num_rows, dtype=torch.uint8, device=model.device)
        self.numbers = self._block[:12].view(torch.int32)
        self.table = self._block[self._table_at :][: 8 * (self._num_pages + 1)].view(torch.int64)
        self.rows = SpanRows.empty(model, num_rows, self._block[self._tokens_at :].view(torch.int64))
        half = len(model.inv_freq)
        self._positions = torch.zeros(num_rows, dtype=torch.int64, device=model.device)
        self._cos, self._sin = (torch.zeros((num_rows, 1, half), device=model.device) for _ in range(2))
        self._first: dict[int, tuple[torch.Tensor, ...]] = {}
        self._first_rows: dict[int, SpanRows] = {}

    def first(self, num_rows: int) -> SpanRows:
        """Views of the first rows, made once."""
        if num_rows not in self._first_rows:
            self._first_rows[num_rows] = self.rows.first(num_rows)
        return self._first_rows[num_rows]

    def take(self, slot: int, start: int, tokens: Sequence[int], table: Sequence[int], num_rows: int) -> Span:
        """Brings a piece's tokens and place to the device; its positions follow by `Span.place`. Waits for nothing."""
        assert len(tokens) <= num_rows <= self.num_rows and len(table) <= self._num_pages, (len(tokens), len(table))
        end = self._tokens_at + 8 * num_rows
        block = torch.zeros(end, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        written = block.numpy()
        written[:12].view(np.int32)[:] = slot, len(tokens), start
        written[self._table_at :][: 8 * len(table)].view(np.int64)[:] = table
        written[self._tokens_at :].view(np.int64)[:] = padded_tokens(tokens, num_rows)
        self._block[:end].copy_(block, non_blocking=True)
        if num_rows not in self._first:
            self._first[num_rows] = tuple(tensor[:num_rows] for tensor in (self._positions, self._cos, self._sin))
        return Span(slot, start, len(tokens), self.table, self.numbers, *self._first[num_rows])
