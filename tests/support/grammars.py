"""A library of grammars for loops whose constraints are made by the test, and such a constraint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pilotfish.engine.grammar.library import Ticket
from tests.support.tiny_models import VOCAB_SIZE


class MadeGrammars:
    """Every grammar is there at once: what `make` returns."""

    def __init__(self, make: Callable[[], Any]):
        self.make = make

    def ask(self, grammar: Any, eos_token_ids: Any, api_key: str = "") -> Ticket:
        return Ticket(grammar, constraint=self.make(), done=True)

    def drop(self, ticket: Ticket) -> bool:
        return True

    def wait(self, seconds: float) -> None: ...


class HeldGrammars(MadeGrammars):
    """Grammars that come when the test says so."""

    def __init__(self, make: Callable[[], Any]):
        super().__init__(make)
        self.tickets: list[Ticket] = []
        self.dropped: list[Ticket] = []
        self.is_compiling = False

    def ask(self, grammar: Any, eos_token_ids: Any, api_key: str = "") -> Ticket:
        self.tickets.append(Ticket(grammar))
        return self.tickets[-1]

    def drop(self, ticket: Ticket) -> bool:
        self.dropped.append(ticket)
        return not self.is_compiling

    def come(self, number: int, **fields: Any) -> None:
        """The ticket of that number is done: with a constraint, or with what `fields` say."""
        ticket = self.tickets[number]
        for name, value in ({"constraint": self.make()} | fields).items():
            setattr(ticket, name, value)
        ticket.done = True


class Multiples:
    """Stands for a grammar: the first five ids are multiples of 3, the others of 4."""

    def __init__(self) -> None:
        self.taken, self.error = 0, None

    def mask_rows(self, drafts: list[int], bits: np.ndarray) -> None:
        for row in range(len(drafts) + 1):
            step = 4 if (self.taken + row) >= 5 else 3
            bits[row] = 0
            for token in range(0, VOCAB_SIZE, step):
                bits[row, token // 32] |= np.int64(1 << token % 32).astype(np.int32)

    def advance(self, tokens: list[int]) -> None:
        self.taken += len(tokens)

    def forced(self, most: int, num_words: int) -> list[int]:
        return []
