"""The engine process and its client, with a scripted core: life, death, and what each side then says."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parents[3] / "support"
if str(SUPPORT) not in sys.path:
    sys.path.append(str(SUPPORT))

from byte_model import IM_END, write_model  # noqa: E402  (the path above makes it importable)
from serving import ENVIRONMENT, PATIENCE, let_go, script  # noqa: E402

from pilotfish.engine.link.client import EngineClient, EngineUnavailable, Failure  # noqa: E402
from pilotfish.engine.link.messages import (  # noqa: E402
    Fatal,
    Ping,
    Pong,
    RequestOutput,
    SamplingParams,
    Submit,
    decode_from_engine,
    frame,
)
from pilotfish.engine.options import EngineOptions  # noqa: E402


class Panic(BaseException):
    """As Rust's panics come: no Exception."""


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path)


@contextlib.asynccontextmanager
async def engine(folder, *, wait=True, core="scripted_core:make_core", on_report=None, **options):
    client = EngineClient(
        EngineOptions(model=str(folder), **options), core=core, on_report=on_report, environment=ENVIRONMENT
    )
    await client.start()
    try:
        if wait:
            await asyncio.wait_for(client.wait_ready(), PATIENCE)
        yield client
    finally:
        await client.close()


def request(name="r", max_tokens=100, **commands):
    prompt = list(script(**commands).encode())
    sampling = SamplingParams(max_tokens=max_tokens, eos_token_ids=(IM_END,))
    return Submit(request_id=name, prompt_token_ids=prompt, sampling=sampling)


async def stream_of(client, submit):
    """The outputs of one request; leaving it frees the sequence."""
    arrived = asyncio.Queue()

    def receive(output):
        arrived.put_nowait(output)
        return output

    client.submit(submit, receive)
    try:
        while True:
            output = await arrived.get()
            yield output
            if output.finish_reason is not None:
                return
    finally:
        client.abort(submit.request_id)


async def collect(client, submit):
    async with asyncio.timeout(PATIENCE):
        return [output async for output in stream_of(client, submit)]


def text_of(outputs):
    return bytes(token for output in outputs for token in output.token_ids if token < 256).decode()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 2 * PATIENCE))


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_tokens_arrive_and_the_process_ends_clean(folder):
    async def body():
        async with engine(folder) as client:
            outputs = await collect(client, request(reply="Hello", runs=[2]))
            assert text_of(outputs) == "Hello"
            assert [output.finish_reason for output in outputs][-1] == "stop"
            assert client.num_open == 0
            pid = client.pid
        assert client.state == "closed" and not alive(pid)
        assert client.failure is None

    run(body())


def test_many_requests_at_once(folder):
    async def body():
        async with engine(folder, max_num_seqs=3) as client:
            texts = [f"reply {index}" * 3 for index in range(20)]
            asked = [request(f"r{i}", reply=text, runs=[1 + i % 4]) for i, text in enumerate(texts)]
            results = await asyncio.gather(*(collect(client, one) for one in asked))
            assert [text_of(outputs) for outputs in results] == texts

    run(body())


def test_leaving_a_stream_frees_the_sequence_within_a_round(folder):
    """In one of three times: on a busy machine the engine may hear of it a round later."""
    reports, go = [], folder / "go"

    async def reports_of(client, name):
        reports.clear()
        go.write_bytes(b"")  # the first token waits for none
        stream = stream_of(client, request(name, reply="x", times=1000, delay=1.0, go=str(go), max_tokens=1000))
        await anext(stream)
        await stream.aclose()
        # the second token is being written: that one alone goes on
        go.write_bytes(b"2")
        await until(lambda: reports[-1].stats.num_running == 0)
        # what was over-produced is reported to nobody
        assert len(reports[0].outputs) == 1 and not any(report.outputs for report in reports[1:])
        return len(reports)

    async def body():
        async with engine(folder, on_report=reports.append) as client:
            assert min([await reports_of(client, name) for name in "abc"]) <= 3

    run(body())


