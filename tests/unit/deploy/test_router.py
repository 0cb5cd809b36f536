"""What deploy/router ships: units that systemd reads, manifests that Kubernetes' schemas know, one set of flags."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from tests.support.tools import needed

ROUTER = Path(__file__).resolve().parents[3] / "deploy" / "router"
MODULES = {"vllm": "vllm_router", "sglang": "sglang_router"}


def command_of(router):
    """The unit's command, in words."""
    text = ROUTER.joinpath(f"{router}-router.service").read_text().replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if line.startswith("ExecStart="))
    return line.removeprefix("ExecStart=").split()


def flags_of(words):
    """Flags and their values, however they are written."""
    found = {}
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found[name] = [value] if value else []
        elif found:
            found[list(found)[-1]].append(word)
    return found


@pytest.mark.parametrize("router", MODULES)
def test_systemd_has_nothing_to_say(router, tmp_path):
    analyze = needed("systemd-analyze", "apt-get install systemd")
    text = ROUTER.joinpath(f"{router}-router.service").read_text()
    unit = tmp_path / f"{router}-router.service"
    unit.write_text(text.replace(command_of(router)[0], sys.executable))
    done = subprocess.run([analyze, "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    security = [analyze, "security", "--offline=true", "--threshold=25", "--no-pager", unit]
    done = subprocess.run(security, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout.splitlines()[-1:]


@pytest.mark.parametrize("router", MODULES)
def test_the_router_knows_every_flag(router):
    """The real program's own words for them; tests/e2e/test_routers.py runs it."""
    pytest.importorskip(MODULES[router])
    command = [sys.executable, "-m", f"{MODULES[router]}.launch_router", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout.replace("\n", " ")
    wanted = [flag for flag in flags_of(command_of(router)) if flag.startswith("--")]
    assert len(wanted) > 15 and [flag for flag in wanted if f"{flag} " not in told] == []


def test_the_pod_has_the_unit_s_flags():
    (document,) = yaml.safe_load_all((ROUTER / "kubernetes" / "deployment.yaml").read_text())
    spec = document["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    pod, unit = flags_of(container["args"]), flags_of(command_of("vllm"))
    where = {"--host", "--port", "--prometheus-host", "--prometheus-port", "--worker-urls"}
    discovery = {name for name in pod if "discovery" in name} | {"--selector"}
    assert {name: value for name, value in pod.items() if name not in where | discovery} == {
        name: value for name, value in unit.items() if name not in where
    }
    ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
    assert {"http": pod["--port"][0], "metrics": pod["--prometheus-port"][0]} == ports
    # it finds the pods of deploy/kubernetes, at their port
    servers = ROUTER.parent / "kubernetes"
    (servers_pod,) = yaml.safe_load_all((servers / "deployment.yaml").read_text())
    assert (
        f"--port={pod['--service-discovery-port'][0]}"
        in servers_pod["spec"]["template"]["spec"]["containers"][0]["args"]
    )
    label = yaml.safe_load((servers / "kustomization.yaml").read_text())["labels"][0]["pairs"]
    assert container["args"].count("--selector=" + "=".join(*label.items())) == 1
    # streams end within the time that each has
    assert spec["terminationGracePeriodSeconds"] == 330


def test_the_schemas_know_every_field(tmp_path):
    command = [needed("kubectl", "it has kustomize"), "kustomize", ROUTER / "kubernetes"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    file = tmp_path / "all.yaml"
    file.write_text(built.stdout)
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", "--no-warn", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and (done.stdout + done.stderr).count("passed for resource") == 5, (
        done.stdout + done.stderr
    )


def test_the_image_has_the_version_that_is_tested():
    pytest.importorskip("vllm_router")
    assert f"vllm-router=={version('vllm-router')}" in (ROUTER / "Containerfile").read_text()
