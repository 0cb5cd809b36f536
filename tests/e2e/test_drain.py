"""A server that ends: only work is refused, and whoever watches it is answered until the end."""

import http.client
import json
import signal
import socket
import urllib.error
import urllib.request

import pytest
from processes import ask, backend, events, status, until
from serving import PATIENCE, let_go, script


def get(url):
    """Status and text, whatever it is."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.fixture
def server(folder):
    with backend(folder, "one") as running:
        yield running


def drains(server):
    server.process.send_signal(signal.SIGTERM)
    until(lambda: status(server.url + "/ready") == 503, "it drains")


def test_probes_and_scrapes_are_answered_and_work_is_refused(server, tmp_path):
    go = tmp_path / "go"
    with ask(server.url, stream=True, reply="x", times=300, delay=0.5, go=str(go)) as response:
        coming = events(response)
        next(coming)
        drains(server)
        for path, state in (("/health", "status"), ("/ready", "engine")):
            code, text = get(server.url + path)
            assert (code, json.loads(text)[state]) == (503, "draining")
        code, text = get(server.url + "/metrics")
        assert code == 200 and "pilotfish_num_requests_running 1.0" in text and "pilotfish_engine_up 1.0" in text
        assert get(server.url + "/ping") == (200, "pong\n")
        assert get(server.url + "/v1/models")[0] == 200
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(server.url, reply="late")
        with refused.value as error:
            assert (error.code, error.headers["Retry-After"]) == (503, "5")
            assert json.load(error)["error"]["code"] == "shutting_down"
        assert 'request_rejected_total{reason="unavailable"} 1.0' in get(server.url + "/metrics")[1]
        let_go(go)
        rest = [event["choices"][0] for event in coming]
    assert rest[-1]["finish_reason"] == "stop" and "".join(choice["text"] for choice in rest) == "x" * 299
    assert server.process.wait(PATIENCE) == 0


def test_a_request_whose_body_is_under_way_is_served(server):
    body = json.dumps({"prompt": script(reply="in time"), "max_tokens": 30}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + body[:10])
        until(lambda: get(server.url + "/ready")[0] == 200, "the server has read it")
        drains(server)
        client.sendall(body[10:])
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 200 ") and b"in time" in answer
    assert server.process.wait(PATIENCE) == 0


def test_a_connection_that_a_relay_keeps_is_closed_with_the_next_answer(server):
    with ask(server.url, stream=True, reply="x", times=2900, delay=0.05) as stream:
        stream.readline()
        kept = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        kept.request("GET", "/ping")
        first = kept.getresponse()
        assert first.read() == b"pong\n" and not first.will_close
        drains(server)
        kept.request("POST", "/v1/completions", "{}", {"Content-Type": "application/json"})
        second = kept.getresponse()
        assert second.status == 503 and second.will_close
        kept.close()
    server.process.send_signal(signal.SIGKILL)


def test_what_nobody_reads_does_not_hold_the_end_up(folder):
    with backend(folder, "one", "--shutdown-timeout", "1", "--max-model-len", "200000") as server:
        body = json.dumps({"prompt": script(ids=[65], times=150_000, runs=[50]), "max_tokens": 150_000, "stream": True})
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            client.recv(1)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE) == 0


def test_without_work_it_ends_at_once(server):
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 0
    with pytest.raises(OSError):
        urllib.request.urlopen(server.url + "/ready", timeout=PATIENCE)