def test_a_receiver_that_ends_its_request_is_sent_nothing_more(folder):
    got = []

    def receive(output):
        got.append(output)
        return RequestOutput(request_id="r", token_ids=output.token_ids[:1], finish_reason="stop")

    async def body():
        reports = []
        async with engine(folder, on_report=reports.append) as client:
            client.submit(request(reply="abc" * 100, runs=[3], delay=0.005), receive)
            await until(lambda: reports and reports[-1].stats.num_running == 0)
            assert len(got) == 1 and client.num_open == 0
            assert sum(len(report.outputs) for report in reports) == 1

    run(body())


def test_a_receiver_that_raises_ends_only_its_own_request(folder):
    heard = []

    def receive(output):
        heard.append(output)
        if output.token_ids:
            raise Panic("a bug in a receiver")

    async def body():
        async with engine(folder) as client:
            client.submit(request("bad", reply="abc", delay=0.01), receive)
            assert text_of(await collect(client, request("good", reply="fine"))) == "fine"
            assert client.num_open == 0 and client.state == "ready"
            # and it is told, or its client would wait for ever
            assert (heard[-1].finish_reason, heard[-1].error) == ("error", "Panic: a bug in a receiver")
            assert len(heard) == 2

    run(body())


@pytest.mark.parametrize(
    ("fault", "part", "words"),
    [("raise", "round", "a scripted fault"), ("exit", "process", "closed its socket")],
)
def test_a_fault_ends_every_request_with_an_error(folder, fault, part, words):
    async def body():
        async with engine(folder) as client:
            long = [collect(client, request(f"r{i}", reply="x" * 1000, delay=0.01)) for i in range(3)]
            faulty = collect(client, request("f", reply="abcdef", fault=fault, at=3, delay=0.01))
            for outputs in await asyncio.gather(*long, faulty):
                assert outputs[-1].finish_reason == "error"
                assert words in outputs[-1].error
            assert client.state == "failed" and client.failure.part == part
            with pytest.raises(EngineUnavailable) as caught:
                client.submit(request("later"), lambda output: output)
            assert caught.value.part == part
            if fault == "exit":
                await until(lambda: "status 7" in client.failure.message)

    run(body())


def test_a_killed_process_is_noticed_and_named(folder):
    async def body():
        async with engine(folder) as client:
            stream = stream_of(client, request(reply="x" * 1000, delay=0.01))
            await anext(stream)
            os.kill(client.pid, signal.SIGKILL)
            outputs = [output async for output in stream]
            assert outputs[-1].finish_reason == "error"
            await until(lambda: "SIGKILL" in client.failure.message)

    run(body())


def test_a_process_that_fails_to_load_says_why(folder):
    async def body():
        async with engine(folder, wait=False, core="scripted_core:make_core_that_fails") as client:
            with pytest.raises(EngineUnavailable, match="no such checkpoint") as caught:
                await asyncio.wait_for(client.wait_ready(), PATIENCE)
            assert caught.value.part == "load" and client.state == "failed"

    run(body())


def test_a_file_s_name_that_is_no_text_is_told_all_the_same(folder):
    async def body():
        async with engine(folder, wait=False, core="scripted_core:make_core_that_names_a_file") as client:
            with pytest.raises(EngineUnavailable, match=r"a\\udcff\.safetensors: damaged"):
                await asyncio.wait_for(client.wait_ready(), PATIENCE)
            assert client.failure.permanent

    run(body())


def test_a_core_that_cannot_be_imported_is_a_load_failure(folder):
    async def body():
        async with engine(folder, wait=False, core="no_such_module:make") as client:
            with pytest.raises(EngineUnavailable, match="no_such_module"):
                await asyncio.wait_for(client.wait_ready(), PATIENCE)

    run(body())


