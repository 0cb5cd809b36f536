import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from pilotfish.server.http import pace
from pilotfish.server.http.pace import MOST_SECONDS, REFUSALS_AT_ONCE, REFUSALS_PER_SECOND, Pace


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


def delays(paced, count, label="alice"):
    """In whole microseconds: sums of 1 / REFUSALS_PER_SECOND are not exact."""
    return [round(paced.delay(label), 6) for _ in range(count)]


def test_a_burst_is_answered_at_once_and_what_follows_at_an_even_rate():
    clock = Clock()
    paced = Pace(clock)
    assert set(delays(paced, REFUSALS_AT_ONCE)) == {0.0}
    held = delays(paced, 10)
    assert held == pytest.approx([number / REFUSALS_PER_SECOND for number in range(1, 11)])
    # another key has its own
    assert delays(paced, 1, "bob") == [0.0]
    # who waits until the last is due, and half of a burst more, has half of a burst at once
    clock.now += held[-1] + REFUSALS_AT_ONCE / 2 / REFUSALS_PER_SECOND
    at_once = sum(not seconds for seconds in delays(paced, 2 * REFUSALS_AT_ONCE))
    assert abs(at_once - REFUSALS_AT_ONCE / 2) <= 1


def test_no_answer_is_held_back_for_longer_than_clients_wait():
    clock = Clock()
    paced = Pace(clock)
    assert max(delays(paced, REFUSALS_AT_ONCE + 100 * REFUSALS_PER_SECOND)) == MOST_SECONDS
    # and what was asked meanwhile is not owed for ever
    clock.now += MOST_SECONDS + REFUSALS_AT_ONCE / REFUSALS_PER_SECOND
    assert set(delays(paced, REFUSALS_AT_ONCE - 1)) == {0.0}


def test_refusals_wait_and_answers_and_probes_do_not(monkeypatch):
    monkeypatch.setattr(pace, "REFUSALS_AT_ONCE", 1)
    monkeypatch.setattr(pace, "REFUSALS_PER_SECOND", 0.001)
    monkeypatch.setattr(pace, "MOST_SECONDS", 3600.0)

    async def handler(request):
        return web.Response(status=int(request.query["status"]))

    async def story():
        app = web.Application(middlewares=[Pace().middleware(lambda: "none", exempt={"/health"})])
        app.add_routes([web.post("/work", handler), web.get("/health", handler)])
        async with TestClient(TestServer(app)) as client:

            async def ask(method, path, status, seconds=120.0):
                asked = client.request(method, path, params={"status": status})
                async with asyncio.timeout(seconds), asked as response:
                    return response.status

            assert await ask("POST", "/work", 503) == 503
            with pytest.raises(TimeoutError):
                await ask("POST", "/work", 400, 0.5)
            assert await ask("POST", "/work", 200) == 200
            assert await ask("GET", "/health", 503) == 503

    asyncio.run(story())
