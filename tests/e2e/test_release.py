"""`pilotfish release` on real servers behind HAProxy: with a scripted core, since here it is about starts and ends."""

import json
import os
import shlex
import signal
import socket
import sys
import threading
import time
import urllib.error

import pytest
from byte_model import write_model
from processes import ask, until
from releases import SCRIPTED, done, find_haproxy, machine
from serving import PATIENCE, let_go

QUICK = ("--steady", "0.5")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def site(model, tmp_path_factory):
    """A machine on which one of `red` and `blue` always serves, whatever a test tries to release."""
    with machine(tmp_path_factory.mktemp("site"), find_haproxy()) as made:
        made.add_version("red", model, SCRIPTED)
        made.add_version("blue", model, SCRIPTED)
        assert done(made.release("red", *QUICK)) == 0
        assert made.runs() == {"one": "red"}
        yield made


@pytest.fixture
def before(site):
    """What ran before the test: the slot and the version."""
    ((slot, version),) = site.runs().items()
    assert model_of(site.relay_url) == version
    return slot, version


def other(version):
    return "blue" if version == "red" else "red"


def model_of(url):
    with ask(url, reply="x") as response:
        return json.load(response)["model"]


def assert_unchanged(site, before, *failed):
    """The old version serves, and the record names the gates."""
    assert site.runs() == dict([before]) and model_of(site.relay_url) == before[1]
    assert site.targets() == [f"127.0.0.1:{site.slot(before[0]).port}"]
    record = site.records()[-1]
    assert (record["outcome"], record["failed"]) == ("rolled back", list(failed))
    assert record["gates"][-1]["name"] == "old version" and record["gates"][-1]["passed"]
    return next(gate["came"] for gate in record["gates"] if not gate["passed"])


@pytest.mark.parametrize("instead", [False, True])
def test_the_new_version_takes_over(site, before, instead):
    (old_slot, old), new = before, other(before[1])
    assert done(site.release(new, *QUICK, *["--instead"] * instead)) == 0
    ((slot, version),) = site.runs().items()
    assert version == new == model_of(site.relay_url) and slot != old_slot
    assert site.targets() == [f"127.0.0.1:{site.slot(slot).port}"]
    record = site.records()[-1]
    assert (record["version"], record["slot"], record["outcome"]) == (new, slot, "released")
    assert (record["old_version"], record["old_slot"], record["instead"]) == (old, old_slot, instead)
    names = [gate["name"] for gate in record["gates"] if gate["passed"]]
    assert names == ["port", "start", "port answers", "model", "steady", "in service"]


def test_a_release_under_load_loses_no_request(site, before, tmp_path):
    stop, answers, failures, go = threading.Event(), [], [], tmp_path / "go"

    def client(stream):
        while not stop.is_set():
            try:
                with ask(site.relay_url, stream=stream, reply="abcde", delay=0.02) as response:
                    text = response.read().decode()
                if stream:
                    assert text.endswith("data: [DONE]\n\n") and '"finish_reason":"stop"' in text, text
                    answers.append(json.loads(text.split("\n")[0].removeprefix("data: "))["model"])
                else:
                    whole = json.loads(text)
                    assert whole["choices"][0]["text"] == "abcde", text
                    answers.append(whole["model"])
            except (OSError, AssertionError) as error:
                failures.append(repr(error))

    threads = [threading.Thread(target=client, args=(number % 2 == 0,)) for number in range(6)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(answers) > 12 or failures, "the old one answers")
        # one that began before the switch and ends after it
        with ask(site.relay_url, stream=True, reply="x", times=1000, delay=0.1, go=str(go)) as response:
            release = site.release(other(before[1]), *QUICK)
            until(lambda: answers[-1] == other(before[1]) or failures, "requests go to the new one")
            let_go(go)
            text = response.read().decode()
        assert done(release) == 0
        seen = len(answers)
        until(lambda: len(answers) > seen + 12 or failures, "the new one answers")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert text.endswith("data: [DONE]\n\n") and f'"model":"{before[1]}"' in text
    assert set(answers[:5]) == {before[1]} and set(answers[-5:]) == {other(before[1])}


