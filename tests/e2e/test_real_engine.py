"""The whole of it with a tiny random model: HTTP, tokenizer, socket, scheduler, rounds. No scripted part.

What a random model says is noise, so the server without speculation is the reference for the one with it.
"""

import asyncio
import json
import random

import aiohttp
import openai
import pytest
from byte_model import write_model
from serving import PATIENCE, serving_in_thread

PROMPTS = ["The quick brown fox", "def f(x):\n    return ", "é€😀 " * 9, "a" * 70]
CORE = "pilotfish.engine.start:make_core"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from tiny_models import build_tiny

    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder)
    return build_tiny(folder, "moe")


def start(model, k, **engine):
    options = {"num_threads": 1, "max_model_len": 256, "dtype": "float32", **engine}
    return serving_in_thread(model, core=CORE, engine={"num_speculative_tokens": k, **options})


@pytest.fixture(scope="module")
def plain(model):
    with start(model, 0, max_num_seqs=1) as server:
        yield server


@pytest.fixture(scope="module")
def speculating(model):
    with start(model, 3, max_num_seqs=4) as server:
        yield server


def requests():
    """Every sampling mode, stop, limit and prompt length, mixed by a fixed seed."""
    for seed in range(24):
        rng = random.Random(seed)
        fields = {"prompt": rng.choice(PROMPTS), "max_tokens": rng.randrange(1, 30), "seed": rng.randrange(-99, 99)}
        fields |= rng.choice([{"temperature": 0}, {"temperature": 1}, {"temperature": 1.5, "top_k": 40, "top_p": 0.9}])
        fields |= rng.choice([{}, {"stop": ["a", "\x07"]}, {"stop_token_ids": list(range(100, 120))}])
        fields |= rng.choice([{}, {"min_tokens": 1}, {"ignore_eos": True}, {"frequency_penalty": 1.5, "min_p": 0.01}])
        fields |= rng.choice([{}, {"n": 2}, {"logprobs": 3}, {"logit_bias": {"97": 5, "200": -100}}])
        yield {**fields, "return_token_ids": True}


async def ask_all(server, at_once, depths=()):
    """`depths`: the k that requests ask for themselves, in turn."""
    bodies = [
        {**body, "speculation": {"k": depths[index % len(depths)]}} if depths else body
        for index, body in enumerate(requests())
    ]
    async with aiohttp.ClientSession() as http:

        async def one(body):
            async with asyncio.timeout(PATIENCE), http.post(server.v1 + "/completions", json=body) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        if at_once:
            return await asyncio.gather(*map(one, bodies))
        return [await one(body) for body in bodies]


def test_every_answer_is_the_one_without_speculation(plain, speculating):
    """One by one without speculation, against all at once with it: other batches, other rounds, the same answers."""
    expected = asyncio.run(ask_all(plain, at_once=False))
    got = asyncio.run(ask_all(speculating, at_once=True))
    for body, one, other in zip(requests(), expected, got, strict=True):
        assert other["choices"] == one["choices"], body
        assert other["seed"] == one["seed"] == body["seed"]
        assert other["usage"]["completion_tokens"] == one["usage"]["completion_tokens"], body
        for choice in other["choices"]:
            assert (0 if body.get("stop") else 1) <= len(choice["token_ids"]) <= body["max_tokens"]
            if choice["logprobs"]:
                assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    reasons = {choice["finish_reason"] for answer in got for choice in answer["choices"]}
    assert reasons == {"stop", "length"}


def test_answers_do_not_depend_on_the_depth_that_a_request_asks_for(plain, speculating):
    """Every k in one batch."""
    expected = asyncio.run(ask_all(plain, at_once=False))
    got = asyncio.run(ask_all(speculating, at_once=True, depths=(0, 3, 1, 2)))
    assert [answer["choices"] for answer in got] == [answer["choices"] for answer in expected]


