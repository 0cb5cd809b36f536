"""/tokenize and /detokenize, and the counter of fields without effect."""

import asyncio
import threading

import aiohttp
from serving import script, serving

from pilotfish.server import handlers
from pilotfish.server.text.chat_template import ChatTemplate
from pilotfish.server.text.tokenizer import Tokenizer


async def post(http, url, body, status=200):
    async with http.post(url, json=body) as response:
        assert response.status == status, await response.text()
        return await response.json()


def test_texts_and_messages_to_ids_and_back(server):
    async def story():
        async with aiohttp.ClientSession() as http:

            async def tokenize(status=200, **body):
                return await post(http, server.url + "/tokenize", body, status)

            answer = await tokenize(prompt="hi €<think>")
            ids = [104, 105, 32, 256, 0xAC, 303]
            assert answer == {"count": 6, "max_model_len": 4096, "tokens": ids, "token_strs": None}
            text = await post(http, server.url + "/detokenize", {"tokens": [*ids, 301], "model": "alias"})
            assert text == {"prompt": "hi €<think><|im_start|>"}
            strings = await tokenize(prompt="€", return_token_strs=True)
            assert strings["token_strs"] == ["bytes:\\xe2\\x82", "bytes:\\xac"]
            assert (await tokenize(prompt=""))["tokens"] == []
            assert (await tokenize(prompt="x" * 50_000))["count"] == 50_000

            # the same ids that a chat has as its prompt
            tools = [{"type": "function", "function": {"name": "f"}}]
            chat = {"messages": [{"role": "user", "content": script(reply="x")}], "tools": tools}
            chat["chat_template_kwargs"] = {"enable_thinking": True}
            asked = await post(http, server.v1 + "/chat/completions", {**chat, "return_token_ids": True})
            assert (await tokenize(**chat))["tokens"] == asked["prompt_token_ids"]

            for body, param in (
                ({}, "prompt"),
                ({"prompt": "x", "messages": []}, "prompt"),
                ({"prompt": "x", "tools": []}, "tools"),
                ({"prompt": ["x"]}, "prompt"),
                ({"messages": []}, "messages"),
                ({"prompt": "x", "promt": 1}, "promt"),
            ):
                assert (await tokenize(status=400, **body))["error"]["param"] == param, body
            for tokens in ([512], [-1], ["a"], None):
                error = await post(http, server.url + "/detokenize", {"tokens": tokens}, 400)
                assert error["error"]["param"].startswith("tokens")
            await tokenize(status=404, prompt="x", model="other")

    asyncio.run(story())


def test_fields_without_effect_are_counted_by_name(folder):
    async def story():
        async with (
            serving(folder, api_keys=("secret",)) as server,
            aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as http,
        ):
            part = {"type": "text", "text": script(reply="x"), "cache_control": {"type": "ephemeral"}}
            body = {"messages": [{"role": "user", "content": [part]}], "user": "me", "relay_trace": 1, "other": 2}
            body["tools"] = [{"type": "function", "function": {"name": "f", "strict": True}}]
            for _ in range(2):
                await post(http, server.v1 + "/chat/completions", body)
            async with http.get(server.url + "/metrics") as response:
                text = await response.text()
            counts = {"user": 2, "cache_control": 2, "tools.strict": 2, "unknown": 4}
            for field, count in counts.items():
                assert f'pilotfish_unused_fields_total{{field="{field}"}} {count}.0' in text
            assert "relay_trace" not in text
            # tokenizing is guarded like the rest
            async with http.post(server.url + "/tokenize", json={}, headers={"Authorization": ""}) as response:
                assert response.status == 401

    asyncio.run(story())


def test_large_bodies_are_never_worked_on_by_the_event_loop(folder, monkeypatch):
    """Decoded, rendered, tokenised: all of it in a lane, on every path."""
    seen = []

    def watched(name, function):
        def call(*args, **kwargs):
            seen.append((name, threading.current_thread().name))
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(handlers, "decode_request", watched("decode", handlers.decode_request))
    monkeypatch.setattr(ChatTemplate, "render", watched("render", ChatTemplate.render))
    monkeypatch.setattr(Tokenizer, "encode", watched("encode", Tokenizer.encode))

    async def story():
        async with serving(folder) as server, aiohttp.ClientSession() as http:
            message = {"role": "user", "content": "word " * 500}
            named = {"model": "scripted", "messages": [message]}
            for path, body in (
                ("/v1/completions", {"prompt": ["word " * 100] * 9, "max_tokens": 1}),
                ("/v1/chat/completions", {"messages": [message], "max_tokens": 1}),
                ("/v1/responses", {"input": [message], "max_output_tokens": 16}),
                ("/v1/messages", {**named, "max_tokens": 1}),
                ("/v1/messages/count_tokens", named),
                ("/tokenize", {"messages": [message]}),
                ("/detokenize", {"tokens": [72] * 2000}),
            ):
                seen.clear()
                await post(http, server.url + path, body)
                work = {name for name, thread in seen if thread.startswith("lane")}
                assert {name for name, _ in seen} == work and "decode" in work, (path, seen)

    asyncio.run(story())
