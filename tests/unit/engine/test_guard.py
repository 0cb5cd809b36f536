"""An exception at any call from the loop into a library is one request's error: the engine and its neighbours go on."""

import functools
import sys
from collections import Counter
from pathlib import Path
from types import FunctionType, ModuleType

import llguidance
import llguidance.numpy
import pytest

SUPPORT = Path(__file__).resolve().parents[2] / "support"
if str(SUPPORT) not in sys.path:
    sys.path.append(str(SUPPORT))

from byte_model import IM_END, write_model  # noqa: E402  (the path above makes it importable)

from pilotfish.engine.grammar import constraint, form, library  # noqa: E402
from pilotfish.engine.grammar.library import GrammarLibrary  # noqa: E402
from pilotfish.engine.grammar.trials import Trials  # noqa: E402
from pilotfish.engine.guard import MAX_REASON, reason  # noqa: E402
from pilotfish.engine.link.messages import Grammar  # noqa: E402
from tests.support.loops import LoopDriver, assert_alone  # noqa: E402
from tests.support.tiny_models import VOCAB_SIZE  # noqa: E402

GRAMMARS = {
    "json_schema": '{"type": "object", "properties": {"name": {"const": "forced text"}}, "required": ["name"]}',
    "json_object": "",
    "regex": "a[bc]{4,9}d",
    "choice": '["abcdefgh", "abcdxyz"]',
    "lark": 'start: "a" /[bc]{4,9}/ "d"',
    "grammar": 'root ::= "a" [bc]+ "d"',
}


LIBRARY = [
    found
    for module in (llguidance, llguidance.numpy)
    for found in vars(module).values()
    if isinstance(found, type | ModuleType | FunctionType) and getattr(found, "__name__", "") != "numpy"
]
"""What the package offers."""


MASKS = "LLMatcher.deep_copy.deep_copy.unsafe_compute_mask_ptr_with_draft_token"


class Panic(BaseException):
    """As Rust's panics come: no Exception."""


class Wordless(Exception):
    def __str__(self):
        raise ValueError("no words")


FAULTS = {"exception": TypeError("an argument too many"), "panic": Panic("index out of bounds"), "wordless": Wordless()}


class Watched:
    """Something of a library's. Its calls, and those of what comes from it, are counted, and one of them raises."""

    def __init__(self, inner, name, calls):
        self.inner, self.name, self.calls = inner, name, calls

    def __call__(self, *args, **options):
        self.calls.count(self.name)
        plain = [arg.inner if isinstance(arg, Watched) else arg for arg in args]
        return self.calls.watch(self.inner(*plain, **options), self.name)

    def __getattr__(self, name):
        return self.calls.watch(getattr(self.inner, name), f"{self.name}.{name}")


class Calls:
    """`raising`: the name of a call and which of them, counted from 1, fails with `fault`."""

    def __init__(self, raising=None, fault=None):
        self.numbers, self.raising, self.fault = Counter(), raising, fault

    def count(self, name):
        self.numbers[name] += 1
        if self.raising == (name, self.numbers[name]):
            raise self.fault

    def watch(self, found, name):
        return Watched(found, name, self) if callable(found) or type(found) in LIBRARY else found

    def patch(self, monkeypatch):
        # trials are in a process of their own: see test_worker.py
        for module in (constraint, form, library):
            for name, found in list(vars(module).items()):
                if found in LIBRARY:
                    monkeypatch.setattr(module, name, Watched(found, name, self))


@functools.cache
def trials(tokenizer_file):
    """One worker for all libraries."""
    return Trials(tokenizer_file, VOCAB_SIZE)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    file = write_model(tmp_path_factory.mktemp("guard")) / "tokenizer.json"
    yield file
    trials(file).close()


def driven(tokenizer_file, kind, **options):
    """A request under a grammar beside one without, both at their end."""
    driver = LoopDriver(depth=3, agreeing="own", **options)
    driver.loop.grammars = GrammarLibrary(tokenizer_file, VOCAB_SIZE, trials=trials(tokenizer_file))
    plain = driver.ask("plain", 21)
    asked = Grammar(kind=kind, source=GRAMMARS[kind])
    masked = driver.ask("masked", 40, seed=2, grammar=asked, eos_token_ids=(IM_END,), max_tokens=12)
    driver.run()
    return driver, plain, masked


def test_where_the_library_is_called(tokenizer_file, monkeypatch):
    """The tests below meet each of these: making, masks, what is forced, and what is committed."""
    calls = Calls()
    with monkeypatch.context() as patched:
        calls.patch(patched)
        for kind in GRAMMARS:
            _, plain, masked = driven(tokenizer_file, kind)
            assert_alone(plain)
            assert masked.finish in ("stop", "length") and masked.tokens
    called = {name.rsplit(".", 1)[-1] for name in calls.numbers}
    assert called >= {
        *("LLMatcher", "LLTokenizer", "fill_next_token_bitmask", "deep_copy", "consume_token", "is_accepting"),
        "unsafe_compute_mask_ptr_with_draft_token",
    }
    # which keeps the interpreter's lock for as long as what must come is long
    assert "compute_ff_tokens" not in called


