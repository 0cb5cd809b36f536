"""The relay configurations of deploy/relay, run by Debian's HAProxy and nginx in front of two real servers."""

import contextlib
import getpass
import http.client
import os
import shutil
import signal
import subprocess
import urllib.error
from pathlib import Path
from types import SimpleNamespace

import pytest
from byte_model import write_model
from processes import ask, backend, events, running, status, until

from pilotfish.deploy.ports import free_port

CONFIGURATIONS = Path(__file__).resolve().parents[2] / "deploy" / "relay"
LONG = {"times": 30, "delay": 0.1}


def binary(name):
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed: apt-get install {name}")
    return found


def filled_in(name, changes):
    """The configuration as it is shipped, but for its addresses and folders."""
    text = (CONFIGURATIONS / name).read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, (name, old)
        text = text.replace(old, new)
    return text


def haproxy(folder, port, ports):
    file = folder / "haproxy.cfg"
    changes = {"bind :8080": f"bind 127.0.0.1:{port}", "/run/haproxy/admin.sock": f"{folder}/admin.sock"}
    changes |= {f"127.0.0.1:{8001 + index}": f"127.0.0.1:{one}" for index, one in enumerate(ports)}
    file.write_text(filled_in("haproxy.cfg", changes))
    command = [binary("haproxy"), "-db", "-f", str(file)]
    return command, [*command, "-c", "-dW"]


def nginx(folder, port, ports):
    file = folder / "nginx.conf"
    places = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    scratch = "".join(f"\n    {place}_temp_path {folder}/{place};" for place in places)
    changes = {"listen 8080;": f"listen 127.0.0.1:{port};", "/run/nginx.pid": f"{folder}/nginx.pid"}
    changes |= {"access_log off;": "access_log off;" + scratch, "worker_processes auto;": "worker_processes 2;"}
    changes |= {f"127.0.0.1:{8001 + index}": f"127.0.0.1:{one}" for index, one in enumerate(ports)}
    file.write_text(filled_in("nginx.conf", changes))
    command = [binary("nginx"), "-c", str(file), "-e", "stderr"]
    user = f"user {getpass.getuser()};" if os.getuid() == 0 else ""
    return [*command, "-g", f"daemon off; {user}"], [*command, "-t", "-g", user]


RELAYS = {"haproxy": haproxy, "nginx": nginx}


@contextlib.contextmanager
def relayed(relay, folder):
    binary(relay)
    with contextlib.ExitStack() as stack:
        names = ("one", "two")
        for name in names:
            (folder / name).mkdir()
        servers = {name: stack.enter_context(backend(write_model(folder / name), name)) for name in names}
        port = free_port()
        command, check = RELAYS[relay](folder, port, [server.port for server in servers.values()])
        checked = subprocess.run(check, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr
        assert not any(word in checked.stderr.lower() for word in ("warn", "alert", "emerg")), checked.stderr
        log = stack.enter_context((folder / "relay.log").open("w"))
        stack.enter_context(running(command, stdout=log, stderr=log))
        url = f"http://127.0.0.1:{port}"
        until(lambda: status(url + "/ready") == 200, "the relay answers")
        yield SimpleNamespace(url=url, servers=servers)


@pytest.fixture(params=RELAYS)
def cluster(request, tmp_path):
    """For one test that breaks it."""
    with relayed(request.param, tmp_path) as running_cluster:
        yield running_cluster


@pytest.fixture(params=RELAYS, scope="module")
def steady(request, tmp_path_factory):
    """For all tests that leave it as they found it."""
    with relayed(request.param, tmp_path_factory.mktemp(request.param)) as running_cluster:
        yield running_cluster


def name_of(response):
    with response:
        return next(events(response))["model"]


def open_stream(cluster, **commands):
    """A stream that has begun: the server it runs on, the one it does not, the response, the events to come."""
    response = ask(cluster.url, stream=True, **commands)
    coming = events(response)
    name = next(coming)["model"]
    other = next(server for server in cluster.servers.values() if server.name != name)
    return cluster.servers[name], other, response, coming


def test_a_stream_passes_token_by_token(steady):
    text = "abcdefghijklmnopqrst"
    before = {name: server.generated() for name, server in steady.servers.items()}
    seen, generated = "", []
    with ask(steady.url, stream=True, reply=text, delay=0.1) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        for event in events(response):
            server = steady.servers[event["model"]]
            generated.append(server.generated() - before[event["model"]])
            seen += event["choices"][0]["text"]
    assert seen == text and len(generated) >= len(text)
    # the client had the first before half was generated, and half before all was
    assert generated[0] < len(text) / 2 and generated[len(text) // 2] < len(text), generated


def test_requests_run_on_both_and_metrics_stay_inside(steady):
    busy, other, response, _ = open_stream(steady, reply="x", **LONG)
    with response:
        # the one with fewer streams gets the next
        assert [name_of(ask(steady.url, stream=True, reply="y")) for _ in range(3)].count(other.name) >= 2
        for path in ("/metrics", "/%6detrics", "/./metrics"):
            assert status(steady.url + path) == 403, path
        assert status(busy.url + "/metrics") == 200


def test_a_client_that_leaves_frees_its_sequence(steady):
    server, _, response, _ = open_stream(steady, reply="x", times=2900, delay=0.02)
    response.close()
    marker = '"finish_reason":"abort"'
    until(lambda: marker in server.folder.joinpath("transcript.jsonl").read_text(), "the engine was told to stop")


def test_a_server_that_dies_breaks_its_stream_and_the_other_answers(cluster):
    dying, other, response, _ = open_stream(cluster, reply="x", **LONG)
    before = other.generated()
    os.kill(dying.process.pid, signal.SIGKILL)
    # a broken stream: the relay may not close it as if it were whole
    with response, pytest.raises((http.client.IncompleteRead, ConnectionError)) as caught:
        response.read()
    assert b"[DONE]" not in getattr(caught.value, "partial", b"")
    # nobody generated it again
    assert other.generated() == before
    for _ in range(4):
        assert name_of(ask(cluster.url, stream=True, reply="y")) == other.name


def test_a_request_that_no_server_can_take_is_refused_at_once(cluster):
    for server in cluster.servers.values():
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(cluster.url, reply="y")
    caught.value.close()
    assert caught.value.code in (502, 503)


def test_a_server_that_drains_ends_its_streams_and_gets_no_new_ones(cluster):
    draining, other, response, coming = open_stream(cluster, reply="x", **LONG)
    draining.process.send_signal(signal.SIGTERM)
    until(lambda: not answers(draining), "it is not ready any more")
    with response:
        for _ in range(4):
            assert name_of(ask(cluster.url, stream=True, reply="y")) == other.name
        assert draining.process.poll() is None
        rest = [event["choices"][0] for event in coming]
    assert "".join(choice["text"] for choice in rest) == "x" * (LONG["times"] - 1)
    assert rest[-1]["finish_reason"] == "stop"
    assert draining.process.wait(10) == 0


def answers(server):
    try:
        return status(server.url + "/ready") == 200
    except OSError:
        return False