def test_a_stop_string_anywhere_in_the_text(plain, speculating):
    """Each piece of the greedy text in turn as the stop string; the engine is one round ahead each time."""
    with openai.OpenAI(base_url=speculating.v1, api_key="unused", timeout=PATIENCE) as client:

        def complete(**fields):
            base = {"prompt": "A", "max_tokens": 20, "temperature": 0, "extra_body": {"ignore_eos": True}}
            return client.completions.create(model="scripted", **base, **fields).choices[0]

        whole = complete().text
        for start_at in range(0, len(whole) - 1):
            stop = whole[start_at : start_at + 2]
            if "\ufffd" in stop:
                continue
            cut = complete(stop=[stop])
            assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_what_only_the_engine_can_refuse_is_a_400(speculating):
    """The limits of server and engine agree: whatever passes here is taken there."""
    cases = [({"prompt": [319] * 255, "max_tokens": 1}, 200), ({"prompt": [320]}, 400), ({"prompt": [1] * 256}, 400)]
    cases += [({"prompt": "x", "max_tokens": 255}, 200), ({"prompt": "x", "max_tokens": 256}, 400)]
    cases += [({"prompt": "x", "stop_token_ids": list(range(32)), "max_tokens": 2}, 200)]
    extremes = [{"top_k": 2**63 - 1}, {"temperature": 1e-300}, {"repetition_penalty": 1e-30}, {"logprobs": 20}]
    extremes += [{"top_p": 1e-300}, {"min_p": 1, "temperature": 2}, {"logit_bias": {str(i): -100 for i in range(320)}}]
    extremes += [{"seed": -(2**63)}, {"seed": 2**63 - 1}, {"presence_penalty": 2, "frequency_penalty": -2, "n": 3}]
    cases += [({"prompt": "x", "max_tokens": 4, **fields}, 200) for fields in extremes]

    async def story():
        async with aiohttp.ClientSession() as http:
            for body, status in cases:
                async with http.post(speculating.v1 + "/completions", json=body) as response:
                    assert response.status == status, (body, await response.text())

    asyncio.run(story())


def test_clients_that_leave_free_pages_and_slots(speculating):
    async def story():
        async with aiohttp.ClientSession() as http:
            url = speculating.v1 + "/completions"
            # four run, two wait
            body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
            answers = await asyncio.gather(*(http.post(url, json=body) for _ in range(6)))
            for answer in answers:
                answer.close()
            async with asyncio.timeout(PATIENCE):
                while speculating.service.client.num_open:
                    await asyncio.sleep(0.01)
            # one more request: its last report says that nothing else holds anything
            async with http.post(url, json={"prompt": "x", "max_tokens": 2, "ignore_eos": True}) as answer:
                assert answer.status == 200
            async with http.get(speculating.url + "/metrics") as response:
                lines = (await response.text()).splitlines()
            values = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
            for name in ("num_requests_running", "num_requests_waiting", "kv_pages_used", "state_slots_used"):
                assert float(values["pilotfish_" + name]) == 0, name

    asyncio.run(story())


def test_a_checkpoint_without_a_head_is_served_and_says_so(tmp_path):
    from tiny_models import build_tiny

    write_model(tmp_path)
    model = build_tiny(tmp_path, "dense", mtp=False)
    with start(model, None) as server:

        async def story():
            async with aiohttp.ClientSession() as http:
                async with http.get(server.url + "/health") as response:
                    health = await response.json()
                async with http.post(server.v1 + "/completions", json={"prompt": "x", "max_tokens": 3}) as response:
                    assert response.status == 200
                async with http.get(server.url + "/metrics") as response:
                    return health, await response.text()

        health, metrics = asyncio.run(story())
    speculation = health["speculation"]
    # a random model knows no text
    assert health["trunk_check"]["verdict"] == "failed" and "likely causes" in health["trunk_check"]["reason"]
    assert 'pilotfish_self_test_failed{part="trunk"} 1.0' in metrics
    assert speculation["enabled"] is False and speculation["disabled_reason"]
    reason = json.dumps(speculation["disabled_reason"])
    assert f"pilotfish_spec_decode_disabled{{reason={reason}}} 1.0" in metrics


def test_a_checkpoint_that_cannot_be_loaded_says_why(model, tmp_path):
    write_model(tmp_path)
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    from pilotfish.engine.link.client import EngineUnavailable

    with pytest.raises(EngineUnavailable, match="safetensors"), start(tmp_path, 3):
        pass