def test_closing_while_it_loads_does_not_wait(folder):
    async def body():
        async with engine(folder, wait=False, core="scripted_core:make_core_that_loads_forever") as client:
            await until(lambda: client._connection is not None)
            pid = client.pid
            # longer than this test may take
            await client.close(timeout=10 * PATIENCE)
        assert not alive(pid)

    run(body())


def test_closing_while_a_step_hangs_takes_force(folder):
    async def body():
        client = EngineClient(EngineOptions(model=str(folder)), core="scripted_core:make_core", environment=ENVIRONMENT)
        await client.start()
        await asyncio.wait_for(client.wait_ready(), PATIENCE)
        hanging = asyncio.create_task(collect(client, request(fault="hang")))
        await asyncio.sleep(0.2)
        await client.close(timeout=0.3)
        assert (await hanging)[-1].finish_reason == "abort"
        assert not alive(client.pid)

    run(body())


def test_signals_of_a_terminal_do_not_end_the_engine(folder):
    """Ctrl-C reaches both processes; the HTTP process decides."""

    async def body():
        async with engine(folder) as client:
            os.kill(client.pid, signal.SIGINT)
            os.kill(client.pid, signal.SIGTERM)
            assert text_of(await collect(client, request(reply="still here"))) == "still here"

    run(body())


def test_a_duplicate_id_is_refused_here(folder):
    async def body():
        async with engine(folder) as client:
            client.submit(request("same", reply="x" * 100, delay=0.01), lambda output: output)
            with pytest.raises(ValueError, match="same"):
                client.submit(request("same"), lambda output: output)
            client.abort("same")
            client.abort("never")

    run(body())


def test_a_full_queue_is_told_apart(folder):
    async def body():
        async with engine(folder, max_num_seqs=1, max_waiting=1) as client:
            go = folder / "go"
            long = [request(f"r{i}", reply="x" * 30, delay=15.0, go=str(go)) for i in range(4)]
            asked = [asyncio.create_task(collect(client, one)) for one in long]
            await until(lambda: sum(one.done() for one in asked) == 2)
            let_go(go)
            ends = [outputs[-1] for outputs in await asyncio.gather(*asked)]
            assert [end.error_code for end in ends].count("queue_full") == 2
            assert [end.finish_reason for end in ends].count("stop") == 2

    run(body())


# -- the process alone, spoken to over a socket of the test's own ------------------------------------------------


