"""An engine that is there and does nothing: red until it speaks, and killed and started again if it does not."""

import asyncio
import json
import os
import re
import signal
import time

import aiohttp
import pytest
from processes import ask, backend, status
from processes import until as until_true
from serving import PATIENCE, script, serving

from pilotfish.engine.link import client as link


@pytest.fixture
def quick(monkeypatch):
    """Asked often, and ended soon. Call it where the engine does nothing, and it is soon found silent."""
    monkeypatch.setattr(link, "PING_SECONDS", 0.05)
    monkeypatch.setattr(link, "STACKS_SECONDS", 0.2)
    return lambda: monkeypatch.setattr(link, "STALLED_SECONDS", 0.3)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 2 * PATIENCE))


def body(stream=False, **commands):
    return {"prompt": script(**commands), "max_tokens": 3000, "stream": stream}


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not await condition():
            await asyncio.sleep(0.02)


async def answer(http, url):
    async with http.get(url) as response:
        return response.status, await response.text()


async def colour(http, server):
    """The states of /health and /ready, and engine_up."""
    health, ready = await answer(http, server.url + "/health"), await answer(http, server.url + "/ready")
    lines = (await answer(http, server.url + "/metrics"))[1].splitlines()
    (up,) = [float(line.split()[1]) for line in lines if line.startswith("pilotfish_engine_up ")]
    return (health[0], json.loads(health[1])["status"]), (ready[0], json.loads(ready[1])["engine"]), up


RED, GREEN = ((503, "stalled"), (503, "stalled"), 0.0), ((200, "ok"), (200, "ready"), 1.0)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_stopped_engine_is_red_until_it_speaks_whether_clients_wait_or_not(folder, monkeypatch, quick, busy):
    async def story():
        async with serving(folder) as server, aiohttp.ClientSession() as http:
            url, client = server.v1 + "/completions", server.service.client

            async def is_now(wanted):
                return await colour(http, server) == wanted

            async def are_open(wanted):
                return client.num_open == wanted

            await until(lambda: is_now(GREEN))
            if busy:
                stream = await http.post(url, json=body(True, reply="x" * 40, delay=0.02))
                await stream.content.readany()
            os.kill(client.pid, signal.SIGSTOP)
            # one that gives up while nothing is known yet
            leaving = asyncio.create_task(http.post(url, json=body(reply="gone")))
            await until(lambda: are_open(1 + busy))
            leaving.cancel()
            quick()
            await until(lambda: is_now(RED))
            assert client.num_open == busy
            for _ in range(5):
                await asyncio.sleep(0.1)
                assert await is_now(RED)
                async with http.post(url, json=body(reply="no")) as response:
                    assert response.status == 503 and response.headers["Retry-After"] == "5"
                    assert (await response.json())["error"]["code"] == "engine_stalled"
            monkeypatch.undo()
            os.kill(client.pid, signal.SIGCONT)
            await until(lambda: is_now(GREEN))
            if busy:
                assert (await stream.text()).endswith("data: [DONE]\n\n")
            async with http.post(url, json=body(reply="again")) as response:
                assert (await response.json())["choices"][0]["text"] == "again"

    run(story())


@pytest.mark.parametrize("how", ["stopped idle", "stopped busy", "stuck in a step"])
def test_one_that_stays_silent_is_killed_and_started_again(folder, quick, how):
    async def story():
        async with serving(folder, restart_engine=1) as server, aiohttp.ClientSession() as http:
            url, client = server.v1 + "/completions", server.service.client
            first, streams = client.pid, []
            if how != "stopped idle":
                streams.append(await http.post(url, json=body(True, reply="x", times=2900, delay=0.02)))
                await streams[0].content.readany()
            if how == "stuck in a step":
                streams.append(await http.post(url, json=body(True, reply="abc", fault="hang", at=1)))
            else:
                os.kill(first, signal.SIGSTOP)
            client._timeout = 1.0
            while client.state == "ready":
                await asyncio.sleep(0.01)
            client._timeout = PATIENCE
            for stream in streams:
                rest = (await stream.read()).decode()
                error = json.loads(rest.strip().rsplit("data: ", 1)[1])["error"]
                assert error["code"] == "engine_failed" and error["message"] == "engine failed (hang)"
                assert "[DONE]" not in rest

            async def is_back():
                return client.pid != first and (await answer(http, server.url + "/ready"))[0] == 200

            await until(is_back)
            with pytest.raises(ProcessLookupError):
                os.kill(first, 0)
            async with http.post(url, json=body(reply="again")) as response:
                assert (await response.json())["choices"][0]["text"] == "again"
            assert "pilotfish_engine_restarts_total 1.0" in (await answer(http, server.url + "/metrics"))[1]

    run(story())


def test_the_failure_is_named_and_without_restarts_it_ends_the_server(folder):
    """Where it was stuck is in the log."""
    with backend(folder, "one", "--restart-engine", "0", "--engine-timeout", "3") as server:
        with ask(server.url, stream=True, reply="abc", fault="hang", at=1) as response:
            assert b'"engine_failed"' in response.read()
        assert server.process.wait(PATIENCE) == 1
    log = (folder / "log").read_text()
    assert re.search(r"engine failed \(hang\): the engine has not answered for \d+ s\n", log)
    assert "in _maybe_fault" in log


def test_loading_is_no_silence(folder, quick):
    async def story():
        core = "scripted_core:make_core_that_loads_forever"
        async with serving(folder, wait=False, core=core, engine_timeout=0.5) as server:
            await asyncio.sleep(1)
            assert server.service.client.state == "loading" and server.service.client.seconds_silent == 0
            async with aiohttp.ClientSession() as http:
                assert (await answer(http, server.url + "/health"))[0] == 200

    run(story())


def test_time_for_which_the_server_was_stopped_itself_is_not_the_engine_s(folder):
    with backend(folder, "one", "--restart-engine", "0", "--engine-timeout", "6") as server:
        pids = [server.process.pid, engine_of(server)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(8)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        with ask(server.url, reply="still here") as response:
            assert json.load(response)["choices"][0]["text"] == "still here"
        assert engine_of(server) == pids[1] and server.process.poll() is None
        until_true(lambda: status(server.url + "/ready") == 200, "it is ready")
    assert "has not answered" not in (folder / "log").read_text()


def engine_of(server):
    """The child that the server started."""
    pid = server.process.pid
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return int(children.read().split()[0])
