"""A draft head along a text it did not write: what it drafts from each place, the text's own tokens given before.

T = tokens of the text, H = hidden. Row i of the head's pairs the trunk's hidden at i with token i + 1 and drafts token
i + 2; deeper drafts go on from the head's own hidden and the text's next token. Uses slot 1 and pages 1.. of a model
that serves nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import eq

import torch
import torch.nn.functional as F

from pilotfish.draft_heads.mtp.head import MtpHead
from pilotfish.engine.model.build import Model
from pilotfish.engine.model.window import Span, Window
from pilotfish.kernels.attention import PAGE
from pilotfish.kernels.linear import TILE_ROWS, padded_rows

SLOT = 1


def pages_of(num_tokens: int) -> list[int]:
    """The page table of a text."""
    return list(range(1, 1 + -(-num_tokens // PAGE)))


def trunk_rows(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """The trunk's hidden [T, H], chunk by chunk as prompts run."""
    table = pages_of(len(tokens))
    model.trunk.state.reset(SLOT)
    chunks = tokens.split(PAGE)
    return torch.cat(
        [
            model.trunk.bulk(chunk, Span.build(SLOT, i * PAGE, len(chunk), table, model.inv_freq))
            for i, chunk in enumerate(chunks)
        ]
    )


def head_rows(model: Model, head: MtpHead, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The head's hidden [T - 2, H] at every place whose draft the text has."""
    count = len(tokens) - 2
    table = pages_of(len(tokens))
    rows = []
    for start in range(0, count, PAGE):
        end = min(start + PAGE, count)
        span = Span.build(SLOT, start, end - start, table, model.inv_freq)
        rows.append(head.fill(tokens[start + 1 : end + 1], hidden[start:end], span))
    return torch.cat(rows)


def later_rows(
    model: Model, head: MtpHead, tokens: torch.Tensor, rows: torch.Tensor, start: int, depth: int
) -> Iterator[torch.Tensor]:
    """The head's hidden [1, H] for drafts 2 .. depth from the place `start`.

    Places must come from the last to the first: what a step leaves in the head's cache lies behind all that follow.
    """
    slots = torch.tensor([SLOT], device=tokens.device)
    table = pages_of(len(tokens))
    hidden = rows[start : start + 1]
    for step in range(1, depth):
        position = start + step
        window = Window.build(1, slots, [position], [table], model.inv_freq)
        padded = F.pad(hidden[:1], (0, 0, 0, padded_rows(1) - 1))
        token = F.pad(tokens[position + 1 : position + 2], (0, padded_rows(1) - 1))
        hidden = head.repair(token, padded, window)
        yield hidden[:1]


def logits(model: Model, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
    """fp32 logits of any number of rows, a tile at a time."""
    for rows in hidden.split(TILE_ROWS):
        yield model.trunk.logits(F.pad(rows, (0, 0, 0, TILE_ROWS - len(rows))))[: len(rows)]


def choices(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    """int64 [n]: the greedy token of each row."""
    return torch.cat([part.argmax(-1) for part in logits(model, hidden)])


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
        """By depth, over all places, whatever the drafts before were."""
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
    """Over all places that have `depth` drafts within the text; `tell` is called with the places done since."""
    head = model.head
    assert isinstance(head, MtpHead) and len(ids) >= depth + 2, "want an MTP head and depth + 2 tokens"
    tokens = torch.tensor(ids, device=model.device)
    hidden = trunk_rows(model, tokens)
    trunk = choices(model, hidden[:-1]).tolist()
    rows = head_rows(model, head, tokens, hidden)
    first = choices(model, rows).tolist()
    found: list[list[bool]] = []
    for start in range(len(rows) - depth, -1, -1):
        later = list(later_rows(model, head, tokens, rows, start, depth))
        drafts = [first[start], *(choices(model, torch.cat(later)).tolist() if later else ())]
        found.append([draft == trunk[start + 1 + d] for d, draft in enumerate(drafts)])
        tell(1)
    return Agreement(found[::-1], sum(map(eq, trunk, ids[1:])) / len(trunk))