CRASHES = "--core crashing_core:make_core"


@pytest.mark.parametrize(
    ("flags", "gate", "words", "instead"),
    [
        pytest.param("--no-such-flag", "start", "unknown flag --no-such-flag", False, id="a flag"),
        pytest.param(f"{SCRIPTED}_that_fails", "start", "no such checkpoint", True, id="a model"),
        pytest.param(f"{SCRIPTED} --chat-template NONE", "start", "NONE", False, id="a template"),
        pytest.param(f"{SCRIPTED} --served-model-name bad", "model", "bad", True, id="a gate"),
        pytest.param(f"{CRASHES}_of_a_server_that_crashes", "steady", "it ended", True, id="a crash after 5 s"),
        pytest.param(CRASHES, "steady", "", False, id="a crash of its engine after 5 s"),
    ],
)
def test_a_broken_version_leaves_the_old_one(site, before, model, flags, gate, words, instead):
    site.add_version("broken", model, flags)
    assert done(site.release("broken", "--steady", "10", *["--instead"] * instead)) == 1
    assert words in assert_unchanged(site, before, gate)


def test_one_that_crashes_when_it_serves_is_taken_out(site, before):
    new = other(before[1])
    release = site.release(new, "--steady", "5")
    until(lambda: model_of(site.relay_url) == new, "it was switched to")
    os.kill(site.pid(new), signal.SIGKILL)
    assert done(release) == 1
    assert "it ended" in assert_unchanged(site, before, "in service")


def test_a_port_that_is_taken(site, before):
    (free,) = {slot.name for slot in site.layout.slots()} - site.runs().keys()
    with socket.create_server(("127.0.0.1", site.slot(free).port)):
        assert done(site.release(other(before[1]), *QUICK)) == 1
    assert_unchanged(site, before, "port")


@pytest.mark.parametrize(
    ("gate", "words"),
    [
        ("/no/such/command", "/no/such/command"),
        ("sh -c 'echo ERROR: no torch; exit 3'", "ERROR: no torch"),
        ("sh -c 'sleep 60; true'", "nothing within 2 s"),
    ],
)
def test_a_gate_command_that_says_nothing_is_no_gate_passed(site, before, gate, words):
    assert done(site.release(other(before[1]), "--gate", gate, "--gate-timeout", "2")) == 1
    assert words in assert_unchanged(site, before, "gates")


def test_an_interrupted_release_goes_back_and_a_second_one_waits_for_it(site, before):
    new = other(before[1])
    release = site.release(new, "--instead", "--steady", "60")
    until(lambda: new in site.runs().values(), "the new one was started")
    second = site.release(new)
    assert "another release is running" in second.communicate(timeout=PATIENCE)[0] and second.returncode == 2
    # the connection breaks: nobody reads any more what it says
    release.stdout.close()
    release.send_signal(signal.SIGHUP)
    # another signal does not stop the way back
    time.sleep(0.2)
    release.send_signal(signal.SIGINT)
    release.wait(PATIENCE)
    assert "SIGHUP" in assert_unchanged(site, before, "release")


SLEEPING = shlex.join([sys.executable, "-c", "import time; time.sleep(120)"])


@pytest.mark.parametrize("instead", [False, True])
def test_a_release_that_was_killed_says_what_serves_and_how_to_go_on(site, before, instead):
    """kill -9 leaves the new version running, not judged and without requests."""
    (slot, old), new = before, other(before[1])
    cut = site.release(new, "--gate", SLEEPING, *["--instead"] * instead)
    until(lambda: "gates" in (site.folder / "opt" / "release.json").read_text(), "its gates look")
    assert "is at: gates" in site.release().communicate(timeout=PATIENCE)[0], "one that runs is no wreck"
    cut.kill()
    cut.wait(PATIENCE)
    cut.stdout.close()
    assert new in site.runs().values()
    serves = "NOTHING SERVES" if instead else f"{old} serves, in slot {slot}"
    words = [f"the release of {new} into slot", "was cut off at: gates", serves, f"{new} was not passed by its gates"]
    words += ["runs and gets no requests", "`pilotfish release --recover` cleans up", f"{old} serves again"]
    for again, code in (((), 0), ((new,), 2), ((old,), 2)):
        next_call = site.release(*again)
        text = next_call.communicate(timeout=PATIENCE)[0]
        assert next_call.returncode == code and all(word in text for word in words), text
    assert done(site.release("--recover")) == 1
    assert assert_unchanged(site, before, "release") == "cut off at: gates"
    assert done(site.release("--recover")) == 2
    assert not (site.folder / "opt" / "release.json").exists()


