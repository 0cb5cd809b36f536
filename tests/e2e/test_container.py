"""The Containerfile's steps in a fresh directory: no image is built here, since nothing here can."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
from byte_model import write_model
from packaging.requirements import Requirement
from processes import backend

from pilotfish.server.cli import build_parser

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "deploy" / "container" / "requirements.lock"
LINES = re.sub(r"\\\n\s*", "", (ROOT / "Containerfile").read_text()).splitlines()


def steps(*kinds):
    found = [line.split(" ", 1) for line in LINES if line.split(" ", 1)[0] in kinds]
    assert found
    return found


def context(folder):
    """What a build would see: what .dockerignore lets through."""
    wanted = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    folder.mkdir()
    for name in wanted:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def test_the_steps_install_a_command_that_runs(tmp_path):
    """Without its dependencies, which are borrowed from here: they are gigabytes."""
    seen, root = context(tmp_path / "context"), tmp_path / "root"
    assert LOCK.relative_to(ROOT).parts[0] in os.listdir(seen)
    (seen / LOCK.relative_to(ROOT)).write_text("# borrowed\n")
    borrowed = str(Path(msgspec.__file__).parents[1])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PIP_NO_DEPS": "1", "PYTHONPATH": borrowed, "PATH": path}
    ran = []
    for kind, text in steps("COPY", "RUN"):
        words = [re.sub(r"^(?=/)", str(root), word) for word in shlex.split(text)]
        if kind == "COPY":
            source, target = seen / words[0], Path(words[1])
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        elif words[-1] != "system" and words[0] != "install":
            done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            ran.append(done.stdout)
    assert len(ran) == 1 and re.search(r"^pilotfish \d", ran[0], re.MULTILINE)
    # what is there beside modules
    package = next((root / "opt/pilotfish/lib").glob("python3*/site-packages/pilotfish"))
    for data in ("deploy/prompts/domains.json", "deploy/grafana/schema_keys.json", "py.typed"):
        assert (package / data).exists(), data
    modules = {
        path.relative_to(ROOT) for name in ("engine", "server", "deploy") for path in (ROOT / name).rglob("*.py")
    }
    assert not [str(path) for path in modules if not (package / path).exists()]


def test_the_lock_has_all_that_the_project_wants_by_version_and_hash():
    locked: dict[str, list[str]] = {}
    for line in re.sub(r"\\\n\s*", "", LOCK.read_text()).splitlines():
        if line and not line.lstrip().startswith("#"):
            found = re.match(r"([a-z0-9-]+)==(\S+)( ;.*?)?( --hash=sha256:[0-9a-f]{64})+\s*$", line)
            assert found, line[:200]
            locked.setdefault(found[1], []).append(found[2])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for wanted in map(Requirement, project["dependencies"] + project["optional-dependencies"]["gpu"]):
        assert locked.get(wanted.name), wanted.name
        assert all(wanted.specifier.contains(version) for version in locked[wanted.name]), wanted


def test_the_script_is_one_for_any_shell():
    script = ROOT / "deploy" / "container" / "install.sh"
    for shell in ("sh", "dash", "bash"):
        if shutil.which(shell):
            subprocess.run([shell, "-n", script], check=True)
    done = subprocess.run([script], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "usage" in done.stderr


def test_what_it_starts_is_a_command_of_ours():
    entrypoint, command = (json.loads(text) for _, text in steps("ENTRYPOINT", "CMD"))
    args = build_parser().parse_args([*entrypoint, *command][1:])
    assert (args.host, args.port, args.log_requests) == ("0.0.0.0", 8000, True)


@pytest.mark.parametrize("alive", [True, False])
def test_the_health_check(folder, alive):
    ((_, text),) = steps("HEALTHCHECK")
    _, *words = json.loads(text[text.index("[") :])
    assert words[1].count(":8000/health") == 1
    with backend(write_model(folder), "scripted") as server:
        port = server.port if alive else 1
        words[1] = words[1].replace(":8000/", f":{port}/")
        done = subprocess.run([sys.executable, *words], capture_output=True, check=False)
    assert (done.returncode == 0) is alive
