"""A library of grammars for loops whose constraints are made by the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pilotfish.engine.grammar.library import Ticket


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
