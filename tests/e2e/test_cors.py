"""What a browser asks for on behalf of a page, and what it is told: preflights, and the headers of every answer."""

import asyncio

import aiohttp
import pytest
from serving import script, serving

from pilotfish.server.http.app import _routes
from pilotfish.server.http.cors import Cors, CorsError

PAGE, OTHER = "https://app.example", "https://evil.example"
KEY = {"Authorization": "Bearer sesame"}
ASK = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
ORIGIN, VARY, CREDENTIALS = "Access-Control-Allow-Origin", "Vary", "Access-Control-Allow-Credentials"
BODY = {"prompt": script(reply="abc")}
NAMED = {
    "default": Cors(),
    "named": Cors(origins=(PAGE, "https://two.example")),
    "credentials": Cors(origins=(PAGE,), credentials=True),
}


def told(story, folder, **options):
    """Runs `story(send)` against a server with a key; `send` gives (status, headers, text)."""

    async def run():
        async with (
            serving(folder, api_keys=("sesame",), **options) as server,
            aiohttp.ClientSession() as http,
        ):

            async def send(method, path, headers, **body):
                async with http.request(method, server.url + path, headers=headers, **body) as response:
                    return response.status, response.headers, await response.text()

            await story(send)

    asyncio.run(run())


@pytest.mark.parametrize("root", ["", "/llm"])
def test_a_preflight_needs_no_key_on_any_route(folder, root):
    async def story(send):
        paths = {root + route.path.replace("{name:.+}", "scripted") for route in _routes("")}
        for path in (*paths, root + "/nowhere"):
            for key in ({}, KEY, {"Authorization": "Bearer wrong"}):
                asked = {**ASK, "Access-Control-Request-Headers": "authorization,content-type, x-stainless-os"}
                status, headers, text = await send("OPTIONS", path, {**asked, **key})
                assert (status, text, headers.getall(ORIGIN)) == (204, "", ["*"]), path
                assert {"GET", "POST"} <= set(headers["Access-Control-Allow-Methods"].split(", "))
                assert headers["Access-Control-Allow-Headers"] == "authorization, content-type, x-stainless-os"
                assert headers["Access-Control-Max-Age"] == "600"
                assert CREDENTIALS not in headers and VARY not in headers

    told(story, folder, root_path=root)


def test_a_preflight_is_answered_while_the_model_loads(folder):
    async def story(send):
        assert (await send("GET", "/ready", {}))[0] == 503
        assert (await send("OPTIONS", "/v1/completions", ASK))[0] == 204
        status, headers, _ = await send("POST", "/v1/completions", {**KEY, "Origin": PAGE}, json=BODY)
        assert (status, headers[ORIGIN]) == (503, "*")

    told(story, folder, wait=False, core="scripted_core:make_core_that_loads_forever")


def test_options_without_an_origin_or_a_method_is_no_preflight(folder):
    async def story(send):
        for headers in ({}, {"Origin": PAGE}, {"Access-Control-Request-Method": "POST"}):
            assert (await send("OPTIONS", "/v1/completions", headers))[0] == 401
            assert (await send("OPTIONS", "/v1/completions", {**headers, **KEY}))[0] == 405
        # and nothing that has a preflight's headers gets past the key with another method
        assert (await send("POST", "/v1/completions", ASK, json=BODY))[0] == 401

    told(story, folder)


@pytest.mark.parametrize("kind", NAMED)
def test_every_answer_says_who_may_read_it(folder, kind):
    cors = NAMED[kind]
    answers = (
        ("POST", "/v1/completions", KEY, {"json": BODY}, 200),
        ("POST", "/v1/completions", KEY, {"json": {**BODY, "stream": True}}, 200),
        ("POST", "/v1/messages", KEY, {"json": {}}, 400),
        ("POST", "/v1/completions", KEY, {"data": b"{"}, 400),
        ("POST", "/v1/completions", {}, {"json": BODY}, 401),
        ("GET", "/v1/nowhere", KEY, {}, 404),
        ("GET", "/v1/models/absent", KEY, {}, 404),
        ("GET", "/v1/completions", KEY, {}, 405),
        ("POST", "/v1/completions", {**KEY, "Expect": "much"}, {"json": BODY}, 417),
        ("GET", "/health", {}, {}, 200),
        ("GET", "/metrics", {}, {}, 200),
        ("GET", "/openapi.json", KEY, {}, 200),
    )

    async def story(send):
        for origin in (PAGE, OTHER, None):
            allowed = None if origin is None else "*" if cors.origins is None else origin if origin == PAGE else None
            for method, path, key, body, status in answers:
                given = key if origin is None else {**key, "Origin": origin}
                got, headers, text = await send(method, path, given, **body)
                assert got == status, (path, text)
                assert headers.getall(ORIGIN, []) == ([] if allowed is None else [allowed]), path
                assert headers.getall(VARY, []) == ([] if kind == "default" else ["Origin"]), path
                assert headers.get(CREDENTIALS) == ("true" if allowed and cors.credentials else None), path

    told(story, folder, cors=cors)


