"""GET /: who gets the page, its headers, what it is made of, and who may call the server from it."""

import asyncio
import hashlib
import json
import re
import tomllib
from pathlib import Path

import aiohttp
import pytest
from serving import script, serving

from pilotfish.server.http import watch
from pilotfish.server.http.app import Page
from pilotfish.server.http.cors import Cors

FOLDER = Path(__file__).resolve().parents[2] / "server" / "page"
BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,image/webp,*/*;q=0.8"}
KEY = {"Authorization": "Bearer right"}
OURS = sorted(file for file in FOLDER.iterdir() if file.suffix in (".js", ".html"))


def told(story, folder, **options):
    """Runs `story(get)` against a server; `get` gives (status, headers, text)."""

    async def run():
        async with serving(folder, **options) as server, aiohttp.ClientSession() as http:

            async def ask(path, method="GET", **sent):
                async with http.request(method, server.url + path, allow_redirects=False, **sent) as response:
                    return response.status, response.headers, await response.text()

            await story(ask)

    asyncio.run(run())


def test_people_get_a_page_and_programs_that_want_json_the_version(folder):
    async def story(ask):
        for headers in (BROWSER, {}, {"Accept": "*/*"}):
            status, found, text = await ask("/", headers=headers)
            assert (status, found["Content-Type"]) == (200, "text/html; charset=utf-8") and text.startswith(
                "<!doctype html>"
            )
            assert "Accept" in found.getall("Vary")
        status, found, text = await ask("/", headers={"Accept": "application/json"})
        assert found["Content-Type"].startswith("application/json") and '"version"' in text
        assert (await ask("/", "HEAD"))[::2] == (200, "")

    told(story, folder)


def test_no_page(folder):
    async def story(ask):
        _, found, text = await ask("/", headers=BROWSER)
        assert found["Content-Type"].startswith("application/json") and '"version"' in text
        assert (await ask("/page/app.js"))[0] == 404

    told(story, folder, page=False)


def test_the_policy_lets_nothing_in_from_elsewhere_and_no_markup(folder):
    async def story(ask):
        for path in ("/", "/page/app.js", "/page/page.css", "/page/uplot/uPlot.iife.min.js"):
            status, found, _ = await ask(path)
            rules = dict(rule.strip().split(" ", 1) for rule in found["Content-Security-Policy"].split(";"))
            assert status == 200 and rules["default-src"] == "'none'"
            assert {rules[f"{kind}-src"] for kind in ("script", "style", "connect", "img")} == {"'self'"}
            assert {rules[name] for name in ("frame-ancestors", "base-uri", "form-action")} == {"'none'"}
            assert (rules["require-trusted-types-for"], rules["trusted-types"]) == ("'script'", "'none'")
            assert found["X-Content-Type-Options"] == "nosniff" and found["Cache-Control"] == "no-cache"

    told(story, folder)


def test_its_parts_need_no_key_and_under_a_prefix_all_is_relative(folder):
    async def story(ask):
        for path in ("/", "/llm/"):
            status, _, text = await ask(path)
            assert status == 200 and 'data-keys="yes"' in text
            addresses = re.findall(r'(?:src|href)="([^"]+)"', text)
            assert addresses and not [address for address in addresses if address.startswith("/") or ":" in address]
            for address in addresses:
                assert (await ask(path + address))[0] == 200, address
        status, found, _ = await ask("/llm")
        assert (status, found["Location"]) == (308, "/llm/")
        for path in ("/v1/watch", "/llm/v1/watch", "/page/nothing.js", "/page/../app.py", "/page/__init__.py"):
            assert (await ask(path))[0] == 401, path
        assert (await ask("/llm/v1/watch", headers=KEY))[0] == 200

    told(story, folder, api_keys=("right",), root_path="/llm")


def test_what_is_known_is_not_sent_again(folder):
    async def story(ask):
        _, found, _ = await ask("/page/app.js")
        status, again, text = await ask("/page/app.js", headers={"If-None-Match": found["ETag"]})
        assert (status, text, again["ETag"]) == (304, "", found["ETag"])
        assert (await ask("/page/app.js", headers={"If-None-Match": '"another"'}))[0] == 200
        assert (await ask("/page/app.js", "POST"))[0] == 405

    told(story, folder)


