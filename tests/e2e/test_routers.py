"""vllm-router and sglang-router, unmodified, as deploy/router starts them, before three servers: the same for both.

vllm-router knows three APIs and asks again, on another server, for two of them; sglang-router knows no Messages API.
"""

import contextlib
import json
import signal
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, IncompleteRead

import pytest

pytest.importorskip("vllm_router")
pytest.importorskip("sglang_router")

from processes import events, until
from routers import MODULES, post, replicas, request, routed
from serving import PATIENCE, let_go, script

ENDS = (b"[DONE]", b"message_stop", b"response.completed")
PLACES = ("--max-num-seqs", "2", "--max-waiting", "1")
LONG = {"reply": "x", "times": 2900, "delay": 0.05}
SOON = ("--health-check-timeout-secs", "3")
"""A server that hangs is out after two of these and as many seconds; as shipped one has five seconds to answer."""
TRIES = 4
"""Of a request that is refused, or whose server has gone, as shipped."""
OWN_KEY = {"vllm": ("--api-key", "alice"), "sglang": ()}
"""vllm-router sends no header of the client's to Messages, Responses and what counts tokens, but this key."""

COMPLETIONS, CHAT, MESSAGES, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    with replicas(tmp_path_factory.mktemp("servers"), *PLACES) as started:
        yield started


@pytest.fixture(params=MODULES, scope="module")
def router(request, tmp_path_factory, servers):
    for server in servers:
        if server.process.poll() is not None:
            server.start()
    for server in servers:
        server.ready()
    with routed(
        request.param, tmp_path_factory.mktemp(request.param), servers, *SOON, *OWN_KEY[request.param]
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def whole(request):
    """Each test of a router begins with three idle servers that it knows."""
    if "router" not in request.fixturenames:
        return
    router = request.getfixturevalue("router")
    for server in router.replicas:
        if server.process.poll() is not None:
            server.start()
            server.ready()
    router.settled()
    until(lambda: not any(server.num_running for server in router.replicas), "nothing runs")


def fields(path, text="", **commands):
    """A request for a scripted text, in the words of the API."""
    prompt = script(text, **commands)
    if path == COMPLETIONS:
        return {"prompt": prompt, "max_tokens": 3000}
    if path == RESPONSES:
        return {"input": prompt, "max_output_tokens": 3000}
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 3000}


def apis(router):
    return [COMPLETIONS, CHAT, RESPONSES, *([MESSAGES] if router.name == "vllm" else [])]


def open_stream(router, **commands):
    """A stream that has begun, the events to come, and the server that writes it."""
    idle = [server for server in router.replicas if not server.num_running]
    response = urllib.request.urlopen(
        request(router.url + COMPLETIONS, {**fields(COMPLETIONS, **commands), "stream": True}), timeout=PATIENCE
    )
    coming = events(response)
    next(coming)
    (server,) = (server for server in idle if server.num_running)
    return response, coming, server


def test_each_api_streaming_and_not(router):
    for path in apis(router):
        asked = fields(path, reply="a b c")
        whole = router.post(path, asked, **{"X-Request-Id": "of-the-client"})
        streamed = router.post(path, {**asked, "stream": True})
        assert (whole.status, streamed.status) == (200, 200), (path, whole.body, streamed.body)
        assert b"a b c" in whole.body and streamed.headers["Content-Type"].startswith("text/event-stream")
        said = [json.loads(line[6:]) for line in streamed.body.splitlines() if line.startswith(b"data: {")]
        if path in (COMPLETIONS, CHAT):
            pieces = [choice for event in said for choice in event["choices"]]
            assert "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in pieces) == "a b c"
            assert streamed.body.rstrip().endswith(b"[DONE]")
            assert whole.headers["X-Request-Id"] == "of-the-client"
        else:
            assert said[-1]["type"] in ("response.completed", "message_stop")
    if router.name == "vllm":
        assert router.post("/v1/messages/count_tokens", fields(MESSAGES)).json()["input_tokens"] > 0
        assert router.post("/tokenize", {"prompt": "abc"}).json()["count"] == 3


def test_tools_and_what_is_not_the_router_s_business_pass(router):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    answer = router.post(CHAT, {**fields(CHAT, reply=call), "tools": [tool], "seed": 7, "loop_guard": False})
    assert answer.status == 200, answer.body
    (choice,) = answer.json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "look"
    assert choice["finish_reason"] == "tool_calls" and answer.json()["seed"] == 7


