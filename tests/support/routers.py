"""vllm-router and sglang-router, unmodified, with deploy/router's flags, before three servers of the scripted core.

Servers that a test stops come back at their address, so that all tests of a file share them.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from byte_model import write_model
from processes import SERVE, running, status, until
from serving import ENVIRONMENT, PATIENCE

from pilotfish.deploy.ports import free_port
from pilotfish.server.http.auth import key_line

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "deploy" / "router"
MODULES = {"vllm": "vllm_router", "sglang": "sglang_router"}
KEYS = {"alice": "", "bob": "", "carol": " concurrent=1"}
"""Each key is its label; what its line adds."""


def shipped_flags(router: str) -> list[str]:
    """What the unit starts the router with, less its program, addresses and servers."""
    text = UNITS.joinpath(f"{router}-router.service").read_text().replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if line.startswith("ExecStart="))
    words = line.split()
    kept = words[words.index("--policy") :]
    kept.remove("$PILOTFISH_ROUTER_FLAGS")
    for flag in ("--prometheus-host", "--prometheus-port"):
        at = kept.index(flag)
        del kept[at : at + 2]
    return kept


@dataclass
class Replica:
    folder: Path
    port: int
    arguments: tuple[str, ...]
    process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [*SERVE, *self.arguments, "--port", str(self.port)]
        with self.folder.joinpath("log").open("a") as log:
            self.process = subprocess.Popen(command, text=True, env=ENVIRONMENT, stderr=log)

    def ready(self) -> None:
        until(lambda: status(self.url + "/ready") == 200, "a server is ready")

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()

    def metric(self, name: str) -> float:
        """The sum over its labels, 0 of one that does not answer."""
        try:
            with urllib.request.urlopen(self.url + "/metrics", timeout=PATIENCE) as response:
                lines = response.read().decode().splitlines()
        except OSError:
            return 0.0
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    @property
    def num_running(self) -> float:
        return self.metric("pilotfish_num_requests_running ")


@dataclass
class Routed:
    """One router before the servers."""

    name: str
    url: str
    replicas: list[Replica]

    def post(self, path: str, fields: Mapping[str, Any], key: str = "alice", **headers: str) -> Answer:
        return post(self.url + path, fields, key, **headers)

    def healthy(self) -> set[str]:
        """The addresses that the router takes for healthy."""
        with urllib.request.urlopen(self.url + "/workers", timeout=PATIENCE) as response:
            return {worker["url"] for worker in json.load(response)["workers"] if worker["is_healthy"]}

    def settled(self) -> None:
        until(lambda: self.healthy() == {replica.url for replica in self.replicas}, "the router sees all servers")

    def remove(self, replica: Replica) -> None:
        """Nothing new is sent to it."""
        if self.name == "vllm":
            self._change("POST", f"/remove_worker?url={replica.url}")
        else:
            with urllib.request.urlopen(self.url + "/workers", timeout=PATIENCE) as response:
                (known,) = (worker for worker in json.load(response)["workers"] if worker["url"] == replica.url)
            self._change("DELETE", f"/workers/{known['id']}")
            until(lambda: replica.url not in self.healthy(), "the router has forgotten it")

    def add(self, replica: Replica) -> None:
        if self.name == "vllm":
            self._change("POST", f"/add_worker?url={replica.url}")
        else:
            self._change("POST", "/workers", {"url": replica.url})

    def _change(self, method: str, path: str, fields: Mapping[str, Any] | None = None) -> None:
        data = b"" if fields is None else json.dumps(fields).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(asked, timeout=PATIENCE):
            pass


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def request(url: str, fields: Mapping[str, Any], key: str = "alice", **headers: str) -> urllib.request.Request:
    data = json.dumps({"model": "m", **fields}).encode()
    return urllib.request.Request(
        url, data, {"Content-Type": "application/json", "Authorization": f"Bearer {key}", **headers}
    )


def post(url: str, fields: Mapping[str, Any], key: str = "alice", **headers: str) -> Answer:
    try:
        with urllib.request.urlopen(request(url, fields, key, **headers), timeout=PATIENCE) as response:
            return Answer(response.status, response.headers, response.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.headers, error.read())


@contextlib.contextmanager
def replicas(folder: Path, *flags: str) -> Iterator[list[Replica]]:
    """Three servers of the scripted core."""
    with replicas_of(write_model(folder), folder, "--core", "scripted_core:make_core", *flags) as started:
        yield started


@contextlib.contextmanager
def replicas_of(model: Path, folder: Path, *flags: str) -> Iterator[list[Replica]]:
    """Three servers of the model that answer to any name, with the keys."""
    keys = folder / "keys"
    keys.write_text("".join(f"{key_line(label, label)}{limits}\n" for label, limits in KEYS.items()))
    started = []
    for number in range(3):
        own = folder / str(number)
        own.mkdir()
        arguments = (str(model), "--api-key-file", str(keys), "--any-model-name")
        arguments += ("--shutdown-timeout", str(PATIENCE), *flags)
        started.append(Replica(own, free_port(), arguments))
    try:
        for replica in started:
            replica.start()
        for replica in started:
            replica.ready()
        yield started
    finally:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(Replica.stop, started))


@contextlib.contextmanager
def routed(name: str, folder: Path, servers: list[Replica], *flags: str) -> Iterator[Routed]:
    """The router with the shipped flags, then these."""
    port = free_port()
    command = [sys.executable, "-m", f"{MODULES[name]}.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *(server.url for server in servers), *shipped_flags(name), *flags]
    command += ["--prometheus-port", str(free_port())]
    with folder.joinpath(f"{name}.log").open("w") as log, running(command, stdout=log, stderr=log):
        router = Routed(name, f"http://127.0.0.1:{port}", servers)
        until(lambda: status(router.url + "/liveness") == 200, "the router answers")
        router.settled()
        yield router
