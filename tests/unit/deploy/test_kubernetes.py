"""The manifests: as `kubectl apply -k` sends them, read by Kubernetes' own schemas, and in step with the server."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pilotfish.metrics.definitions import DEFINITIONS
from pilotfish.server.cli import build_parser
from pilotfish.server.http.app import ServerOptions
from tests.support.tools import needed

FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"


def validate(file):
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", "--no-warn", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def load(name):
    (document,) = yaml.safe_load_all((FOLDER / name).read_text())
    return document


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """What kustomize makes of the folder."""
    command = [needed("kubectl", "it has kustomize"), "kustomize", FOLDER]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    file = tmp_path_factory.mktemp("built") / "all.yaml"
    file.write_text(done.stdout)
    return file


def test_the_schemas_know_every_field(built):
    done = validate(built)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("passed for resource") == 4


@pytest.mark.parametrize("kind", ["Deployment", "Service", "HorizontalPodAutoscaler", "NetworkPolicy"])
def test_an_unknown_field_would_be_refused(built, tmp_path, kind):
    (document,) = (one for one in yaml.safe_load_all(built.read_text()) if one["kind"] == kind)
    document["spec"]["replica"] = 2
    file = tmp_path / "changed.yaml"
    file.write_text(yaml.safe_dump(document))
    done = validate(file)
    assert done.returncode == 1 and "replica" in done.stdout + done.stderr


def test_everything_selects_the_same_pods(built):
    by_kind = {document["kind"]: document for document in yaml.safe_load_all(built.read_text())}
    assert by_kind.keys() == {"Deployment", "Service", "PodMonitor", "HorizontalPodAutoscaler", "NetworkPolicy"}
    spec = by_kind["Deployment"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert labels == spec["selector"]["matchLabels"] == by_kind["Service"]["spec"]["selector"]
    assert by_kind["PodMonitor"]["spec"]["selector"]["matchLabels"] == labels
    assert by_kind["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert (
        by_kind["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"]
        == by_kind["Deployment"]["metadata"]["name"]
    )
    assert "replicas" not in spec, "it would fight the autoscaler"


def test_the_pod_agrees_with_the_server():
    spec = load("deployment.yaml")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    args = build_parser().parse_args(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": args.port, "metrics": args.metrics_port} and args.host == "0.0.0.0"
    policy = load("networkpolicy.yaml")["spec"]
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == ports.keys()
    assert load("podmonitor.yaml")["spec"]["podMetricsEndpoints"][0]["port"] == "metrics"
    closing = args.shutdown_timeout + ServerOptions(served_names=("m",)).close_seconds
    assert spec["terminationGracePeriodSeconds"] > closing + int(
        container["lifecycle"]["preStop"]["exec"]["command"][1]
    )
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in spec["volumes"]}
    assert str(args.api_key_file).startswith(mounts["keys"]) and args.model.startswith(mounts["models"])
    # nothing that is written is without a limit
    assert all("sizeLimit" in volume["emptyDir"] for volume in spec["volumes"] if "emptyDir" in volume)
    assert {"memory", "ephemeral-storage"} <= container["resources"]["limits"].keys()
    # what the server writes to, its root being read-only
    assert {mounts["tmp"], mounts["cache"]} == {"/tmp", "/var/cache/pilotfish"}


def test_the_autoscalers_metric_is_one_that_is_exported():
    text = (FOLDER / "autoscaler.yaml").read_text()
    names = {definition.name for definition in DEFINITIONS}
    used = set(re.findall(r"pilotfish_\w+", text)) - {"pilotfish_requests_per_place"}
    running, waiting = "pilotfish_num_requests_running", "pilotfish_num_requests_waiting"
    assert used == {running, waiting, "pilotfish_max_num_seqs"} and used <= names


def test_the_gateway_s_manifests_speak_of_the_same_pods_port_and_metrics():
    pool, route, scaled = (load(f"gateway/{name}.yaml") for name in ("inferencepool", "httproute", "scaledobject"))
    label = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["labels"][0]["pairs"]
    (container,) = load("deployment.yaml")["spec"]["template"]["spec"]["containers"]
    assert pool["spec"]["selector"]["matchLabels"] == label
    assert f"--port={pool['spec']['targetPorts'][0]['number']}" in container["args"]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])
    assert scaled["spec"]["scaleTargetRef"]["name"] == load("deployment.yaml")["metadata"]["name"]
    kinds = {definition.name: definition.kind for definition in DEFINITIONS}
    asked = " ".join(trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"])
    picker = load("gateway/picker.yaml")
    assert picker["metadata"]["name"] == pool["spec"]["endpointPickerRef"]["name"]
    config = yaml.safe_load(picker["data"]["config.yaml"])
    plugins = {plugin["type"]: plugin.get("parameters") for plugin in config["plugins"]}
    (engine,) = plugins["core-metrics-extractor"]["engineConfigs"]
    assert engine["name"] == plugins["core-metrics-extractor"]["defaultEngine"]
    specs = {name: metric for name, metric in engine.items() if name.endswith("Spec")}
    assert specs.keys() == {"queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec"}
    # the picker reads one series of a gauge: none of these may have labels
    assert all(not definition.labels for definition in DEFINITIONS if definition.name in specs.values())
    for metric in {*specs.values(), *re.findall(r"pilotfish_\w+", asked)}:
        assert kinds[metric] == "gauge", metric
    profile = config["schedulingProfiles"][0]["plugins"]
    assert {plugin["pluginRef"] for plugin in profile} <= plugins.keys()
