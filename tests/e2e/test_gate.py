"""`pilotfish gate` against real servers: a sound one passes, one broken in one way fails the gate named for it."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from demo_models import DEMO, changed_demo, drop_tensor, shift_norms
from processes import backend
from serving import serving_in_thread

from pilotfish.deploy.evaluate import harness, quality
from pilotfish.deploy.evaluate.command import main as evaluate
from pilotfish.deploy.gate import after, audit, requests
from pilotfish.deploy.gate.command import main

CORE = "pilotfish.engine.start:make_core"
ENGINE = {"num_speculative_tokens": 3, "max_model_len": 2048, "num_threads": 1, "head_check": "warn"}


def gate(tmp_path, target, *flags):
    """Exit status, and what came of each gate by name."""
    file = tmp_path / "gates.json"
    status = main([str(target), "--watch", "1", "--json", str(file), *flags])
    report = json.loads(file.read_text())
    assert report["passed"] == (status == 0)
    return status, {gate["name"]: gate for gate in report["gates"]}


def failed(gates):
    return [name for name, gate in gates.items() if not gate["passed"]]


@pytest.fixture(scope="module")
def sound():
    with serving_in_thread(DEMO, core=CORE, engine=ENGINE) as server:
        yield server


def test_a_sound_server_passes_every_gate(sound, tmp_path, capsys, monkeypatch):
    """Of the questions ten, five of each kind; the demo model knows half (one more or less in another dtype)."""
    ten = quality.items()[20:30]
    monkeypatch.setattr(quality, "items", lambda: ten)
    monkeypatch.setattr(harness, "is_installed", lambda: False)
    monkeypatch.setattr(requests, "EXACT_TOKENS", 8)
    status, gates = gate(tmp_path, sound.url, "--k", "3", "--score", "0.5", "--score-margin", "0.1")
    assert failed(gates) == [] and status == 0
    assert len(gates) == 21 and "all gates passed" in capsys.readouterr().out
    assert re.search(r"\b8 layers", gates["kernel routes"]["came"])


@pytest.mark.skipif(not harness.is_installed(), reason="lm-eval is an extra (eval)")
def test_lm_eval_scores_as_our_own_client_does(sound, tmp_path):
    """Both ask the demo model the shipped questions, with speculation and without."""
    values = []
    for flags in (["--client", "own"], ["--k", "0"], []):
        file = tmp_path / "scores.json"
        assert evaluate([sound.url, "--json", str(file), *flags]) == 0
        values.append(json.loads(file.read_text())["scores"][-1]["value"])
    assert len(set(values)) == 1 and values[0] == pytest.approx(0.38, abs=0.05)


def test_a_gate_alone_passes_on_a_server_that_nobody_has_asked(tmp_path):
    with serving_in_thread(DEMO, core=CORE, engine=ENGINE) as server:
        for name in ("metrics", "graphs", "memory"):
            status, gates = gate(tmp_path, server.url, "--only", name)
            assert status == 0 and list(gates) == ["answers", name], gates


def test_what_was_not_asked_for_is_named(sound, tmp_path):
    names = "version,k served,KV dtype"
    flags = ["--k", "5", "--expect-version", "9.9", "--kv-dtype", "float8_e4m3fn", "--only", names]
    status, gates = gate(tmp_path, sound.url, *flags)
    assert status == 1 and failed(gates) == names.split(",") and list(gates) == ["answers", *names.split(",")]
    assert gates["k served"]["came"].startswith("k = 3") and gates["k served"]["wanted"] == "k = 5"


def test_shifted_norms_of_the_head(tmp_path):
    model = changed_demo(tmp_path / "model", shift_norms)
    with serving_in_thread(model, core=CORE, engine=ENGINE) as server:
        _, gates = gate(tmp_path, server.url, "--only", "k served,head weights,head rank")
    assert failed(gates) == ["head rank"], "text stays right, and only the head's gate sees it"
    assert gates["head rank"]["came"].startswith("weak") and "shifted twice" in gates["head rank"]["came"]


def test_a_missing_tensor_of_the_head(tmp_path):
    model = changed_demo(tmp_path / "model", drop_tensor)
    with serving_in_thread(model, core=CORE, engine=ENGINE) as server:
        _, gates = gate(tmp_path, server.url, "--only", "k served,head weights,chat template")
    assert failed(gates) == ["k served", "head weights"]
    assert "first mtp.pre_fc_norm_hidden" in gates["head weights"]["came"]


def test_a_bad_template(folder, tmp_path):
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("{{ message.content }}", "{{ message.content[:8] }}"))
    with serving_in_thread(folder) as server:
        _, gates = gate(tmp_path, server.url, "--only", "tokenizer,chat template")
    assert failed(gates) == ["chat template"] and "0 times" in gates["chat template"]["came"]


def test_a_port_that_is_taken(folder, tmp_path):
    """Whoever listens there, a server in order perhaps, is not taken for the one that could not start."""
    with serving_in_thread(folder) as server:
        port = server.url.rsplit(":", 1)[1]
        status, gates = gate(tmp_path, folder, "--port", port)
    assert status == 1 and failed(gates) == ["answers"]
    assert f"port {port} is taken" in gates["answers"]["came"]


def test_a_server_that_does_not_start(folder, tmp_path):
    """A folder without a model: the report has the server's own reason."""
    status, gates = gate(tmp_path, folder)
    assert status == 1 and failed(gates) == ["answers"] and "num_hidden_layers" in gates["answers"]["came"]


@pytest.mark.parametrize("victim", ["server", "engine"])
def test_a_crash_in_the_first_seconds(folder, tmp_path, monkeypatch, victim):
    """A server that is gone, and one whose engine was started again, are both seen by the gate that waits for it."""
    with backend(folder, "scripted") as server:
        pid = server.process.pid
        if victim == "engine":
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

        def sleep(seconds):
            """The gate has looked once, and waits."""
            if not killed:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)
            time.sleep(seconds)

        killed = []
        monkeypatch.setattr(after, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
        status, gates = gate(tmp_path, server.url, "--only", "stays up", "--watch", "60")
    assert killed and status == 1 and failed(gates) == ["stays up"]


def test_a_model_is_served_gated_and_audited(tmp_path, monkeypatch, capfd):
    """A random model knows no text, so its head cannot be judged: a gate without a verdict has not passed.

    The audit is of one prompt and few tokens.
    """
    run = subprocess.run

    def run_short(command, **options):
        return run([*command, "--num-prompts", "1", "--max-tokens", "6"], **options)

    monkeypatch.setattr(audit, "subprocess", SimpleNamespace(run=run_short, PIPE=subprocess.PIPE))
    from byte_model import write_model
    from tiny_models import TWO_LAYERS, build_tiny

    folder = tmp_path / "tiny"
    folder.mkdir()
    model = build_tiny(write_model(folder), "dense", **TWO_LAYERS)
    only = "k served,trunk,head rank,kernel routes,KV dtype,metrics,full audit"
    flags = ["--num-speculative-tokens", "1", "--max-num-seqs", "1", "--max-model-len", "1024", "--num-threads", "1"]
    flags += ["--kv-cache-dtype", "fp8"]
    status, gates = gate(tmp_path, model, "--k", "1", "--only", only, "--", *flags)
    assert status == 1 and failed(gates) == ["trunk", "head rank"] and list(gates) == ["answers", *only.split(",")]
    assert gates["head rank"]["came"].startswith("untested")
    assert gates["KV dtype"]["came"] == "KV float8_e4m3fn, state float32"
    assert gates["full audit"]["came"].startswith("5 runs") and "0 differ" in gates["full audit"]["came"]