def test_keys_are_the_server_s_to_judge_and_limits_reach_the_client(router):
    asked = fields(COMPLETIONS, reply="x")
    assert [router.post(COMPLETIONS, asked, key).status for key in ("bob", "mallory")] == [200, 401]
    assert router.post(COMPLETIONS, {**asked, "temperature": 99}).status == 400
    held = [
        request(server.url + COMPLETIONS, {**fields(COMPLETIONS, **LONG), "stream": True}, "carol")
        for server in router.replicas
    ]
    with contextlib.ExitStack() as stack:
        for one in held:
            stack.enter_context(urllib.request.urlopen(one, timeout=PATIENCE))
        before = refusals(router, "rate_limited")
        refused = router.post(COMPLETIONS, asked, "carol")
        assert refused.status == 429 and refused.headers["Retry-After"]
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= refusals(router, "rate_limited") - before <= TRIES
        assert router.post(COMPLETIONS, asked, "bob").status == 200


def refusals(router, reason):
    return sum(server.metric(f'pilotfish_request_rejected_total{{reason="{reason}"}}') for server in router.replicas)


def test_full_servers_are_asked_a_few_times_and_taken_for_sound(router):
    """With a circuit breaker, the routers' default, refusals would close every server for a minute."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(12) as pool:
        asked = {**fields(COMPLETIONS, **LONG), "stream": True}
        urls = [server.url + COMPLETIONS for server in router.replicas for _ in range(3)]
        for response in pool.map(lambda url: urllib.request.urlopen(request(url, asked), timeout=PATIENCE), urls):
            stack.enter_context(response)
        before = refusals(router, "queue_full")
        for path in apis(router):
            refused = router.post(path, fields(path))
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1"), refused.body
            assert b"queue is full" in refused.body
        assert refusals(router, "queue_full") - before <= TRIES * len(apis(router))
        answers = list(pool.map(lambda _: router.post(COMPLETIONS, fields(COMPLETIONS)).status, range(12)))
        assert answers == [503] * 12
    until(lambda: not any(server.num_running for server in router.replicas), "the streams are gone")
    assert [router.post(COMPLETIONS, fields(COMPLETIONS)).status for _ in range(6)] == [200] * 6


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_frees_its_sequence(router, stream):
    body = json.dumps({"model": "m", **fields(COMPLETIONS, **LONG), "stream": stream}).encode()
    host, port = router.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer alice\r\n"
        client.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: sum(server.num_running for server in router.replicas) == 1, "it runs")
    until(lambda: not any(server.num_running for server in router.replicas), "it is freed")


def test_one_that_is_killed_breaks_its_streams_alone(router, tmp_path):
    streams, go = {}, tmp_path / "go"
    with contextlib.ExitStack() as stack:
        while len(streams) < 2:
            # cache_aware has texts that begin alike on one server
            text = f"{len(streams)} of several" * 40
            response, coming, server = open_stream(router, text=text, **LONG, go=str(go))
            stack.enter_context(response)
            streams[server.port] = (response, coming, server)
        (broken, _, dying), (_, coming, _) = streams.values()
        dying.signal(signal.SIGKILL)
        with pytest.raises((IncompleteRead, ConnectionError)) as caught:
            broken.read()
        assert b"[DONE]" not in getattr(caught.value, "partial", b"")
        answers = [router.post(path, fields(path)).status for path in (COMPLETIONS, CHAT) for _ in range(6)]
        assert answers == [200] * 12
        let_go(go)
        assert [event["choices"][0]["finish_reason"] for event in coming][-1] == "stop"
        until(lambda: len(router.healthy()) == 2, "the router has noticed")
        assert [router.post(path, fields(path)).status for path in apis(router)] == [200] * len(apis(router))


def test_one_that_hangs_is_left_out_and_comes_back(router):
    """What was sent to it before it is out waits for it: neither router asks again what a server may have begun."""
    hung = router.replicas[0]
    with ThreadPoolExecutor(6) as pool:
        hung.signal(signal.SIGSTOP)
        try:
            early = [pool.submit(router.post, COMPLETIONS, fields(COMPLETIONS, text=f"{n} " * 100)) for n in range(6)]
            until(lambda: hung.url not in router.healthy(), "it is out")
            for path in apis(router):
                assert router.post(path, fields(path)).status == 200
        finally:
            hung.signal(signal.SIGCONT)
        assert [one.result().status for one in early] == [200] * 6
    until(lambda: hung.url in router.healthy(), "it is back")


def test_one_that_is_slow_loses_nothing(router):
    """Stopped nine tenths of the time: it answers probes in time, and requests late."""
    slow, going = router.replicas[0], True

    def brake():
        while going:
            slow.signal(signal.SIGSTOP)
            time.sleep(0.09)
            slow.signal(signal.SIGCONT)
            time.sleep(0.01)

    with ThreadPoolExecutor(5) as pool:
        braking = pool.submit(brake)
        try:
            answers = list(pool.map(lambda _: router.post(COMPLETIONS, fields(COMPLETIONS)).status, range(24)))
        finally:
            going = False
            braking.result()
            slow.signal(signal.SIGCONT)
    assert answers == [200] * 24


def test_all_three_are_replaced_under_load_and_no_request_is_lost(router):
    """One after the other, when those before are back: the router forgets it, SIGTERM, a new process at its address.

    Without the first step vllm-router hands the 503 of a server that drains to clients of Messages and Responses, and
    sglang-router the connection that ends under it to all.
    """
    clients = [Client(router, path) for path in apis(router)]
    with ThreadPoolExecutor(len(clients)) as pool:
        working = [pool.submit(client.work) for client in clients]
        try:
            for server in router.replicas:
                router.remove(server)
                arrived = [client.next_arrival() for client in clients]
                until(lambda arrived=arrived: all(one() for one in arrived), "what it was chosen for has reached it")
                server.signal(signal.SIGTERM)
                assert server.process.wait(PATIENCE) == 0
                server.start()
                served = [client.next_answer() for client in clients]
                until(lambda served=served: all(one() for one in served), "each client is answered without it")
                server.ready()
                router.add(server)
                router.settled()
        finally:
            for client in clients:
                client.going = False
            for one in working:
                one.result()
    assert [fault for client in clients for fault in client.faults] == []


class Client:
    """Asks one API for one stream after the other; all of them have to be whole."""

    def __init__(self, router, path):
        self.router, self.path = router, path
        self.going, self.asked, self.begun, self.ended, self.faults = True, 0, 0, 0, []

    def work(self):
        while self.going:
            try:
                self.ask()
            except urllib.error.HTTPError as error:
                with error:
                    self.faults.append((error.code, error.read()))
            except (OSError, HTTPException) as error:
                self.faults.append(repr(error))

    def ask(self):
        asked = {**fields(self.path, reply="some text ", times=4, delay=0.03), "stream": True}
        self.asked += 1
        with urllib.request.urlopen(request(self.router.url + self.path, asked), timeout=PATIENCE) as response:
            self.begun = self.asked
            text = response.read()
        if not any(end in text[-4000:] for end in ENDS):
            self.faults.append(text)
        self.ended = self.asked

    def next_arrival(self):
        """Whether what it has asked until now was begun by some server."""
        asked = self.asked
        return lambda: self.begun >= asked or self.faults

    def next_answer(self):
        """Whether an answer was begun and ended that it asks for after now."""
        asked = self.asked
        return lambda: self.ended > asked or self.faults


def test_a_conversation_stays_where_its_beginning_was_read(router):
    """cache_aware, as shipped: what begins anew goes to the server with the least to do, what goes on to its own."""
    talks, places = [f"{talk} of many, " * 40 for talk in "abc"], {}
    with contextlib.ExitStack() as stack:
        for talk in talks:
            response, _, server = open_stream(router, text=talk, **LONG)
            stack.enter_context(response)
            places[talk] = server
    assert len({server.port for server in places.values()}) == 3
    until(lambda: not any(server.num_running for server in router.replicas), "all is idle")
    for turn in range(1, 4):
        for talk, server in places.items():
            before = server.metric("pilotfish_prompt_tokens_total")
            assert router.post(COMPLETIONS, fields(COMPLETIONS, text=talk + "and so on. " * turn)).status == 200
            assert server.metric("pilotfish_prompt_tokens_total") > before, (talk, turn)


def test_replicas_of_a_checkpoint_give_the_same_bits(demo_server):
    """Whichever server a router chooses, and whatever its k: tokens and their log-probabilities."""
    conversation = [{"role": "user", "content": "Name a book."}, {"role": "assistant", "content": "Moby-Dick."}]
    conversation.append({"role": "user", "content": "And another, as JSON."})
    wishes = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 0.7, "seed": 6, "response_format": {"type": "json_object"}},
    ]
    told = []
    for k in (0, 3):
        url = demo_server(k).v1 + "/chat/completions"
        asked = {"model": "scripted", "messages": conversation, "max_tokens": 16, "logprobs": True}
        answers = [post(url, asked | wish).json()["choices"] for wish in wishes]
        told.append(json.dumps(answers))
    assert "logprob" in told[0] and told[1] == told[0]