@functools.cache
def calls_of(kind, tokenizer_file):
    calls = Calls()
    with pytest.MonkeyPatch.context() as patched:
        calls.patch(patched)
        driven(tokenizer_file, kind)
    return calls.numbers


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_fault_at_any_call_into_the_library_is_that_request_s_error(tokenizer_file, monkeypatch, kind, fault):
    numbers = calls_of(kind, tokenizer_file)
    assert numbers
    # all calls by one exception, the first of each by the others
    places = {(name, n) for name, last in numbers.items() for n in ((1, last) if fault == "exception" else (1,))}
    if kind not in ("json_schema", "regex"):
        # the rest is theirs too
        places = {(name, n) for name, n in places if "grammar_from" in name or "any_to_lark" in name}
    for place in sorted(places):
        with monkeypatch.context() as patched:
            Calls(place, FAULTS[fault]).patch(patched)
            driver, plain, masked = driven(tokenizer_file, kind)
        assert_alone(plain)
        assert plain.finish == "length"
        assert masked.finish == "error" and masked.last.error, place
        assert masked.last.token_ids == [] and driver.loop.scheduler.pages.num_used == 0
        assert not driver.loop.has_work()


def test_the_next_request_under_a_grammar_is_served(tokenizer_file, monkeypatch):
    with monkeypatch.context() as patched:
        Calls((MASKS, 2), Panic()).patch(patched)
        driver, _, masked = driven(tokenizer_file, "regex")
        assert (masked.finish, masked.last.error) == ("error", "Panic")
        again = Grammar(kind="regex", source=GRAMMARS["regex"])
        later = driver.ask("later", 40, seed=2, grammar=again, eos_token_ids=(IM_END,), max_tokens=12)
        driver.run()
    _, _, alone = driven(tokenizer_file, "regex")
    assert later.tokens == alone.tokens and later.finish == alone.finish


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("where", ["check_rules", "allowed_ids", "stop_ids_of"])
def test_a_fault_while_a_request_is_checked_is_its_own(monkeypatch, where, run_ahead):
    def broken(*_):
        raise Panic(where)

    driver = LoopDriver(depth=3, run_ahead=run_ahead)
    plain = driver.ask("plain", 21)
    with monkeypatch.context() as patched:
        patched.setattr(f"pilotfish.engine.requests.checks.{where}", broken)
        checked = driver.ask("checked", 40, seed=2)
    driver.run()
    assert_alone(plain)
    assert (checked.finish, checked.last.error, checked.last.error_code) == ("error", f"Panic: {where}", None)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_fault_while_a_request_gets_its_slot_is_its_own(monkeypatch, run_ahead):
    driver = LoopDriver(depth=3, max_num_seqs=3, run_ahead=run_ahead)
    plain = driver.ask("plain", 21)
    driver.step()
    admit = driver.loop.executor.state.admit

    def broken(slot, prompt, *rest):
        admit(slot, prompt, *rest)
        if len(prompt) == 40:
            raise OverflowError("a number too large")

    monkeypatch.setattr(driver.loop.executor.state, "admit", broken)
    bad, good = driver.ask("bad", 40, seed=2), driver.ask("good", 9)
    driver.run()
    assert_alone(plain)
    assert_alone(good)
    assert (bad.finish, bad.last.error, bad.tokens) == ("error", "OverflowError: a number too large", [])
    assert driver.loop.scheduler.slots.num_used == 0


def test_a_check_that_meets_a_fault_is_given_up_and_is_no_mismatch(tokenizer_file, monkeypatch):
    calls = calls_of("regex", tokenizer_file)
    for place in (("LLMatcher.deep_copy", 2), (MASKS, calls[MASKS] + 2)):
        driver = LoopDriver(depth=3, agreeing="own")
        loop = driver.loop
        loop.grammars = GrammarLibrary(tokenizer_file, VOCAB_SIZE, trials=trials(tokenizer_file))
        loop.self_audit.rate = 1.0
        # they know no checks
        loop.executor.observers.clear()
        asked = Grammar(kind="regex", source=GRAMMARS["regex"])
        with monkeypatch.context() as patched:
            Calls(place, FAULTS["exception"]).patch(patched)
            driver.ask("masked", 40, seed=2, grammar=asked, eos_token_ids=(IM_END,), max_tokens=12)
            reports = [loop.step() for _ in iter(loop.has_work, False)]
        outputs = [output for report in reports if report for output in report.outputs]
        assert {output.request_id for output in outputs} == {"masked"}
        assert outputs[-1].finish_reason in ("stop", "length")
        assert not any(report.stats.num_audit_mismatches for report in reports if report)
        assert loop.self_audit.running is None and loop.scheduler.slots.num_used == 0


def test_reasons_are_short_text():
    assert reason(ValueError("x" * 9999)) == f"ValueError: {'x' * 9999}"[:MAX_REASON]
    assert reason(ValueError("\ud800")) == "ValueError: \\ud800"
    assert reason(Wordless()) == "Wordless" and reason(Panic()) == "Panic"
