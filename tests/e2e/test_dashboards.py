"""Every expression of every panel and rule, run by a real Prometheus that scraped a real server under a little load.

A panel's expression must return data; so must the value under every alert. The model is random, so its head is always
wrong: the alerts on acceptance have to see that, and no other may.
"""

import asyncio
import math
import re
import subprocess
import time
import urllib.request

import aiohttp
import pytest
from byte_model import write_model
from serving import PATIENCE, serving_in_thread

from pilotfish.deploy.grafana.generate import DEPLOY
from pilotfish.deploy.grafana.panels import ROWS
from pilotfish.deploy.prometheus import api, rules

CORE = "pilotfish.engine.start:make_core"
pytestmark = pytest.mark.skipif(api.missing() is not None, reason=str(api.missing()))

EMPTY_WHEN_HEALTHY = {"PilotfishSpeculationOff", "PilotfishExactnessUnchecked"}
"""Alerts on a series that exists only when something is wrong."""
FIRING = {"PilotfishAcceptanceCollapsed", "PilotfishSelfTestFailed"}
"""A random head is a broken head, and a random trunk knows no text."""
OF_THE_MOMENT = {"PilotfishSpeculationLoses", "PilotfishKvCacheBinds"}
"""Alerts on times, or on one scrape: a busy machine bends either. promtool tests them."""
LOAD_SECONDS = 8.0


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    """(Prometheus, time of a query): every window ends there, at the end of the load."""
    from tiny_models import build_tiny

    model = build_tiny(write_model(tmp_path_factory.mktemp("tiny")), "moe")
    engine = {"num_speculative_tokens": 3, "max_model_len": 512, "num_threads": 1, "dtype": "float32"}
    engine |= {"cost_table": True}
    with serving_in_thread(model, core=CORE, engine=engine, api_keys=("first", "second")) as server:
        target = server.url.removeprefix("http://")
        with api.scraping(target, DEPLOY / "prometheus" / "pilotfish.rules.yml") as prometheus:
            asyncio.run(load(server.v1))
            yield prometheus, last_scrape(prometheus)


def last_scrape(prometheus):
    """A time just after a scrape that went well: on a busy machine one may time out, and gauges are then stale."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        now = time.time()
        if values(prometheus.instant("up", now)) == [1.0]:
            return now
        time.sleep(0.2)
    raise AssertionError("the server is not scraped")


async def load(url):
    """Mixed requests of two keys, a few of them wrong, until the time is up."""
    until = time.monotonic() + LOAD_SECONDS
    bodies = [
        {"prompt": "The quick brown fox", "max_tokens": 40, "ignore_eos": True, "temperature": 0},
        {"prompt": "one", "max_tokens": 12, "temperature": 0, "stream": True},
        {"prompt": "bad", "max_tokens": -2},
    ]

    async def client(http, key, number):
        sent = number
        while time.monotonic() < until:
            headers = {"Authorization": f"Bearer {key}"}
            async with http.post(url + "/completions", json=bodies[sent % 3], headers=headers) as response:
                await response.read()
            sent += 1
            await asyncio.sleep(0.02)

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(client(http, ("first", "second")[i % 2], i) for i in range(5)))


def in_window(expression, split="together"):
    return expression.replace("$__rate_interval", "8s").replace("$instance", ".*").replace("$split", split)


def values(series):
    return [value for one in series for _, value in one.points if not math.isnan(value)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_every_query_of_every_panel_returns_data(scraped, row):
    prometheus, now = scraped
    for panel in row.panels:
        for query in panel.queries:
            found = values(prometheus.instant(in_window(query.expression), now))
            assert found, f"{panel.title}: {query.expression}"
            # of one server, each for itself is what they are together
            apart = values(prometheus.instant(in_window(query.expression, "instance"), now))
            assert sorted(apart) == pytest.approx(sorted(found)), panel.title
            assert all(value >= 0 for value in found), (panel.title, found)
            if panel.maximum is not None:
                assert max(found) <= panel.maximum + 1e-9, (panel.title, found)


def test_the_labels_of_legends_exist(scraped):
    prometheus, now = scraped
    for panel in (panel for row in ROWS for panel in row.panels):
        for query in panel.queries:
            wanted = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
            for series in prometheus.instant(in_window(query.expression), now):
                assert wanted <= series.labels.keys(), (panel.title, series.labels)


def test_recordings_and_the_values_under_alerts_return_data(scraped):
    prometheus, now = scraped
    for recording in rules.RECORDINGS:
        assert values(prometheus.instant(recording.name, now)), recording.name
    for alert in rules.ALERTS:
        found = values(prometheus.instant(alert.value, now))
        assert bool(found) == (alert.name not in EMPTY_WHEN_HEALTHY), alert.name
        if alert.guard:
            left = re.sub(r" > [\d.]+$", "", alert.guard)
            assert values(prometheus.instant(left, now)), left


def test_alerts_see_the_random_head_and_nothing_else(scraped):
    prometheus, now = scraped
    seen = {alert.name for alert in rules.ALERTS if prometheus.instant(alert.expression, now)}
    assert seen - OF_THE_MOMENT == FIRING


def test_prometheus_itself_finds_no_fault_in_the_rules(scraped):
    prometheus, _ = scraped
    found = prometheus.rules()
    assert len(found) == len(rules.RECORDINGS) + len(rules.ALERTS)
    assert [(rule["name"], rule["lastError"]) for rule in found if rule.get("lastError")] == []


def test_load_is_told_apart_by_the_number_of_the_key(scraped):
    prometheus, now = scraped
    found = prometheus.instant("pilotfish_key_generation_tokens_total > 0", now)
    assert {series.labels["key"] for series in found} == {"1", "2"}


def test_promtool_finds_no_fault_in_the_metrics(scraped):
    prometheus, _ = scraped
    (up,) = prometheus.instant("up")
    with urllib.request.urlopen(f"http://{up.labels['instance']}/metrics", timeout=PATIENCE) as response:
        text = response.read()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_figures_agree_with_each_other(scraped):
    """Panels that show one quantity twice show it once."""
    prometheus, now = scraped

    def one(name):
        (series,) = prometheus.instant(name, now)
        return series.points[0][1]

    speed_up = one("pilotfish:speed_up:rate5m")
    plain = one("pilotfish:plain_tokens_per_second:rate5m")
    assert one("pilotfish:tokens_per_second:rate5m") == pytest.approx(speed_up * plain)
    assert 1 <= one("pilotfish:acceptance_length:rate5m") <= 4
    phases = sum(values(prometheus.instant(in_window("sum(rate(pilotfish_round_seconds_sum[8s]))"), now)))
    steps = sum(values(prometheus.instant(in_window("sum(rate(pilotfish_step_seconds_sum[8s]))"), now)))
    assert 0.5 * steps < phases <= 1.001 * steps


@pytest.mark.parametrize(
    "command",
    [
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "pilotfish.rules.yml"],
        ["test", "rules", "pilotfish.rules.test.yml"],
    ],
    ids=" ".join,
)
def test_promtool(command):
    done = subprocess.run(
        ["promtool", *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
