"""A draft head along a text it did not write: what it drafts from each place, the text's own tokens given before.

T = tokens of the text, H = hidden. Row i of the head's pairs the trunk's hidden at i with token i + 1 and drafts token
i + 2; deeper drafts go on from the head's own hidden and the text's next token. Uses slot 1 and pages 1.. of a model
that serves nobody.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import eq

import torch

from pilotfish.draft_heads.mtp.head import MtpHead
from pilotfish.engine.model.build import Model
from pilotfish.engine.round.batch_state import BatchState
from pilotfish.engine.round.body import RoundBody
from pilotfish.engine.round.buffers import RoundBuffers
from pilotfish.engine.round.prompt import SLOT, PromptPass, pages_of, read_text
from pilotfish.engine.round.shapes import Sizes
from pilotfish.kernels.attention import PAGE
from pilotfish.kernels.linear import TILE_ROWS


def logits(model: Model, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
    """fp32 logits of any number of rows, a tile at a time."""
    prompt = PromptPass(model)
    for rows in hidden.split(TILE_ROWS):
        yield prompt.logits(rows)


class TextReader:
    """A model's text, its trunk and a head along it. `head`: in place of the model's own."""

    def __init__(self, model: Model, head: MtpHead | None = None):
        own = model.head if head is None else head
        assert isinstance(own, MtpHead), own
        self.model, self.head = dataclasses.replace(model, head=own), own
        self.prompt = PromptPass(self.model)

    def head_rows(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The head's hidden [T - 2, H] at every place whose draft the text has."""
        count, table = len(tokens) - 2, pages_of(len(tokens))
        rows = []
        for start in range(0, count, PAGE):
            end = min(start + PAGE, count)
            span = self.prompt.span(SLOT, start, end - start, table)
            rows.append(self.prompt.fill(tokens[start + 1 : end + 1], hidden[start:end], span))
        return torch.cat(rows)

    @cached_property
    def _body(self) -> RoundBody:
        """A round of one row, for the head's steps."""
        model, ops = self.model, self.prompt.ops
        sizes = Sizes(SLOT + 1, 1, ops.padded(1), 1, len(self.head.cache.k) * PAGE)
        state = BatchState(SLOT + 1, 1, model.config.vocab_size, model.device)
        body = RoundBody(self.model, state, RoundBuffers(self.model, sizes, ops), ops)
        body.buffers.slots[:1] = SLOT
        return body

    def later_rows(self, tokens: torch.Tensor, rows: torch.Tensor, start: int, depth: int) -> Iterator[torch.Tensor]:
        """The head's hidden [1, H] for drafts 2 .. depth from the place `start`, as a round computes them.

        Places must come from the last to the first: what a step leaves in the head's cache lies behind all that follow.
        """
        body, table = self._body, pages_of(len(tokens))
        b, padded = body.buffers, body.ops.padded(1)
        b.tables[SLOT, : len(table)] = torch.tensor(table, dtype=b.tables.dtype)
        b.head_hidden[:1] = rows[start : start + 1]
        hidden = b.head_hidden[:padded]
        for step in range(1, depth):
            position = start + step
            body.state.length[SLOT] = position
            b.draft[:1] = tokens[position + 1 : position + 2]
            body.plan(1, 1, 0)
            self.head.rows(body, b.draft[:padded], hidden, 1, 1, hidden)
            yield b.head_hidden[:1].clone()

    def choices(self, hidden: torch.Tensor) -> torch.Tensor:
        """int64 [n]: the greedy token of each row."""
        return torch.cat([part.argmax(-1) for part in logits(self.model, hidden)])


@dataclass(frozen=True)
class Agreement:
    """agrees[s][d]: draft d + 1 from place s is the trunk's own greedy token after the text so far. `trunk_top1`: share
    of the text's tokens that the trunk itself ranks first."""

    agrees: list[list[bool]]
    trunk_top1: float

    @property
    def num_places(self) -> int:
        return len(self.agrees)

    def shares(self) -> list[float]:
        """The share that agrees by depth, over all places, whatever the drafts before were."""
        return [sum(column) / self.num_places for column in zip(*self.agrees, strict=True)]

    def rounds(self, k: int, first: int = 0) -> list[int]:
        """Committed tokens of each round, if rounds of depth k ran along the text from the place `first`."""
        lengths, place = [], first
        while place < self.num_places:
            accepted = next((d for d in range(k) if not self.agrees[place][d]), k)
            lengths.append(accepted + 1)
            place += accepted + 1
        return lengths


@torch.inference_mode()
def agreement(model: Model, ids: list[int], depth: int, tell: Callable[[int], object] = lambda _: None) -> Agreement:
    """Agreement over all places that have `depth` drafts within the text; `tell` is called with the places done
    since."""
    assert len(ids) >= depth + 2, "want depth + 2 tokens"
    reader, tokens = TextReader(model), torch.tensor(ids, device=model.device)
    hidden = read_text(model, tokens)
    trunk = reader.choices(hidden[:-1]).tolist()
    rows = reader.head_rows(tokens, hidden)
    first = reader.choices(rows).tolist()
    found: list[list[bool]] = []
    for start in range(len(rows) - depth, -1, -1):
        later = list(reader.later_rows(tokens, rows, start, depth))
        drafts = [first[start], *(reader.choices(torch.cat(later)).tolist() if later else ())]
        found.append([draft == trunk[start + 1 + d] for d, draft in enumerate(drafts)])
        tell(1)
    return Agreement(found[::-1], sum(map(eq, trunk, ids[1:])) / len(trunk))
