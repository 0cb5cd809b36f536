"""Requests that come at once are begun in many passes of the loop, and what clients begin and leave has a pace."""

import asyncio
import contextlib
import json
from collections import Counter

import aiohttp
import pytest
from serving import PATIENCE, script, serving

from pilotfish.engine.link.client import EngineClient
from pilotfish.server.http import pace
from pilotfish.server.http.auth import NO_KEY
from pilotfish.server.http.turns import BEGUN_IN_A_PASS

MANY = 32


def post(**body):
    sent = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return (head % len(sent)).encode() + sent


async def connected(server, count):
    """So many connections that the server has accepted: each was answered once."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    made = [await asyncio.open_connection(host, int(port)) for _ in range(count)]
    for reader, writer in made:
        writer.write(b"HEAD /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
    return made


class Submitted:
    """How many requests were submitted, in each pass of the loop: a task that gives its turn away has one in each."""

    def __init__(self):
        self.by_pass = Counter()
        self.number = 0

    @contextlib.asynccontextmanager
    async def counting(self):
        async def count():
            while True:
                self.number += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(count())
        try:
            yield
        finally:
            task.cancel()

    async def until(self, number):
        async with asyncio.timeout(PATIENCE):
            while self.by_pass.total() < number:
                await asyncio.sleep(0.01)


@pytest.fixture
def submitted(monkeypatch):
    seen, submit = Submitted(), EngineClient.submit

    def noted(self, request, receive):
        seen.by_pass[seen.number] += 1
        submit(self, request, receive)

    monkeypatch.setattr(EngineClient, "submit", noted)
    return seen


def test_requests_that_come_at_once_are_begun_in_many_passes(folder, submitted):
    async def story():
        async with serving(folder, engine={"max_waiting": MANY}) as server:
            made = await connected(server, MANY)
            async with submitted.counting():
                for _, writer in made:
                    writer.write(post(prompt=script(text="a"), max_tokens=1))
                await submitted.until(MANY)
            # in one pass those who had waited, and as many who had not
            assert max(submitted.by_pass.values()) <= 2 * BEGUN_IN_A_PASS
            for reader, writer in made:
                assert b" 200 " in await reader.readline()
                writer.close()
            # what was answered was not left
            assert NO_KEY not in server.service.turns.left._due

    asyncio.run(story())


def test_a_key_whose_clients_leave_what_they_began_waits_and_who_looks_does_not(folder, submitted, monkeypatch):
    monkeypatch.setattr(pace, "REFUSALS_AT_ONCE", 8)
    monkeypatch.setattr(pace, "REFUSALS_PER_SECOND", 0.001)
    monkeypatch.setattr(pace, "MOST_SECONDS", 3600.0)
    long = post(prompt=script(reply="x", times=1000, delay=0.05), max_tokens=1000)

    async def story():
        async with (
            asyncio.timeout(PATIENCE),
            serving(folder, engine={"max_waiting": MANY}) as server,
            aiohttp.ClientSession() as session,
        ):
            made = await connected(server, 10)
            for _, writer in made:
                writer.write(long)
            await submitted.until(len(made))
            for _, writer in made:
                writer.close()
            while server.service.client.num_open:
                await asyncio.sleep(0.01)
            counted = server.service.turns.left.seconds(NO_KEY)
            assert counted > 1000

            # these wait, and leave: they were never submitted, and are not counted
            made = await connected(server, 10)
            for _, writer in made:
                writer.write(long)
            while not server.service.turns._waiting or len(server.service.turns._waiting[NO_KEY]) < len(made):
                await asyncio.sleep(0.01)
            async with session.get(server.v1 + "/models") as response:
                assert response.status == 200
            for _, writer in made:
                writer.close()
            while server.service.turns._waiting:
                await asyncio.sleep(0.01)
            assert submitted.by_pass.total() == 10
            assert server.service.turns.left.seconds(NO_KEY) <= counted

    asyncio.run(story())
