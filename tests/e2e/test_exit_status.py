"""The exit status of `pilotfish serve`: 2 for what another start would meet again, 1 for what may pass."""

import os
import signal
import socket
import subprocess
import sys

import pytest
from byte_model import write_model
from processes import PATIENCE, SERVE, backend, status, until
from serving import ENVIRONMENT
from tiny_models import build_tiny

SMALL = ["--port", "0", "--num-threads", "1", "--max-model-len", "256", "--head-check", "off"]


def ended(*args):
    """Exit status and stderr of a server that cannot start."""
    command = [*SERVE, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=ENVIRONMENT, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("core", "code", "words"),
    [
        ("scripted_core:make_core_that_refuses", 2, "engine failed (load): max_model_len: want 2..8, got 9\n"),
        ("scripted_core:make_core_of_a_damaged_checkpoint", 2, "engine failed (load): model.safetensors: the head is"),
        (
            "no_such_package:make_core",
            2,
            "engine failed (load): ModuleNotFoundError: No module named 'no_such_package'",
        ),
        ("scripted_core:make_core_without_room", 1, "engine failed (load): memory: other processes hold it\n"),
        # a fault of ours: nobody knows
        ("scripted_core:make_core_that_fails", 1, "engine failed (load): ValueError: no such checkpoint\n"),
    ],
)
def test_of_an_engine_that_does_not_load(folder, core, code, words):
    got, errors = ended(folder, "--port", "0", "--core", core)
    assert got == code and errors.count(words) == 1, errors


def test_of_an_option_and_of_a_file_of_a_real_checkpoint(tmp_path):
    """tests/unit/engine/test_memory.py has more options, tests/unit/engine/checkpoint more damage."""
    folder = build_tiny(write_model(tmp_path), "dense")
    code, errors = ended(folder, *SMALL, "--kv-cache-tokens", "99999999999")
    assert code == 2 and "engine failed (load): kv_cache_tokens: 99999999999 tokens take " in errors, errors
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    cut, said = ended(folder, *SMALL)
    assert cut == 2 and "Traceback" not in errors + said, said


def test_of_an_engine_that_cannot_be_started(folder):
    """As on a full disk."""
    code = (
        "import os, sys, pilotfish.engine.link.client as client, pilotfish.server.cli as cli\n"
        "def full(): raise OSError(28, os.strerror(28), '/tmp')\n"
        "client._private_folder = full\n"
        f"sys.exit(cli.main(['serve', {str(folder)!r}, '--port', '0']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "the engine cannot be started: [Errno 28] No space left on device: '/tmp'\n" in done.stderr


def test_of_addresses(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        core = ("--core", "scripted_core:make_core")
        busy = ended(folder, *core, "--port", taken.getsockname()[1])
        missing = ended(folder, *core, "--uds", folder / "nowhere" / "socket")
        long = ended(folder, *core, "--uds", folder / ("x" * 200))
    assert busy[0] == 1 and "cannot listen" in busy[1]
    assert missing[0] == 2 and "cannot listen" in missing[1] and "Traceback" not in missing[1]
    assert long[0] == 2 and "cannot listen" in long[1] and "Traceback" not in long[1]


def test_of_a_checkpoint_that_was_damaged_while_it_was_served(folder):
    with backend(folder, "one", "--core", "scripted_core:make_core_that_serves_once") as server:
        pid = server.process.pid
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            os.kill(int(children.read().split()[0]), signal.SIGKILL)
        assert server.process.wait(PATIENCE) == 2
    assert (folder / "log").read_text().count("starting the engine again") == 1


def test_of_a_server_that_was_asked_to_end(folder):
    with backend(folder, "one") as server:
        until(lambda: status(server.url + "/ready") == 200, "it serves")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
