"""The process that tries grammars: whatever a trial does, its grammar is refused, and the next one is tried."""

import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pilotfish.engine.grammar import worker
from pilotfish.engine.grammar.trial import Task
from pilotfish.engine.grammar.trials import Trials
from pilotfish.engine.link.messages import Grammar

ROOT = Path(__file__).resolve().parents[4]
TOKENIZER = ROOT / "demo" / "model" / "tokenizer.json"
EOS, VOCAB = (8179,), 8192


class Asked:
    """Trials whose verdicts are collected, in the order of their coming."""

    def __init__(self, **options):
        self.trials = Trials(TOKENIZER, VOCAB, **options)
        self.verdicts = queue.SimpleQueue()

    def start(self, source, kind="lark", key=""):
        return self.trials.start(Grammar(kind=kind, source=source), EOS, key, self.verdicts.put)

    def next(self):
        return self.verdicts.get(timeout=60)

    def ask(self, source, kind="lark"):
        number = self.start(source, kind)
        verdict = self.next()
        assert verdict.number == number
        return verdict


@pytest.fixture(scope="module")
def real():
    asked = Asked()
    yield asked
    asked.trials.close()


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
    asked = Asked(module="scripted_trials")
    yield asked
    asked.trials.close()


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(what):
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_passes_comes_back_in_the_library_s_form_with_its_cost(real):
    verdict = real.ask('{"type": "integer"}', "json_schema")
    assert verdict.error is None and '"json_schema"' in verdict.form
    assert 0 < verdict.seconds < 1 and 0 <= verdict.num_bytes < worker.MEMORY_BYTES


DEEP = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(18_000)) + '\nr18000: "a"'
SLOW = 'start: %json {"type": "integer", "multipleOf": 999983}'


@pytest.mark.parametrize(("source", "word"), [(DEEP, "deeply"), (SLOW, "CPU time"), ("start: nowhere", "nowhere")])
def test_what_the_library_cannot_bear_is_that_grammar_s_refusal(real, source, word):
    real.ask('start: "a"')
    pid = real.trials.pid
    verdict = real.ask(source)
    assert word in verdict.error and not verdict.form and len(verdict.error) < 600
    assert real.ask('start: "a"').error is None
    assert real.trials.pid == pid and children_of(pid) == []


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("allocate 400", "MiB"),
        ("spin 5", "CPU time"),
        ("signal SIGSEGV", "deeply"),
        ("signal SIGABRT", "MiB"),
        ("signal SIGKILL", "MiB"),
        ("exit 0", "MiB"),
        ("exit 3", "MiB"),
    ],
)
def test_every_death_of_a_child_is_that_grammar_s_refusal(scripted, source, word):
    verdict = scripted.ask(source)
    assert verdict.error and word in verdict.error, verdict
    assert scripted.ask("pass").error is None


@pytest.mark.parametrize("source", ["allocate 100", "shout"])
def test_a_child_has_room_and_its_words_go_nowhere(scripted, source):
    assert scripted.ask(source).error is None


def test_small_grammars_pass_slow_ones(scripted):
    """The slow lane is one at a time; the quick one is not held up by it."""
    slow = [scripted.start("spin 0.5") for _ in range(3)]
    # the first of them leaves the quick lane when it has used up that one's time
    quick = [scripted.start("spin 0.01") for _ in range(6)]
    numbers = [scripted.next().number for _ in range(9)]
    assert set(numbers) == {*slow, *quick}
    # the kernel counts CPU time by samples: one of the slow ones may get through before it is found out
    assert numbers.index(quick[-1]) < max(map(numbers.index, slow))


def test_api_keys_take_turns():
    line = worker.Line()
    for number, key in enumerate("aaaabbc"):
        line.add(Task(number=number, key=key))
    line.drop(1)
    assert [line.next().number for _ in range(6)] == [0, 4, 6, 2, 5, 3]
    assert line.next() is None


def test_what_nobody_waits_for_ends(scripted):
    running, *waiting = [scripted.start("sleep 60") for _ in range(4)]
    wait_until(lambda: scripted.trials.pid and children_of(scripted.trials.pid))
    for number in (*waiting, running):
        scripted.trials.give_up(number)
    assert scripted.ask("pass").error is None
    assert children_of(scripted.trials.pid) == []
    assert scripted.verdicts.empty()


def test_a_lost_worker_is_replaced_and_what_it_had_is_tried_again(scripted, tmp_path):
    assert scripted.ask("pass").error is None
    first = scripted.trials.pid
    scripted.start(f"sleep-without {tmp_path / 'file'}")
    wait_until(lambda: children_of(first))
    (child,) = children_of(first)
    os.kill(first, signal.SIGKILL)
    (tmp_path / "file").touch()
    assert scripted.next().error is None
    assert scripted.trials.pid != first
    wait_until(lambda: not Path(f"/proc/{child}").exists())


def test_a_child_ends_whose_worker_was_lost_as_it_began(scripted, monkeypatch):
    monkeypatch.setenv("CHILD_WAITS", "0.5")
    scripted.start("sleep 600")
    wait_until(lambda: scripted.trials.pid and children_of(scripted.trials.pid))
    (child,) = children_of(scripted.trials.pid)
    os.kill(scripted.trials.pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{child}").exists())


def test_what_every_worker_is_lost_with_is_refused(scripted):
    number = scripted.start("sleep 60")
    lost = set()
    for _ in range(2):
        wait_until(lambda: scripted.trials.pid not in {None, *lost} and children_of(scripted.trials.pid))
        lost.add(scripted.trials.pid)
        os.kill(scripted.trials.pid, signal.SIGKILL)
    verdict = scripted.next()
    assert verdict.number == number and "lost" in verdict.error


def test_what_is_no_verdict_is_a_lost_worker(scripted):
    verdict = scripted.ask("babble")
    assert verdict.error and "lost" in verdict.error
    assert scripted.ask("pass").error is None


def test_what_cannot_be_sent_is_told_at_once(scripted):
    with pytest.raises(UnicodeEncodeError):
        scripted.start("\ud800")
    assert scripted.ask("pass").error is None and not scripted.trials._open


def test_the_end_of_the_engine_ends_worker_and_children(scripted):
    scripted.start("sleep 60")
    wait_until(lambda: scripted.trials.pid and children_of(scripted.trials.pid))
    pids = [scripted.trials.pid, *children_of(scripted.trials.pid)]
    scripted.trials.close()
    scripted.trials._process.wait(60)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_a_worker_that_cannot_be_started_is_a_refusal(monkeypatch):
    asked = Asked()
    monkeypatch.setattr(asked.trials, "_command", ["/nowhere/python"])
    assert "cannot be started" in asked.ask("start: x").error


def test_the_worker_imports_neither_torch_nor_a_server():
    code = (
        "import sys, pilotfish.engine.grammar.worker as w; print([m for m in ('torch', 'aiohttp') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
