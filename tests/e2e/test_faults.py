"""What happens when something breaks: clients that leave, an engine that dies, queues that are full, hostile bytes."""

import asyncio
import contextlib
import gzip
import json
import os
import random
import re
import signal

import aiohttp
import openai
import pytest
from serving import PATIENCE, let_go, script, serving


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 2 * PATIENCE))


def body(stream=False, **commands):
    return {"prompt": script(**commands), "max_tokens": 3000, "stream": stream}


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


async def exchange(server, data):
    """Raw bytes to the server, and its answer; nothing where it closes without one."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    await writer.drain()
    answer = b""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        answer = await reader.readuntil(b"\r\n\r\n")
        answer += await reader.readexactly(int(re.search(rb"Content-Length: (\d+)", answer)[1]))
    writer.transport.abort()
    return answer


async def metric(http, server, line):
    async with http.get(server.url + "/metrics") as response:
        found = [text for text in (await response.text()).splitlines() if text.startswith(line + " ")]
    return float(found[0].rsplit(" ", 1)[1]) if found else None


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_sequence_within_a_round(folder, stream):
    async def story():
        async with serving(folder) as server, aiohttp.ClientSession() as http:
            asked = asyncio.create_task(
                http.post(server.url + "/v1/completions", json=body(stream, reply="x", times=2900, delay=0.01))
            )
            await until(lambda: server.service.client.num_open == 1)
            if stream:
                response = await asked
                await response.content.readany()
                response.close()
            else:
                await until(server.transcript)
                asked.cancel()
            await until(lambda: server.service.client.num_open == 0)
            steps = len(server.transcript())
            await until(lambda: server.service.client.num_leaving == 0)
            # the engine itself has stopped: at most the rounds under way when the abort came
            later = server.transcript()
            assert len(later) <= steps + 2
            assert later[-1]["outputs"][-1]["finish_reason"] == "abort" and not later[-1]["stats"].get("num_running")
            assert await metric(http, server, 'pilotfish_request_finished_total{finish_reason="abort"}') == 1

    run(story())


def test_a_client_that_does_not_read_holds_nobody_up(folder):
    async def story():
        async with serving(folder, engine={"max_model_len": 100_000}) as server, aiohttp.ClientSession() as http:
            slow = await http.post(
                server.url + "/v1/completions",
                json={**body(True, ids=[65], times=20_000, runs=[4]), "max_tokens": 20_000, "logprobs": 1},
            )
            async with http.post(server.url + "/v1/completions", json=body(reply="quick")) as response:
                assert (await response.json())["choices"][0]["text"] == "quick"
            await until(lambda: server.service.client.num_open == 0)
            text = (await slow.read()).decode()
            assert text.endswith("data: [DONE]\n\n")

    run(story())


@pytest.mark.parametrize("how", ["kill", "raise", "exit"])
def test_an_engine_that_dies_ends_every_stream_with_an_error_and_turns_health_red(folder, how):
    async def story():
        async with serving(folder) as server, aiohttp.ClientSession() as http:
            url = server.url + "/v1/completions"
            stream = await http.post(url, json=body(True, reply="x", times=2900, delay=0.01))
            await stream.content.readany()
            whole = asyncio.create_task(http.post(url, json=body(reply="x", times=2900, delay=0.01)))
            await until(lambda: server.service.client.num_open == 2)
            if how == "kill":
                os.kill(server.service.client.pid, signal.SIGKILL)
            else:
                faulty = asyncio.create_task(http.post(url, json=body(reply="abc", fault=how)))
                assert (await faulty).status == 500
            rest = (await stream.read()).decode()
            last = json.loads(rest.strip().rsplit("data: ", 1)[1])
            assert last["error"]["code"] == "engine_failed" and "[DONE]" not in rest
            answer = await whole
            assert answer.status == 500
            assert (await answer.json())["error"]["code"] == "engine_failed"
            async with http.get(server.url + "/health") as response:
                health = await response.json()
                assert response.status == 503
                assert health["engine"]["part"] == ("round" if how == "raise" else "process")
                assert health["http"]["status"] == "ok"
            async with http.get(server.url + "/ready") as response:
                assert response.status == 503
            async with http.post(url, json=body(reply="later")) as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "engine_failed"
            assert await metric(http, server, "pilotfish_engine_up") == 0
            assert await metric(http, server, 'pilotfish_request_finished_total{finish_reason="error"}') >= 2

    run(story())


def test_a_stream_without_news_sends_comments(folder, monkeypatch):
    monkeypatch.setattr("pilotfish.server.handlers.HEARTBEAT_SECONDS", 0.05)

    async def story():
        async with serving(folder) as server, aiohttp.ClientSession() as http:
            async with http.post(server.v1 + "/completions", json=body(True, reply="abc", delay=0.3)) as response:
                text = (await response.read()).decode()
            assert text.count(": waiting\n\n") >= 3 and text.endswith("data: [DONE]\n\n")
            client = openai.AsyncOpenAI(base_url=server.v1, api_key="unused", max_retries=0)
            async with client:
                stream = await client.completions.create(
                    model="scripted", prompt=script(reply="abc", delay=0.2), stream=True
                )
                assert "".join([chunk.choices[0].text async for chunk in stream]) == "abc"

    run(story())


@pytest.mark.parametrize("stream", [False, True])
def test_a_library_that_fails_on_the_way_out_ends_its_request_alone(folder, monkeypatch, stream):
    """As a tokenizer that panics while tokens become text: nobody waits for ever."""

    class Panic(BaseException):
        pass

    from pilotfish.server.text.detokenize import Detokenizer

    push_all = Detokenizer.push_all

    def panics(detokenizer, ids):
        if ord("!") in ids:
            raise Panic("index out of bounds")
        return push_all(detokenizer, ids)

    async def story():
        monkeypatch.setattr(Detokenizer, "push_all", panics)
        async with serving(folder) as server, aiohttp.ClientSession() as http:
            url = server.url + "/v1/completions"
            beside = asyncio.create_task(http.post(url, json=body(reply="x" * 100, delay=0.01)))
            async with http.post(url, json=body(stream, reply="oh!", delay=0.01)) as response:
                text = await response.text()
                assert response.status == (200 if stream else 500) and "engine_failed" in text and "[DONE]" not in text
            assert (await (await beside).json())["choices"][0]["text"] == "x" * 100
            assert server.service.client.state == "ready" and server.service.client.num_open == 0

    run(story())


def test_while_it_loads_health_is_green_ready_is_not_and_requests_are_told_to_wait(folder):
    async def story():
        core = "scripted_core:make_core_that_loads_forever"
        async with serving(folder, wait=False, core=core) as server, aiohttp.ClientSession() as http:
            async with http.get(server.url + "/health") as response:
                assert (response.status, (await response.json())["status"]) == (200, "loading")
            async with http.get(server.url + "/ready") as response:
                assert response.status == 503
            async with http.post(server.url + "/v1/completions", json=body()) as response:
                assert response.status == 503 and response.headers["Retry-After"]
                assert (await response.json())["error"]["code"] == "loading"
            async with http.get(server.url + "/v1/models") as response:
                assert (await response.json())["data"][0]["max_model_len"] is None

    run(story())


def test_a_model_without_a_head_is_served_and_says_so(folder):
    async def story():
        async with serving(folder, engine={"num_speculative_tokens": 0}) as server, aiohttp.ClientSession() as http:
            async with http.get(server.url + "/health") as response:
                speculation = (await response.json())["speculation"]
            assert speculation == {
                "enabled": False,
                "num_speculative_tokens": 0,
                "disabled_reason": "no head in a scripted core",
                "draft_head": None,
                "head_check": None,
            }
            line = 'pilotfish_spec_decode_disabled{reason="no head in a scripted core"}'
            assert await metric(http, server, line) == 1

    run(story())


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_503_with_retry_after(folder, stream):
    go = folder / "go"

    async def story():
        limits = {"max_num_seqs": 1, "max_waiting": 2}
        async with serving(folder, engine=limits) as server, aiohttp.ClientSession() as http:
            url = server.url + "/v1/completions"
            long = body(stream, reply="x", times=300, delay=0.5, go=str(go))
            asked = [asyncio.create_task(http.post(url, json=long)) for _ in range(8)]
            await until(lambda: sum(one.done() and one.result().status == 503 for one in asked) == 5)
            let_go(go)
            answers = await asyncio.gather(*asked)
            codes = [answer.status for answer in answers]
            assert codes.count(200) == 3 and codes.count(503) == 5
            for answer in answers:
                if answer.status == 503:
                    assert answer.headers["Retry-After"].isdigit()
                    assert (await answer.json())["error"]["code"] == "queue_full"
                await answer.read()
            assert await metric(http, server, 'pilotfish_request_rejected_total{reason="queue_full"}') == 5
            async with http.post(url, json=body(reply="room again")) as response:
                assert response.status == 200
            async with http.post(url, json={**body(), "n": 4}) as response:
                assert response.status == 400

    run(story())


def test_a_full_queue_is_told_at_once_even_while_a_step_is_long(folder):
    async def story():
        limits = {"max_num_seqs": 1, "max_waiting": 1}
        async with serving(folder, engine=limits, close_seconds=0.2) as server, aiohttp.ClientSession() as http:
            url = server.url + "/v1/completions"
            stuck = [asyncio.create_task(http.post(url, json=body(fault="hang"))) for _ in range(2)]
            await until(lambda: server.service.client.num_open == 2)
            async with http.post(url, json=body(True)) as response:
                assert response.status == 503
            for task in stuck:
                task.cancel()

    run(story())


def test_keys_guard_the_api_and_nothing_else(folder):
    async def story():
        async with serving(folder, api_keys=("secret",)) as server, aiohttp.ClientSession() as http:
            for headers, status in (
                ({}, 401),
                ({"Authorization": "Bearer no"}, 401),
                ({"Authorization": "Bearer secret"}, 200),
            ):
                async with http.get(server.url + "/v1/models", headers=headers) as response:
                    assert response.status == status
            for path in ("/health", "/ready", "/metrics", "/version", "/ping", "/"):
                for method in ("GET", "HEAD"):
                    async with http.request(method, server.url + path) as response:
                        assert response.status == 200, (method, path)

    run(story())


@pytest.mark.parametrize("strict", [False, True])
def test_relays_may_send_fields_nobody_knows(folder, caplog, strict):
    """A header of the answer names them, in streams and refusals too, and the log does once."""
    cases = [
        ({"relay_trace": 1, "hop": {}}, 200, "relay_trace, hop"),
        ({"relay_trace": 1, "stream": True}, 200, "relay_trace"),
        ({"relay_trace": 1, "temperature": 9}, 400, "relay_trace"),
        ({'ключ, "x"': 1}, 200, "???????x?"),
        ({f"field{number}": 1 for number in range(40)}, 200, None),
        ({"suffix": "x"}, 400, ""),
        ({"max_token": 9}, 400, ""),
    ]

    async def story():
        async with serving(folder, strict_fields=strict) as server, aiohttp.ClientSession() as http:
            for extra, status, told in cases:
                async with http.post(server.url + "/v1/completions", json={**body(reply="x"), **extra}) as response:
                    assert response.status == (400 if strict else status)
                    header = response.headers.get("X-Ignored-Fields", "")
                    if told is None and not strict:
                        assert header.endswith("field15, ...") and len(header) < 2000
                    else:
                        assert header == ("" if strict else told)
                    await response.read()

    run(story())
    assert sum("relay_trace" in record.message for record in caplog.records) == (0 if strict else 1)


def counted_rounds(transcript, kept):
    """Plain arithmetic over the engine's own log: (drafted, accepted) of every round, each request cut after
    `kept[i]` tokens, as a decoder without runs would have cut it."""
    order = list(dict.fromkeys(output["request_id"] for step in transcript for output in step["outputs"]))
    left = dict(zip(order, kept, strict=True))
    for step in transcript:
        for output in step["outputs"]:
            shown = min(len(output.get("token_ids", [])), left[output["request_id"]])
            left[output["request_id"]] -= shown
            if shown and output.get("round", True):
                yield output.get("num_drafted", 0), min(output.get("num_accepted", 0), shown)


def test_acceptance_on_metrics_equals_the_engines_transcript(folder):
    """Requests that end in every way, a stop string inside a run among them."""
    reply = "abcdefghijkl"
    asked = [
        ({"runs": [1]}, {}, 12, 12),
        ({"runs": [4]}, {}, 12, 12),
        ({"runs": [2, 3]}, {"max_tokens": 10}, 10, 10),
        # generated up to the end of the stop string, shown up to its beginning
        ({"runs": [4, 1]}, {"stop": "gh"}, 8, 6),
        ({"runs": [4]}, {"stop": ["fg", "zz"]}, 7, 5),
        ({"runs": [3]}, {"stop_token_ids": [ord("e")]}, 5, 5),
        ({"runs": [3], "drafted": 0}, {"stream": True}, 12, 12),
    ]

    async def story():
        async with serving(folder) as server, aiohttp.ClientSession() as http:
            for commands, extra, _, shown in asked:
                url = server.url + "/v1/completions"
                async with http.post(url, json={**body(reply=reply, delay=0.002, **commands), **extra}) as response:
                    assert response.status == 200
                    if not extra.get("stream"):
                        assert (await response.json())["usage"]["completion_tokens"] == shown
                    await response.read()
            async with http.get(server.url + "/metrics") as response:
                lines = (await response.text()).splitlines()
            return lines, server.transcript()

    lines, transcript = run(story())
    values = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
    rounds = list(counted_rounds(transcript, [kept for _, _, kept, _ in asked]))
    spec = "pilotfish_spec_decode_"
    assert values[spec + "num_drafts_total"] == sum(drafted > 0 for drafted, _ in rounds)
    assert values[spec + "num_draft_tokens_total"] == sum(drafted for drafted, _ in rounds)
    assert values[spec + "num_accepted_tokens_total"] == sum(accepted for _, accepted in rounds)
    for position in range(3):
        labels = f'{{position="{position}"}}'
        drafts = sum(drafted > position for drafted, _ in rounds)
        assert values[spec + "num_draft_tokens_per_pos_total" + labels] == drafts
        accepts = sum(accepted > position for _, accepted in rounds)
        assert values[spec + "num_accepted_tokens_per_pos_total" + labels] == accepts
    assert values[spec + "committed_tokens_per_round_count"] == len(rounds)
    generated = [kept for _, _, kept, _ in asked]
    assert values["pilotfish_generation_tokens_total"] == sum(generated)
    assert values["pilotfish_request_generation_tokens_sum"] == sum(generated)
    # the mean of each request's rounds; the first token of each came from its prompt, in no round
    name = spec + "request_acceptance_length"
    assert values[name + "_count"] == len(asked)
    assert 1 <= values[name + "_sum"] / len(asked) <= 4


def test_a_crowd_that_comes_and_goes_leaves_nothing_behind(folder):
    """Streams and whole answers, stop strings, several choices, and every third client leaves early."""

    async def one(http, server, seed):
        rng = random.Random(seed)
        reply = "".join(rng.choices("abc€ ", k=rng.randrange(1, 60)))
        stop, stream, leaves = rng.choice([None, "ab", "€c"]), rng.random() < 0.5, rng.random() < 0.33
        commands = {"reply": reply, "runs": [rng.randrange(1, 5), rng.randrange(1, 5)], "delay": 0.001}
        fields = {"stop": stop, "n": rng.randrange(1, 3)}
        await asyncio.sleep(rng.random() * 0.5)
        asked = http.post(server.url + "/v1/completions", json={**body(stream, **commands), **fields})
        try:
            async with asyncio.timeout(rng.random() * 0.3 if leaves else PATIENCE), asked as response:
                assert response.status == 200
                text = (await response.read()).decode()
        except TimeoutError:
            assert leaves
            return False
        expected = reply.split(stop)[0] if stop else reply
        texts = dict.fromkeys(range(fields["n"]), "")
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        for chunk in chunks if stream else [json.loads(text)]:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == dict.fromkeys(range(fields["n"]), expected), f"seed {seed}"
        return True

    async def story():
        async with serving(folder, engine={"max_num_seqs": 6}) as server:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as http:
                done = await asyncio.gather(*(one(http, server, seed) for seed in range(150)))
                assert 20 < sum(done) < 150
                await until(lambda: server.service.client.num_open == 0)
                name = "pilotfish_num_requests_running"
                async with asyncio.timeout(PATIENCE):
                    while await metric(http, server, name):
                        await asyncio.sleep(0.02)
                assert server.service.client.state == "ready"

    run(story())


# -- hostile bodies ----------------------------------------------------------------------------------------------

VALUES = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        2**64,
        -(2**63) - 1,
        10**40,
        0.5,
        -0.0,
        1e308,
        1e-320,
        "",
        "x",
        "\x00",
        "😀",
    ),
    *(
        "\ufffe",
        "a" * 5000,
        "9" * 400,
        [],
        {},
        [[]],
        [{}],
        [None],
        {"": None},
        {"1": {}},
        [1, "a"],
        [[1], ["a"]],
        [-1],
        [2**70],
    ),
    *(
        {"role": "user"},
        [{"role": "user", "content": "x"}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
    ),
]
FIELDS = [
    *("model", "prompt", "messages", "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "seed", "stop"),
    *(
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "stop_token_ids",
        "min_tokens",
        "ignore_eos",
        "max_tokens",
    ),
    *(
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "echo",
        "tools",
        "response_format",
        "chat_template_kwargs",
    ),
    *(
        "max_completion_tokens",
        "user",
        "best_of",
        "suffix",
        "reasoning_effort",
        "add_special_tokens",
        "return_token_ids",
    ),
    *("include_stop_str_in_output", "skip_special_tokens", "add_generation_prompt", "nonsense", ""),
]
RAW = [
    *(
        b"",
        b"\x00",
        b"{",
        b"}",
        b"null",
        b'{"prompt"',
        b"\xff\xfe\x00",
        b"[" * 50_000,
        b'{"a":' * 50_000,
        b'"' + b"a" * 100_000,
    ),
    *(rb'{"prompt": "\ud800"}', rb'{"prompt": "a\udfffb"}', rb'{"messages": [{"role": "user", "content": "\ud83d"}]}'),
    *(b'{"temperature": NaN, "prompt": "x"}', b'{"temperature": -Infinity, "prompt": "x"}', b'{"prompt": "\xc3\x28"}'),
    *(
        b'{"n": ' + b"9" * 10_000 + b"}",
        b'{"temperature": 1e99999, "prompt": "x"}',
        b'{"prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    ),
    *(b'{"chat_template_kwargs": {"messages": 1}, "messages": [{"role": "user", "content": "x"}]}',),
]


def hostile_bodies(count):
    for seed in range(count):
        rng = random.Random(seed)
        base = (
            {"prompt": "x", "max_tokens": 2}
            if seed % 2
            else {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        )
        yield json.dumps(
            {**base, **{rng.choice(FIELDS): rng.choice(VALUES) for _ in range(rng.randrange(1, 4))}}
        ).encode()


def test_no_body_gets_a_500_or_stops_the_engine(folder):
    async def story():
        async with serving(folder) as server, aiohttp.ClientSession() as http:
            paths = [server.v1 + "/completions", server.v1 + "/chat/completions"]
            headers = {"Content-Type": "application/json"}
            for index, data in enumerate([*RAW, *RAW, *hostile_bodies(600)]):
                path = paths[(index + index // len(RAW)) % 2]
                async with asyncio.timeout(PATIENCE), http.post(path, data=data, headers=headers) as response:
                    text = await response.text()
                    assert response.status in (200, 400, 404), f"{response.status} {data[:300]!r} {text[:300]}"
                    if response.status != 200:
                        error = json.loads(text)["error"]
                        assert error.keys() == {"message", "type", "param", "code"}
                        assert len(error["message"]) < 6000
            await until(lambda: server.service.client.num_open == 0)
            async with http.post(paths[0], json=body(reply="alive")) as response:
                assert (await response.json())["choices"][0]["text"] == "alive"
            assert await metric(http, server, 'pilotfish_request_rejected_total{reason="internal"}') == 0

    run(story())


def nested_bodies(depth):
    """A value of this depth in every place where a request may hold one, and where it may not."""
    user = '{"role": "user", "content": "x"}'
    for value in ("[" * depth + "1" + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        for field in ("stop", "logit_bias", "metadata", "response_format", "unknown", "stream_options"):
            yield "/completions", f'{{"prompt": "x", "max_tokens": 1, "{field}": {value}}}'
        yield "/completions", f'{{"prompt": {value}}}'
        yield "/chat/completions", f'{{"messages": {value}}}'
        yield "/chat/completions", f'{{"messages": [{{"role": "user", "content": {value}}}]}}'
        yield "/chat/completions", f'{{"messages": [{{"role": {value}, "content": "x"}}]}}'
        yield "/chat/completions", f'{{"messages": [{{"role": "user", "content": [{{"type": {value}}}]}}]}}'
        values = f'{{"a": {value}}}'
        yield "/chat/completions", f'{{"messages": [{user}], "chat_template_kwargs": {values}, "max_tokens": 1}}'


def test_no_depth_of_nesting_gets_a_500(folder):
    """Deep enough to decode, too deep for what comes after, and everything around it."""

    async def story():
        async with serving(folder) as server, aiohttp.ClientSession() as http:
            headers = {"Content-Type": "application/json"}
            for depth in (*range(10, 1000, 45), *range(900, 1000, 7), 3000):
                for path, data in nested_bodies(depth):
                    async with http.post(server.v1 + path, data=data, headers=headers) as response:
                        assert response.status in (200, 400), (depth, data[:80], await response.text())

    run(story())


def test_undecodable_headers_and_endless_names_are_answered_in_shape(folder):
    async def story():
        async with serving(folder, api_keys=("secret",)) as server:
            key = b"Authorization: Bearer secret\r\n"
            cases = [
                (b"Content-Type: \xff\xfe/\xe2\x82\r\n" + key, b"{}", b"400"),
                (b"Content-Type: application/json\r\nAuthorization: Bearer \xff\xfe\r\n", b"{}", b"401"),
                (b"Content-Type: application/json\r\n" + key, b'{"' + b"n" * 1_000_000 + b'": 1}', b"400"),
                (b"Content-Type: application/json\r\n" + key, b'{"model": "' + b"m" * 1_000_000 + b'"}', b"404"),
            ]
            for headers, data, status in cases:
                size = b"Content-Length: %d\r\n\r\n" % len(data)
                answer = await exchange(server, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + headers + size + data)
                assert answer.startswith(b"HTTP/1.1 " + status), answer[:300]
                assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["message"]
                assert len(answer) < 4000

    run(story())


def test_wrong_content_types_encodings_methods_paths_and_sizes(folder, caplog):
    async def story():
        async with serving(folder) as server, aiohttp.ClientSession() as http:
            url, data = server.v1 + "/completions", json.dumps(body(reply="x")).encode()
            cases = [
                ("POST", url, {"Content-Type": "text/plain"}, data, 400),
                ("POST", url, {"Content-Type": "application/x-www-form-urlencoded"}, data, 400),
                ("POST", url, {"Content-Type": "multipart/form-data"}, data, 400),
                ("POST", url, {"Content-Type": "application/json; charset=utf-8"}, data, 200),
                ("POST", url, {"Content-Type": "application/json", "Content-Encoding": "gzip"}, b"not gzip", 400),
                (
                    "POST",
                    url,
                    {"Content-Type": "application/json", "Content-Encoding": "gzip"},
                    gzip.compress(data),
                    200,
                ),
                ("POST", url, {"Content-Type": "application/json", "Content-Encoding": "deflate"}, b"not that", 400),
                ("POST", url, {"Content-Type": "application/json", "Content-Encoding": "br"}, data, 415),
                ("GET", url, {}, None, 405),
                ("DELETE", server.v1 + "/models", {}, None, 405),
                ("GET", server.url + "/v1/nothing", {}, None, 404),
                ("GET", server.url + "/%ff%00", {}, None, 400),
            ]
            for method, target, headers, content, status in cases:
                async with http.request(method, target, headers=headers, data=content) as response:
                    text = await response.text()
                    assert response.status == status, (method, target, headers, text)
                    message = "" if status == 200 else json.loads(text)["error"]["message"]
                    assert bool(message) == (status != 200) and ("/openapi.json" in message) == (status == 404)
                    # whoever sends another type is told how to send this one
                    is_another = not headers.get("Content-Type", "application/json").startswith("application/json")
                    assert ("-H 'Content-Type: application/json'" in message) == is_another

    run(story())
    assert "Traceback" not in caplog.text


def test_bytes_that_are_no_http_leave_the_server_up(folder):
    async def story():
        async with serving(folder) as server, aiohttp.ClientSession() as http:
            for data in (
                b"\x00" * 100,
                b"GET\r\n\r\n",
                b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
                b"A" * 100_000,
            ):
                await exchange(server, data)
            async with http.get(server.url + "/ping") as response:
                assert response.status == 200

    run(story())


def test_a_body_that_is_too_large_is_refused_before_it_is_read(folder):
    async def story():
        async with serving(folder) as server:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            answer = await exchange(server, f"{head}Content-Length: {33 << 20}\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 413") and b'"invalid_request_error"' in answer
            chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
            answer = await exchange(server, f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * 33)
            assert answer.startswith(b"HTTP/1.1 413") and b'"invalid_request_error"' in answer

    run(story())


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_what_failed_is_told_to_all_and_the_reason_to_those_with_a_key(folder, how):
    async def story():
        reason = "a scripted fault" if how == "raise" else "the engine process"
        async with serving(folder, api_keys=("secret",)) as server, aiohttp.ClientSession() as http:
            key = {"Authorization": "Bearer secret"}

            async def health(headers):
                async with http.get(server.url + "/health", headers=headers) as response:
                    return (await response.json())["engine"]

            async with http.post(server.v1 + "/completions", json=body(reply="abc", fault=how), headers=key) as failed:
                assert failed.status == 500 and reason in (await failed.json())["error"]["message"]
            await until(lambda: server.service.client.failure is not None)
            part = "round" if how == "raise" else "process"
            assert reason in (await health(key))["message"]
            for headers in ({}, {"Authorization": "Bearer guessed"}, {"x-api-key": ""}):
                told = await health(headers)
                assert (told["part"], told["message"]) == (part, None)
            async with http.post(server.v1 + "/completions", json=body(reply="later"), headers=key) as later:
                assert reason in (await later.json())["error"]["message"]

        async with serving(folder) as server, aiohttp.ClientSession() as http:
            for stream in (True, False):
                request = body(stream, reply="abc", fault=how, at=2 if stream else 0, delay=0.05)
                async with http.post(server.v1 + "/completions", json=request) as failed:
                    text = await failed.text()
                    assert "engine_failed" in text and part in text and reason not in text

    asyncio.run(story())
