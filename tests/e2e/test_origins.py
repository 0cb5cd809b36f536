"""A server without keys and the pages of a browser on its machine: other origins, and names that lead here."""

import asyncio
import json

import aiohttp
import pytest
from serving import script, serving

from pilotfish.server.http.cors import Cors, is_local

BODY = {"prompt": script(reply="abc")}
HERE = ("http://localhost:3000", "http://127.0.0.1", "https://127.8.9.1:8443", "http://[::1]:5173", "tauri://localhost")
ELSEWHERE = (
    *("https://evil.example", "http://localhost.evil.example", "http://127.0.0.1.evil.example", "null", ""),
    *(
        "http://evil.example@localhost",
        "http://evil.example/localhost",
        "http://192.168.0.7:3000",
        "http://0.0.0.0:8000",
    ),
    *("chrome-extension://abcdef", "localhost", "file://"),
)


def told(story, folder, **options):
    """Runs `story(send)` against a server; `send` gives (status, headers, text)."""

    async def run():
        async with serving(folder, **options) as server, aiohttp.ClientSession() as http:

            async def send(method, path, headers, **body):
                async with http.request(method, server.url + path, headers=headers, **body) as response:
                    return response.status, response.headers, await response.text()

            await story(send)

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/metrics", "/health", "/nowhere"])
def test_a_page_of_another_origin_is_refused_on_every_path(folder, path):
    async def story(send):
        for origin in ELSEWHERE:
            status, headers, text = await send("POST", path, {"Origin": origin}, json=BODY)
            assert status == 403 and "Access-Control-Allow-Origin" not in headers, origin
            error = json.loads(text)["error"]
            assert "--allowed-origins" in error["message"]
            if path == "/v1/messages":
                assert error["type"] == "permission_error"
            else:
                assert error["code"] == "origin_not_allowed"
        # nothing of it ran
        _, _, text = await send("GET", "/metrics", {})
        assert "pilotfish_prompt_tokens_total 0.0" in text

    told(story, folder)


def test_pages_of_this_machine_and_programs_are_served(folder):
    async def story(send):
        for origin in HERE:
            status, headers, text = await send("POST", "/v1/completions", {"Origin": origin}, json=BODY)
            assert status == 200 and "abc" in text
            assert (headers["Access-Control-Allow-Origin"], headers["Vary"]) == (origin, "Origin")
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            status, headers, _ = await send("OPTIONS", "/v1/completions", asked)
            assert (status, headers["Access-Control-Allow-Origin"]) == (204, origin)
        for headers in ({}, {"Host": "llm.example"}, {"Host": "anything:99"}, {"Referer": "https://evil.example/"}):
            assert (await send("POST", "/v1/completions", headers, json=BODY))[0] == 200

    told(story, folder)


def test_a_preflight_of_another_origin_is_a_no(folder):
    async def story(send):
        asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        status, headers, text = await send("OPTIONS", "/v1/completions", asked)
        assert status == 400 and "across origins: origin." in text and "Access-Control-Allow-Origin" not in headers

    told(story, folder)


def test_a_name_that_leads_here_is_no_name_of_this_machine(folder):
    """DNS rebinding: the page's own host, which now resolves to the loopback."""

    async def story(send):
        for host in ("evil.example:8000", "localhost.evil.example", "192.168.0.7:8000", "0.0.0.0:8000", "[::2]:8000"):
            for origin in ("http://localhost:3000", f"http://{host}"):
                headers = {"Host": host, "Origin": origin}
                status, _, text = await send("POST", "/v1/completions", headers, json=BODY)
                # what came from an address of ours is our own page; an address cannot be led elsewhere, as a name can
                is_own = origin == f"http://{host}" and "example" not in host
                assert status == (200 if is_own else 403), (host, origin)
                if origin == "http://localhost:3000":
                    assert json.loads(text)["error"]["code"] == "host_not_allowed" and "--allowed-hosts" in text
                asked = {**headers, "Access-Control-Request-Method": "POST"}
                status, _, text = await send("OPTIONS", "/v1/completions", asked)
                assert status == 400 and "host" in text
        for host in ("localhost", "LOCALHOST:8000", "app.localhost:1", "127.0.0.1:99", "[::1]:8000", "localhost.:80"):
            headers = {"Host": host, "Origin": "http://localhost:3000"}
            assert (await send("POST", "/v1/completions", headers, json=BODY))[0] == 200, host

    told(story, folder)


def test_origins_and_hosts_that_are_named_are_served(folder):
    async def story(send):
        page = {"Origin": "https://app.example"}
        for host in ("llm.example", "LLM.example:443", "two.example:8443", "localhost:8000"):
            status, headers, _ = await send("POST", "/v1/completions", {**page, "Host": host}, json=BODY)
            assert (status, headers["Access-Control-Allow-Origin"]) == (200, "https://app.example"), host
        for host in ("two.example", "two.example:1", "x.llm.example"):
            assert (await send("POST", "/v1/completions", {**page, "Host": host}, json=BODY))[0] == 403, host
        assert (await send("POST", "/v1/completions", {"Origin": "https://b.example"}, json=BODY))[0] == 403
        # the machine's own remain
        assert (await send("POST", "/v1/completions", {"Origin": "http://localhost:3000"}, json=BODY))[0] == 200

    told(story, folder, cors=Cors(origins=("https://app.example",), hosts=("llm.example", "two.example:8443")))


def test_any_origin_and_host_is_served_where_it_is_said(folder):
    async def story(send):
        headers = {"Origin": "https://a.example", "Host": "b.example"}
        status, answered, _ = await send("POST", "/v1/completions", headers, json=BODY)
        assert (status, answered["Access-Control-Allow-Origin"]) == (200, "*")

    told(story, folder, cors=Cors(origins=("*",), hosts=("*",)))


def test_a_second_origin_hides_nothing(folder):
    async def story():
        async with serving(folder) as server:
            host, port = server.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            lines = ("GET /ping HTTP/1.1", "Host: localhost", "Origin: http://localhost", "Origin: http://evil.example")
            writer.write("\r\n".join((*lines, "Connection: close", "", "")).encode())
            answer = await reader.read()
            writer.close()
        assert b" 403 " in answer.splitlines()[0] or b" 400 " in answer.splitlines()[0]

    asyncio.run(story())


def test_with_keys_pages_are_told_as_ever(folder):
    """It is the key that keeps strangers out, and the browser that keeps the answer from a page."""

    async def story(send):
        key = {"Authorization": "Bearer sesame"}
        for origin, host in (("https://evil.example", "evil.example"), ("null", "localhost")):
            headers = {"Origin": origin, "Host": host}
            assert (await send("POST", "/v1/completions", headers, json=BODY))[0] == 401
            status, answered, _ = await send("POST", "/v1/completions", {**headers, **key}, json=BODY)
            assert (status, answered["Access-Control-Allow-Origin"]) == (200, "*")

    told(story, folder, api_keys=("sesame",))


@pytest.mark.parametrize("host", ["localhost", "a.b.localhost:8", "127.255.0.1:1", "[::1]", "[::ffff:127.0.0.1]:80"])
def test_local_hosts(host):
    assert is_local(host)


@pytest.mark.parametrize("host", ["", ":80", "xlocalhost", "127.0.0.1.example", "1.2.3.4", "[fe80::1]", "128.0.0.1:80"])
def test_hosts_that_are_not(host):
    assert not is_local(host)