def test_watch_tells_only_the_points_that_are_wanted(folder, monkeypatch):
    monkeypatch.setattr(watch, "INTERVAL_SECONDS", 0.05)

    async def story(ask):
        points = []
        while len(points) < 3:
            points = json.loads((await ask("/v1/watch"))[2])["points"]
        *_, told = await ask(f"/v1/watch?after={points[1]['time']}")
        assert json.loads(told)["points"][0] == points[2]
        for wrong in ("x", "", "nan", "1e999"):
            status, _, text = await ask(f"/v1/watch?after={wrong}")
            assert status == 400 and json.loads(text)["error"]["param"] == "after"

    told(story, folder)


def test_watch_answers_before_the_engine_has_loaded(folder):
    async def story(ask):
        status, _, text = await ask("/v1/watch")
        assert status == 200 and '"max_num_seqs":null' in text

    told(story, folder, core="scripted_core:make_core_that_loads_forever", wait=False, close_seconds=0.1)


@pytest.mark.parametrize(
    ("host", "origin", "allowed"),
    [
        # by the address, whatever it is; a name may be led here after its page came from elsewhere
        ("192.168.0.7:8000", "http://192.168.0.7:8000", True),
        ("[2001:db8::1]:8000", "http://[2001:db8::1]:8000", True),
        ("192.168.0.7", "https://192.168.0.7", True),
        ("llm.example:8000", "https://llm.example:8000", True),
        ("rebound.example:8000", "http://rebound.example:8000", False),
        ("192.168.0.7:8000", "http://192.168.0.8:8000", False),
        ("192.168.0.7:8000", "http://192.168.0.7:9000", False),
        ("192.168.0.7:8000", "http://192.168.0.7.evil.example:8000", False),
        ("3232235527:8000", "http://3232235527:8000", False),
        ("192.168.0.7:8000", "null", False),
    ],
)
def test_without_keys_the_page_may_call_by_the_address_that_it_came_from(folder, host, origin, allowed):
    async def story(ask):
        body = {"prompt": script(reply="abc")}
        status, _, _ = await ask("/v1/completions", "POST", headers={"Host": host, "Origin": origin}, json=body)
        assert status == (200 if allowed else 403)

    told(story, folder, cors=Cors(hosts=("llm.example",)))


def test_uplot_is_what_was_published_and_brings_its_licence():
    lines = (FOLDER / "uplot" / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, name in (line.split() for line in lines)}
    assert sums.keys() == {"uPlot.iife.min.js", "uPlot.min.css", "LICENSE"}
    for name, digest in sums.items():
        assert hashlib.sha256((FOLDER / "uplot" / name).read_bytes()).hexdigest() == digest
    version = re.search(r"\(v([\d.]+)\)", (FOLDER / "uplot" / "uPlot.iife.min.js").read_text()[:200])[1]
    assert f"uPlot) {version}" in (FOLDER / "uplot" / "README.md").read_text().replace(
        "[uPlot](https://github.com/leeoniya/", ""
    )
    assert "MIT" in (FOLDER / "uplot" / "LICENSE").read_text()


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.name)
def test_nothing_in_it_writes_markup_or_keeps_a_key(file):
    """The policy refuses it anyway, in browsers that know the policy."""
    text = file.read_text()
    wrong = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|localStorage|sessionStorage"
    assert not re.findall(wrong + r"|document\.cookie|indexedDB|https?:|<script>|\sstyle=|\son\w+=", text)


def test_every_file_of_it_is_in_the_wheel():
    settings = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["pilotfish.server.page"]
    for file in FOLDER.rglob("*"):
        if file.is_file() and file.suffix not in (".py", ".pyc"):
            assert any(file.relative_to(FOLDER).match(pattern) for pattern in patterns), file


def test_every_part_is_served_and_named_by_another(folder):
    """No file is forgotten, and none that is imported is missing."""
    names = {path.removeprefix("/page/") for path in Page(keys=False).paths}
    texts = "".join(file.read_text() for file in OURS)
    assert names == set(re.findall(r'(?:page/|"\./)([\w./]+\.(?:js|css|svg))"', texts))
