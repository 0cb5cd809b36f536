"""Grammars of one tokenizer: tried elsewhere, compiled once for each source, kept while there is room.

Whoever asks gets a ticket at once and never waits. A source that is not known goes to the worker process (trials.py);
what passed is compiled by a thread of its own, cheap ones first; every ticket gets a copy. Refusals are kept too.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from pilotfish.engine.errors import RequestError
from pilotfish.engine.grammar.constraint import Constraint
from pilotfish.engine.grammar.form import compile_form, load_tokenizer
from pilotfish.engine.grammar.threads import Threads
from pilotfish.engine.grammar.trial import TrialVerdict
from pilotfish.engine.grammar.trials import Trials
from pilotfish.engine.guard import reason
from pilotfish.engine.link.messages import Grammar

logger = logging.getLogger(__name__)

MAX_KEPT = 512
MAX_KEPT_BYTES = 256 << 20
"""Memory of compiled grammars that nobody waits for, as trials measured it; one of over a quarter is not kept."""
NICE = 10
"""The compiling thread leaves the processors to rounds."""
QUICK_SECONDS = 0.005
"""CPU time below which a thread compiles that does not: where processors are busy, one that leaves them keeps the
interpreter's lock meanwhile, and rounds wait for it longer than compiling takes."""


@dataclass(eq=False)
class Ticket:
    """A constraint that will be there, or why there is none. Fields are set by another thread; `done` at last.

    `error` is the client's fault, `fault` ours or the library's.
    """

    grammar: Grammar
    constraint: Constraint | None = None
    error: str | None = None
    fault: BaseException | None = None
    done: bool = False


@dataclass(eq=False)
class Entry:
    """One source: how far it is, and who waits for it."""

    key: tuple[Grammar, tuple[int, ...]]
    number: int = 0
    tickets: set[Ticket] = field(default_factory=set)
    matcher: LLMatcher | None = None
    error: str | None = None
    num_bytes: int = 0
    is_compiling: bool = False


