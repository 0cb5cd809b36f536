"""Refusals that come before a handler have our shape: paths, methods, and Expect headers of any bytes."""

import json
import socket

import pytest
from serving import PATIENCE


def exchange(server, *lines, body=b""):
    """Status lines and the last body of one connection."""
    host, port = server.url.removeprefix("http://").split(":")
    head = b"\r\n".join((*lines, b"Host: x", b"Connection: close", b"Content-Length: %d" % len(body)))
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(head + b"\r\n\r\n" + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    statuses = [int(line.split()[1]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    return statuses, answer.rpartition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("expect", (b"\x80", b"\xff\xfe", b"the best", b"200-ok"))
@pytest.mark.parametrize("path", (b"/v1/completions", b"/nowhere"))
def test_an_expectation_that_cannot_be_met_is_a_417(server, path, expect):
    statuses, body = exchange(server, b"POST " + path + b" HTTP/1.1", b"Expect: " + expect)
    assert statuses == [417]
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_client_that_waits_for_continue_gets_it(server):
    lines = (b"POST /v1/completions HTTP/1.1", b"Expect: 100-Continue", b"Content-Type: application/json")
    statuses, body = exchange(server, *lines, body=b'{"prompt": "Hi"}')
    assert statuses == [100, 200]
    assert json.loads(body)["choices"][0]["text"] == "Hello, world!"


def test_a_client_is_not_told_to_send_what_is_refused_unread(server):
    lines = (b"POST /v1/completions HTTP/1.1", b"Expect: 100-continue", b"Content-Type: text/plain")
    assert exchange(server, *lines, body=b"{}")[0] == [400]
    assert exchange(server, b"POST /nowhere HTTP/1.1", b"Expect: 100-continue", body=b"{}")[0] == [404]


def test_http_1_0_expects_nothing(server):
    lines = (b"POST /v1/completions HTTP/1.0", b"Expect: \x80", b"Content-Type: application/json")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        body = b'{"prompt": "Hi"}'
        connection.sendall(b"\r\n".join((*lines, b"Content-Length: %d" % len(body))) + b"\r\n\r\n" + body)
        assert b" 200 OK" in connection.recv(65536)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET /v1/completions", 405),
        (b"DELETE /v1/models/scripted", 405),
        (b"POST /health", 405),
        (b"GET /nowhere", 404),
        (b"PUT /v1/", 404),
        (b"GET /v1/models/none", 404),
    ],
)
def test_other_paths_and_methods_are_refused_in_json(server, line, status):
    statuses, body = exchange(server, line + b" HTTP/1.1")
    assert statuses == [status]
    assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "target",
    [
        *(
            b"/metrics#",
            b"/metrics#x",
            b"/metrics#/v1",
            b"/%6detrics",
            b"/m%65trics#x",
            b"/metrics%23x",
            b"/metrics?x#y",
        ),
        *(b"/health%00", b"/v1/%63ompletions", b"/v1%2fmodels", b"/v1/models/scripted#x", b"/%2e%2e/metrics"),
        *(b"http://x/%6detrics", b"http://x/metrics#x", b"https://x/metrics#x"),
    ],
)
def test_a_path_that_is_not_written_plainly_is_a_400(server, target):
    statuses, body = exchange(server, b"GET " + target + b" HTTP/1.1")
    assert statuses == [400]
    assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "target", [b"//metrics", b"/metrics/", b"/./metrics", b"/../metrics", b"/metrics;x", b"/METRICS", b"/x//metrics"]
)
def test_a_path_is_not_made_into_another(server, target):
    statuses, _ = exchange(server, b"GET " + target + b" HTTP/1.1")
    assert statuses in ([404], [400])


@pytest.mark.parametrize(
    "target",
    [b"/metrics", b"/metrics?name=x%23", b"http://x/metrics", b"/v1/models/%73cripted", b"/v1/models/scripted"],
)
def test_plain_paths_are_answered(server, target):
    statuses, _ = exchange(server, b"GET " + target + b" HTTP/1.1")
    assert statuses == [200]
