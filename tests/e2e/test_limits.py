"""The limits of an API key, as a client meets them."""

import asyncio
import contextlib
import json
from pathlib import Path

import aiohttp
from serving import PATIENCE, let_go, script, serving

from pilotfish.server import handlers
from pilotfish.server.http.auth import key_line


def test_a_key_beyond_its_limits_is_told_to_wait_and_others_are_not(folder, monkeypatch):
    monkeypatch.setattr("pilotfish.server.http.auth.LOOK_SECONDS", 0)
    file = folder / "keys"
    file.write_text(key_line("alice", "a") + " concurrent=1\n" + key_line("bob", "b") + "\n")

    async def story():
        async with serving(folder, api_key_file=file) as server, aiohttp.ClientSession() as http:

            def ask(key, **commands):
                body = {"prompt": script(**commands), "max_tokens": 3000, "stream": "times" in commands}
                headers = {"Authorization": f"Bearer {key}"}
                return http.post(server.v1 + "/completions", json=body, headers=headers)

            async with ask("a", reply="x", times=2900, delay=0.05) as stream:
                await stream.content.readany()
                async with ask("a", reply="y") as refused, ask("b", reply="y") as other:
                    assert (refused.status, other.status) == (429, 200)
                    assert refused.headers["Retry-After"].isdigit()
                    assert (await refused.json())["error"]["code"] == "rate_limit_exceeded"
                # the file counts at once
                file.write_text(key_line("alice", "a") + " concurrent=2\n")
                async with ask("a", reply="y") as admitted:
                    assert admitted.status == 200
                stream.close()
            async with asyncio.timeout(PATIENCE):
                while server.service.client.num_open + server.service.client.num_leaving:
                    await asyncio.sleep(0.01)
            file.write_text(key_line("alice", "a") + " concurrent=1 per-minute=1\n")
            for status in (200, 429):
                async with ask("a", reply="y") as response:
                    assert response.status == status
            async with http.get(server.url + "/metrics") as response:
                assert 'pilotfish_request_rejected_total{reason="rate_limited"} 2.0' in await response.text()

    asyncio.run(story())


DEMO = Path(__file__).resolve().parents[2] / "demo" / "model"


def test_grammars_that_a_client_leaves_behind_end_and_count_until_then(tmp_path):
    """One key, one sequence at a time: who hangs up on costly grammars has no second one at work."""
    file = tmp_path / "keys"
    file.write_text(key_line("alice", "a") + " concurrent=1\n")
    options = {"core": "pilotfish.engine.start:make_core", "engine": {"max_model_len": 1024, "num_threads": 1}}

    async def story():
        async with serving(DEMO, api_key_file=file, **options) as server, aiohttp.ClientSession() as http:

            def ask(**fields):
                body = {"prompt": "x", "max_tokens": 8, **fields}
                return http.post(server.v1 + "/completions", json=body, headers={"Authorization": "Bearer a"})

            for number in range(8):
                schema = json.dumps({"type": "integer", "multipleOf": 999_983 + number})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.2), ask(guided_grammar=f"start: %json {schema}") as response:
                        assert response.status == 429
                assert len(trials_of(server.service.client.pid)) <= 1
            async with asyncio.timeout(PATIENCE):
                while server.service.client.num_open + server.service.client.num_leaving:
                    await asyncio.sleep(0.01)
                while trials_of(server.service.client.pid):
                    await asyncio.sleep(0.01)
            async with ask(guided_regex="[ab]{3}") as response:
                assert response.status == 200 and len((await response.json())["choices"][0]["text"]) == 3

    asyncio.run(story())


def trials_of(engine):
    """The children of the engine's children."""
    return [trial for worker in children_of(engine) for trial in children_of(worker)]


def children_of(pid):
    found = []
    # processes and their threads end while we look
    with contextlib.suppress(FileNotFoundError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, task.joinpath("children").read_text().split())
    return found


def test_what_only_counts_tokens_and_what_is_refused_count_too(folder):
    """n x prompts as well: each sequence is a request."""
    file = folder / "keys"
    file.write_text("\n".join(key_line(label, label) + " per-minute=4" for label in ("alice", "bob", "carol")))

    async def story():
        async with serving(folder, api_key_file=file) as server, aiohttp.ClientSession() as http:

            async def ask(key, path, **body):
                headers = {"Authorization": f"Bearer {key}"}
                async with http.post(server.url + path, json=body, headers=headers) as response:
                    return response.status

            message = {"role": "user", "content": "hi"}
            statuses = [
                await ask("alice", "/tokenize", prompt="hi"),
                await ask("alice", "/detokenize", tokens=[72]),
                await ask("alice", "/v1/messages/count_tokens", model="scripted", messages=[message]),
                await ask("alice", "/v1/completions", prompt="x" * 500_000),
                await ask("alice", "/tokenize", prompt="hi"),
            ]
            assert statuses == [200, 200, 200, 400, 429]
            completions = "/v1/completions"
            assert await ask("bob", completions, prompt=["hi", "ho"], n=2) == 200
            assert await ask("bob", "/tokenize", prompt="hi") == 429
            # more than it could ever send
            assert await ask("carol", completions, prompt="hi", n=5) == 400
            assert await ask("carol", completions, prompt="hi", n=4) == 429

    asyncio.run(story())