class GrammarLibrary:
    """Makes constraints for one tokenizer.json. With `eos_token_ids` it is read at once, here and by the worker, else
    when a grammar needs it."""

    def __init__(
        self,
        tokenizer_file: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        trials: Trials | None = None,
    ):
        self.file, self.vocab_size = tokenizer_file, vocab_size
        self.num_compiled = 0
        self._news = threading.Condition()
        self._entries: OrderedDict[tuple[Grammar, tuple[int, ...]], Entry] = OrderedDict()
        self._numbered: dict[int, Entry] = {}
        self._trials = trials or Trials(tokenizer_file, vocab_size)
        self._compiler = Threads(1, "grammar-compiler", NICE)
        self._quick_compiler = Threads(1, "grammar-compiler-quick")
        self._copier = Threads(1, "grammar-copier")
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._read = threading.Event()
        if eos_token_ids:
            self._trials.warm_up(eos_token_ids)
            self._compiler.submit(lambda: self._read_first(eos_token_ids))
        else:
            self._read.set()

    def wait_read(self) -> None:
        """Waits until the tokenizer is read, if end ids were given: other threads stand still meanwhile."""
        self._read.wait()

    def _read_first(self, eos_token_ids: tuple[int, ...]) -> None:
        try:
            self._tokenizer(eos_token_ids)
        except BaseException as error:
            # without grammars everything else is served; each of them will tell the reason
            logger.warning("%s cannot be used for grammars: %s", self.file.name, reason(error))
        finally:
            self._read.set()

    def ask(self, grammar: Grammar, eos_token_ids: tuple[int, ...], api_key: str = "") -> Ticket:
        """Never waits. API keys take turns with what is not known yet."""
        ticket = Ticket(grammar)
        key = (msgspec.structs.replace(grammar, after_token_id=None, min_tokens=0, ends=()), eos_token_ids)
        with self._news:
            if not eos_token_ids:
                ticket.error = "grammar: the model has no end-of-text token, so no grammar could end"
                self._end([ticket])
                return ticket
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = Entry(key)
                entry.number = self._trials.start(*key, api_key, self._on_verdict)
                self._numbered[entry.number] = entry
            self._entries.move_to_end(key)
            if entry.error is not None:
                ticket.error = entry.error
                self._end([ticket])
            else:
                entry.tickets.add(ticket)
                if entry.matcher is not None:
                    self._copier.submit(lambda: self._hand_out(entry))
        return ticket

    def constraint(self, grammar: Grammar, eos_token_ids: tuple[int, ...]) -> Constraint:
        """Waits, so it is for whoever has nothing else to do. Raises RequestError with why it is refused."""
        ticket = self.ask(grammar, eos_token_ids)
        while not ticket.done:
            self.wait(0.1)
        if ticket.fault is not None:
            raise ticket.fault
        if ticket.constraint is None:
            raise RequestError(ticket.error)
        return ticket.constraint

    def drop(self, ticket: Ticket) -> bool:
        """Nobody waits for it any more: a trial that is nobody else's ends. False while it is being compiled, which
        cannot be ended: then the ticket will be done."""
        with self._news:
            for entry in self._numbered.values():
                if ticket not in entry.tickets:
                    continue
                if entry.is_compiling:
                    return False
                entry.tickets.discard(ticket)
                if not entry.tickets:
                    self._trials.give_up(entry.number)
                    self._forget(entry)
                break
        return True

    def wait(self, seconds: float) -> None:
        """Waits until some ticket is done, or so long."""
        with self._news:
            self._news.wait(seconds)

    def close(self) -> None:
        """Ends the worker process."""
        self._trials.close()

    @property
    def worker_pid(self) -> int | None:
        return self._trials.pid

    # -- on other threads --------------------------------------------------------------------------------------------

    def _on_verdict(self, verdict: TrialVerdict) -> None:
        with self._news:
            entry = self._numbered.get(verdict.number)
            if entry is None:
                return
            entry.num_bytes = verdict.num_bytes
            if verdict.error is not None:
                self._settle(entry, verdict.error)
                return
        threads = self._quick_compiler if verdict.seconds < QUICK_SECONDS else self._compiler
        threads.submit(lambda: self._compile(entry, verdict.form), verdict.seconds)

    def _compile(self, entry: Entry, form: str) -> None:
        with self._news:
            if not entry.tickets:
                self._forget(entry)
                return
            entry.is_compiling = True
        try:
            matcher = compile_form(form, self._tokenizer(entry.key[1]))
            # what the first masks look up is found once for all copies
            fill_next_token_bitmask(matcher, np.zeros((1, -(-self.vocab_size // 32)), dtype=np.int32))
        except ValueError as error:
            with self._news:
                self._settle(entry, f"{entry.key[0].kind}: {error}")
            return
        except BaseException as error:
            # of our own or the library's: it is not kept
            with self._news:
                self._forget(entry)
                tickets, entry.tickets = entry.tickets, set()
                for ticket in tickets:
                    ticket.fault = error
                self._end(tickets)
            return
        with self._news:
            self.num_compiled += 1
            entry.matcher = matcher
            self._numbered.pop(entry.number, None)
        # this thread gives way to others, and whoever waits for the interpreter's lock gives way with it
        self._copier.submit(lambda: self._hand_out_new(entry))

    def _hand_out_new(self, entry: Entry) -> None:
        self._hand_out(entry)
        with self._news:
            self._shrink(entry)

    def _hand_out(self, entry: Entry) -> None:
        """A copy for each ticket."""
        assert entry.matcher is not None
        with self._news:
            tickets, entry.tickets = entry.tickets, set()
        for ticket in tickets:
            try:
                asked = ticket.grammar
                copy = entry.matcher.deep_copy()
                ticket.constraint = Constraint(copy, asked.after_token_id, asked.min_tokens, asked.ends)
            except BaseException as error:
                ticket.fault = error
        with self._news:
            self._end(tickets)

    def _settle(self, entry: Entry, error: str) -> None:
        """Refuses it, now and when it comes again."""
        entry.error = error
        self._numbered.pop(entry.number, None)
        tickets, entry.tickets = entry.tickets, set()
        for ticket in tickets:
            ticket.error = error
        self._end(tickets)
        self._shrink(entry)

    def _end(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            ticket.done = True
        self._news.notify_all()

    def _forget(self, entry: Entry) -> None:
        self._numbered.pop(entry.number, None)
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]

    def _shrink(self, newest: Entry) -> None:
        """Takes out what is over the limits, the longest unused first; never what someone waits for."""
        if newest.num_bytes > MAX_KEPT_BYTES // 4 and newest.error is None and not newest.tickets:
            self._forget(newest)
        kept = [entry for entry in self._entries.values() if entry.matcher is not None or entry.error is not None]
        num_bytes = sum(entry.num_bytes for entry in kept if entry.matcher is not None)
        for entry in kept:
            if len(self._entries) <= MAX_KEPT and num_bytes <= MAX_KEPT_BYTES:
                return
            if not entry.tickets:
                num_bytes -= entry.num_bytes if entry.matcher is not None else 0
                self._forget(entry)

    def _tokenizer(self, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
        """Raises OSError or ValueError."""
        if eos_token_ids not in self._tokenizers:
            text = self.file.read_text(encoding="utf-8")
            self._tokenizers[eos_token_ids] = load_tokenizer(text, self.vocab_size, eos_token_ids)
        return self._tokenizers[eos_token_ids]