@contextlib.contextmanager
def bare_engine(folder, core="scripted_core:make_core"):
    path = str(folder / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        command = [sys.executable, "-m", "pilotfish.engine.link.process", "--socket", path, "--core", core]
        options = json.dumps({"model": str(folder)})
        with subprocess.Popen([*command, "--options", options], env=ENVIRONMENT, stderr=subprocess.PIPE) as process:
            try:
                listener.settimeout(PATIENCE)
                connection, _ = listener.accept()
                with connection, connection.makefile("rb") as stream:
                    yield process, connection, stream
            finally:
                process.kill()


def read(stream):
    return decode_from_engine(stream.read(int.from_bytes(stream.read(4), "big")))


def test_a_ping_is_answered_when_idle_and_between_the_steps_of_a_busy_engine(folder):
    with bare_engine(folder) as (_, connection, stream):
        read(stream)
        connection.sendall(frame(Ping()))
        assert read(stream) == Pong()
        connection.sendall(frame(request(reply="x", times=2000, delay=0.05, max_tokens=2000)))
        reports = [read(stream)]
        connection.sendall(frame(Ping()))
        while not isinstance(message := read(stream), Pong):
            reports.append(message)
        # it still had work
        assert len(reports) < 2000 and reports[-1].outputs[0].finish_reason is None


def test_a_failed_process_that_does_not_go_is_given_up(folder, monkeypatch):
    """As one that waits in its driver, and cannot be killed."""
    monkeypatch.setattr("pilotfish.engine.link.client.UNDEAD_SECONDS", 0.2)

    async def body():
        async with engine(folder) as client:
            watcher = client._watcher
            client._watcher = asyncio.get_running_loop().create_future()
            client._fail(Failure("hang", "the engine has not answered"))
            with pytest.raises(EngineUnavailable, match="does not end"):
                await client.restart()
            assert client.state == "failed"
            client._watcher = watcher

    run(body())


def test_the_end_of_the_socket_ends_a_computing_process(folder):
    with bare_engine(folder) as (process, connection, stream):
        read(stream)
        connection.sendall(frame(request(fault="hang")))
        time.sleep(0.2)
        connection.shutdown(socket.SHUT_RDWR)
        assert process.wait(PATIENCE) == 1


def test_the_end_of_the_socket_ends_a_loading_process(folder):
    with bare_engine(folder, "scripted_core:make_core_that_loads_forever") as (process, connection, _):
        connection.shutdown(socket.SHUT_RDWR)
        assert process.wait(PATIENCE) == 1


@pytest.mark.parametrize(
    "data",
    [b"\x00\x00\x00\x03abc", b"\xff\xff\xff\xff", frame(Fatal("x", "the wrong way"))],
    ids=["junk", "huge", "tag"],
)
def test_bytes_that_are_no_message_are_fatal_and_said(folder, data):
    with bare_engine(folder) as (process, connection, stream):
        read(stream)
        connection.sendall(data)
        message = read(stream)
        assert isinstance(message, Fatal) and message.part == "protocol"
        assert process.wait(PATIENCE) == 1


def test_no_orphan_when_the_parent_is_killed(folder):
    """The parent gets no chance to close anything."""
    code = (
        "import asyncio, sys\n"
        "from pilotfish.engine.link.client import EngineClient\n"
        "from pilotfish.engine.options import EngineOptions\n"
        "async def main():\n"
        f"    client = EngineClient(EngineOptions(model={str(folder)!r}), core='scripted_core:make_core')\n"
        "    await client.start()\n"
        "    await client.wait_ready()\n"
        "    print(client.pid, flush=True)\n"
        "    await asyncio.sleep(3600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
        deadline = time.monotonic() + PATIENCE
        while alive(child) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not alive(child)


def test_neither_side_imports_torch():
    code = (
        "import sys, pilotfish.engine.link.client, pilotfish.engine.link.process\n"
        "import pilotfish.server.http.app, pilotfish.server.cli\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'heavy imports'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


def test_an_aborted_request_is_gone_when_the_engine_says_so(folder):
    async def body():
        async with engine(folder) as client:
            client.submit(request("r", reply="x", times=500, delay=0.05), lambda output: output)
            gone = asyncio.Event()
            client.when_gone("unknown", gone.set)
            assert gone.is_set()
            gone.clear()
            client.abort("r")
            client.when_gone("r", gone.set)
            assert not gone.is_set() and client.num_open == 0
            await asyncio.wait_for(gone.wait(), PATIENCE)
            # once
            gone.clear()
            client.when_gone("r", gone.set)
            assert gone.is_set()

    run(body())


def test_with_the_engine_all_that_has_left_it_is_gone(folder):
    async def body():
        async with engine(folder) as client:
            client.submit(request("hangs", fault="hang"), lambda output: output)
            gone = asyncio.Event()
            client.abort("hangs")
            client.when_gone("hangs", gone.set)
            os.kill(client.pid, signal.SIGKILL)
            await asyncio.wait_for(gone.wait(), PATIENCE)

    run(body())


def test_who_ends_a_request_itself_does_not_wait_for_the_engine(folder):
    """A client that asks again at once must find its place free."""

    async def body():
        async with engine(folder) as client:
            ended = asyncio.Event()

            def stop(output):
                ended.set()
                return output if output.finish_reason else RequestOutput(request_id="r", finish_reason="stop")

            client.submit(request("r", reply="x", times=500), stop)
            await asyncio.wait_for(ended.wait(), PATIENCE)
            gone = asyncio.Event()
            client.when_gone("r", gone.set)
            assert gone.is_set()

    run(body())