HEAD = "POST /v1/{} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer {}\r\n"


async def raw_answer(reader):
    """Status, headers and body of an answer with a Content-Length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    return int(head[0].split()[1]), headers, json.loads(await reader.readexactly(int(headers["content-length"])))


def test_what_cannot_be_taken_is_refused_before_it_is_read(folder):
    """Whatever API, however the body comes; the connection serves the next request, and other work is done."""
    file = folder / "keys"
    file.write_text("\n".join(key_line(label, label) + " concurrent=1" for label in ("alice", "bob", "carol")))

    async def story():
        engine = {"max_num_seqs": 1, "max_waiting": 1}
        async with serving(folder, api_key_file=file, engine=engine) as server, aiohttp.ClientSession() as http:

            def ask(key, path="completions", **fields):
                headers = {"Authorization": f"Bearer {key}"}
                return http.post(f"{server.v1}/{path}", json=fields, headers=headers)

            stream = {"prompt": script(reply="x", times=3900, delay=0.05), "max_tokens": 3900, "stream": True}
            host, port = server.url.removeprefix("http://").split(":")
            body = b"[" * 300_000
            async with ask("alice", **stream) as running:
                await running.content.readany()
                # a place is left, but not for this key; and for another, whose body is no JSON and is read
                reader, writer = await asyncio.open_connection(host, int(port))
                for path in ("completions", "chat/completions", "responses", "messages"):
                    writer.write((HEAD.format(path, "alice") + f"Content-Length: {len(body)}\r\n\r\n").encode())
                    async with asyncio.timeout(PATIENCE):
                        status, headers, told = await raw_answer(reader)
                    assert (status, told["error"]["type"]) == (429, "rate_limit_error")
                    assert headers["retry-after"] == "1"
                    writer.write(body)
                async with http.post(
                    server.v1 + "/completions", data=b"[", headers={"Authorization": "Bearer bob"}
                ) as r:
                    assert r.status == 400
                async with ask("bob", **stream) as waiting:
                    async with asyncio.timeout(PATIENCE):
                        while server.service.client.num_open < 2:
                            await asyncio.sleep(0.01)
                    # now there is none for anybody
                    writer.write((HEAD.format("completions", "carol") + "Transfer-Encoding: chunked\r\n\r\n").encode())
                    async with asyncio.timeout(PATIENCE):
                        status, headers, told = await raw_answer(reader)
                    assert (status, told["error"]["code"], headers["retry-after"]) == (503, "queue_full", "1")
                    writer.write(b"5\r\n[[[[[\r\n0\r\n\r\n")
                    writer.write(
                        (HEAD.format("messages/count_tokens", "carol") + "Content-Length: 1\r\n\r\n{").encode()
                    )
                    async with asyncio.timeout(PATIENCE):
                        assert (await raw_answer(reader))[0] == 400
                    async with http.get(server.url + "/metrics") as response:
                        text = await response.text()
                    assert 'pilotfish_request_rejected_total{reason="queue_full"} 1.0' in text
                    assert 'pilotfish_request_rejected_total{reason="rate_limited"} 4.0' in text
                    waiting.close()
                running.close()
            writer.transport.abort()

    asyncio.run(story())


def test_of_many_that_come_for_one_place_one_is_worked_on(folder, monkeypatch):
    """What is refused after it was read and rendered costs all others; so the rest is refused unread."""
    rendered, go = [], folder / "go"
    plan_chat = handlers.plan_chat
    monkeypatch.setattr(handlers, "plan_chat", lambda *args: rendered.append(1) or plan_chat(*args))

    async def story():
        engine = {"max_num_seqs": 1, "max_waiting": 0}
        async with serving(folder, engine=engine) as server, aiohttp.ClientSession() as http:
            # beyond what the event loop itself works on
            content = script("y" * handlers.SMALL_BODY, reply="x", times=300, delay=0.5, go=str(go))
            body = {"messages": [{"role": "user", "content": content}]}

            async def ask():
                async with http.post(server.v1 + "/chat/completions", json=body) as response:
                    await response.read()
                    return response.status

            asked = [asyncio.create_task(ask()) for _ in range(20)]
            for _, refused in zip(range(19), asyncio.as_completed(asked), strict=False):
                assert await refused == 503
            let_go(go)
            assert sorted(await asyncio.gather(*asked)) == [200] + [503] * 19
            assert len(rendered) == 1
            assert await ask() == 200 and server.service.limiter.num_held == 0

    asyncio.run(story())