def test_one_that_was_killed_near_its_end_goes_on(site, before):
    """The new version serves, and the old one was still to be stopped."""
    (slot, old), new = before, other(before[1])
    assert done(site.release(new, *QUICK)) == 0
    left = site.records()[-1]
    (site.folder / "opt" / "release.json").write_text(json.dumps(left | {"step": "end of the old version"}))
    text = site.release().communicate(timeout=PATIENCE)[0]
    assert f"{new} serves, in slot {left['slot']}; {old}, in slot {slot}, is stopped" in text
    assert done(site.release("--recover")) == 0
    assert site.runs() == {left["slot"]: new} and model_of(site.relay_url) == new
    assert site.records()[-1]["outcome"] == "released"


def test_a_journal_that_cannot_be_written_touches_nothing(site, before):
    (site.folder / "opt" / "release.new").mkdir()
    try:
        release = site.release(other(before[1]))
        assert "release.json: Is a directory" in release.communicate(timeout=PATIENCE)[0] and release.returncode == 2
    finally:
        (site.folder / "opt" / "release.new").rmdir()
    assert site.runs() == dict([before]) and model_of(site.relay_url) == before[1]


def test_what_runs_is_shown(site, before):
    shown = site.release()
    text = shown.communicate(timeout=PATIENCE)[0]
    assert shown.returncode == 0
    assert [line.split()[0] for line in text.splitlines()[:2]] == ["one", "two"]
    assert f"runs     {before[1]}" in text and ": rolled back, " in text


def test_when_nothing_can_serve_it_says_so(site, before, model):
    """A status of 1 would let everyone sleep. Last of the tests that share a site."""
    slot, version = before
    site.add_version("broken", model, "--no-such-flag")
    release = site.release("broken", "--instead")
    until(lambda: slot not in site.runs(), "the old one was stopped")
    assert site.targets() != [f"127.0.0.1:{site.slot(slot).port}"], "nobody is called for it"
    (site.folder / "opt" / "versions" / version / "bin" / "pilotfish").write_text("#!/bin/sh\nexit 1\n")
    assert done(release) == 3
    record = site.records()[-1]
    assert record["outcome"] == "down" and record["failed"] == ["start", "old version"]
    assert site.targets() == [f"127.0.0.1:{site.slot(slot).port}"], "now somebody is"
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(site.relay_url, reply="x")
    caught.value.close()
    assert caught.value.code == 503


def test_without_a_relay_both_slots_may_have_one_port(tmp_path, model):
    """And a key, which the gates and the last question need."""
    with machine(tmp_path, None) as made:
        made.add_version("red", model, SCRIPTED)
        made.add_version("blue", model, SCRIPTED)
        port = made.slot("one").port
        for name in ("one", "two"):
            (made.folder / "etc" / f"{name}.env").write_text(f"PILOTFISH_PORT={port}\nPILOTFISH_API_KEY=sesame\n")
        assert done(made.release("red", *QUICK, relay=False)) == 0
        assert done(made.release("blue", *QUICK, relay=False)) == 1
        port_, old = made.records()[-1]["gates"]
        assert (port_["name"], port_["passed"], old["came"]) == ("port", False, "1 token")
        assert done(made.release("blue", *QUICK, "--instead", relay=False)) == 0
        assert made.runs() == {"two": "blue"}


def test_a_relay_that_does_not_answer_touches_nothing(tmp_path, model):
    with machine(tmp_path, None) as made:
        made.add_version("red", model, SCRIPTED)
        release = made.release("red")
        assert "haproxy.sock" in release.communicate(timeout=PATIENCE)[0] and release.returncode == 2
        assert made.runs() == {}