def test_failures_can_be_read_too(folder, monkeypatch):
    async def story(send):
        sent = {**KEY, "Origin": PAGE}
        with monkeypatch.context() as broken:
            broken.setattr("pilotfish.server.handlers.decode_request", lambda *_, **__: 1 / 0)
            status, headers, _ = await send("POST", "/v1/completions", sent, json=BODY)
            assert (status, headers[ORIGIN]) == (500, "*")
        failing = {"prompt": script(reply="x", times=99, delay=0.02, fault="raise", at=5), "max_tokens": 99}
        status, headers, text = await send("POST", "/v1/completions", sent, json={**failing, "stream": True})
        assert (status, headers[ORIGIN]) == (200, "*") and "engine_failed" in text

    told(story, folder)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"Origin": OTHER}, "origin"),
        ({"Origin": "null"}, "origin"),
        ({"Origin": PAGE.upper()}, "origin"),
        ({"Access-Control-Request-Method": "PUT"}, "method"),
        ({"Access-Control-Request-Method": "post"}, "method"),
        ({"Access-Control-Request-Headers": "content-type,x-other"}, "headers"),
        ({"Origin": OTHER, "Access-Control-Request-Method": "PUT"}, "origin, method"),
    ],
)
@pytest.mark.parametrize("credentials", [False, True])
def test_a_preflight_for_what_is_not_allowed_is_a_400_that_names_it(folder, asked, named, credentials):
    cors = Cors(origins=(PAGE,), methods=("POST",), headers=("authorization",), credentials=credentials)

    async def story(send):
        status, headers, text = await send("OPTIONS", "/v1/completions", {**ASK, **asked})
        assert status == 400 and f"across origins: {named}." in text
        assert headers.get(ORIGIN) == (None if "origin" in named else PAGE)
        assert headers[VARY] == "Origin" and "Access-Control-Allow-Methods" not in headers
        asked_well = {**ASK, "Access-Control-Request-Headers": "Authorization, content-type"}
        status, headers, _ = await send("OPTIONS", "/v1/completions", asked_well)
        assert (status, headers[ORIGIN], headers[VARY]) == (204, PAGE, "Origin")
        assert headers["Access-Control-Allow-Methods"] == "POST"
        assert headers["Access-Control-Allow-Headers"].endswith(", Content-Type, authorization")
        assert headers.get(CREDENTIALS) == ("true" if credentials else None)
        assert "*" not in "".join(value for name, value in headers.items() if name.startswith("Access-Control"))

    told(story, folder, cors=cors)


def test_without_origins_no_page_may_do_anything(folder):
    async def story(send):
        assert (await send("OPTIONS", "/v1/completions", ASK))[0] == 400
        status, headers, _ = await send("POST", "/v1/completions", {**KEY, "Origin": PAGE}, json=BODY)
        assert status == 200 and not [name for name in headers if name.startswith("Access-Control")]

    told(story, folder, cors=Cors(origins=()))


def test_header_names_that_are_none_are_not_repeated(folder):
    async def story():
        lines = (
            *(b"OPTIONS /v1/models HTTP/1.1", b"Host: x", b"Connection: close", b"origin: https://app.example"),
            *(b"access-control-request-method: GET", b"access-control-request-headers: a, \xff\xfe"),
        )
        async with serving(folder, api_keys=("sesame",)) as server:
            host, port = server.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
            answer = await reader.read()
            writer.close()
        assert answer.startswith(b"HTTP/1.1 400 ") and b"across origins: headers." in answer

    asyncio.run(story())


def test_credentials_and_any_origin_are_refused_together():
    for origins in (None, ("*",), (PAGE, "*")):
        with pytest.raises(CorsError, match="name each origin"):
            Cors(origins=origins, credentials=True)
