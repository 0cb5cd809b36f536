"""Connections as strangers use them: half-sent heads, too many of them, what is no HTTP, and a log that stays short."""

import asyncio
import contextlib
import json
import logging
import resource
import socket
import subprocess
import sys
from collections import Counter

import aiohttp
import pytest
from serving import ENVIRONMENT, PATIENCE, let_go, script, serving

from pilotfish.deploy.ports import free_port
from pilotfish.server.http import bodies, connections
from pilotfish.server.http.bounded_log import MOST, SECONDS, Bounded

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Half: "
WHOLE = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n\r\n"


@contextlib.asynccontextmanager
async def connected(server, sent=b""):
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def ended(reader):
    """All that comes until the server closes."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), PATIENCE)
    return b""


@pytest.mark.parametrize("sent", [b"", HALF, b"\r\n", b"G"])
def test_a_head_that_does_not_come_ends_its_connection(server, monkeypatch, sent):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)

    async def story():
        async with connected(server, sent) as (reader, writer):

            async def drip():
                while not writer.is_closing():
                    writer.write(b"x" if sent == HALF else b"")
                    await asyncio.sleep(0.05)

            dripping = asyncio.create_task(drip())
            assert await ended(reader) == b""
            dripping.cancel()

    asyncio.run(story())


def test_a_head_that_has_come_gives_its_answer_all_the_time(server, monkeypatch, tmp_path):
    go = tmp_path / "go"

    async def story():
        body = json.dumps({"prompt": script(reply="x", times=300, delay=0.5, go=str(go)), "max_tokens": 300})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
        async with connected(server, f"{head}Content-Type: application/json\r\n\r\n{body}".encode()) as (reader, _):
            while not server.service.client.num_open:
                await asyncio.sleep(0.01)
            monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
            async with connected(server) as (later, _):
                assert await ended(later) == b""
            let_go(go)
            answer = await ended(reader)
            assert answer.startswith(b"HTTP/1.1 200") and b'"completion_tokens":300' in answer

    asyncio.run(story())


def test_the_head_of_a_second_request_has_a_deadline_too(folder, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 1.0)
    monkeypatch.setattr(connections, "IDLE_SECONDS", 1.5)

    async def story():
        async with serving(folder) as server, connected(server, WHOLE + HALF) as (reader, _):
            answer = await ended(reader)
            assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1

    asyncio.run(story())


def test_a_body_that_does_not_come_is_a_408_in_json(server, monkeypatch):
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(connections, "LINGERING_SECONDS", 0.1)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"

    async def story():
        async with connected(server, head) as (reader, _):
            head_of_answer, _, body = (await ended(reader)).partition(b"\r\n\r\n")
            assert head_of_answer.startswith(b"HTTP/1.1 408") and b"Connection: close" in head_of_answer
            assert json.loads(body)["error"]["code"] == "request_timeout"
            assert server.service.bodies.num_bytes == 0

    asyncio.run(story())


def test_a_head_without_end_is_a_431_in_json(server):
    line = b"X-%d: " + b"x" * 4000 + b"\r\n"

    async def story():
        async with connected(server, HALF + b"\r\n") as (reader, writer):
            with contextlib.suppress(ConnectionError):
                for number in range(100):
                    writer.write(line % number)
                    await writer.drain()
            body = (await ended(reader)).rpartition(b"\r\n\r\n")[2]
            # whatever is sent after the answer resets the connection: the answer may be lost
            assert not body or json.loads(body)["error"]["type"] == "invalid_request_error"

    asyncio.run(story())


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"NONSENSE\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_in_json(server, sent):
    async def story():
        async with connected(server, sent) as (reader, _):
            head, _, body = (await ended(reader)).partition(b"\r\n\r\n")
            assert head.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")) and b"application/json" in head
            error = json.loads(body)["error"]
            assert error["type"] == "invalid_request_error" and error["message"]

    asyncio.run(story())


def test_strangers_make_room_for_those_with_keys(folder):
    go = folder / "go"

    async def story():
        async with (
            serving(folder, api_keys=("secret",), max_connections=20) as server,
            aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as http,
            contextlib.AsyncExitStack() as stack,
        ):
            body = {"prompt": script(reply="x", times=400, delay=0.5, go=str(go)), "max_tokens": 400, "stream": True}
            async with http.post(server.v1 + "/completions", json=body) as stream:
                assert stream.status == 200
                # one that has shown its key and waits for a next request
                friend = await stack.enter_async_context(connected(server, WHOLE))
                assert (await friend[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                strangers = [await stack.enter_async_context(connected(server, HALF)) for _ in range(60)]
                for _ in range(3):
                    async with http.get(server.v1 + "/models", headers={"Connection": "close"}) as response:
                        assert response.status == 200
                # the first ones are gone, the friend and the stream are not
                assert await ended(strangers[0][0]) == b""
                friend[1].write(WHOLE)
                assert (await friend[0].readuntil(b'"object"')) != b""
                let_go(go)
                text = await stream.text()
                pieces = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
                assert "".join(piece["choices"][0]["text"] for piece in pieces) == "x" * 400
                assert text.endswith("data: [DONE]\n\n")
            async with http.get(server.url + "/metrics") as response:
                lines = (await response.text()).splitlines()
            refused = [line for line in lines if 'rejected_total{reason="connections"}' in line]
            assert refused and float(refused[0].split()[-1]) >= 40

    asyncio.run(story())


def test_busy_connections_are_not_cut_for_new_ones(folder):
    go = folder / "go"

    async def story():
        async with (
            serving(folder, max_connections=3, engine={"max_num_seqs": 4}) as server,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http,
        ):
            body = {"prompt": script(reply="x", times=300, delay=0.5, go=str(go)), "max_tokens": 300}

            async def ask():
                async with http.post(server.v1 + "/completions", json=body) as response:
                    return response.status

            tasks = [asyncio.create_task(ask()) for _ in range(3)]
            while server.service.client.num_open < 3:
                await asyncio.sleep(0.01)
            async with connected(server, HALF) as (reader, _):
                assert await ended(reader) == b""
            let_go(go)
            assert await asyncio.gather(*tasks) == [200, 200, 200]

    asyncio.run(story())


def test_the_process_may_open_as_many_files_as_its_connections_need(monkeypatch):
    limits, told = {"now": (1024, 5000)}, []
    monkeypatch.setattr("resource.getrlimit", lambda _: limits["now"])
    monkeypatch.setattr("resource.setrlimit", lambda _, wanted: told.append(wanted))
    assert connections.room_for_connections(4096) == 4096 and told.pop() == (4224, 5000)
    limits["now"] = (256, 256)
    assert connections.room_for_connections(4096) == 128 and told.pop() == (256, 256)
    limits["now"] = (65536, 65536)
    assert connections.room_for_connections(4096) == 4096 and told == []


def test_a_long_queue_is_accepted_in_small_parts(server):
    async def story():
        host, port = server.url.removeprefix("http://").split(":")
        opened = []
        try:
            # the loop is not run meanwhile: the kernel alone holds them
            for _ in range(200):
                opened.append(socket.create_connection((host, int(port)), timeout=PATIENCE))
                opened[-1].sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            for one in opened:
                one.settimeout(PATIENCE)
                answer = await asyncio.to_thread(one.recv, 4096)
                assert answer.startswith(b"HTTP/1.1 200")
        finally:
            for one in opened:
                one.close()

    asyncio.run(story())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_chunks_has_an_end(server, stream):
    """Also where HTTP/1.0 asks to keep the connection: only a stated length lets it stay."""
    body = json.dumps({"prompt": script(reply="Hello"), "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: {len(body)}\r\n\r\n"

    async def story():
        async with connected(server, head.encode() + body) as (reader, _):
            answer = await reader.readuntil(b"\r\n\r\n")
            if stream:
                # long before a connection that is kept is closed for being idle
                return answer, await asyncio.wait_for(reader.read(), 60)
            (length,) = (int(line[15:]) for line in answer.splitlines() if line.lower().startswith(b"content-length:"))
            return answer, await reader.readexactly(length)

    head, text = asyncio.run(story())
    assert head.startswith(b"HTTP/1.0 200")
    assert text.endswith(b"data: [DONE]\n\n") if stream else json.loads(text)["choices"][0]["text"] == "Hello"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def record(message="%s failed", *args, line=7, name="asyncio"):
    return logging.LogRecord(name, logging.ERROR, "file", line, message, args, None)


def test_the_log_has_the_first_of_many_alike_and_their_number():
    clock = Clock()
    bounded = Bounded(clock)
    shown = [bounded.filter(record("%s failed", number)) for number in range(100_000)]
    assert sum(shown) == MOST and all(shown[:MOST])
    # what differs after the first line is alike, another place is not
    assert [bounded.filter(record(f"accept failed\nfd={number}")) for number in range(50)].count(True) == MOST
    assert bounded.filter(record("another"))
    clock.now = SECONDS + 1
    later = record("%s failed", "it")
    assert bounded.filter(later)
    assert later.getMessage() == f"it failed ({100_000 - MOST} more like it in the last {SECONDS + 1:.0f} s)"


@pytest.mark.parametrize("num_bytes", [100_000, 900_000])
def test_a_long_body_is_no_long_head(server, num_bytes):
    async def story():
        async with aiohttp.ClientSession() as http:

            async def ask():
                async with http.post(
                    server.v1 + "/completions", json={"prompt": "x", "mood": "x" * num_bytes}
                ) as answer:
                    return answer.status

            assert 431 not in await asyncio.gather(*(ask() for _ in range(40)))

    asyncio.run(story())


def test_with_few_files_strangers_are_turned_away_and_the_log_stays_short(folder):
    """The process may open 200 files: connections leave it the rest."""
    go = folder / "go"
    port = free_port()
    command = ["prlimit", "--nofile=200:200", sys.executable, "-m", "pilotfish.server.cli", "serve", str(folder)]
    command += ["--port", str(port), "--core", "scripted_core:make_core", "--api-key", "secret"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=ENVIRONMENT, stderr=log)
    key = {"Authorization": "Bearer secret"}

    async def story():
        url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession(headers=key) as http, contextlib.AsyncExitStack() as stack:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(url + "/ready") as response:
                        if response.status == 200:
                            break
                assert process.poll() is None
                await asyncio.sleep(0.1)
            body = {"prompt": script(reply="x", times=200, delay=0.5, go=str(go)), "max_tokens": 200, "stream": True}
            async with http.post(url + "/v1/completions", json=body) as stream:
                for _ in range(600):
                    stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                    with contextlib.suppress(ConnectionError):
                        stranger.sendall(HALF)
                async with http.get(url + "/v1/models") as response:
                    assert response.status == 200
                let_go(go)
                assert (await stream.text()).endswith("data: [DONE]\n\n")

    try:
        asyncio.run(asyncio.wait_for(story(), 2 * PATIENCE))
    finally:
        process.terminate()
        process.wait(PATIENCE)
    assert len((folder / "log").read_bytes()) < 10_000


def test_files_used_up_by_others_are_a_few_lines_in_the_log(folder):
    """What else may open files took all of them: accepting fails until they are given back."""
    lines, failures = [], []

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(self.format(record))

        def handle(self, record):
            failures.append(record)
            return super().handle(record)

    handler, logger = Lines(), logging.getLogger("asyncio")
    handler.addFilter(Bounded())
    logger.addHandler(handler)

    async def story():
        async with serving(folder, api_keys=("secret",)) as server:
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            host, port = server.url.removeprefix("http://").split(":")
            clients = [socket.socket() for _ in range(50)]
            for client in clients:
                client.setblocking(False)
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
                for client in clients:
                    with contextlib.suppress(BlockingIOError):
                        client.connect((host, int(port)))
                # the loop tries again each second
                async with asyncio.timeout(PATIENCE):
                    while len(failures) <= 2 * MOST:
                        await asyncio.sleep(0.1)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            async with aiohttp.ClientSession() as http, http.get(server.url + "/health") as response:
                assert response.status == 200
            for client in clients:
                client.close()

    try:
        asyncio.run(story())
    finally:
        logger.removeHandler(handler)
    assert "out of system resource" in lines[0]
    # other things that found no file may be told too, each as seldom
    alike = Counter(line.partition("\n")[0] for line in lines)
    assert max(alike.values()) <= MOST and len(alike) < 5, alike
