"""The relay configurations of deploy/relay, run by Debian's HAProxy and nginx in front of two real servers."""

import contextlib
import getpass
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from byte_model import write_model
from processes import ask, backend, events, running, status, until
from serving import PATIENCE, let_go, script

from pilotfish.deploy.gate.command import main as gate
from pilotfish.deploy.ports import free_port

CONFIGURATIONS = Path(__file__).resolve().parents[2] / "deploy" / "relay"
LONG = {"times": 1000, "delay": 0.1}


def binary(name):
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed: apt-get install {name}")
    return found


def filled_in(name, changes):
    """The configuration as it is shipped, but for its addresses and folders."""
    text = (CONFIGURATIONS / name).read_text()
    for old, new in changes.items():
        assert text.count(old) == (2 if name == "nginx.conf" and old.startswith("127.0.0.1:") else 1), (name, old)
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
def relayed(relay, folder, *flags):
    binary(relay)
    with ExitStack() as stack:
        names, flags = ("one", "two"), ("--max-model-len", "25000", *flags)
        for name in names:
            (folder / name).mkdir()
        servers = {name: stack.enter_context(backend(write_model(folder / name), name, *flags)) for name in names}
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


def test_a_stream_passes_token_by_token(steady, tmp_path):
    """The engine writes the next one when the client has read the last."""
    text, go, seen = "abcdefghijklmnopqrst", tmp_path / "go", ""
    before = {name: server.generated() for name, server in steady.servers.items()}
    with ask(steady.url, stream=True, reply=text, delay=15.0, go=str(go)) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        for event in events(response):
            seen += event["choices"][0]["text"]
            assert steady.servers[event["model"]].generated() - before[event["model"]] == len(seen)
            go.write_bytes(bytes(len(seen)))
    assert seen == text


def test_requests_run_on_both_and_metrics_stay_inside(steady):
    busy, other, response, _ = open_stream(steady, reply="x", **LONG)
    with response:
        # the one with fewer streams gets the next
        assert [name_of(ask(steady.url, stream=True, reply="y")) for _ in range(3)].count(other.name) >= 2
        for path in ("/metrics", "/%6detrics", "/./metrics"):
            assert status(steady.url + path) == 403, path
        for target in ("/metrics#", "/metrics#x", "/metrics?x#y", "/m%65trics#", "http://x/metrics#x"):
            # urllib would leave out what comes after '#'
            connection = http.client.HTTPConnection(steady.url.removeprefix("http://"), timeout=PATIENCE)
            connection.request("GET", target)
            assert connection.getresponse().status in (400, 403), target
            connection.close()
        assert status(busy.url + "/metrics") == 200


def num_aborted(cluster):
    texts = [server.folder.joinpath("transcript.jsonl").read_text() for server in cluster.servers.values()]
    return sum(text.count('"finish_reason":"abort"') for text in texts)


def num_running(cluster):
    """As the servers count them."""
    found = 0.0
    for server in cluster.servers.values():
        with urllib.request.urlopen(server.url + "/metrics", timeout=PATIENCE) as response:
            lines = response.read().decode().splitlines()
        found += sum(float(line.split()[1]) for line in lines if line.startswith("pilotfish_num_requests_running "))
    return found


@pytest.mark.parametrize("begun", [False, True], ids=["before its first byte", "after it"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_frees_its_sequence(steady, stream, begun):
    """Of a whole answer, which comes in one piece, the first byte is late: what is read then is nothing."""
    until(lambda: num_running(steady) == 0, "nothing else runs")
    aborted = num_aborted(steady)
    # the second step, and with it the first byte of a stream that has one, may be long in coming
    commands = {"reply": "x", "times": 2900, "delay": 0.02 if begun else 1.0}
    body = json.dumps({"prompt": script(**commands), "max_tokens": 3000, "stream": stream}).encode()
    address = urllib.parse.urlsplit(steady.url)
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if stream and begun:
            assert client.recv(1)
        else:
            until(lambda: num_running(steady) == 1, "it runs")
    until(lambda: num_aborted(steady) == aborted + 1, "the engine was told to stop")


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


def test_a_server_that_drains_ends_its_streams_and_gets_no_new_ones(cluster, tmp_path):
    go = tmp_path / "go"
    draining, other, response, coming = open_stream(cluster, reply="x", **LONG, go=str(go))
    draining.process.send_signal(signal.SIGTERM)
    until(lambda: not answers(draining), "it is not ready any more")
    assert status(draining.url + "/metrics") == 200
    with response:
        for size in (1, 1, 20_000, 1):
            # the relay may still take it for the one with fewer streams, and ask the other one then
            assert name_of(ask(cluster.url, stream=True, reply="y", note="z" * size)) == other.name
        assert draining.process.poll() is None
        let_go(go)
        rest = [event["choices"][0] for event in coming]
    assert "".join(choice["text"] for choice in rest) == "x" * (LONG["times"] - 1)
    assert rest[-1]["finish_reason"] == "stop"
    assert draining.process.wait(PATIENCE) == 0


@pytest.mark.parametrize("relay", RELAYS)
def test_what_both_servers_refuse_is_their_own_503(tmp_path, relay):
    """Neither is taken for broken."""
    with relayed(relay, tmp_path, "--max-num-seqs", "1", "--max-waiting", "1") as cluster, ExitStack() as held:
        # those that wait get their status line after a while
        with ThreadPoolExecutor(4) as pool:
            asked = pool.map(lambda _: ask(cluster.url, stream=True, reply="x", times=2900, delay=0.1), range(4))
            for response in asked:
                held.enter_context(response)
        for _ in range(3):
            with pytest.raises(urllib.error.HTTPError) as refused:
                ask(cluster.url, reply="y")
            with refused.value as error:
                assert error.code == 503
                assert json.load(error)["error"]["code"] == "queue_full"


def answers(server):
    try:
        return status(server.url + "/ready") == 200
    except OSError:
        return False


def test_gates_want_the_server_itself(steady, tmp_path):
    """Through a relay the first gate says so, and the others do not guess."""
    file = tmp_path / "gates.json"
    assert gate([steady.url, "--only", "version,metrics", "--json", str(file)]) == 1
    first, *others = json.loads(file.read_text())["gates"]
    assert first["name"] == "answers" and "/metrics: 403" in first["came"]
    assert "gates want the server itself, not a relay before it" in first["came"]
    assert all("the gate 'answers' did not pass" in other["came"] for other in others) and len(others) == 2
