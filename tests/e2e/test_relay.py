"""What relays rely on: request ids, a prefix, keys that change while the server runs."""

import asyncio
import json

import aiohttp
import pytest
from serving import script, serving

from pilotfish.server.http.auth import key_line

CHAT = "/chat/completions"


def body(**fields):
    return {"messages": [{"role": "user", "content": script(reply="x")}], **fields}


@pytest.mark.parametrize("sent", ["abc-123", "!~" * 64])
def test_a_request_id_comes_back_on_everything(server, sent):
    async def story():
        headers = {"X-Request-Id": sent}
        async with aiohttp.ClientSession() as http:
            for path, data, status in (
                (CHAT, body(), 200),
                (CHAT, body(stream=True), 200),
                (CHAT, body(temperature=9), 400),
                ("/nothing", {}, 404),
            ):
                async with http.post(server.v1 + path, json=data, headers=headers) as response:
                    assert (response.status, response.headers.getall("X-Request-Id")) == (status, [sent])
            async with http.get(server.url + "/health", headers=headers) as response:
                assert response.headers["X-Request-Id"] == sent

    asyncio.run(story())


@pytest.mark.parametrize("sent", [None, "", "a b", "é", "x" * 129])
def test_without_a_usable_id_the_answer_has_its_own(server, sent):
    async def story():
        headers = {} if sent is None else {"X-Request-Id": sent}
        async with aiohttp.ClientSession() as http:
            async with http.post(server.v1 + CHAT, json=body(), headers=headers) as response:
                assert response.headers["X-Request-Id"] == (await response.json())["id"]
            async with http.post(server.v1 + CHAT, json=body(stream=True), headers=headers) as response:
                first = (await response.text()).split("\n\n")[0]
                assert response.headers["X-Request-Id"] == json.loads(first.removeprefix("data: "))["id"]
            async with http.post(server.v1 + CHAT, json={}, headers=headers) as response:
                assert response.status == 400 and len(response.headers["X-Request-Id"]) == 24

    asyncio.run(story())


def test_a_prefix_may_be_stripped_or_not_and_is_guarded_either_way(folder):
    async def story():
        async with (
            serving(folder, root_path="/llm", api_keys=("secret",)) as server,
            aiohttp.ClientSession() as http,
        ):
            good = {"Authorization": "Bearer secret"}
            for root in ("", "/llm"):
                for headers, status in ((good, 200), ({}, 401)):
                    async with http.get(f"{server.url}{root}/v1/models", headers=headers) as response:
                        assert response.status == status
                async with http.post(f"{server.url}{root}/v1{CHAT}", json=body(), headers=good) as response:
                    assert response.status == 200
                async with http.get(f"{server.url}{root}/health") as response:
                    assert response.status == 200
            for path in ("/llm/llm/v1/models", "/other/v1/models", "/llmv1/models", "/llm//v1/models", "/health/x"):
                async with http.get(server.url + path) as response:
                    assert response.status == 401, path
                async with http.get(server.url + path, headers=good) as response:
                    assert response.status == 404, path

    asyncio.run(story())


def test_keys_change_while_the_server_runs(folder, monkeypatch):
    monkeypatch.setattr("pilotfish.server.http.auth.LOOK_SECONDS", 0)
    file = folder / "keys"
    file.write_text(key_line("alice", "a") + "\n")

    async def story():
        async with serving(folder, api_key_file=file) as server, aiohttp.ClientSession() as http:

            async def ask(key):
                headers = {"Authorization": f"Bearer {key}"}
                async with http.post(server.v1 + CHAT, json=body(), headers=headers) as response:
                    return response.status

            assert (await ask("a"), await ask("b")) == (200, 401)
            file.write_text(key_line("bob", "b") + "\n" + key_line("carol", "c") + "\n")
            assert (await ask("a"), await ask("b")) == (401, 200)
            file.write_text("broken")
            assert await ask("c") == 200
            async with http.get(server.url + "/metrics") as response:
                text = await response.text()
            for label in ("alice", "bob", "carol"):
                assert f'pilotfish_key_requests_total{{key="{label}"}} 1.0' in text

    asyncio.run(story())
