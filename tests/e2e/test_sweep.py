"""`pilotfish sweep` as a process: a small matrix on a tiny random model, killed in the middle and taken up again."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from byte_model import write_model
from serving import ENVIRONMENT, serving_in_thread

from pilotfish.deploy.sweep.records import COLUMNS

PATIENCE = 240
SMALL = ["--domains", "code", "--paths", "completions", "--single-tokens", "6", "--concurrency", "2"]
SMALL += ["--concurrent-tokens", "6", "--contexts", "150", "--long-tokens", "4", "--quiet"]
FLAGS = ["--", "--max-model-len", "1024", "--dtype", "float32", "--num-threads", "1"]
ROOMY = ["--", "--max-model-len", "2048", *FLAGS[3:]]
CORE = "pilotfish.engine.start:make_core"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from tiny_models import build_tiny

    return build_tiny(write_model(tmp_path_factory.mktemp("tiny")), "dense")


def sweep(*args):
    command = [sys.executable, "-m", "pilotfish.server.cli", "sweep", *map(str, args)]
    return subprocess.Popen(command, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process):
    out, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, out, errors


def test_a_matrix_killed_and_taken_up_again(model, tmp_path):
    """The kill loses the running cell only; the second run measures what is missing, and no cell twice."""
    out = tmp_path / "sweep"
    command = [model, "--out", out, "--k", "0,2", "--max-num-seqs", "2", *SMALL, *FLAGS]
    with sweep(*command) as first:
        deadline = time.monotonic() + PATIENCE
        while not list(out.glob("cells/*.json")) and time.monotonic() < deadline:
            time.sleep(0.1)
        first.send_signal(signal.SIGINT)
        code, _, errors = finish(first)
    assert code == 130 and "goes on with the cell" in errors
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("cells/*.json")}
    assert len(kept) == 1
    assert "Recommended" in (out / "report.md").read_text()

    with sweep(*command) as second:
        code, said, errors = finish(second)
    assert code == 0, errors
    assert "1 of 2 cells are there already" in errors
    cells = {path.name: json.loads(path.read_text()) for path in out.glob("cells/*.json")}
    assert sorted(cells) == ["k0-mns2.json", "k2-mns2.json"]
    for name, changed in kept.items():
        assert (out / "cells" / name).stat().st_mtime_ns == changed
    check(cells, out, said, model)


def check(cells, out, said, model):
    for cell in cells.values():
        kinds = [one["kind"] for one in cell["measurements"]]
        assert kinds == ["single", "concurrent", "long"]
        single, together, after_long = cell["measurements"]
        assert single["completion_tokens"] == 6 and together["completion_tokens"] == 12
        assert 100 <= after_long["context"] <= 200 and after_long["completion_tokens"] == 4
        # a random head is never right: each round commits one token, and the first comes from prefill
        assert single["accepted"] <= single["drafted"] and single["tokens_per_second"] > 0
        assert (single["drafts"] > 0) == (cell["k"] > 0)
        assert cell["binding_limit"] == "configured" and cell["start_seconds"] > 0
    text = (out / "report.md").read_text()
    assert f"pilotfish serve {model} --num-speculative-tokens" in text and said.splitlines()[0][13:] in text
    head, *lines = (out / "measurements.tsv").read_text().splitlines()
    assert head.split("\t") == list(COLUMNS) and len(lines) == 2 * 3
    whole = json.loads((out / "sweep.json").read_text())
    assert len(whole["cells"]) == 2 and whole["recommendation"]["command"] in text


def test_an_endpoint_that_runs_already(model, tmp_path):
    """By --url nothing is started: one cell, named by what the endpoint says of itself."""
    engine = {
        "num_speculative_tokens": 2,
        "max_num_seqs": 3,
        "max_model_len": 1024,
        "num_threads": 1,
        "dtype": "float32",
    }
    with serving_in_thread(model, core=CORE, engine=engine, api_keys=("secret",)) as server:
        with sweep("--url", server.url, "--api-key", "secret", "--out", tmp_path, *SMALL) as process:
            code, said, errors = finish(process)
        assert code == 0, errors
        with sweep("--url", server.url, "--api-key", "wrong", "--out", tmp_path / "other", *SMALL) as process:
            code, refused, _ = finish(process)
    assert said.startswith("recommended: k2-mns3")
    assert "secret" not in "".join(p.read_text() for p in tmp_path.rglob("*") if p.suffix in (".json", ".md", ".tsv"))
    assert code == 1 and "Incorrect API key" in refused


def test_a_cell_that_cannot_start_is_named_and_the_rest_goes_on(model, tmp_path):
    """The reason is the server's own, and the exit status says so."""
    with sweep(model, "--out", tmp_path / "out", "--k", "0", "--max-num-seqs", "300,1", *SMALL, *ROOMY) as process:
        code, said, _ = finish(process)
    assert code == 1 and "k0-mns300 did not run: " in said and "max_num_seqs: want 1..256" in said
    assert (tmp_path / "out" / "cells" / "k0-mns1.json").exists()
    assert "Cells that did not run" in (tmp_path / "out" / "report.md").read_text()


