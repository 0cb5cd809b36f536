"""Grammars are compiled once for each source, by a thread with room, and kept; nobody who asks waits."""

import threading
from pathlib import Path

import pytest

from pilotfish.engine.errors import RequestError
from pilotfish.engine.grammar import library as library_module
from pilotfish.engine.grammar.library import GrammarLibrary
from pilotfish.engine.grammar.trials import Trials
from pilotfish.engine.link.messages import Grammar

TOKENIZER = Path(__file__).resolve().parents[4] / "demo" / "model" / "tokenizer.json"
EOS, VOCAB = (8179,), 8192
SLOW = Grammar(kind="lark", source='start: %json {"type": "integer", "multipleOf": 999983}')


@pytest.fixture(scope="module")
def trials():
    trials = Trials(TOKENIZER, VOCAB)
    yield trials
    trials.close()


@pytest.fixture
def library(trials):
    return GrammarLibrary(TOKENIZER, VOCAB, trials=trials)


def regex(source, after=None):
    return Grammar(kind="regex", source=source, after_token_id=after)


def end(library, tickets):
    for _ in range(600):
        if all(ticket.done for ticket in tickets):
            return
        library.wait(0.1)
    raise AssertionError("no end")


def test_a_source_is_compiled_once_for_all_who_ask(library):
    tickets = [library.ask(regex("ab*c", after), EOS) for after in (None, 7, None)]
    assert not any(ticket.done for ticket in tickets)
    end(library, tickets)
    later = library.ask(regex("ab*c"), EOS)
    end(library, [later])
    assert library.num_compiled == 1
    constraints = [ticket.constraint for ticket in (*tickets, later)]
    assert len({id(constraint) for constraint in constraints}) == 4
    assert len({id(constraint._matcher) for constraint in constraints}) == 4
    assert [constraint._after for constraint in constraints] == [None, 7, None, None]


def test_kind_and_end_ids_are_part_of_a_source(library):
    for grammar, eos in ((regex("a"), EOS), (regex("a"), (8178,)), (Grammar(kind="choice", source='["a"]'), EOS)):
        library.constraint(grammar, eos)
    assert library.num_compiled == 3


def test_copies_do_not_move_each_other(library):
    first, second = (library.constraint(regex("ab"), EOS) for _ in range(2))
    first.advance([first._matcher.compute_ff_tokens()[0]])
    assert first._matcher.is_stopped() and not second._matcher.is_stopped()


@pytest.mark.parametrize(("seconds", "compiler"), [(0.0, "grammar-compiler"), (60.0, "grammar-compiler-quick")])
def test_nothing_is_compiled_by_who_asks(library, monkeypatch, seconds, compiler):
    """What costs little by one that has the interpreter's lock no longer than it must."""
    monkeypatch.setattr(library_module, "QUICK_SECONDS", seconds)
    threads = set()

    def watched(name):
        whole = getattr(library_module, name)

        def call(*args):
            threads.add(threading.current_thread().name)
            return whole(*args)

        return call

    for name in ("compile_form", "Constraint", "load_tokenizer", "fill_next_token_bitmask"):
        monkeypatch.setattr(library_module, name, watched(name))
    for _ in range(2):
        library.constraint(regex("a{3}"), EOS)
    assert threads == {compiler, "grammar-copier"}


def test_refusals_are_kept(library, trials):
    with pytest.raises(RequestError, match="regex"):
        library.constraint(regex("(unclosed"), EOS)
    started = trials._num_started
    again = library.ask(regex("(unclosed"), EOS)
    assert again.done and again.constraint is None and "regex" in again.error
    assert trials._num_started == started


def test_what_nobody_waits_for_is_given_up_and_nothing_is_kept_of_it(library, trials):
    tickets = [library.ask(SLOW, EOS) for _ in range(2)]
    library.drop(tickets[0])
    assert trials._open
    library.drop(tickets[1])
    assert not trials._open and not library._entries and not library._numbered
    library.constraint(regex("a"), EOS)
    assert not any(ticket.done for ticket in tickets)
    library.drop(tickets[1])


def test_a_drop_after_the_trial_leaves_nothing(library, monkeypatch):
    ticket = library.ask(regex("abc"), EOS)
    held = threading.Event()
    monkeypatch.setattr(library_module, "compile_form", lambda *_: held.wait(60) and None)
    for _ in range(600):
        if not library._trials._open:
            break
        threading.Event().wait(0.01)
    library.drop(ticket)
    held.set()
    monkeypatch.undo()
    library.constraint(regex("abcd"), EOS)
    assert [key[0].source for key in library._entries] == ["abcd"]


def test_what_is_being_compiled_is_waited_for(library, monkeypatch):
    begun, held = threading.Event(), threading.Event()

    def slow(*args):
        begun.set()
        assert held.wait(60)
        return whole(*args)

    whole = library_module.compile_form
    monkeypatch.setattr(library_module, "compile_form", slow)
    ticket = library.ask(regex("abc"), EOS)
    assert begun.wait(60) and not library.drop(ticket) and not ticket.done
    held.set()
    end(library, [ticket])


def shrunk(library):
    """Whoever asked may have its constraint before what is kept has shrunk for it: the compiling thread's next job."""
    done = threading.Event()
    library._compiler.submit(done.set)
    assert done.wait(60)


def test_the_longest_unused_goes_first(library, monkeypatch):
    monkeypatch.setattr(library_module, "MAX_KEPT", 3)
    for source in ("a", "b", "c", "a", "d"):
        library.constraint(regex(source), EOS)
    shrunk(library)
    end(library, [library.ask(regex("a"), EOS)])
    assert library.num_compiled == 4
    library.constraint(regex("b"), EOS)
    assert library.num_compiled == 5


def test_what_is_kept_has_a_size(library, monkeypatch):
    monkeypatch.setattr(library_module, "MAX_KEPT_BYTES", 0)
    library.constraint(Grammar(kind="json_object"), EOS)
    shrunk(library)
    library.constraint(Grammar(kind="json_object"), EOS)
    assert library.num_compiled == 2


def test_a_fault_while_compiling_is_told_and_not_kept(library, monkeypatch):
    monkeypatch.setattr(library_module, "compile_form", lambda *_: 1 / 0)
    ticket = library.ask(regex("x"), EOS)
    end(library, [ticket])
    assert ticket.constraint is None and isinstance(ticket.fault, ZeroDivisionError)
    monkeypatch.undo()
    assert library.constraint(regex("x"), EOS)


def test_without_an_end_or_a_tokenizer_each_grammar_is_refused(library, tmp_path):
    with pytest.raises(RequestError, match="end-of-text"):
        library.constraint(regex("a"), ())
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    other = GrammarLibrary(broken, VOCAB, EOS)
    other.wait_read()
    with pytest.raises(RequestError, match="cannot be tried"):
        other.constraint(regex("a"), EOS)
    other.close()
