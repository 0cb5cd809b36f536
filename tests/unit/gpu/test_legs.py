"""Legs on a GPU: what passed is not run again, what fails shows its end, what hangs is ended with all it started."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pilotfish.engine.check.audit.hits import depths_of
from pilotfish.engine.options import MAX_DEPTH
from tests.gpu import legs
from tests.gpu.legs import Leg, main, run
from tests.gpu.test_audit import RUNS

PASSES = "print('{\"us\": 1}'); print('{\"us\": 2}')"
FAILS = "print('a reason'); raise SystemExit(3)"


def leg(name, code, limit_seconds=60):
    return Leg("bench", name, ("-c", code), limit_seconds)


def test_rows_and_outcome_are_written(tmp_path):
    outcome = run(leg("good", PASSES), tmp_path)
    assert outcome["status"] == "passed" and outcome["rows"] == 2 and outcome["end"] == []
    rows = (tmp_path / "bench-good.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in rows] == [{"us": 1}, {"us": 2}]
    assert json.loads((tmp_path / "bench-good.json").read_text()) == outcome


def test_a_failed_leg_shows_its_end_and_is_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(legs, "bench_legs", lambda: [leg("bad", FAILS), leg("good", PASSES)])
    assert main(["bench", "--out", str(tmp_path)]) == 1
    assert "a reason" in capsys.readouterr().out
    monkeypatch.setattr(legs, "bench_legs", lambda: [leg("bad", PASSES), leg("good", FAILS)])
    assert main(["bench", "--out", str(tmp_path)]) == 0
    assert "passed before" in capsys.readouterr().out
    assert main(["bench", "good", "--out", str(tmp_path), "--again"]) == 1


def test_a_measurement_is_not_taken_for_the_test_of_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(legs, "test_legs", lambda: [Leg("test", "linear", ("-c", PASSES))])
    monkeypatch.setattr(legs, "bench_legs", lambda: [leg("linear", FAILS)])
    assert main(["test", "--out", str(tmp_path)]) == 0
    assert main(["bench", "--out", str(tmp_path)]) == 1
    assert main(["test", "--out", str(tmp_path)]) == 0
    assert "passed before" in capsys.readouterr().out


def test_of_a_progress_bar_the_last_state_is_shown(tmp_path):
    bar = "import sys; sys.stderr.write(''.join(f'\\rat {i} of 99' for i in range(100)) + '\\n')"
    rows = "print('\\rat 1 of 1\\r{\"us\": 3}')"
    outcome = run(leg("slow", f"{bar}; {rows}; {FAILS}"), tmp_path)
    assert outcome["end"] == ["at 99 of 99", '{"us": 3}', "a reason"] and outcome["rows"] == 1


def test_a_leg_that_hangs_is_ended_with_what_it_started(tmp_path):
    mark = tmp_path / "mark"
    child = "import time; time.sleep(600)"
    code = f"import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', {child!r}])"
    code += f"; open({str(mark)!r}, 'w').write(str(child.pid)); time.sleep(600)"
    outcome = run(leg("slow", code, 3), tmp_path)
    assert outcome["status"] == "out of time"
    # on a slow machine it has started nothing yet
    if mark.exists() and (pid := mark.read_text()):
        while is_running(pid):
            time.sleep(0.01)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_tests_that_were_all_skipped_have_not_passed(tmp_path):
    code = "import sys; print('9 skipped in 0.1s')"
    skipped = Leg("test", "skipped", ("-m", "pytest", "--version"))
    assert run(leg("other", code), tmp_path)["status"] == "passed"
    assert run(skipped, tmp_path)["status"] == "failed"


def test_a_name_that_is_no_leg_is_told(capsys):
    with pytest.raises(SystemExit):
        main(["test", "no_such_leg"])
    assert "want environment, small_operators" in capsys.readouterr().err


def test_what_a_leg_that_passed_left_running_ends_with_it(tmp_path):
    mark = tmp_path / "mark"
    child = "import time; time.sleep(600)"
    code = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {child!r}])"
    code += f"; open({str(mark)!r}, 'w').write(str(child.pid))"
    assert run(leg("leaves", code), tmp_path)["status"] == "passed"
    while is_running(mark.read_text()):
        time.sleep(0.01)


def test_a_run_that_is_ended_ends_its_legs(tmp_path):
    mark = tmp_path / "mark"
    slow = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"from tests.gpu import legs; legs.LOCK = legs.Path({str(tmp_path / 'lock')!r})"
    code += f"; legs.test_legs = lambda: [legs.Leg('test', 'slow', ('-c', {slow!r}))]"
    code += f"; legs.main(['test', '--out', {str(tmp_path)!r}])"
    run_of_legs = subprocess.Popen([sys.executable, "-c", code], cwd=legs.ROOT, env=legs.environment())
    while not (mark.exists() and mark.read_text()):
        time.sleep(0.01)
    run_of_legs.send_signal(signal.SIGTERM)
    assert run_of_legs.wait() != 0
    while is_running(mark.read_text()):
        time.sleep(0.01)


def test_a_measurement_waits_for_memory_and_names_who_holds_it(tmp_path, monkeypatch):
    monkeypatch.setattr(legs, "FREED_SECONDS", 5.0)
    found = iter([["41, python, 9 MiB"], []])
    monkeypatch.setattr(legs, "holders_of_memory", lambda: next(found))
    assert run(leg("good", PASSES), tmp_path)["status"] == "passed"
    monkeypatch.setattr(legs, "FREED_SECONDS", 0.0)
    monkeypatch.setattr(legs, "holders_of_memory", lambda: ["41, python, 9 MiB"])
    outcome = run(leg("held", PASSES), tmp_path)
    assert outcome["status"] == "not alone" and "41, python, 9 MiB" in outcome["end"]
    assert not (tmp_path / "bench-held.json").exists()
    # tests of small models share the device
    assert run(Leg("test", "small", ("-c", PASSES)), tmp_path)["status"] == "passed"


def test_a_second_run_is_refused_while_one_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(legs, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(legs, "bench_legs", lambda: [leg("good", PASSES)])
    with legs.alone() as is_alone:
        assert is_alone and main(["bench", "--out", str(tmp_path)]) == 1
    assert "another run of legs" in capsys.readouterr().err
    assert main(["bench", "--out", str(tmp_path)]) == 0
    with pytest.raises(SystemExit):
        main(["bench", "--out", str(tmp_path), "--jobs", "2"])


def test_no_leg_is_begun_that_may_outlast_the_call(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(legs, "bench_legs", lambda: [leg("long", PASSES, 900), leg("short", PASSES, 20)])
    assert main(["bench", "--out", str(tmp_path), "--within", "100"]) == 1
    assert main(["bench", "--out", str(tmp_path), "--list"]) == 0
    printed = capsys.readouterr().out
    assert "not begun" in printed and "at most 900 s  not yet" in printed and "at most  20 s  passed" in printed
    assert main(["bench", "--out", str(tmp_path), "--within", "1000"]) == 0


def test_every_file_of_tests_has_a_leg():
    words = [shlex.split(" ".join(each.command)) for each in legs.test_legs() if each.is_pytest]
    files = {word for command in words for word in command if word.startswith("tests/gpu/")}
    assert files == {str(file.relative_to(legs.ROOT)) for file in (legs.ROOT / "tests/gpu").glob("test_*.py")}


def test_the_audit_s_legs_are_all_of_its_parameters():
    assert list(RUNS) == list(legs.AUDITED)


def test_the_demo_model_s_audits_share_out_every_k():
    lists = [[int(k) for k in one.split(",")] for one in legs.AUDITED_DEPTHS]
    assert sorted(k for one in lists for k in one) == list(range(1, MAX_DEPTH + 1))
    # hits of the prefix cache: each k that one audit of all would compare, and no list without any
    of_lists = [depths_of(one, MAX_DEPTH, torch.device("cuda")) for one in lists]
    assert {1, 3, MAX_DEPTH} <= {k for one in of_lists for k in one} and {len(one) for one in of_lists} == {1}
