"""The limits of an API key, as a client meets them."""

import asyncio

import aiohttp
from serving import script, serving

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

            async with ask("a", reply="x", times=2900, delay=0.01) as stream:
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
            async with asyncio.timeout(20):
                while server.service.client.num_open:
                    await asyncio.sleep(0.01)
            file.write_text(key_line("alice", "a") + " concurrent=1 per-minute=1\n")
            for status in (200, 429):
                async with ask("a", reply="y") as response:
                    assert response.status == status
            async with http.get(server.url + "/metrics") as response:
                assert 'pilotfish_request_rejected_total{reason="rate_limited"} 2.0' in await response.text()

    asyncio.run(story())
