"""The engine dies and is started again: open requests end, health says so, readiness returns, nothing is repeated."""

import asyncio
import json
import os
import re
import signal
from pathlib import Path

import aiohttp
import pytest
from processes import ask, backend, status
from processes import until as until_true
from serving import PATIENCE, script, serving


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 2 * PATIENCE))


def body(stream=False, **commands):
    return {"prompt": script(**commands), "max_tokens": 3000, "stream": stream}


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not await condition():
            await asyncio.sleep(0.005)


async def answer(http, url):
    async with http.get(url) as response:
        return response.status, await response.text()


@pytest.mark.parametrize("how", ["kill", "raise", "exit"])
def test_the_engine_comes_back_and_no_request_is_repeated(folder, how):
    async def story():
        async with serving(folder, restart_engine=3) as server, aiohttp.ClientSession() as http:
            url, client = server.v1 + "/completions", server.service.client
            gate = hold_restarts(client)
            stream = await http.post(url, json=body(True, reply="x", times=2900, delay=0.01))
            await stream.content.readany()
            whole = asyncio.create_task(http.post(url, json=body(reply="x", times=2900, delay=0.01)))
            while client.num_open < 2:
                await asyncio.sleep(0.01)
            if how == "kill":
                os.kill(client.pid, signal.SIGKILL)
            else:
                assert (await http.post(url, json=body(reply="abc", fault=how))).status == 500
            first = client.pid
            rest = (await stream.read()).decode()
            assert json.loads(rest.strip().rsplit("data: ", 1)[1])["error"]["code"] == "engine_failed"
            assert "[DONE]" not in rest and (await whole).status == 500
            await check_red(http, server, "round" if how == "raise" else "process")
            gate.set()
            await until_green(http, server)
            assert client.pid != first and client.failure is None
            steps = len(server.transcript())
            async with http.post(url, json=body(reply="again")) as response:
                assert (await response.json())["choices"][0]["text"] == "again"
            # the new engine worked for the new request alone
            later = server.transcript()[steps:]
            assert len({output["request_id"] for step in later for output in step["outputs"]}) == 1
            _, metrics = await answer(http, server.url + "/metrics")
            assert "pilotfish_engine_restarts_total 1.0" in metrics and "pilotfish_engine_up 1.0" in metrics
            assert "pilotfish_num_requests_running 0.0" in metrics

    run(story())


def hold_restarts(client):
    """No restart before the event that this returns: what is true until then can be looked at in peace."""
    gate, restart = asyncio.Event(), client.restart

    async def held():
        await gate.wait()
        await restart()

    client.restart = held
    return gate


async def check_red(http, server, part):
    """Health names the part, and nobody is served."""
    code, text = await answer(http, server.url + "/health")
    health = json.loads(text)
    assert code == 503 and health["engine"]["part"] == part and health["engine"]["message"] is None
    assert health["status"] == "failed" and health["http"]["status"] == "ok"
    assert (await answer(http, server.url + "/ready"))[0] == 503
    async with http.post(server.v1 + "/completions", json=body()) as response:
        assert response.status == 503 and (await response.json())["error"]["code"] == "engine_failed"


async def until_green(http, server):
    async def is_green():
        green = (await answer(http, server.url + "/health"))[0] == 200
        ready = (await answer(http, server.url + "/ready"))[0] == 200
        # never green before it serves
        assert ready or not green
        return green

    await until(is_green)


def test_while_it_restarts_retry_after_is_told(folder):
    async def story():
        go = folder / "go"
        go.touch()
        core = "scripted_core:make_core_when_told"
        async with serving(folder, restart_engine=1, core=core) as server, aiohttp.ClientSession() as http:
            client, first = server.service.client, server.service.client.pid
            go.unlink()
            os.kill(first, signal.SIGKILL)

            async def restarting():
                return client.state == "restarting" and client.pid != first

            await until(restarting)
            async with http.get(server.url + "/health") as response:
                health = await response.json()
                assert response.status == 503
                assert (health["status"], health["engine"]["part"]) == ("restarting", "process")
            async with http.post(server.v1 + "/completions", json=body()) as response:
                assert response.status == 503 and response.headers["Retry-After"] == "5"
            go.touch()
            await until_green(http, server)

    run(story())


def test_closing_while_the_engine_restarts_leaves_no_process(folder):
    async def story():
        async with serving(folder, restart_engine=1) as server:
            client, first = server.service.client, server.service.client.pid
            os.kill(first, signal.SIGKILL)

            async def another():
                return client.state == "restarting" and client.pid != first

            await until(another)
        assert client.state == "closed"
        with pytest.raises(ProcessLookupError):
            os.kill(client.pid, 0)

    run(story())


@pytest.mark.parametrize("limit", [0, 1])
def test_an_engine_that_dies_too_often_ends_the_server(folder, limit):
    """Its last stream still gets the error event."""
    with backend(folder, "one", "--restart-engine", str(limit)) as server:
        for number in range(1, limit + 2):
            with ask(server.url, stream=True, reply="x", times=2900, delay=0.01) as response:
                response.readline()
                os.kill(engine_of(server), signal.SIGKILL)
                assert b'"engine_failed"' in response.read()
            if number <= limit:
                until_true(lambda: status(server.url + "/ready") == 200, "the engine is back")
        assert server.process.wait(PATIENCE) == 1
    log = (folder / "log").read_text()
    assert len(re.findall("starting the engine again", log)) == limit
    assert "is not started again" in log and "Traceback" not in log


def engine_of(server):
    """The child that the server started."""
    pid = server.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
