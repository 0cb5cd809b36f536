"""A machine with versions and slots in a folder, HAProxy in front, and the `pilotfish release` command on it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import running, status, until
from serving import ENVIRONMENT, PATIENCE

from pilotfish.deploy.ports import free_port
from pilotfish.deploy.release.managers import Processes
from pilotfish.deploy.release.slots import SlotLayout

CLI = [sys.executable, "-m", "pilotfish.server.cli"]
SCRIPTED = "--core scripted_core:make_core"
RELAY = Path(__file__).resolve().parents[2] / "deploy" / "relay" / "haproxy.cfg"
GATES = """
import json, os, sys, urllib.request
url, _, file = sys.argv[1:]
headers = {"Authorization": "Bearer " + os.environ.get("PILOTFISH_API_KEY", "")}
with urllib.request.urlopen(urllib.request.Request(url + "/v1/models", headers=headers)) as response:
    model = json.load(response)["data"][0]["id"]
gates = [{"name": "port answers", "passed": True, "wanted": "200", "came": "200", "seconds": 0.1},
         {"name": "model", "passed": "bad" not in model, "wanted": "a good one", "came": model, "seconds": 0.0}]
passed = all(gate["passed"] for gate in gates)
json.dump({"url": url, "passed": passed, "gates": gates}, open(file, "w"))
sys.exit(not passed)
"""


@dataclass
class Machine:
    folder: Path
    relay_port: int

    @property
    def layout(self) -> SlotLayout:
        return SlotLayout(self.folder / "opt", self.folder / "etc")

    @property
    def relay_url(self) -> str:
        return f"http://127.0.0.1:{self.relay_port}"

    def slot(self, name: str):
        return next(slot for slot in self.layout.slots() if slot.name == name)

    def runs(self) -> dict[str, str | None]:
        """The version of each slot whose process runs."""
        manager = Processes(self.layout)
        return {slot.name: self.layout.version_of(slot) for slot in self.layout.slots() if manager.is_up(slot)}

    def pid(self, version: str) -> int:
        slot = next(slot for slot, runs in self.runs().items() if runs == version)
        return int((self.folder / "opt" / "run" / f"{slot}.pid").read_text().split()[0])

    def add_version(self, name: str, model: Path, flags: str = "") -> None:
        """Its command is this checkout's. One of that name is replaced."""
        folder = self.folder / "opt" / "versions" / name
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "bin").mkdir(parents=True)
        flags = f"--served-model-name {name} --num-threads 1 {flags}"
        (folder / "environment").write_text(f"PILOTFISH_MODEL={model}\nPILOTFISH_FLAGS='{flags}'\n")
        command = folder / "bin" / "pilotfish"
        command.write_text(f'#!/bin/sh\nexec {shlex.join(CLI)} "$@"\n')
        command.chmod(0o755)

    def release(self, *args: str, relay: bool = True, gates: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """The running command, its output in one pipe. `gates`: flags of the version's own gates, else a stand-in."""
        command = [*CLI, "release", "--root", self.folder / "opt", "--config", self.folder / "etc"]
        command += ["--manager", "processes", "--start-timeout", "60"]
        command += ["--haproxy-socket", self.folder / "haproxy.sock"] if relay else ["--relay", "none"]
        if gates:
            args = (*args, "--", *gates)
        elif "--gate" not in args:
            command += ["--gate", shlex.join([sys.executable, str(self.folder / "gates.py")])]
        return subprocess.Popen(
            list(map(str, [*command, *args])),
            env=ENVIRONMENT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def targets(self) -> list[str]:
        """What Prometheus is told to scrape."""
        (group,) = json.loads((self.folder / "opt" / "targets.json").read_text())
        return group["targets"]

    def records(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "opt" / "releases.jsonl").read_text().splitlines()]


def find_haproxy() -> str:
    found = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip("haproxy is not installed: apt-get install haproxy")
    return found


def done(process: subprocess.Popen[str]) -> int:
    """The exit status; what it said is shown where a test fails."""
    print(process.communicate(timeout=PATIENCE)[0])
    return process.returncode


@contextlib.contextmanager
def machine(folder: Path, haproxy: str | None) -> Iterator[Machine]:
    """Two slots, no version; with a relay if its executable is given. What still runs at the end is killed."""
    (folder / "opt").mkdir()
    (folder / "etc").mkdir()
    (folder / "gates.py").write_text(GATES)
    made = Machine(folder, free_port())
    ports = {name: free_port() for name in ("one", "two")}
    for name, port in ports.items():
        (folder / "etc" / f"{name}.env").write_text(f"PILOTFISH_PORT={port}\n")
    with contextlib.ExitStack() as stack:
        stack.callback(_kill_all, made)
        if haproxy is not None:
            text = RELAY.read_text().replace("bind :8080", f"bind 127.0.0.1:{made.relay_port}")
            text = text.replace("/run/haproxy/admin.sock", str(folder / "haproxy.sock"))
            for index, port in enumerate(ports.values()):
                text = text.replace(f"127.0.0.1:{8001 + index}", f"127.0.0.1:{port}")
            (folder / "haproxy.cfg").write_text(text)
            log = stack.enter_context((folder / "haproxy.log").open("w"))
            command = [haproxy, "-db", "-f", str(folder / "haproxy.cfg")]
            stack.enter_context(running(command, stdout=log, stderr=log))
            until(lambda: status(made.relay_url + "/ready") == 503, "the relay answers, and has no server")
        yield made


def _kill_all(made: Machine) -> None:
    for file in (made.folder / "opt" / "run").glob("*.pid"):
        pid = int(file.read_text().split()[0])
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