def test_a_damaged_checkpoint_ends_the_sweep_at_once(tmp_path):
    """No weights: no cell could start."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder)
    with sweep(folder, "--out", tmp_path / "out", "--k", "0,1", "--max-num-seqs", "1,2", *SMALL) as process:
        code, said, errors = finish(process)
    assert code == 2 and not said and errors.count("engine failed (load)") == 1
    assert not list(tmp_path.glob("out/cells/*"))


def test_a_model_that_is_none_ends_the_sweep_at_once(tmp_path):
    with sweep(tmp_path / "nothing", "--out", tmp_path / "out", "--k", "0,1", *SMALL) as process:
        code, said, errors = finish(process)
    assert code == 2 and not said and errors.count("want a checkpoint folder") == 1
    assert not list(tmp_path.glob("out/cells/*"))


def test_a_server_that_dies_loses_its_cell_and_a_sweep_that_dies_takes_its_server_along(model, tmp_path):
    out = tmp_path / "out"
    with sweep(
        model, "--out", out, "--k", "0,2", "--max-num-seqs", "1", *SMALL, "--single-tokens", "600", *ROOMY
    ) as run:
        os.kill(server_of(run), signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE
        while not list(out.glob("cells/*.json")) and time.monotonic() < deadline:
            time.sleep(0.1)
        (failed,) = out.glob("cells/*.json")
        assert failed.name == "k0-mns1.json" and json.loads(failed.read_text())["error"]
        second = server_of(run)
        run.kill()
        run.communicate(timeout=PATIENCE)
    while Path(f"/proc/{second}/cmdline").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{second}/cmdline").exists()


def server_of(run):
    """The process id of the server that a sweep has started, once it answers."""
    deadline = time.monotonic() + PATIENCE
    while run.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # of a process that has just ended, or of a server not up yet
            for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split():
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if "serve" in words:
                    port = words[words.index("--port") + 1]
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                        return int(pid)
        time.sleep(0.05)
    run.kill()
    raise AssertionError(f"the sweep starts no server: {run.communicate(timeout=PATIENCE)}")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "want either MODEL or --url"),
        (["m", "--url", "http://u"], "want either MODEL or --url"),
        (["m", "--domains", "poetry"], "essay,code,prose,chinese"),
        (["m", "--k=-1,0"], "at least 0"),
        (["m", "--k=1,two"], "want numbers of at least 0, got 1,two"),
        (["m", "--k="], "at least 0"),
        (["m", "--relay", "http://r"], "--relay wants --port"),
    ],
)
def test_wrong_flags_are_explained(args, words, capsys):
    from pilotfish.deploy.sweep.command import parse

    with pytest.raises(SystemExit):
        parse(args)
    assert words in capsys.readouterr().err


def test_help_needs_no_torch():
    code = "import sys, pilotfish.server.cli as c\ntry: c.main(['sweep', '--help'])\n"
    code += "finally: assert 'torch' not in sys.modules"
    options = {"capture_output": True, "text": True, "timeout": PATIENCE, "env": os.environ}
    done = subprocess.run([sys.executable, "-c", code], **options)
    assert done.returncode == 0 and "--max-num-seqs" in done.stdout
