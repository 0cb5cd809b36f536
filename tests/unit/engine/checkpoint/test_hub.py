"""Models by name against a local stand-in for the hub: fetched, pinned, cached, offline, and refused in one line."""

import json
import os
import subprocess
import sys
import threading
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from pilotfish.engine.checkpoint.hub import resolve_model
from pilotfish.engine.errors import CheckpointError
from tests.support.tiny_models import build_tiny

COMMITS = {"main": "a" * 40, "v2": "b" * 40}


class Hub(BaseHTTPRequestHandler):
    """The three calls that a snapshot needs: a revision's file list, and HEAD and GET of a file."""

    folders: ClassVar[dict[str, Path]] = {}
    asked: ClassVar[list[str]] = []

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        self.asked.append(f"{self.command} {self.path}")
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:4] == ["api", "models", "org", "tiny"]:
            revision = parts[5] if len(parts) > 5 else "main"
            commit = COMMITS.get(revision, revision)
            if commit not in self.folders:
                return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
            names = sorted(path.name for path in self.folders[commit].iterdir())
            if "tree" in parts:
                tree = [
                    {"type": "file", "path": n, "size": (self.folders[commit] / n).stat().st_size, "oid": "0" * 40}
                    for n in names
                ]
                return self.send(200, json.dumps(tree).encode(), {}, body)
            files = [{"rfilename": name} for name in names]
            return self.send(200, json.dumps({"id": "org/tiny", "sha": commit, "siblings": files}).encode(), {}, body)
        if parts[:3] == ["org", "tiny", "resolve"] and parts[3] in self.folders:
            data = (self.folders[parts[3]] / parts[4]).read_bytes()
            headers = {"ETag": f'"{sha1(data).hexdigest()}"', "X-Repo-Commit": parts[3]}
            return self.send(200, data, headers, body)
        return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

    def send(self, status, data, headers, body):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    for number, (revision, commit) in enumerate(COMMITS.items()):
        folder = build_tiny(root / revision, "dense", seed=number + 1)
        (folder / "pytorch_model.bin").write_bytes(b"not wanted")
        Hub.folders[commit] = folder
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def resolve(hub, home, name, *, revision=None, offline=False):
    """In a process of its own: the library reads its environment when it is imported."""
    code = (
        "import sys; from pilotfish.engine.checkpoint.hub import resolve_model;"
        "from pilotfish.engine.errors import CheckpointError\n"
        "try: print(resolve_model(sys.argv[1], sys.argv[2] or None))\n"
        "except CheckpointError as error: sys.exit(str(error))"
    )
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= {"HF_HUB_OFFLINE": "1"} if offline else {}
    return subprocess.run(
        [sys.executable, "-c", code, name, revision or ""], capture_output=True, text=True, timeout=120, env=environment
    )


def test_a_name_is_fetched_once_then_found_offline_and_a_revision_is_pinned(hub, tmp_path):
    done = resolve(hub, tmp_path, "org/tiny")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == (Hub.folders["a" * 40] / "model.safetensors").read_bytes()
    assert not (folder / "pytorch_model.bin").exists()
    Hub.asked.clear()
    again = resolve(hub, tmp_path, "org/tiny", offline=True)
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert Hub.asked == []
    other = Path(resolve(hub, tmp_path, "org/tiny", revision="v2").stdout.strip())
    assert (other / "model.safetensors").read_bytes() == (Hub.folders["b" * 40] / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "revision", "offline"),
    [("org/nothing", None, False), ("org/tiny", "v9", False), ("org/tiny", None, True)],
)
def test_what_is_not_there_is_one_line(hub, tmp_path, name, revision, offline):
    done = resolve(hub, tmp_path, name, revision=revision, offline=offline)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith(name)]
    assert len(lines) == 1, done.stderr


def test_a_folder_is_itself(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(CheckpointError, match="revision"):
        resolve_model(str(tmp_path), revision="main")


@pytest.mark.parametrize("name", ["no-slash", "a/b/c", "../up", "/nowhere/at/all", "org/bad name", ""])
def test_what_is_neither_folder_nor_id_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="want a checkpoint folder"):
        resolve_model(name)
