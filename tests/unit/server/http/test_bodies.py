import asyncio

import aiohttp
import pytest
from aiohttp import web

from pilotfish.server.errors import ApiError, Overloaded, TooManyRequests
from pilotfish.server.http import bodies
from pilotfish.server.http.bodies import FREE_BYTES, Bodies, read_body

MORE = 1000


def hold(budget, label, num_bytes):
    """A context that holds so many counted bytes; entered at once."""
    context = budget.hold(label)
    held = context.__enter__()
    held.add(FREE_BYTES)
    try:
        held.add(num_bytes)
    except ApiError as error:
        assert context.__exit__(type(error), error, None) is not True
        raise
    return context


def test_all_of_them_have_one_budget_and_what_is_short_is_free():
    budget = Bodies(shared=False, most=4 * MORE)
    contexts = [hold(budget, "none", MORE) for _ in range(4)]
    with pytest.raises(Overloaded) as caught:
        hold(budget, "none", 1)
    assert int(caught.value.headers["Retry-After"]) >= 1
    contexts.append(hold(budget, "none", 0))
    contexts.pop(0).__exit__(None, None, None)
    contexts.append(hold(budget, "none", MORE))
    for context in contexts:
        context.__exit__(None, None, None)
    assert budget.num_bytes == 0


def test_one_key_cannot_use_up_the_budget_of_others():
    budget = Bodies(shared=True, most=4 * MORE)
    kept = hold(budget, "alice", MORE)
    with pytest.raises(TooManyRequests) as caught:
        hold(budget, "alice", 1)
    assert int(caught.value.headers["Retry-After"]) >= 1
    hold(budget, "bob", MORE)
    kept.__exit__(None, None, None)


def test_what_is_counted_is_given_back_however_it_ends():
    budget = Bodies(shared=True, most=4 * MORE)
    for _ in range(20):
        with pytest.raises(ZeroDivisionError), budget.hold("alice") as held:
            held.add(FREE_BYTES + MORE)
            raise ZeroDivisionError
        with pytest.raises(TooManyRequests), budget.hold("alice") as held:
            held.add(FREE_BYTES + 2 * MORE)
    assert budget.num_bytes == 0


def answers(*requests, budget=None):
    """What a server says that only reads: the status of each request, sent all at once."""
    budget = budget or Bodies(shared=False)

    async def handler(request):
        try:
            with budget.hold("none") as held:
                return web.Response(text=str(sum(map(len, await read_body(request, held)))))
        except ApiError as error:
            return web.Response(status=error.status, text=error.message)

    async def story():
        app = web.Application()
        app.router.add_post("/", handler)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = "http://{}:{}/".format(*runner.addresses[0][:2])

            async def send(data):
                async with http.post(url, data=data(), headers={"Content-Type": "application/json"}) as response:
                    return response.status, await response.text()

            async with aiohttp.ClientSession() as http:
                return await asyncio.gather(*map(send, requests))
        finally:
            await runner.cleanup()

    return asyncio.run(story())


async def drip():
    for _ in range(400):
        yield b"x"
        await asyncio.sleep(0.05)


async def stall():
    yield b"x" * 100_000
    await asyncio.sleep(20)


async def whole():
    yield b"x" * 300_000


def test_a_body_that_comes_too_slowly_is_a_408_and_frees_what_it_held(monkeypatch):
    budget = Bodies(shared=False)
    with monkeypatch.context() as short:
        short.setattr(bodies, "BODY_SECONDS", 0.3)
        assert [status for status, _ in answers(drip, stall, budget=budget)] == [408, 408]
    assert budget.num_bytes == 0
    assert [status for status, _ in answers(whole, budget=budget)] == [200]


def test_a_body_without_a_length_is_cut_at_the_bound(monkeypatch):
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 200_000)
    assert [status for status, _ in answers(whole)] == [413]
